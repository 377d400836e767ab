"""A quantised target on the backend cuda: its kernels are reached, memory is what was foretold, trees are lossless."""

import json

import numpy as np
import pytest
from bench.small import SMALL
from compare_arrays import assert_close
from model.quantised_models import quantised_tiny
from support import run, tokens_of

from ddtree.bench_layers import parity
from ddtree.bench_random import open_random
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.engine_memory import plan_memory
from ddtree.engine_parts import EngineSizes
from ddtree.errors import UsageError
from ddtree.lab_bf16 import Bf16Ops
from ddtree.ops import get_ops
from ddtree.quantised import Fp8Matrix

QUANTISED = ("fp8", "int4")
HF = SMALL | {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "vocab_size": 32, "q_lora_rank": 16,
    "n_routed_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip
OPTIONS = {"max_budget": 15, "max_context": 96}
CONTEXT, ROWS = 5, 9
PROMPT = (
    np.random.default_rng(77).integers(512, size=80).tolist()
)  # no choice of experts is close, as a test says


def bundle_of(tmp_path, weights, **changes):
    (tmp_path / "micro.json").write_text(json.dumps(HF | changes))
    return open_random(str(tmp_path / "micro.json"), layers=2, seed=1, weights=weights)


@pytest.mark.simulator
@pytest.mark.parametrize("weights", QUANTISED)
def test_a_forward_errs_as_bf16_does(tmp_path, weights):
    """Against f64 of the same weights."""
    options = {"max_budget": 1, "max_context": 8, "prefill_chunk": 1}
    bundle = bundle_of(tmp_path, weights)
    engine = Engine(bundle, backend="cuda", dtype="bf16", graphs=False, **options)
    assert isinstance(engine.model.weights.layers[1].o, Fp8Matrix) == (weights == "fp8")
    record = parity(engine, Engine(bundle, dtype="f64", **options), [5, 17, 30], 1, 1)
    errors, flips = record["layer_errors"], record["experts_differing"]
    assert flips == 0 and 1e-4 < max(errors) < 1.5e-2, (errors, flips)


@pytest.mark.simulator
@pytest.mark.parametrize("gemm", ["invariant", "cublas"])
def test_products_with_fp8_are_the_kernels_whatever_makes_the_others(tmp_path, gemm):
    ops, twin = get_ops("cuda", "bf16", gemm=gemm), Bf16Ops()
    mine, theirs = (
        bundle_of(tmp_path, "fp8").target_weights(4, each).layers[0].mlp.up for each in (ops, twin)
    )
    x, want = np.linspace(-2, 3, 64, dtype=np.float32).reshape(2, 32), np.empty((2, 32), np.float32)
    out = ops.empty((2, 32))
    ops.linear(ops.put_exact(x), mine, out)
    twin.linear(x, theirs, want)
    assert_close(ops.read(out), want.astype(np.float64), 1e-6, gemm)


@pytest.mark.simulator
@pytest.mark.parametrize("weights", QUANTISED)
def test_memory_is_what_was_foretold(tmp_path, weights):
    bundle = bundle_of(tmp_path, weights)
    engine = Engine(bundle, backend="cuda", dtype="bf16", max_budget=3, max_context=8, prefill_chunk=2)
    assert engine.memory() == plan_memory(bundle, EngineSizes(3, 8, 2), "bf16").areas


@pytest.mark.simulator
def test_f32_is_refused(tmp_path):
    with pytest.raises(UsageError, match="int4 weights need bf16 on the backend cuda, found f32"):
        Engine(bundle_of(tmp_path, "int4"), backend="cuda", max_budget=3, max_context=8)


@pytest.mark.simulator
def test_fp8_inputs_that_no_kernel_takes(tmp_path):
    """A matrix of K = 24 is dequantised; experts of it are refused in one line."""
    bundle = bundle_of(tmp_path, "fp8", q_lora_rank=24)
    weights = bundle.target_weights(8, get_ops("cuda", "bf16"))
    assert weights.layers[0].q_b.dtype == np.uint16 and isinstance(weights.layers[0].o, Fp8Matrix)
    with pytest.raises(
        UsageError, match="fp8 experts: the backend cuda takes inputs in multiples of 16, found 24"
    ):
        bundle_of(tmp_path, "fp8", moe_intermediate_size=24).target_weights(8, get_ops("cuda", "bf16"))


def ranked_by(engine):
    """What the gate ranks from now on, scores and bias [rows, experts], a f64 array each call."""
    seen, gate = [], engine.ops.gate

    def see(logits, bias, *rest):
        seen.append(1 / (1 + np.exp(-logits.astype(np.float64))) + bias)
        gate(logits, bias, *rest)

    engine.ops.gate = see
    return seen


def margins(ranked):
    """How far the second group of four is behind the first, or its third expert behind the second: the less."""
    groups = np.sort(ranked.reshape(-1, 2, 4), axis=2)
    strength = groups[..., 2:].sum(axis=2)
    first = groups[np.arange(len(groups)), strength.argmax(axis=1)]
    return np.minimum(np.abs(strength[:, 0] - strength[:, 1]), first[:, 2] - first[:, 1])


@pytest.mark.parametrize("weights", QUANTISED)
def test_no_expert_of_the_prompt_is_a_close_choice(monkeypatch, weights):
    """Of emulated bf16, in every row of test_on_the_gpu, context and tree: at most an eighth of what another needs.

    Four scores make a choice of groups. An expert chosen otherwise is worth 0.1 to 0.4 of a layer.
    """
    bundle, exact = quantised_tiny(weights), Engine(quantised_tiny(weights), dtype="f64", **OPTIONS)
    monkeypatch.setattr("ddtree.engine.get_ops", lambda *_: Bf16Ops())
    engine = Engine(bundle, **OPTIONS)
    mine, theirs = ranked_by(engine), ranked_by(exact)
    record = parity(engine, exact, PROMPT, CONTEXT, ROWS)
    assert [len(each) for each in theirs] == [CONTEXT] * 2 + [ROWS] * 2
    for got, want in zip(mine, theirs, strict=True):
        assert (np.abs(got - want).max(axis=1) < margins(want) / 8).all()
    errors, flips = record["layer_errors"], record["experts_differing"]
    assert flips == 0 and 1e-4 < max(errors) < 1e-2, (errors, flips)


@pytest.mark.gpu
@pytest.mark.parametrize("weights", QUANTISED)
def test_on_the_gpu(weights):
    """Errors of bf16 by layer, and the autoregressive tokens from every tree, by captured rounds."""
    bundle = quantised_tiny(weights)
    engine = Engine(bundle, backend="cuda", dtype="bf16", **OPTIONS)
    record = parity(engine, Engine(bundle, dtype="f64", **OPTIONS), PROMPT, CONTEXT, ROWS)
    errors, flips = record["layer_errors"], record["experts_differing"]
    assert flips == 0 and 1e-4 < max(errors) < 1.5e-2, (errors, flips)  # the emulated bf16's: below 1e-2
    want = tokens_of(run(engine, PROMPT[:9], DecodeConfig("ar", max_new_tokens=32)))
    for budget in (1, 7, 15):
        assert tokens_of(run(engine, PROMPT[:9], DecodeConfig("tree", budget, max_new_tokens=32))) == want
