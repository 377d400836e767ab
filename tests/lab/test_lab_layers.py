"""The forward taken apart: sessions, errors by step and by operation, emulated bf16, routing, cache bytes."""

import functools

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import tiny, trained

from ddtree.batch import chain_batch
from ddtree.lab import Count, Factor, Matrix, Out, Twins
from ddtree.lab_bf16 import Bf16Ops, Rounded, rounded
from ddtree.lab_layers import (
    Session,
    kv_bytes,
    local_errors,
    prefilled,
    relative_error,
    relative_errors,
    routing,
)
from ddtree.ops import get_ops

TOKENS = np.arange(5, 17, dtype=np.int32)


@functools.cache
def observed(dtype: str, name: str = "dsv3") -> dict:
    ops = Bf16Ops() if dtype == "bf16" else get_ops("numpy", dtype)
    return prefilled(tiny(name), ops, TOKENS[:6]).observed(chain_batch(TOKENS[6:], 6))


def test_a_session_commits_what_it_is_asked_to() -> None:
    whole, parts = (Session(tiny("dsv3"), get_ops("numpy", "f32")) for _ in range(2))
    logits = whole.forward(chain_batch(TOKENS, 0))
    first = parts.forward(chain_batch(TOKENS[:5], 0))
    parts.forward(chain_batch(TOKENS[:1], 5), commit=False)
    second = parts.forward(chain_batch(TOKENS[5:], 5))
    assert_same_bits(np.concatenate([first, second]), logits, "two chunks")
    assert parts.committed() == whole.committed() and whole.cache.context_len == len(TOKENS)


@pytest.mark.parametrize(("dtype", "least", "most"), [("f32", 1e-9, 1e-5), ("bf16", 1e-4, 0.3)])
def test_errors_of_every_step(dtype: str, least: float, most: float) -> None:
    records = relative_errors(observed(dtype), observed("f64"))
    assert [(r["step"], r["layer"]) for r in records] == list(observed("f64"))
    worst = max(r["error"] for r in records if r["step"] == "layer")
    assert least < worst < most and records[-1]["step"] == "logits"
    assert not any(r["error"] for r in relative_errors(observed("f64"), observed("f64")))


def test_a_relative_error() -> None:
    assert relative_error(np.array([3.0, 5.0]), np.array([3.0, 4.0])) == 0.2
    assert relative_error(np.zeros(2), np.zeros(2)) == 0


@pytest.mark.parametrize("name", ["dsv3", "dsv3_yarn"])
def test_no_operation_alone_errs_by_much(name: str) -> None:
    """In f32; a twin that errs is found, in that operation alone."""
    errors = local_errors(tiny(name), chain_batch(TOKENS, 0), get_ops("numpy", "f32"))
    assert 0 < max(max(calls) for calls in errors.values()) < 2e-6
    assert len(errors["attention"]) == tiny(name).config.num_hidden_layers

    class Wrong(type(get_ops("numpy"))):
        def head_linear(self, x, weight, out) -> None:
            super().head_linear(x, weight, out)
            out[..., 0] *= 1.1

    wrong = local_errors(tiny(name), chain_batch(TOKENS, 0), Wrong("f32"))
    assert min(wrong["head_linear"]) > 1e-3
    assert all(wrong[one] == errors[one] for one in errors if one != "head_linear")


def test_bf16_rounds_matrices_and_caches_alone() -> None:
    session = prefilled(tiny("dsv3"), Bf16Ops(), TOKENS)
    layer, weights = session.model.weights.layers[-1], session.model.weights
    matrices = [weights.embedding, weights.head, layer.qkv_a, layer.q_b, layer.w_kc, layer.w_vc, layer.o]
    matrices += [layer.mlp.experts.gate, layer.mlp.experts.up, layer.mlp.experts.down]
    for array in matrices + [cache[: len(TOKENS)] for cache in session.cache.arrays]:
        assert isinstance(array, Rounded) and np.array_equal(array, rounded(array))
    for array in (
        layer.mlp.router,
        layer.mlp.bias,
        layer.input_norm,
        weights.cos,
        session.model.buffers.logits,
    ):
        assert not isinstance(array, Rounded) and not np.array_equal(array, rounded(array))


def twins_and_emulation(name: str, *arguments) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each output of a bf16 kernel in the simulator, and of the emulation."""
    ops, twins = Bf16Ops(), Twins("bf16")
    kernels = [pair[0] for pair in twins.run(name, *arguments)]

    def plain(argument):
        if isinstance(argument, Matrix):
            return ops.put(argument.values)
        if isinstance(argument, Out):
            return np.full(argument.shape, np.nan, argument.dtype)
        return argument.value if isinstance(argument, Count) else getattr(argument, "values", argument)

    mine = [plain(argument) for argument in arguments]
    getattr(ops, name)(*mine)
    kept = [a for a, b in zip(mine, arguments, strict=True) if isinstance(b, Out)]
    return list(zip(kernels, kept, strict=True))


@pytest.mark.simulator
def test_bf16_rounds_where_the_kernels_round() -> None:
    """To f32 accuracy, which an input rounded or not in one of them alone would be far from."""
    rng = np.random.default_rng(5)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    gates = np.zeros((4, 3), np.float32)
    gates[[0, 1, 2], [0, 1, 1]], gates[3, 2] = 0.7, 1.3
    experts = Matrix(normal(5, 8, 16)), Matrix(normal(5, 8, 16)), Matrix(normal(5, 16, 8))  # 4 and one shared
    caches = Matrix(normal(6, 16)), Matrix(normal(6, 8))
    tree = np.array([[0, -1], [0, 1]], np.int32), np.array([0, 1], np.int32), Count(4)
    cases = {
        "linear": (Factor(normal(3, 32)), Matrix(normal(6, 32)), Out(3, 6)),
        "head_linear": (Factor(normal(2, 2, 16)), Matrix(normal(2, 5, 16)), Out(2, 2, 5)),
        "attention": (Factor(normal(2, 2, 16)), Factor(normal(2, 2, 8)), *caches, *tree, 0.2, Out(2, 2, 16)),
        "experts": (Factor(normal(3, 16)), gates, *experts, Out(9, 8), Out(3, 16)),
    }
    for name, arguments in cases.items():
        got, want = twins_and_emulation(name, *arguments)[-1]
        assert relative_error(want, got) < 1e-5, name


def test_routing_is_gates_by_row() -> None:
    config = tiny("dsv3").config
    gates = routing(observed("f64"), config)
    assert gates.shape == (2, 6, config.n_routed_experts)
    assert (np.count_nonzero(gates, axis=2) == config.num_experts_per_tok).all()
    assert np.array_equal(gates[0], observed("f64")["gates", 1].T)


def test_cache_bytes_are_those_of_a_bf16_cache() -> None:
    config = trained().config
    assert kv_bytes(config) == {"latent": 8 * (64 + 16) * 2, "heads": 8 * 8 * (48 + 32) * 2}
