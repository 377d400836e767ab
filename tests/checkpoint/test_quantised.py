"""fp8 and INT4 checkpoints: read as their libraries wrote them, kept quantised in KDTR, and given back bit for bit."""

import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint.makers import assert_same_checkpoint, read_hf, write_hf
from checkpoint.quantisers import (
    CONFIGS,
    SMALL,
    linear,
    matrix_of,
    quantised,
    routed,
    small_tensors,
    tiny_source,
    to_fp8,
    to_int4,
    with_config,
)
from support import arrays_of

from ddtree.bench_random import open_random
from ddtree.checkpoint import convert_to_hf, convert_to_kdtr, load_config
from ddtree.checkpoint_names import expected_tensors
from ddtree.checkpoint_rotary import check_blocks, rotary_weights
from ddtree.config import ModelConfig
from ddtree.config_quantisation import read_scheme
from ddtree.kdtr import KdtrFile
from ddtree.quantised import E4M3_VALUES, Fp8Matrix, Int4Matrix, dequantised, rows_of

CASES = [("fp8", linear), ("fp8", routed), ("int4", routed), ("int4", linear)]
each_case = pytest.mark.parametrize(("scheme", "chosen"), CASES, ids=lambda v: getattr(v, "__name__", v))
PREFIX = "model.layers.{}.self_attn."


# --- what others' code made ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", "abc")
def test_values_are_those_of_compressed_tensors(case):
    z = arrays_of("quantised.npz")
    matrix = Int4Matrix(z[f"int4_{case}_packed"], z[f"int4_{case}_scale"])
    assert matrix.shape == tuple(z[f"int4_{case}_shape"])
    np.testing.assert_array_equal(dequantised(matrix), z[f"int4_{case}_values"].astype(np.float64))


@pytest.mark.parametrize("case", "abc")
def test_values_are_those_of_transformers_fp8(case):
    """Its products are f32's, ours exact: rounded they are the same."""
    z = arrays_of("quantised.npz")
    matrix = Fp8Matrix(z[f"fp8_{case}"], z[f"fp8_{case}_scale_inv"])
    exact = dequantised(matrix)
    assert (exact != exact.astype(np.float32)).any()
    np.testing.assert_array_equal(exact.astype(np.float32), z[f"fp8_{case}_values"])


def test_every_byte_of_e4m3_is_torchs():
    np.testing.assert_array_equal(E4M3_VALUES, arrays_of("quantised.npz")["e4m3"])
    assert np.flatnonzero(np.isnan(E4M3_VALUES)).tolist() == [0x7F, 0xFF]


def test_our_makers_make_the_libraries_bits():
    """The quantisers of these tests, from the libraries' values: so they say the same of other weights too."""
    z = arrays_of("quantised.npz")
    for case in "abc":
        values, scales = to_fp8(z[f"fp8_{case}_values"])
        np.testing.assert_array_equal(values.view(np.uint8), z[f"fp8_{case}"])
        np.testing.assert_allclose(scales, z[f"fp8_{case}_scale_inv"], rtol=2e-7)
        words, _, shape = to_int4(z[f"int4_{case}_values"])
        found = Int4Matrix(words, z[f"int4_{case}_scale"])
        same = dequantised(found) == z[f"int4_{case}_values"]
        assert same.mean() > 0.9 and shape.tolist() == list(z[f"int4_{case}_values"].shape)


def test_rows_of_a_matrix():
    rng = np.random.default_rng(0)
    values, scales = to_fp8(rng.standard_normal((300, 200)))
    words, small, _ = to_int4(rng.standard_normal((300, 64)))
    for matrix in (Fp8Matrix(values.view(np.uint8), scales), Int4Matrix(words, small.view(np.uint16))):
        whole = dequantised(matrix)
        for first, last in ((0, 300), (128, 256), (256, 300), (128, 129)):
            np.testing.assert_array_equal(dequantised(rows_of(matrix, first, last)), whole[first:last])


# --- there and back -----------------------------------------------------------------------------------------------


@each_case
@pytest.mark.parametrize("num_shards", [1, 3])
def test_every_bit_comes_back(tmp_path, scheme, chosen, num_shards):
    tensors = small_tensors(scheme, chosen)
    source = write_hf(tmp_path / "hf", with_config(SMALL, scheme), tensors, num_shards)
    summary = convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    names = [name for name in small_tensors(scheme, lambda name: False) if chosen(name)]
    assert summary["quantised"] == {scheme: len(names)} and len(names) in (12, 28)
    with KdtrFile(tmp_path / "m.kdtr") as file:
        assert {name for name in file if name != "config.json"} == set(tensors)
        assert load_config(file) == ModelConfig.from_hf(SMALL)
        for name in names:
            wanted = {
                "fp8": {"": "f8_e4m3", "_scale_inv": "f32"},
                "int4": {"_packed": "i32", "_scale": "bf16"},
            }
            assert {end: file.info(name + end).dtype for end in wanted[scheme]} == wanted[scheme]
    convert_to_hf(tmp_path / "m.kdtr", tmp_path / "back", progress=False)
    assert_same_checkpoint(tmp_path / "back", source)


@each_case
def test_values_are_what_they_were_but_for_the_order_of_rotary_rows(tmp_path, scheme, chosen):
    """The permutation takes scales along: dequantised, the rows are the source's in the order of halves."""
    tensors = small_tensors(scheme, chosen)
    source = write_hf(tmp_path / "hf", with_config(SMALL, scheme), tensors)
    convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    halves = [0, 2, 4, 6, 1, 3, 5, 7]
    query = np.concatenate([np.r_[16 * h : 16 * h + 8, 16 * h + 8 + np.array(halves)] for h in range(4)])
    key = np.r_[0:32, 32 + np.array(halves)]
    with KdtrFile(tmp_path / "m.kdtr") as file:
        for name in filter(chosen, small_tensors(scheme, lambda name: False)):
            wanted = dequantised(matrix_of(tensors, name))
            if name.endswith("q_b_proj.weight"):
                wanted = wanted[query]
            if name.endswith("kv_a_proj_with_mqa.weight"):
                wanted = wanted[key]
            np.testing.assert_array_equal(dequantised(matrix_of(file, name)), wanted)


def test_rows_of_a_published_shape_stay_in_their_blocks(tmp_path):
    """576 and 192 rows a head: the rotary 64 lie in one block of 128 each, whose scale they keep."""
    hf = SMALL | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512, "v_head_dim": 32}
    tensors = small_tensors("fp8", linear, hf)
    convert_to_kdtr(
        write_hf(tmp_path / "hf", with_config(hf, "fp8"), tensors), tmp_path / "m", progress=False
    )
    order = np.arange(64).reshape(32, 2).T.reshape(-1)
    with KdtrFile(tmp_path / "m") as file:
        for part, rows, starts in (
            ("q_b_proj", 768, range(128, 768, 192)),
            ("kv_a_proj_with_mqa", 576, (512,)),
        ):
            name = PREFIX.format(1) + part + ".weight"
            source = np.arange(rows)
            for start in starts:
                source[start : start + 64] = start + order
            wanted = dequantised(matrix_of(tensors, name))
            assert len(np.unique(tensors[f"{name}_scale_inv"])) == -(-rows // 128)
            np.testing.assert_array_equal(dequantised(matrix_of(file, name)), wanted[source])


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "kimi-k2.6", "deepseek-v2-lite", "random-4.8b"])
def test_no_published_shape_is_cut_by_its_scales(name):
    config = open_random(name).config
    formats = {weight: "fp8" for weight in filter(linear, expected_tensors(config))}
    check_blocks(formats, config, name)
    assert any(weight.endswith(tuple(rotary_weights(config, formats))) for weight in formats)


@pytest.mark.parametrize("place", ["text_config", "top level", "both"])
def test_kimis_prefix_and_nested_config(tmp_path, place):
    text = with_config(SMALL, "int4") if place != "top level" else SMALL
    hf = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text}
    hf = with_config(hf, "int4") if place != "text_config" else hf
    tensors = {f"language_model.{name}": t for name, t in small_tensors("int4", routed).items()}
    vision = {"vision_tower.a.weight": np.ones(3, ml_dtypes.bfloat16)}
    source = write_hf(tmp_path / "hf", hf, tensors | vision, 2)
    summary = convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    assert summary["quantised"] == {"int4": 12} and summary["skipped"]["vision"]["count"] == 1
    convert_to_hf(tmp_path / "m.kdtr", tmp_path / "back", progress=False)
    assert read_hf(tmp_path / "back") == {n: v for n, v in read_hf(source).items() if n in tensors}


def test_a_shape_of_i32_is_read_too(tmp_path):
    tensors = small_tensors("int4", routed)
    for name in tensors:
        if name.endswith("_shape"):
            tensors[name] = tensors[name].astype(np.int32)
    source = write_hf(tmp_path / "hf", with_config(SMALL, "int4"), tensors)
    convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    convert_to_hf(tmp_path / "m.kdtr", tmp_path / "back", progress=False)
    assert_same_checkpoint(tmp_path / "back", source)


def test_prediction_layers_are_left_out_quantised_or_not(tmp_path):
    extra = "model.layers.2.mlp.experts.0.up_proj.weight"
    values, scales = to_fp8(np.ones((32, 64)))
    tensors = small_tensors("fp8", linear) | {extra: values, f"{extra}_scale_inv": scales}
    source = write_hf(tmp_path / "hf", with_config(SMALL, "fp8"), tensors)
    summary = convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)
    assert summary["skipped"]["multi_token_prediction"]["count"] == 2


def test_a_plain_checkpoint_whose_config_names_a_scheme_is_plain(tmp_path):
    """Tensors decide; a config left over from before it was dequantised does no harm."""
    tensors = small_tensors("fp8", lambda name: False)
    source = write_hf(tmp_path / "hf", with_config(SMALL, "fp8"), tensors)
    assert convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)["quantised"] == {}


@pytest.mark.parametrize("name", ["dsv3", "dsv3_yarn"])
def test_the_fixtures_models_come_back(tmp_path, name):
    hf, tensors = tiny_source(name)
    for scheme, chosen in CASES[:3]:
        made = quantised(tensors, scheme, chosen)
        source = write_hf(tmp_path / scheme / chosen.__name__, with_config(hf, scheme), made)
        kdtr, back = source.with_suffix(".kdtr"), source.with_suffix(".back")
        convert_to_kdtr(source, kdtr, progress=False)
        convert_to_hf(kdtr, back, progress=False)
        assert_same_checkpoint(back, source)


def test_inspect_counts_the_weights_and_not_the_scales(tmp_path):
    from ddtree.inspect import describe

    counts = []
    for scheme, chosen in (("fp8", linear), ("int4", routed), ("fp8", lambda name: False)):
        folder = tmp_path / f"{scheme}{len(counts)}"
        tensors = small_tensors(scheme, chosen)
        convert_to_kdtr(write_hf(folder, with_config(SMALL, scheme), tensors), tmp_path / "m", progress=False)
        counts.append(describe(tmp_path / "m")["parameters"])
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize("scheme", CONFIGS)
def test_schemes_are_read(scheme):
    assert read_scheme({"quantization_config": CONFIGS[scheme]}) == scheme
    assert read_scheme({"text_config": {"quantization_config": CONFIGS[scheme]}}) == scheme
    assert read_scheme(json.loads('{"text_config": null, "quantization_config": null}')) is None
