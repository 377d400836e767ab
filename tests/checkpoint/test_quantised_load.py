"""Quantised weights on their way into a backend: stacks, shared experts, and values where plain ones are wanted."""

import numpy as np
import pytest
from checkpoint.makers import DRAFTER, random_tensors, read_hf, write_hf
from checkpoint.quantisers import SMALL, linear, matrix_of, quantised, small_tensors, with_config

from ddtree.bundle import open_bundle
from ddtree.checkpoint import convert_to_hf, convert_to_kdtr, load_config
from ddtree.kdtr import KdtrFile
from ddtree.ops import get_ops
from ddtree.quantised import Fp8Matrix, Int4Matrix, dequantised
from ddtree.weights import load_drafter

SHARED = "model.layers.1.mlp.shared_experts.{}_proj.weight"


def loaded(tmp_path, scheme, hf, chosen=linear, ops=None):
    """The bundle of a small checkpoint and its weights in f64."""
    source = write_hf(tmp_path / "hf", with_config(hf, scheme), small_tensors(scheme, chosen, hf))
    convert_to_kdtr(source, tmp_path / "target.kdtr", progress=False)
    bundle = open_bundle(tmp_path)
    return bundle, bundle.target_weights(8, ops or get_ops("numpy", "f64"))


@pytest.mark.parametrize(("scheme", "width"), [("int4", 32), ("int4", 64), ("fp8", 128)])
def test_two_shared_experts_behind_the_routed_ones(tmp_path, scheme, width):
    """Gate and up are cut by rows, down by columns, scales with them."""
    bundle, weights = loaded(tmp_path, scheme, SMALL | {"moe_intermediate_size": width})
    moe = weights.layers[1].mlp
    assert moe.shared is None and moe.experts.up.shape == (6, width, 64)
    for name in ("gate", "up", "down"):
        whole = dequantised(matrix_of(bundle.target, SHARED.format(name)))
        stack = getattr(moe.experts, name)
        for expert in range(2):
            cut = slice(expert * width, (expert + 1) * width)
            wanted = whole[:, cut] if name == "down" else whole[cut]
            np.testing.assert_array_equal(dequantised(stack[4 + expert]), wanted)
        for expert in range(4):
            stored = matrix_of(bundle.target, f"model.layers.1.mlp.experts.{expert}.{name}_proj.weight")
            np.testing.assert_array_equal(dequantised(stack[expert]), dequantised(stored))


@pytest.mark.parametrize("width", [32, 96])
def test_two_shared_experts_in_one_block_of_scales_stay_one_mlp(tmp_path, width):
    bundle, weights = loaded(tmp_path, "fp8", SMALL | {"moe_intermediate_size": width})
    moe = weights.layers[1].mlp
    assert moe.experts.up.shape == (4, width, 64) and isinstance(moe.shared.down, Fp8Matrix)
    wanted = dequantised(matrix_of(bundle.target, SHARED.format("down")))
    np.testing.assert_array_equal(dequantised(moe.shared.down), wanted)


@pytest.mark.parametrize("part", ["gate", "down"])
def test_shared_experts_that_are_partly_plain_run_apart(tmp_path, part):
    def chosen(name):
        return linear(name) and name != SHARED.format(part)

    moe = loaded(tmp_path, "int4", SMALL, chosen)[1].layers[1].mlp
    assert moe.experts.up.shape[0] == 4
    for name in ("gate", "up", "down"):
        assert isinstance(getattr(moe.shared, name), np.ndarray if name == part else Int4Matrix)


@pytest.mark.parametrize("scheme", ["fp8", "int4"])
@pytest.mark.parametrize("chunk_bytes", [1 << 25, 1 << 17, 1000])
def test_plain_values_are_exact_in_pieces_of_any_size(tmp_path, scheme, chunk_bytes):
    """A router of 300 experts, dequantised in blocks of rows, and kv_b's parts."""

    def chosen(name):
        return linear(name) or name.endswith("mlp.gate.weight")

    ops = get_ops("numpy", "f64")
    ops.chunk_bytes = chunk_bytes
    bundle, weights = loaded(tmp_path, scheme, SMALL | {"n_routed_experts": 300}, chosen, ops)
    wanted = dequantised(matrix_of(bundle.target, "model.layers.1.mlp.gate.weight"))
    np.testing.assert_array_equal(weights.layers[1].mlp.router, wanted)
    by_head = dequantised(matrix_of(bundle.target, "model.layers.1.self_attn.kv_b_proj.weight"))
    by_head = by_head.reshape(4, 16, 32)
    np.testing.assert_array_equal(weights.layers[1].w_kc, by_head[:, :8].transpose(0, 2, 1))
    np.testing.assert_array_equal(weights.layers[1].w_vc, by_head[:, 8:])


@pytest.mark.parametrize(
    ("scheme", "rank", "plain", "kept"),
    [
        ("int4", 64, (), True),
        ("fp8", 128, (), True),
        ("fp8", 256, (), True),
        ("fp8", 96, (), False),  # a block of scales would hold rows of both
        ("fp8", 128, ("q_a_proj",), False),
        ("int4", 64, ("kv_a_proj_with_mqa",), False),
    ],
)
def test_what_takes_one_input_is_one_matrix(tmp_path, scheme, rank, plain, kept):
    """q_a's rows and kv_a's in turn: quantised where both are, and scales are of rows of one of them; else values."""

    def chosen(name):
        return linear(name) and not any(part in name for part in plain)

    bundle, weights = loaded(tmp_path, scheme, SMALL | {"q_lora_rank": rank}, chosen)
    joined, wanted = weights.layers[1].qkv_a, []
    for part in ("q_a_proj", "kv_a_proj_with_mqa"):
        name = f"model.layers.1.self_attn.{part}.weight"
        stored = bundle.target[name] if part in plain else dequantised(matrix_of(bundle.target, name))
        wanted.append(stored.astype(np.float64))
    assert isinstance(joined, {"fp8": Fp8Matrix, "int4": Int4Matrix}[scheme]) == kept
    values = dequantised(joined) if kept else joined
    np.testing.assert_array_equal(values, np.concatenate(wanted))
    norms = [bundle.target[f"model.layers.1.self_attn.{part}_a_layernorm.weight"] for part in ("q", "kv")]
    np.testing.assert_array_equal(weights.layers[1].qkv_a_norm, np.concatenate(norms).astype(np.float64))


def test_a_drafter_may_be_quantised_too(tmp_path):
    plain = {name: np.nan_to_num(t.astype(np.float32)) for name, t in random_tensors(DRAFTER, "bf16").items()}
    tensors = quantised({name: np.clip(t, -9, 9) for name, t in plain.items()}, "fp8", linear)
    source = write_hf(tmp_path / "hf", with_config(DRAFTER, "fp8"), tensors)
    assert convert_to_kdtr(source, tmp_path / "d.kdtr", progress=False)["quantised"] == {"fp8": 14}
    convert_to_hf(tmp_path / "d.kdtr", tmp_path / "back", progress=False)
    assert read_hf(tmp_path / "back") == read_hf(source)
    with KdtrFile(tmp_path / "d.kdtr") as file:
        weights = load_drafter(file, load_config(file), 8, get_ops("numpy"))
    assert isinstance(weights.layers[1].q, Fp8Matrix) and isinstance(weights.fc, np.ndarray)
    wanted = dequantised(matrix_of(tensors, "layers.1.mlp.down_proj.weight"))
    np.testing.assert_array_equal(dequantised(weights.layers[1].mlp.down), wanted)
