"""Every way a quantised checkpoint can be wrong is one line that names it, and leaves nothing."""

import copy
import json

import ml_dtypes
import numpy as np
import pytest
from checkpoint.makers import refuses, write_hf
from checkpoint.quantisers import (
    CONFIGS,
    FP8_CONFIG,
    SMALL,
    linear,
    routed,
    small_tensors,
    to_fp8,
    to_int4,
    with_config,
)

from ddtree.config_quantisation import read_scheme
from ddtree.errors import CheckpointError, ConfigError

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"
OUT = "model.layers.0.self_attn.o_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def changed(tensors, name, place, value):
    """The array `name` with one element set."""
    array = tensors[name].copy()
    array[place] = value
    tensors[name] = array


def plain(tensors, *names):
    """Put bf16 weights in place of INT4 ones."""
    for name in names:
        shape = tensors[f"{name}_shape"].tolist()
        for ending in ("_packed", "_scale", "_shape"):
            del tensors[name + ending]
        tensors[name] = np.ones(shape, ml_dtypes.bfloat16)


FP8_FAULTS = {
    "scale missing": (lambda t: t.pop(f"{OUT}_scale_inv"), f"1 missing ({OUT}_scale_inv)"),
    "weight missing": (lambda t: t.pop(OUT), f"1 missing ({OUT})"),
    "scale shape": (
        lambda t: t.update({f"{OUT}_scale_inv": np.ones((1, 2), np.float32)}),
        f"{OUT}_scale_inv: expected [1, 1], found [1, 2]",
    ),
    "a scale a row": (
        lambda t: t.update({f"{OUT}_scale_inv": np.ones((64, 1), np.float32)}),
        "expected [1, 1], found [64, 1]",
    ),
    "scale dtype": (
        lambda t: t.update({f"{OUT}_scale_inv": np.ones((1, 1), ml_dtypes.bfloat16)}),
        f"{OUT}_scale_inv: expected f32, found bf16",
    ),
    "weight dtype": (
        lambda t: t.update({OUT: np.ones((64, 32), ml_dtypes.bfloat16)}),
        f"{OUT}: expected f8_e4m3, found bf16",
    ),
    "other fp8": (
        lambda t: t.update({OUT: np.ones((64, 32), ml_dtypes.float8_e5m2)}),
        f"{OUT}: expected f8_e4m3, found F8_E5M2",
    ),
    "weight shape": (
        lambda t: t.update({OUT: t[OUT].T.copy()}),
        f"{OUT}: expected [64, 32], found [32, 64]",
    ),
    "nan scale": (
        lambda t: changed(t, f"{OUT}_scale_inv", (0, 0), np.nan),
        f"{OUT}_scale_inv: expected finite numbers, found nan at [0, 0]",
    ),
    "infinite scale": (lambda t: changed(t, f"{OUT}_scale_inv", (0, 0), np.inf), "found inf at [0, 0]"),
    "nan weight": (
        lambda t: changed(t, OUT, (63, 30), np.nan),
        f"{OUT}: expected finite numbers, found nan at [63, 30]",
    ),
    "norm": (
        lambda t: t.update({NORM: t[NORM].astype(ml_dtypes.float8_e4m3fn)}),
        f"{NORM}: expected bf16, f16, f32, found f8_e4m3",
    ),
    "embedding": (
        lambda t: t.update(
            dict(zip((EMBEDDING, f"{EMBEDDING}_scale_inv"), to_fp8(t[EMBEDDING]), strict=True))
        ),
        f"1 extra ({EMBEDDING}_scale_inv)",
    ),
    "activations": (
        lambda t: t.update({f"{OUT[:-6]}input_scale": np.ones(1, np.float32)}),
        "1 extra (model.layers.0.self_attn.o_proj.input_scale)",
    ),
    "one expert plain": (
        lambda t: (t.pop(f"{EXPERT}_scale_inv"), t.update({EXPERT: t[EXPERT].astype(ml_dtypes.bfloat16)})),
        f"the routed experts of a layer must be of one format; they differ in model.layers.1.mlp.experts.0."
        f"gate_proj.weight and {EXPERT}",
    ),
    "a weight in INT4": (
        lambda t: (t.pop(f"{OUT}_scale_inv"), t.update(int4_parts(OUT, t.pop(OUT)))),
        f"{OUT}: its tensors are int4, but quantization_config says fp8",
    ),
}


def int4_parts(name, weight):
    """The three tensors of a weight, by name."""
    return {
        name + end: array for end, array in zip(("_packed", "_scale", "_shape"), to_int4(weight), strict=True)
    }


INT4_FAULTS = {
    "scale missing": (lambda t: t.pop(f"{EXPERT}_scale"), f"1 missing ({EXPERT}_scale)"),
    "packed missing": (lambda t: t.pop(f"{EXPERT}_packed"), f"1 missing ({EXPERT}_packed)"),
    "shape missing": (lambda t: t.pop(f"{EXPERT}_shape"), f"1 missing ({EXPERT}_shape)"),
    "packed and plain": (
        lambda t: t.update({EXPERT: np.ones((32, 64), ml_dtypes.bfloat16)}),
        f"1 extra ({EXPERT})",
    ),
    "groups of 64": (
        lambda t: t.update({f"{EXPERT}_scale": t[f"{EXPERT}_scale"][:, :1].copy()}),
        f"{EXPERT}_scale: expected [32, 2], found [32, 1]",
    ),
    "packed along the rows": (
        lambda t: t.update({f"{EXPERT}_packed": np.ones((4, 64), np.int32)}),
        f"{EXPERT}_packed: expected [32, 8], found [4, 64]",
    ),
    "scale dtype": (
        lambda t: t.update({f"{EXPERT}_scale": np.ones((32, 2), np.float16)}),
        f"{EXPERT}_scale: expected bf16, found f16",
    ),
    "packed dtype": (
        lambda t: t.update({f"{EXPERT}_packed": np.ones((32, 8), np.int64)}),
        f"{EXPERT}_packed: expected i32, found i64",
    ),
    "another shape": (
        lambda t: changed(t, f"{EXPERT}_shape", 1, 63),
        f"{EXPERT}_shape: expected [32, 64], the shape of the weight, found [32, 63]",
    ),
    "a shape of three": (
        lambda t: t.update({f"{EXPERT}_shape": np.ones(3, np.int64)}),
        f"{EXPERT}_shape: expected [2], found [3]",
    ),
    "nan scale": (
        lambda t: changed(t, f"{EXPERT}_scale", (31, 1), np.nan),
        f"{EXPERT}_scale: expected finite numbers, found nan at [31, 1]",
    ),
    "zero points": (
        lambda t: t.update({f"{EXPERT}_zero_point": np.ones((4, 2), np.int32)}),
        f"1 extra ({EXPERT}_zero_point)",
    ),
    "reordered groups": (
        lambda t: t.update({f"{EXPERT}_g_idx": np.ones(64, np.int32)}),
        f"1 extra ({EXPERT}_g_idx)",
    ),
    "one expert plain": (lambda t: plain(t, EXPERT), f"gate_proj.weight and {EXPERT}"),
    "norm": (lambda t: t.update({f"{NORM}_packed": np.ones((1, 8), np.int32)}), f"1 extra ({NORM}_packed)"),
}


@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_fp8_tensors_that_do_not_fit(tmp_path, fault):
    tensors = small_tensors("fp8", linear)
    change, fragment = FP8_FAULTS[fault]
    change(tensors)
    source = write_hf(tmp_path / "hf", with_config(SMALL, "fp8"), tensors)
    refuses(tmp_path, source, CheckpointError, str(source), fragment)


@pytest.mark.parametrize("fault", INT4_FAULTS)
def test_int4_tensors_that_do_not_fit(tmp_path, fault):
    tensors = small_tensors("int4", routed)
    change, fragment = INT4_FAULTS[fault]
    change(tensors)
    source = write_hf(tmp_path / "hf", with_config(SMALL, "int4"), tensors)
    refuses(tmp_path, source, CheckpointError, str(source), fragment)


@pytest.mark.parametrize(("scheme", "chosen"), [("fp8", linear), ("int4", routed)])
def test_quantised_tensors_that_no_config_names(tmp_path, scheme, chosen):
    source = write_hf(tmp_path / "hf", SMALL, small_tensors(scheme, chosen))
    refuses(
        tmp_path, source, CheckpointError, f"its tensors are {scheme}, but quantization_config is missing"
    )


@pytest.mark.parametrize("length", [48, 40, 36])
def test_inputs_that_are_no_multiple_of_a_group(tmp_path, length):
    hf = with_config(SMALL | {"moe_intermediate_size": length}, "int4")
    tensors = small_tensors("int4", lambda name: False, hf)
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    del tensors[name]
    tensors[f"{name}_packed"] = np.ones((64, length // 8), np.int32)
    refuses(
        tmp_path,
        write_hf(tmp_path / "hf", hf, tensors),
        CheckpointError,
        f"1 weights cannot be INT4 ({name}: K = {length} is no multiple of 32)",
    )


def test_rotary_rows_that_scales_cut(tmp_path):
    """Heads of 100 + 64 rows: the first head's rotary rows 100 .. 163 lie in two blocks of scales."""
    hf = with_config(SMALL | {"qk_nope_head_dim": 100, "qk_rope_head_dim": 64}, "fp8")
    source = write_hf(tmp_path / "hf", hf, small_tensors("fp8", linear, hf))
    said = "q_b_proj.weight: fp8 scales of 128 rows cut a rotary part (64 rows after 100) at row"
    refuses(tmp_path, source, CheckpointError, said, "give a bf16 checkpoint")


def test_stored_halves_are_cut_by_nothing(tmp_path):
    from ddtree.checkpoint import convert_to_kdtr

    hf = SMALL | {"qk_nope_head_dim": 100, "qk_rope_head_dim": 64, "rope_interleave": False}
    hf = with_config(hf, "fp8")
    source = write_hf(tmp_path / "hf", hf, small_tensors("fp8", linear, hf))
    assert convert_to_kdtr(source, tmp_path / "m.kdtr", progress=False)["permuted"] == 0


SCHEMES = {
    "method": (
        FP8_CONFIG | {"quant_method": "gptq"},
        "quant_method: expected one of fp8, compressed-tensors",
    ),
    "no method": ({"bits": 4}, "field quant_method is missing"),
    "not an object": ([1], "expected a JSON object, found list"),
    "a scale a tensor": (FP8_CONFIG | {"weight_block_size": None}, "field weight_block_size is missing"),
    "block": (FP8_CONFIG | {"weight_block_size": [64, 128]}, "expected [128, 128], found [64, 128]"),
    "e5m2": (FP8_CONFIG | {"fmt": "e5m2"}, "fmt: expected one of e4m3, found 'e5m2'"),
}


@pytest.mark.parametrize("fault", SCHEMES)
def test_schemes_that_are_not_read(tmp_path, fault):
    scheme, fragment = SCHEMES[fault]
    source = write_hf(tmp_path / "hf", SMALL | {"quantization_config": scheme}, small_tensors("fp8", linear))
    refuses(tmp_path, source, ConfigError, "config.json: quantization_config", fragment)


GROUPS = {
    "8 bits": (("weights", "num_bits"), 8, "group_0: weights: num_bits: expected 4, found 8"),
    "1 is not true": (("weights", "symmetric"), 1, "symmetric: expected True, found 1"),
    "asymmetric": (("weights", "symmetric"), False, "symmetric: expected True, found False"),
    "groups of 128": (("weights", "group_size"), 128, "group_size: expected 32, found 128"),
    "channels": (("weights", "strategy"), "channel", "strategy: expected 'group', found 'channel'"),
    "floats": (("weights", "type"), "float", "type: expected 'int', found 'float'"),
    "order": (("weights", "actorder"), "group", "actorder: expected null, found 'group'"),
    "activations": (("input_activations",), {"num_bits": 8}, "input_activations: expected null"),
    "no weights": (("weights",), None, "field weights is missing"),
    "format": (("format",), "int-quantized", "format: expected one of pack-quantized"),
}


@pytest.mark.parametrize("fault", GROUPS)
def test_groups_that_are_not_read(fault):
    path, value, fragment = GROUPS[fault]
    scheme = copy.deepcopy(CONFIGS["int4"])
    place = scheme["config_groups"]["group_0"]
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ConfigError) as caught:
        read_scheme({"quantization_config": scheme})
    assert fragment in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change", [{"format": "float-quantized"}, {"config_groups": {}}, {"config_groups": None}]
)
def test_other_packings_are_not_read(change):
    with pytest.raises(ConfigError, match=r"quantization_config"):
        read_scheme({"quantization_config": CONFIGS["int4"] | change})


def test_two_schemes_are_one_too_many():
    with pytest.raises(ConfigError, match="text_config has another than the top level"):
        read_scheme(json.loads(json.dumps(with_config({"text_config": with_config({}, "fp8")}, "int4"))))
