"""Every operation that takes rows gives each row the same bits, whoever rides along and in whatever order.

One case an operation: `case(rng, dtype)` returns `run(rows)`, which calls it on a selection of NUM_ROWS hard rows
into outputs full of NaN and returns the outputs with the rows first.
"""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from support import DTYPES, ODD_SIZES

from ddtree.ops import get_ops
from ddtree.reference.gate import GateRule, gate_device, gate_host

NUM_ROWS, POSITIONS, CONTEXT = 70, 140, 61
OPS = get_ops("numpy")
GATE_RULES = {
    "noaux_tc": GateRule(4, 4, 2, True, 2.5, "noaux_tc"),
    "greedy": GateRule(3, 1, 1, False, 1.0, "greedy"),
    "group_limited_greedy": GateRule(3, 4, 2, True, 16.0, "group_limited_greedy"),
}


def hard(rng, dtype, *shape):
    """Normal rows, every fifth scaled by 1e4, every seventh by 1e-4, some exact zeros and ties."""
    x = rng.standard_normal((NUM_ROWS, *shape))
    x[::5] *= 1e4
    x[::7] *= 1e-4
    x[rng.random(x.shape) < 0.05] = 0
    x[1::6] = np.round(x[1::6] * 4) / 4
    return x.astype(dtype)


def nan(dtype, *shape):
    return np.full(shape, np.nan, dtype)


def embed(rng, dtype):
    table, ids = rng.standard_normal((50, 9)).astype(dtype), rng.integers(50, size=NUM_ROWS).astype(np.int32)

    def run(rows):
        out = nan(dtype, len(rows), 9)
        OPS.embed(ids[rows], table, out)
        return [out]

    return run


def linear(rng, dtype, name="linear"):
    x, weight = hard(rng, dtype, 129), rng.standard_normal((67, 129)).astype(dtype)

    def run(rows):
        out = nan(dtype, len(rows), 67)
        getattr(OPS, name)(x[rows], weight, out)
        return [out]

    return run


def head_linear(rng, dtype):
    x, weight = hard(rng, dtype, 3, 33), rng.standard_normal((3, 65, 33)).astype(dtype)

    def run(rows):
        out = nan(dtype, len(rows), 3, 65)
        OPS.head_linear(x[rows], weight, out)
        return [out]

    return run


def rms_norm(rng, dtype):
    x, weight = hard(rng, dtype, 65), rng.standard_normal(65).astype(dtype)

    def run(rows):
        out = nan(dtype, len(rows), 65)
        OPS.rms_norm(x[rows], weight, 1e-6, out)
        return [out]

    return run


def add_norm(rng, dtype):
    x, y, weight = hard(rng, dtype, 65), hard(rng, dtype, 65), rng.standard_normal(65).astype(dtype)

    def run(rows):
        residual, out = x[rows].copy(), nan(dtype, len(rows), 65)
        OPS.add_norm(residual, y[rows], weight, 1e-6, out)
        return [residual, out]

    return run


def elementwise(name):
    def case(rng, dtype):
        x, y = hard(rng, dtype, 33), hard(rng, dtype, 33)

        def run(rows):
            out = nan(dtype, len(rows), 33)
            getattr(OPS, name)(x[rows], y[rows], out)
            return [out]

        return run

    return case


def copy_columns(rng, dtype):
    x = hard(rng, dtype, 5)

    def run(rows):
        out = np.zeros((len(rows), 12), dtype)
        OPS.copy_columns(x[rows], 5, out)
        return [out]

    return run


def tables(rng, dtype, half):
    angles = rng.random((POSITIONS, half)) * 7
    return np.cos(angles).astype(dtype), np.sin(angles).astype(dtype)


def rope(rng, dtype):
    x, at = hard(rng, dtype, 3, 10), tables(rng, dtype, 5)
    depths = rng.integers(20, size=NUM_ROWS).astype(np.int32)

    def run(rows):
        out = nan(dtype, len(rows), 3, 10)
        OPS.rope(x[rows], *at, depths[rows], CONTEXT, out)
        return [out]

    return run


def split_query(rng, dtype):
    query, at = hard(rng, dtype, 3, 17), tables(rng, dtype, 5)
    depths = rng.integers(20, size=NUM_ROWS).astype(np.int32)

    def run(rows):
        outs = nan(dtype, len(rows), 3, 7), nan(dtype, len(rows), 3, 10)
        OPS.split_query(query[rows], *at, depths[rows], CONTEXT, *outs)
        return outs

    return run


def append_latent(rng, dtype):
    qkv, weight, at = hard(rng, dtype, 60), rng.standard_normal(50).astype(dtype), tables(rng, dtype, 5)
    depths = rng.integers(20, size=NUM_ROWS).astype(np.int32)

    def run(rows):
        query, *caches = nan(dtype, len(rows), 17), nan(dtype, POSITIONS, 33), nan(dtype, POSITIONS, 10)
        OPS.append_latent(qkv[rows], weight, 1e-6, *at, depths[rows], CONTEXT, query, *caches)
        new = slice(CONTEXT, CONTEXT + len(rows))
        for cache in caches:
            assert np.isnan(cache[:CONTEXT]).all() and np.isnan(cache[new.stop :]).all()
        return [query, *(cache[new] for cache in caches)]

    return run


def append_rows(rng, dtype):
    values = hard(rng, dtype, 3, 5)

    def run(rows):
        cache = nan(dtype, POSITIONS, 3, 5)
        OPS.append_rows(values[rows], CONTEXT, cache)
        new = slice(CONTEXT, CONTEXT + len(rows))
        assert np.isnan(cache[:CONTEXT]).all() and np.isnan(cache[new.stop :]).all()
        return [cache[new]]

    return run


def attention(rng, dtype):
    """Queries of a deep tree; whichever are asked, the keys of all stand in the cache."""
    q_latent, q_rope = hard(rng, dtype, 2, 33) * dtype(0.01), hard(rng, dtype, 2, 10) * dtype(0.01)
    latents = rng.standard_normal((CONTEXT + NUM_ROWS, 33)).astype(dtype)
    ropes = rng.standard_normal((CONTEXT + NUM_ROWS, 10)).astype(dtype)
    parents = np.array([-1] + [int(rng.integers(max(0, row - 4), row)) for row in range(1, NUM_ROWS)])
    depths, lineage = np.zeros(NUM_ROWS, np.int32), np.full((NUM_ROWS, NUM_ROWS), -1, np.int32)
    for row in range(NUM_ROWS):
        if row:
            depths[row] = depths[parents[row]] + 1
            lineage[row] = lineage[parents[row]]
        lineage[row, depths[row]] = row
    assert depths.max() > 10  # beyond the tile's end at position 64

    def run(rows):
        out = nan(dtype, len(rows), 2, 33)
        OPS.attention(
            q_latent[rows], q_rope[rows], latents, ropes, lineage[rows], depths[rows], CONTEXT, 0.2, out
        )
        return [out]

    return run


def experts(rng, dtype):
    x = hard(rng, dtype, 33)
    gate, up = (rng.standard_normal((7, 17, 33)).astype(dtype) for _ in range(2))  # the last is shared
    down = rng.standard_normal((7, 33, 17)).astype(dtype)
    gates = np.zeros((6, NUM_ROWS), dtype)
    for row in range(NUM_ROWS):
        gates[rng.choice(6, 2, replace=False), row] = rng.random(2) + 0.1

    def run(rows):
        out, pairs = nan(dtype, len(rows), 33), nan(dtype, 3 * len(rows), 17)
        OPS.experts(x[rows], np.ascontiguousarray(gates[:, rows]), gate, up, down, pairs, out)
        return [out]

    return run


def gate(method, route):
    def case(rng, dtype):
        logits = hard(rng, dtype, 12)
        logits[2::6] = np.float32(0.5)  # all equal
        bias = rng.standard_normal(12).astype(np.float32) if method == "noaux_tc" else None

        def run(rows):
            gates = nan(dtype, 12, len(rows))
            route(logits[rows], bias, GATE_RULES[method], gates)
            return [gates.T]

        return run

    return case


def choosing(name, *settings):
    def case(rng, dtype):
        logits = hard(rng, dtype, 40)
        logits[3, 5], logits[4] = np.nan, -np.inf
        positions = rng.integers(500, size=NUM_ROWS).astype(np.int32)

        def run(rows):
            if name == "topk_log_softmax":
                outs = np.full((len(rows), 7), -7, np.int32), nan(np.float32, len(rows), 7)
                OPS.topk_log_softmax(logits[rows], 7, *outs)
                return outs
            out = np.zeros(len(rows), bool if name == "row_is_bad" else np.int32)
            if name == "sample":
                OPS.sample(logits[rows], positions[rows], *settings, 11, 2, out)
            else:
                getattr(OPS, name)(logits[rows], out)
            return [out]

        return run

    return case


CASES = {
    "embed": embed,
    "linear": linear,
    "head_linear": head_linear,
    "wide_linear": lambda rng, dtype: linear(rng, np.float32, "wide_linear"),
    "rms_norm": rms_norm,
    "add_norm": add_norm,
    **{name: elementwise(name) for name in ("swiglu", "add")},
    "copy_columns": copy_columns,
    "rope": rope,
    "split_query": split_query,
    "append_latent": append_latent,
    "append_rows": append_rows,
    "attention": attention,
    "experts": experts,
    "topk_log_softmax": choosing("topk_log_softmax"),
    "argmax": choosing("argmax"),
    "row_is_bad": choosing("row_is_bad"),
    "sample": choosing("sample", 0.8, 20, 0.9),
}
CASES |= {
    f"{route.__name__} {method}": gate(method, route)
    for method in GATE_RULES
    for route in (gate_device, gate_host)
}
# Of a tree, of a table or a block as a whole, or of a cache.
NOT_BY_ROW = {"accept", "branch_scores", "build_branch_tree", "build_tree", "compact", "block_attention"}
MEMORY = {"integers", "empty_f32", "empty_quantised", "repeat"}


def test_every_operation_has_a_case():
    static = {name for name, value in vars(type(OPS)).items() if isinstance(value, staticmethod)}
    offered = static - MEMORY - {"gate_rule", "check_sizes", "multiplies"}
    assert offered - NOT_BY_ROW == set(name for name in CASES if not name.startswith("gate_"))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
@pytest.mark.parametrize("case", CASES)
def test_rows_never_see_each_other(case, dtype):
    rng = np.random.default_rng(len(case))
    run_rows = CASES[case](rng, DTYPES[dtype])
    alone = [run_rows(np.array([row])) for row in range(NUM_ROWS)]
    want = [np.concatenate([out[part] for out in alone]) for part in range(len(alone[0]))]
    for size in (*ODD_SIZES, NUM_ROWS):
        for rows in (np.arange(size), rng.permutation(NUM_ROWS)[:size]):
            for part, got in enumerate(run_rows(rows)):
                assert_same_bits(got, want[part][rows], f"{case} {dtype}, output {part} of {size} rows")
