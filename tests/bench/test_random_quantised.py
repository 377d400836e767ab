"""Random models whose weights are stored in fp8 or INT4: formats, deviation, and the same on both backends."""

import json

import numpy as np
import pytest
from bench.small import SMALL, SMALL_DRAFTER

from ddtree.batch import chain_batch
from ddtree.bench_calls import cost_of, label_of, record_forward, weight_names
from ddtree.bench_random import PERIOD, WEIGHTS, open_random
from ddtree.engine import Engine
from ddtree.engine_memory import plan_memory
from ddtree.engine_parts import EngineSizes
from ddtree.errors import UsageError
from ddtree.ops import get_ops
from ddtree.quantised import Fp8Matrix, Int4Matrix, dequantised

WIDE = SMALL | {"moe_intermediate_size": 32, "hidden_size": 64, "q_lora_rank": 128}
QUANTISED = WEIGHTS[1:]


@pytest.fixture
def wide(tmp_path):
    """A config whose experts have inputs in groups of 32, with a drafter."""
    (tmp_path / "wide.json").write_text(json.dumps(WIDE))
    (tmp_path / "wide-drafter.json").write_text(json.dumps(SMALL_DRAFTER | {"hidden_size": 64}))
    return str(tmp_path / "wide.json")


def large(tmp_path, weights):
    """One layer whose matrices are large enough to measure."""
    hf = WIDE | {"hidden_size": 512, "moe_intermediate_size": 256, "first_k_dense_replace": 0}
    (tmp_path / "large.json").write_text(json.dumps(hf))
    return open_random(str(tmp_path / "large.json"), layers=1, weights=weights)


def test_which_weights_are_quantised(wide):
    fp8, int4 = (open_random(wide, weights=w).target_weights(8, get_ops("numpy")) for w in QUANTISED)
    assert isinstance(int4.layers[1].mlp.experts.up, Int4Matrix) and int4.layers[1].mlp.shared is not None
    assert int4.layers[1].mlp.experts.up.shape == (4, 32, 64)
    assert isinstance(fp8.layers[1].mlp.experts.up, Fp8Matrix) and fp8.layers[1].mlp.shared is None
    assert fp8.layers[1].mlp.experts.up.shape == (5, 32, 64)
    for layer in fp8.layers:
        assert all(isinstance(matrix, Fp8Matrix) for matrix in (layer.qkv_a, layer.q_b, layer.o))
    for weights in (int4, fp8):
        plain = [weights.embedding, weights.head, weights.layers[1].w_kc, weights.layers[1].mlp.router]
        assert all(isinstance(array, np.ndarray) for array in plain)
    assert isinstance(int4.layers[1].o, np.ndarray) and isinstance(int4.layers[0].mlp.gate, np.ndarray)


@pytest.mark.parametrize("weights", QUANTISED)
def test_values_deviate_as_plain_weights_do(tmp_path, weights):
    stack = large(tmp_path, weights).target_weights(8, get_ops("numpy")).layers[0].mlp.experts
    for matrix, length in ((stack.gate, 512), (stack.up, 512), (stack.down, 256)):
        values = dequantised(matrix)
        assert np.isfinite(values).all()
        assert values.std() == pytest.approx(1.5 * length**-0.5, rel=0.03)
        assert abs(values.mean()) < 0.02 * values.std()
    assert (dequantised(stack.gate) != dequantised(stack.up)).mean() > 0.9


def test_no_byte_is_nan_and_most_values_there_can_be_are_there(tmp_path):
    stack = large(tmp_path, "fp8").target_weights(8, get_ops("numpy")).layers[0].mlp.experts.up
    assert len(np.unique(stack.values)) == 128 and not np.isin(stack.values & 0x7F, 0x7F).any()
    words = large(tmp_path, "int4").target_weights(8, get_ops("numpy")).layers[0].mlp.experts.up.packed
    assert len(np.unique(words)) > 0.99 * words.size


def test_seeds_fix_the_words(wide):
    ops = get_ops("numpy")
    one, two, other = (open_random(wide, seed=s, weights="int4").target_weights(8, ops) for s in (1, 1, 2))
    stacks = [w.layers[1].mlp.experts.down for w in (one, two, other)]
    for part in ("packed", "scales"):
        a, b, c = (getattr(stack, part) for stack in stacks)
        assert (a == b).all() and (a != c).mean() > 0.9


def test_words_repeat_after_a_prime_number_of_them():
    ops, flat = get_ops("numpy"), np.arange(40, dtype=np.int32).reshape(5, 8)
    ops.repeat(flat, 7)
    np.testing.assert_array_equal(flat.reshape(-1), np.arange(40) % 7)
    ops.repeat(whole := np.arange(6), 6)
    np.testing.assert_array_equal(whole, np.arange(6))
    assert all(PERIOD % divisor for divisor in range(2, 1024))


@pytest.mark.parametrize("weights", QUANTISED)
def test_all_of_an_array_is_filled(wide, weights, monkeypatch):
    monkeypatch.setattr("ddtree.bench_random.PERIOD", 97)
    stack = open_random(wide, weights=weights).target_weights(8, get_ops("numpy")).layers[1].mlp.experts.gate
    words = stack.arrays[0].reshape(-1).view(np.int32)
    np.testing.assert_array_equal(words, np.resize(words[:97], words.size))
    assert len(np.unique(words)) == 97 < words.size / 4


def test_plain_weights_are_what_they_were(wide):
    assert open_random(wide).sha256() == {"target": "wide, random weights of seed 0"}
    assert open_random(wide, weights="fp8").sha256() == {"target": "wide, random weights in fp8 of seed 0"}


@pytest.mark.parametrize("weights", QUANTISED)
def test_an_engine_runs_on_them(wide, weights):
    engine = Engine(open_random(wide, weights=weights), max_budget=4, max_context=16)
    logits = engine.prefill(np.arange(6, dtype=np.int32))
    assert np.isfinite(logits).all() and logits.std() > 0.1


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_a_layer_of_kimi_takes(weights):
    """A dense layer and a MoE layer of 384 experts: bytes of weights, without a GPU."""
    bundle = open_random("kimi-k2.6", layers=2, weights=weights)
    areas = plan_memory(bundle, EngineSizes(16, 256), "bf16").areas["target weights"]
    per_weight = {"bf16": 2, "int4": 0.5 + 2 / 32, "fp8": 1 + 4 / 128**2}[weights]
    experts = 384 + (weights != "int4")
    assert areas["experts"] == round(experts * 3 * 7168 * 2048 * per_weight)
    assert areas.get("shared experts", 0) == (3 * 7168 * 2048 * 2 if weights == "int4" else 0)


def test_what_is_not_offered(wide, tmp_path):
    with pytest.raises(UsageError, match=r"weights: expected one of bf16, fp8, int4, found 'int8'"):
        open_random(wide, weights="int8")
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    with pytest.raises(UsageError) as caught:
        open_random(str(tmp_path / "small.json"), weights="int4")
    assert "int4 needs inputs in groups of 32" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.simulator
@pytest.mark.parametrize("weights", QUANTISED)
def test_the_simulators_weights_are_numpys(wide, weights):
    bundle, host, device = open_random(wide, weights=weights), get_ops("numpy"), get_ops("cuda", "bf16")
    got, want = (bundle.target_weights(4, ops).layers[1].mlp.experts for ops in (device, host))
    for part in ("gate", "up", "down"):
        for mine, theirs in zip(getattr(got, part).arrays, getattr(want, part).arrays, strict=True):
            np.testing.assert_array_equal(device.read(mine), theirs)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_what_calls_of_a_forward_cost(wide, weights):
    """Bytes are those stored, scales included; operations are those of plain weights."""
    engine = Engine(open_random(wide, weights=weights), max_budget=4, max_context=16)
    calls = record_forward(engine, chain_batch(np.arange(3), 0))
    names, depths = weight_names(engine.model.weights), np.arange(3)
    costs = {(call.layer, label_of(call, names)): cost_of(call, names, 0, depths) for call in calls}
    stacks = "experts " + "+".join(f"mlp.experts.{name}" for name in ("gate", "up", "down"))
    touched = next(call.routed for call in calls if call.routed)
    pairs = next(call for call in calls if call.routed).arguments[5].shape[0]
    assert pairs == 3 * (2 + (weights != "int4"))  # of the experts in the stack that a row goes to
    if weights == "int4":
        words = touched[0] * 3 * 64 * 32 // 2
        assert costs[1, stacks].weights == words + words // 8
        assert costs[1, stacks].flops == 2 * 3 * 2 * 3 * 64 * 32
        assert costs[1, "linear mlp.shared.down"].weights == 4 * 64 * 32
    elif weights == "fp8":
        assert costs[1, stacks].weights == (touched[0] + 1) * 3 * (64 * 32 + 4)
        assert costs[0, "linear qkv_a"].weights == (128 + 24) * 64 + 2 * 4
    assert costs[0, "linear qkv_a"].flops == 2 * 3 * (128 + 24) * 64
