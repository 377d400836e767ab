"""The kernels' scratch is that of the weights there are: fp8 matrices take some beside either way to multiply."""

import json

import pytest
from checkpoint.makers import write_hf
from checkpoint.quantisers import linear, quantised, with_config
from engine.micro import TARGET
from fixtures.seeded import checkpoint_dir
from model.quantised_models import KINDS, quantised_tiny
from safetensors import safe_open
from support import tiny

from ddtree.bench_random import open_random
from ddtree.bundle import open_bundle
from ddtree.checkpoint import convert_to_kdtr
from ddtree.checkpoint_formats import holds_fp8
from ddtree.config import ModelConfig
from ddtree.engine_memory import plan_memory
from ddtree.engine_parts import EngineSizes
from ddtree.ops.scratch import largest_scratch
from kernels_numba.linear_fp8 import linear_fp8_scratch

SIZES, SCRATCH = EngineSizes(64, 8192), "kernels' scratch"


def scratch(weights, gemm, dtype="bf16"):
    """Bytes by name, of Kimi's first two layers."""
    bundle = open_random("kimi-k2.6", 2, weights=weights)
    assert bundle.fp8 == (weights == "fp8")
    return plan_memory(bundle, SIZES, dtype, gemm).areas[SCRATCH]


@pytest.mark.parametrize("gemm", ["invariant", "cublas"])
def test_only_fp8_weights_take_scratch_for_fp8(gemm):
    plain, int4, fp8 = (scratch(weights, gemm) for weights in ("bf16", "int4", "fp8"))
    assert plain == int4 and ("linear" in plain) == (gemm == "invariant")
    assert fp8.pop("linear") > plain.pop("linear", 0) and fp8 == plain


def test_f32_takes_none():
    assert "linear" not in scratch("bf16", "invariant", "f32")


def test_what_holds_fp8():
    """The stack of routed experts has a kernel of its own; what stands beside it has `linear`."""
    layer = "model.layers.1"
    routed = [f"{layer}.mlp.experts.0.up_proj.weight_scale_inv", f"{layer}.self_attn.o_proj.weight"]
    assert not holds_fp8(routed) and not holds_fp8([f"{layer}.mlp.gate.weight", f"{layer}.a_packed"])
    for name in ("self_attn.o_proj", "mlp.shared_experts.up_proj", "mlp.down_proj"):
        assert holds_fp8([*routed, f"{layer}.{name}.weight_scale_inv"]), name
    assert not open_bundle().fp8
    assert {kind: quantised_tiny(kind).fp8 for kind in KINDS} == {"int4": 0, "fp8": 1, "int4 everywhere": 0}


@pytest.mark.parametrize("gemm", ["invariant", "cublas"])
def test_an_fp8_drafter_of_a_plain_target_has_its_scratch(tmp_path, gemm):
    """What its block and the features that it learns take, or the first draft is refused."""
    drafter = checkpoint_dir("dsv3", "draft")
    with safe_open(drafter / "model.safetensors", framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    hf = json.loads((drafter / "config.json").read_text())
    source = write_hf(tmp_path / "hf", with_config(hf, "fp8"), quantised(tensors, "fp8", linear))
    convert_to_kdtr(source, tmp_path / "drafter.kdtr", progress=False)
    bundle = open_bundle(tiny("dsv3").path, tmp_path / "drafter.kdtr")
    assert bundle.fp8 and not tiny("dsv3").fp8
    c, rows = bundle.drafter_config, SIZES.max_rows
    wanted = [linear_fp8_scratch(rows, c.num_key_value_heads * c.head_dim, c.hidden_size)]
    wanted += [linear_fp8_scratch(c.block_size, c.intermediate_size, c.hidden_size)]
    wanted += [linear_fp8_scratch(c.block_size, c.hidden_size, c.intermediate_size)]
    assert plan_memory(bundle, SIZES, "bf16", gemm).areas[SCRATCH].get("linear", 0) >= 4 * max(wanted) > 0


@pytest.mark.parametrize(("gemm", "rows", "count"), [("cublas", 9, 230_400), ("invariant", 3, 76_800)])
def test_fp8_layers_as_wide_as_the_vocabulary_have_their_scratch(gemm, rows, count):
    """The head may be fp8 as well as a layer whose N is the vocabulary's: neither is left out."""
    sizes = {"hidden_size": 2048, "vocab_size": 6144, "intermediate_size": 6144}
    config = ModelConfig.from_hf(TARGET | sizes)
    assert linear_fp8_scratch(rows, 6144, 2048) == count
    assert largest_scratch(config, None, rows, 64, gemm, fp8=True)["linear"][0] >= count
