"""Parity by layer, and the recorded operations of a forward: what they are and what they must move."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import why_no_gpu
from engine.micro import write_nano_bundle
from support import tiny, trained

from ddtree import bench_forward, bench_kernels, bench_layers
from ddtree.bench_calls import cost_of, label_of, record_forward, size_of, weight_names
from ddtree.bench_forward import commit, random_context, tree_forward, verify_tree
from ddtree.bench_layers import parity, run_layer_bench, tokens_for
from ddtree.bundle import open_bundle
from ddtree.engine import Engine


@pytest.fixture(scope="module")
def engine():
    return Engine(trained(), max_budget=31, max_context=200)


def test_f32_is_f64_within_its_bound(engine):
    document = run_layer_bench(engine, (1, 16), (70,))
    assert bench_layers.passed(document) and document["times"] is None
    for record in document["parity"]:
        assert record["worst_layer"]["error"] < 1e-5 and record["experts_differing"] == 0
        names = {step["step"] for step in record["steps"]}
        assert {"embedding", "attention", "mlp", "layer", "router", "gates", "norm", "logits"} <= names
        assert len([step for step in record["steps"] if step["step"] == "layer"]) == 8
    text = bench_layers.format_layer_table(document)
    assert "worst layer" in text and "need a GPU" in text


def test_a_wrong_layer_is_named(engine):
    """One weight of layer 5 is changed: errors begin there, the check fails and says so."""
    broken = Engine(trained(), max_budget=31, max_context=200)
    broken.model.weights.layers[5].o[3] *= 1.5
    reference = Engine(trained(), dtype="f64", max_budget=31, max_context=200)
    record = parity(broken, reference, tokens_for(trained(), 102), 70, 4)
    layers = {step["layer"]: step["error"] for step in record["steps"] if step["step"] == "layer"}
    assert not record["passed"] and record["worst_layer"]["layer"] >= 5
    assert max(layers[layer] for layer in range(5)) < 1e-5 < min(layers[layer] for layer in range(5, 8))
    text = bench_layers.format_layer_table({"parity": [record], "times": None})
    assert f"FAILED, worst layer {record['worst_layer']['layer']}" in text


def test_nan_is_worst(engine):
    record = {"step": "layer", "layer": 0, "error": float("nan")}
    assert bench_layers._ordered(record["error"]) > 1e30


def test_recorded_calls_are_the_forward(engine):
    tokens = tokens_for(engine.bundle, 90)
    commit(engine, tokens[:70])
    tree = verify_tree(tokens[70:], 16, engine.config.vocab_size)
    batch = tree_forward(engine, tree)
    want = engine.model.forward(batch, engine.cache)[0].copy()
    engine.model.buffers.logits[...] = np.nan
    calls = record_forward(engine, batch)
    assert engine.model.ops is engine.ops
    assert (engine.model.buffers.logits[:16] == want).all()
    names, depths = weight_names(engine.model.weights), tree.depths
    ahead = {(before.name, call.name) for before, call in itertools.pairwise(calls)}
    early = {"attention": "head_linear", "append_latent": "linear", "split_query": "linear"}
    assert {(a, b) for a, b in ahead if b in early} == {
        (a, b) for b, a in early.items()
    }  # writes no place, no cache
    assert all(call.step for call in calls) and {call.layer for call in calls} == set(range(9))
    assert label_of(calls[-1], names) in ("linear head", "linear embedding")  # tied or not
    costs = {id(call): cost_of(call, names, 70, depths) for call in calls}
    config = engine.config

    def total(*wanted):
        return sum(costs[id(call)].weights for call in calls if call.name in wanted)

    matrices = [w for layer in engine.model.weights.layers for w in (layer.qkv_a, layer.q_b, layer.o)]
    dense = engine.model.weights.layers[0].mlp
    routers = [layer.mlp.router for layer in engine.model.weights.layers[1:]]
    mlps = [matrix for mlp in (dense,) for matrix in (mlp.gate, mlp.up, mlp.down)]
    assert total("linear") == sum(map(size_of, [*matrices, *mlps, *routers, engine.model.weights.head]))
    for call in calls:
        cost = costs[id(call)]
        if call.name == "experts":
            touched, pairs = call.routed
            assert pairs == 16 * config.num_experts_per_tok and touched <= config.n_routed_experts
            one = 3 * config.hidden_size * config.moe_intermediate_size
            shared = config.n_shared_experts
            assert cost.weights == 4 * (touched + shared) * one
            assert cost.flops == 2 * (pairs + 16 * shared) * one
        if call.name == "attention":
            width = config.kv_lora_rank + config.qk_rope_head_dim
            assert cost.cache == 4 * 86 * width
            seen = int((71 + depths.astype(int)).sum())
            assert cost.flops == 2 * seen * config.num_attention_heads * (width + config.kv_lora_rank)
        if call.name == "linear":
            assert cost.flops == 2 * call.arguments[0].shape[0] * cost.weights // 4
        assert 0 < cost.bytes < 1e8


def test_without_a_q_lora_and_with_yarn():
    engine = Engine(tiny("dsv3_yarn"), max_budget=7, max_context=100)
    document = run_layer_bench(engine, (8,), (40,))
    assert bench_layers.passed(document)


@pytest.mark.simulator
def test_parity_in_the_simulator(tmp_path):
    bundle = open_bundle(write_nano_bundle(tmp_path))
    options = {"max_budget": 2, "max_context": 8, "prefill_chunk": 1}
    engine = Engine(bundle, backend="cuda", **options)
    record = parity(engine, Engine(bundle, dtype="f64", **options), [5, 17, 40, 3, 4], 1, 3)
    assert record["passed"] and record["worst_layer"]["error"] < 1e-5


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_parity_fails_for_a_wrong_layer_and_for_nan(dtype):
    engine, reference = (Engine(tiny("dsv3"), dtype=d, max_budget=3, max_context=9) for d in ("f32", "f64"))
    engine.ops.dtype_name = dtype  # what is asked of that mode, by the arithmetic of f32
    tokens, layer = [1, 2, 3, 4, 5], engine.model.weights.layers[-1]
    assert parity(engine, reference, tokens, 2, 3)["passed"]
    for spoil in (2, np.nan):
        layer.o[...] *= spoil
        record = parity(engine, reference, tokens, 2, 3)
        assert not record["passed"] and record["worst_layer"]["layer"] == engine.config.num_hidden_layers - 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_on_the_gpu(dtype):
    engine = Engine(trained(), backend="cuda", dtype=dtype, max_budget=63, max_context=200)
    document = run_layer_bench(engine, (1, 64), (128,))
    assert not why_no_gpu() and bench_layers.passed(document)
    for record in document["times"]:
        layers = [layer["us"] for layer in record["layers"]]
        assert len(layers) == 10 and min(layers[:-1]) > 0
        assert 0.5 < sum(layers) / record["forward"]["us"] < 2
        assert {one["kind"] for one in record["operations"]} == {"dense", "moe", "ends"}
        assert all(one["us"] > 0 and one["bytes"] > 0 for one in record["operations"])


class _PretendOps:
    """NumPy's operations with what the timing asks of a GPU backend besides."""

    def __init__(self, ops):
        self._ops = ops

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def empty(self, shape, dtype=np.float32):
        return np.empty(shape, dtype)

    def read(self, array):
        return array.copy()

    def stamp(self, times, slot):
        times[slot] = time.perf_counter_ns()


class _PretendStream:
    """The clock of this machine in place of a GPU's."""

    device = SimpleNamespace(properties=SimpleNamespace(l2_cache_size=1 << 20))

    def sync(self):
        """Nothing is under way."""

    def milliseconds(self, work):
        start = time.perf_counter()
        work()
        return (time.perf_counter() - start) * 1e3


def test_times_on_a_pretended_gpu(monkeypatch):
    """Everything but the GPU's clock: each operation runs again alone, layers add up, the text can be read."""
    monkeypatch.setattr(bench_kernels, "REPLAY_SECONDS", 0.0)
    monkeypatch.setattr(bench_forward, "NODES", 3)
    monkeypatch.setattr(bench_forward, "SECONDS", 0.0)
    monkeypatch.setattr(bench_forward, "placed", lambda engine, batch: batch)
    engine = Engine(trained(), max_budget=31, max_context=200)
    engine.ops = engine.model.ops = _PretendOps(engine.ops)
    runner = SimpleNamespace(stream=_PretendStream(), graphs=True, run=lambda key, body: body())
    monkeypatch.setattr(engine, "runner", runner)
    record = bench_layers.time_forward(engine, tokens_for(engine.bundle, 110), 70, 16, 1.0)
    whole = record["forward"]
    assert record["mode"] == "graphs" and len(whole["experts_touched"]) == 7 and whole["us"] > 0
    assert [layer["layer"] for layer in record["layers"]] == ["embedding", *range(8), "head"]
    assert [layer["kind"] for layer in record["layers"][:3]] == ["", "dense", "moe"]
    assert all(layer["us"] > 0 for layer in record["layers"])
    by_kind = {
        kind: {one["operation"]: one for one in record["operations"] if one["kind"] == kind}
        for kind in ("dense", "moe", "ends")
    }
    assert {"linear qkv_a", "linear mlp.gate", "attention"} <= set(by_kind["dense"])
    assert {"linear mlp.router", "gate mlp.bias"} <= set(by_kind["moe"])
    assert (
        by_kind["moe"]["linear qkv_a"]["layers_in_turn"] == 7
        and by_kind["dense"]["linear qkv_a"]["layers_in_turn"] == 1
    )
    floor = whole["bytes"] / 1.0 / 1e3
    assert whole["floor_us"] == floor and whole["fraction"] == floor / whole["us"]
    document = {"parity": None, "times": [record]}
    text = bench_layers.format_layer_table(document)
    assert "experts a layer" in text and "linear qkv_a" in text and "not computed" in text


@pytest.mark.simulator
def test_a_random_context_fills_every_row_of_the_caches(tmp_path):
    engine = Engine(
        open_bundle(write_nano_bundle(tmp_path)), backend="cuda", max_budget=2, max_context=8, prefill_chunk=1
    )
    random_context(engine, 5)
    assert engine.context_len == 5
    for cache in (engine.cache.latent, engine.cache.rope):
        values = engine.ops.read(cache)
        assert np.isfinite(values).all() and len(np.unique(values)) > 0.9 * values.size
        assert 0.5 < values.std() < 1.5
