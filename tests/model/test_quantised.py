"""A target of quantised weights: the model of their exact values, errors by layer, engines that decode, refusals."""

import functools

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from model.quantised_models import KINDS, dequantised_tiny, quantised_tiny
from support import make_model, observed, poisoned_cache, run, tiny, tokens_of

from ddtree.batch import chain_batch
from ddtree.bench_errors import layer_errors
from ddtree.bench_layers import format_layer_table, observe, parity
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.engine_memory import plan_memory, sum_of
from ddtree.engine_parts import EngineSizes
from ddtree.errors import UsageError
from ddtree.lab_bf16 import Bf16Ops
from ddtree.ops.plan_ops import PlanOps
from ddtree.quantised import Fp8Matrix, Int4Matrix, dequantised
from ddtree.weights import load_target

NAMES = ("dsv3", "dsv3_yarn")
TOKENS = np.random.default_rng(0).integers(512, size=80).astype(np.int32)
each_kind = pytest.mark.parametrize("kind", KINDS)


@functools.cache
def forwarded(make, kind, name, dtype):
    """Logits and steps of 24 tokens in one forward."""
    model = make_model(make(kind, name), dtype)
    logits, _, seen = observed(model, chain_batch(TOKENS[:24], 0), poisoned_cache(model))
    return logits, seen


@each_kind
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [("f64", 1e-13), ("f32", 2e-5)])
def test_every_step_is_that_of_the_exact_values(kind, name, dtype, bound):
    got, want = forwarded(quantised_tiny, kind, name, dtype), forwarded(dequantised_tiny, kind, name, "f64")
    assert_close(got[0], want[0], bound, f"{kind} {name} {dtype} logits")
    assert set(got[1]) == set(want[1])
    for key, value in want[1].items():
        assert_close(got[1][key], value, bound, f"{kind} {name} {dtype} {key}")


@each_kind
def test_which_weights_stay_quantised(kind):
    """Routed experts and, by format, the rest; kv_b's parts, the router, embedding and head are plain."""
    weights = make_model(quantised_tiny(kind), "f32").weights
    layer, stored = weights.layers[2], {"fp8": Fp8Matrix}.get(kind, Int4Matrix)
    assert isinstance(layer.mlp.experts.down, stored) and layer.mlp.experts.down.shape[1:] == (128, 64)
    assert isinstance(layer.o, stored) == (kind != "int4")
    assert isinstance(layer.qkv_a, stored) == (
        kind == "int4 everywhere"
    )  # fp8: 48 rows share scales with kv_a's
    assert isinstance(weights.layers[0].mlp.up, stored) == (kind != "int4")
    together = kind != "int4"  # shared experts of the routed ones' format lie behind them
    assert layer.mlp.experts.gate.shape[0] == 8 + together and (layer.mlp.shared is None) == together
    for array in (layer.w_kc, layer.w_vc, layer.mlp.router, layer.mlp.bias, weights.embedding, weights.head):
        assert isinstance(array, np.ndarray)


def test_shared_experts_that_share_scales_run_apart():
    """Two of 64 rows each in one block of 128: they cannot be cut, and run as one MLP of 128."""
    from ddtree.bench_random import RandomBundle

    bundle = quantised_tiny("fp8")
    config = bundle.config.__class__(**{**vars(bundle.config), "n_shared_experts": 2})
    weights = RandomBundle(bundle.path, config, None, 0, "fp8").target_weights(8, PlanOps("bf16"))
    assert weights.layers[1].mlp.experts.up.shape == (8, 64, 128)
    assert weights.layers[1].mlp.shared.up.shape == (128, 128)


def test_a_stack_holds_each_expert_as_it_was_stored():
    bundle = quantised_tiny("int4")
    stack = make_model(bundle, "f32").weights.layers[1].mlp.experts
    for part in ("gate", "up", "down"):
        for expert in (0, 5, 7):
            name = f"model.layers.1.mlp.experts.{expert}.{part}_proj.weight"
            one = getattr(stack, part)[expert]
            assert_same_bits(one.packed, bundle.target[f"{name}_packed"], name)
            assert_same_bits(one.scales, bundle.target[f"{name}_scale"].view(np.uint16), name)


# --- errors by layer ------------------------------------------------------------------------------------------------


def engine_of(bundle, dtype):
    return Engine(bundle, dtype=dtype, max_budget=8, max_context=64)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_errors_of_arithmetic_and_of_quantisation_by_layer(kind):
    """f32 errs by its own epsilon whatever the weights are; quantisation by some hundredths."""
    exact, plain = engine_of(quantised_tiny(kind), "f64"), engine_of(tiny("dsv3"), "f64")
    record = parity(engine_of(quantised_tiny(kind), "f32"), exact, TOKENS, 24, 9, plain)
    assert record["passed"] and record["experts_differing"] == 0
    errors, quantisation = record["layer_errors"], record["quantisation"]
    assert len(errors) == len(quantisation["layer_errors"]) == 3
    assert 1e-8 < max(errors) < 2e-6
    first, second, last = quantisation["layer_errors"]
    assert first == 0 if kind == "int4" else 0.01 < first < 0.05  # INT4 leaves the dense layer plain
    assert 0.03 < second < 0.15
    assert (
        0.05 < last < 0.3 and 0 < quantisation["experts_differing"] < 5
    )  # of 36 choices, where the errors grow
    print(f"{kind}: {format_layer_table({'parity': [record], 'times': None}).splitlines()[1]}")


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_bf16_errs_by_its_own_rounding(kind):
    """The emulated bf16 mode on quantised weights against f64 of the same: rounded rows, and the plain weights."""
    engine, exact = (engine_of(quantised_tiny(kind), dtype) for dtype in ("f32", "f64"))
    want = observe(exact, TOKENS, 24, 9)
    ops, config = Bf16Ops(), engine.config
    engine.ops, weights = ops, load_target(engine.bundle.target, config, 80, ops)
    engine.model = make_model(engine.bundle, ops=ops)
    engine.cache = poisoned_cache(engine.model, 96)
    assert isinstance(weights.layers[1].mlp.experts.up, Int4Matrix if kind == "int4" else Fp8Matrix)
    errors = layer_errors(observe(engine, TOKENS, 24, 9), want)
    assert all(1e-4 < error < 3e-2 for error in errors)
    print(f"{kind}: bf16 by layer " + ", ".join(f"{error:.1e}" for error in errors))


# --- engines --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_trees_give_the_autoregressive_tokens(kind):
    engine = Engine(quantised_tiny(kind), max_budget=8, max_context=64)
    prompt = TOKENS[:9]
    want = tokens_of(run(engine, prompt, DecodeConfig("ar", max_new_tokens=24)))
    for budget in (3, 8):
        config = DecodeConfig("tree", budget, max_new_tokens=24)
        assert tokens_of(run(engine, prompt, config)) == want
    assert len(want) == 24


@each_kind
def test_memory_is_foretold_and_smaller(kind):
    bundle, sizes = quantised_tiny(kind), EngineSizes(5, 32, 4)
    report, plain = (plan_memory(b, sizes, "bf16").areas for b in (bundle, tiny("dsv3")))
    weights, before = report["target weights"], plain["target weights"]
    per_weight = 1 + 4 / (64 * 128) if kind == "fp8" else 0.5 + 2 / 32
    experts = 2 * 3 * (8 + (kind != "int4")) * 64 * 128
    assert weights["experts"] == pytest.approx(experts * per_weight)
    assert weights["experts"] < 0.55 * before["experts"]
    assert ("shared experts" in weights) == (kind == "int4")
    if kind == "int4":
        assert weights["shared experts"] == 2 * 2 * 3 * 64 * 128
    assert sum_of(report["model buffers"]) - sum_of(plain["model buffers"]) == (
        5 * 0 + 6 * 4 * (2 * 64 + 128) if kind == "int4" else 0
    )


@each_kind
def test_an_engine_on_numpy_holds_the_quantised_bytes(kind):
    engine = Engine(quantised_tiny(kind), max_budget=5, max_context=32, prefill_chunk=4)
    weights = engine.model.weights.layers[1].mlp.experts
    arrays = [array for part in (weights.gate, weights.up, weights.down) for array in part.arrays]
    assert engine.memory()["target weights"]["experts"] == 2 * sum(array.nbytes for array in arrays)


def test_cuda_wants_bf16():
    for kind, stored in (("int4", "int4"), ("fp8", "fp8")):
        with pytest.raises(UsageError) as caught:
            plan_memory(quantised_tiny(kind), EngineSizes(5, 32, 4), "f32")
        assert str(caught.value) == (
            f"dtype: {stored} weights need bf16 on the backend cuda, found f32: use --dtype bf16"
        )


def test_what_cuda_has_no_kernel_for_is_dequantised():
    """INT4 outside the experts: plain bf16 there, quantised on the host."""
    bundle = quantised_tiny("int4 everywhere")
    weights = load_target(bundle.target, bundle.config, 8, PlanOps("bf16"))
    assert isinstance(weights.layers[1].mlp.experts.up, Int4Matrix)
    assert weights.layers[0].o.shape == (128, 64) and weights.layers[0].o.dtype == np.uint16
    ops = Bf16Ops()
    got = load_target(bundle.target, bundle.config, 8, ops).layers[0].o
    want = dequantised(make_model(bundle, "f64").weights.layers[0].o)
    np.testing.assert_array_equal(got, ops.put(want))


def test_loading_tells_of_all_bytes_but_the_shapes():
    bundle, told = quantised_tiny("int4"), []
    Engine(bundle, max_budget=2, max_context=32, progress=lambda count, total: told.append((count, total)))
    shapes = sum(info.nbytes for name, info in bundle.target.arrays.items() if name.endswith("_shape"))
    assert {total for _, total in told} == {bundle.weight_bytes}
    assert sum(count for count, _ in told) == bundle.weight_bytes - shapes
