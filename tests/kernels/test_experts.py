"""The grouped expert product, stage by stage against f64, however rows meet in experts; a row's bits are its own."""

from dataclasses import dataclass

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from conftest import SIMULATED
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference.experts import experts as twin
from kernels_numba import experts, experts_one
from kernels_numba.experts_mma import split_bits_of
from kernels_numba.primitives import WARP
from kernels_numba.primitives_dot import chunk_of
from kernels_numba.primitives_tensor import MULTIPLE

EPS = float(np.finfo(np.float32).eps) / 2  # of one rounding
DTYPES = ("f32", "bf16")
# A step of 16 products on tensor cores may cut each of its 17 summands off at 2**-24 of the largest: 9 x 2**-23.
ROUNDINGS_A_STEP = 18  # of 2**-24
LOUD = (
    2 if SIMULATED else 30
)  # on the GPU some activations saturate; the simulator's exp warns where it overflows


@dataclass(frozen=True)
class Case:
    """Rows, experts, experts a row, hidden and intermediate width; `used` experts of all are ever chosen."""

    rows: int
    experts: int
    chosen: int
    hidden: int
    width: int
    used: int | None = None

    def __str__(self):
        return "-".join(str(n) for n in vars(self).values())


SMALL = [
    Case(1, 4, 2, 16, 8),
    Case(9, 4, 2, 32, 16),  # the micro model
    Case(5, 6, 3, 8, 24, used=3),
    Case(3, 2, 1, 33, 17),
    Case(9, 3, 1, 8, 8, used=1),
    Case(11, 2, 2, 8, 8),  # two tiles an expert
]
LARGE = [
    *(Case(rows, 16, 4, 256, 96) for rows in (1, 2, 5, 17, 65, 512)),  # the trained model
    *(Case(rows, 384, 8, 256, 128) for rows in (1, 3, 16, 64, 257)),
    *(Case(rows, 16, 8, 1024, 512) for rows in (1, 8, 65)),
    Case(33, 64, 6, 72, 40, used=7),
    *(Case(rows, 64, 6, 264, 136) for rows in (15, 16, 17)),  # about a gate for each of the plan's threads
    *(
        Case(rows, 64, 6, 72, 40) for rows in (1, 2)
    ),  # fewer blocks than multiprocessors, as of 1-16-6-2048-1024
    *(Case(rows, 5, 2, 33, 17) for rows in (1, 9, 65)),
    Case(31, 8, 8, 64, 1000),
    Case(64, 7, 1, 128, 64, used=1),
    Case(1000, 512, 16, 64, 32),
    *(Case(rows, 16, 6, 2048, 1024) for rows in (1, 16, 64)),
    Case(300, 16, 8, 1024, 520),
    Case(40, 8, 2, 100, 64),  # on tensor cores down alone
    Case(40, 8, 2, 64, 100),  # up alone
]


def depth(k, half, columns, chosen):
    """Roundings a product passes through, on tensor cores: a share's steps, then the shares.

    Else: a lane's fmas, then log2(WARP) pairs.
    """
    if half and k % MULTIPLE == 0:
        splits = 1 << split_bits_of(columns, k, chosen)
        return -(-k // (32 * splits)) * 2 * ROUNDINGS_A_STEP + splits
    return -(-k // (WARP * chunk_of(half))) * chunk_of(half) + WARP.bit_length()


def make(rng, case, dtype, gates=None):
    """Inputs as the kernels take them; experts that no row chose hold NaN."""
    x = rng.standard_normal((case.rows, case.hidden))
    x[1::4] *= LOUD
    x[rng.random(x.shape) < 0.02] *= 2 * LOUD
    if gates is None:
        gates = np.zeros((case.experts, case.rows), np.float32)
        for row in range(case.rows):
            chosen = rng.choice(case.used or case.experts, case.chosen, replace=False)
            gates[chosen, row] = rng.random(case.chosen) + 0.1
        gates[:, 2::5] *= -1
        gates[:, 4::9] = 0  # rows that go nowhere
    shapes = ((case.width, case.hidden), (case.width, case.hidden), (case.hidden, case.width))
    weights = [(rng.standard_normal((case.experts, *shape)) / 5).astype(np.float32) for shape in shapes]
    for weight in weights:
        weight[~gates.any(axis=1)] = np.nan
    return x.astype(np.float32), gates, [bf16_bits(w) for w in weights] if dtype == "bf16" else weights


def run(case, x, gates, weights):
    """(out, hidden, pair_out) of a launch into poisoned memory, every scratch of the least size, guards behind all."""
    pairs, size = len(x) * case.chosen, experts.plan_size(len(x), case.experts, case.chosen)
    hidden, pair_out = poisoned((pairs + 1, case.width)), poisoned((pairs + 1, case.hidden))
    out, plan = poisoned((len(x) + 2, case.hidden)), poisoned(size + 1, np.int32)
    arrays = [to_device(array) for array in (x, gates, *weights)]
    experts.experts(*arrays, hidden[:-1], out[1:-1], pair_out[:-1], plan[:-1], case.chosen)
    got, hidden, pair_out = to_host(out), to_host(hidden), to_host(pair_out)
    for name, guards in (("out", got[[0, -1]]), ("hidden", hidden[-1]), ("pair_out", pair_out[-1])):
        assert np.isnan(guards).all(), f"{case}: wrote past {name}"
    assert to_host(plan)[-1] == -1, f"{case}: wrote past plan"
    used = min(np.count_nonzero(gates), pairs)
    for name, rest in (("hidden", hidden[used:]), ("pair_out", pair_out[used:])):
        assert np.isnan(rest).all(), f"{case}: wrote to {name} of pairs there are not"
    return got[1:-1], hidden[:used], pair_out[:used]


def rounded(array, dtype):
    """An input of a product as f64, rounded to bf16 in bf16 mode."""
    return (bf16_values(bf16_bits(array)) if dtype == "bf16" else array).astype(np.float64)


def check_pairs(case, dtype, x, gates, weights, hidden, what):
    """hidden, by expert, then row, against f64 from the inputs; returns pair_out in f64 of that hidden, and bounds."""
    w_gate, w_up, w_down = ((bf16_values(w) if dtype == "bf16" else w).astype(np.float64) for w in weights)
    half, start = dtype == "bf16", 0
    want_hidden, hidden_bound = np.empty(hidden.shape), np.empty(hidden.shape)
    want_out, out_bound = (np.empty((len(hidden), case.hidden)) for _ in range(2))
    for expert in np.flatnonzero(gates.any(axis=1)):
        rows = np.flatnonzero(gates[expert])
        pairs, inputs = slice(start, start + len(rows)), rounded(x[rows], dtype)
        start += len(rows)
        gate, up = inputs @ w_gate[expert].T, inputs @ w_up[expert].T
        roundings = depth(case.hidden, half, 2 * case.width, case.chosen) * EPS
        gate_error = roundings * (np.abs(inputs) @ np.abs(w_gate[expert]).T)
        up_error = roundings * (np.abs(inputs) @ np.abs(w_up[expert]).T)
        silu = gate * np.exp(-np.logaddexp(0, -gate))
        want_hidden[pairs] = silu * up
        # The slope of silu is at most 1.1; then four roundings and exp's 2 ulp; 1e-36: exp overflows early.
        largest = np.abs(up) + up_error
        hidden_bound[pairs] = (1.1 * gate_error + 1e-36) * largest + np.abs(silu) * (
            up_error + 12 * EPS * largest
        )
        made, factors = rounded(hidden[pairs], dtype), gates[expert, rows, None].astype(np.float64)
        want_out[pairs] = factors * (made @ w_down[expert].T)
        terms = np.abs(factors) * (np.abs(made) @ np.abs(w_down[expert]).T)
        roundings = depth(case.width, half, case.hidden, case.chosen) + 1
        out_bound[pairs] = roundings * EPS * terms + 1e-44
    assert_close(hidden, want_hidden, 1, f"{what}: hidden", scale=hidden_bound + 1e-44)
    return want_out, out_bound


def alone(case, gates, dtype):
    """Whether one row's experts are added where they are made, in `experts_one`, which has no pair_out."""
    bits = (
        split_bits_of(2 * case.width, case.hidden, case.chosen),
        split_bits_of(case.hidden, case.width, case.chosen),
    )
    multiple = case.hidden % MULTIPLE == case.width % MULTIPLE == 0
    elements = case.hidden * case.width
    return (
        dtype == "bf16"
        and multiple
        and experts_one.takes(case.rows, len(gates), case.chosen, elements, *bits)
    )


def summed(gates, pair_out):
    """f32 sums of each row's pairs, one by one in the order of their experts."""
    out = np.zeros((gates.shape[1], pair_out.shape[1]), np.float32)
    for (_, row), pair in zip(np.argwhere(gates), pair_out, strict=True):
        out[row] += pair
    return out


def check(case, dtype, seed, gates=None):
    rng = np.random.default_rng(seed)
    x, gates, weights = make(rng, case, dtype, gates)
    what = f"experts {case} {dtype}, seed {seed}"
    got, hidden, pair_out = run(case, x, gates, weights)
    want, bound = check_pairs(case, dtype, x, gates, weights, hidden, what)
    if alone(case, gates, dtype):
        assert np.isnan(pair_out).all(), f"{what}: there is no pair_out"
        bound = bound.sum(axis=0) + len(want) * EPS * np.abs(want).sum(axis=0)
        assert_close(got[0], want.sum(axis=0), 1, f"{what}: out", scale=bound)
        return x, gates, weights, got
    assert_close(pair_out, want, 1, f"{what}: pair_out", scale=bound)
    assert_same_bits(got, summed(gates, pair_out), f"{what}: sums over experts")
    if dtype == "f32":
        plain, scratch = np.empty_like(got), np.empty_like(hidden)
        twin(x, gates, *weights, scratch, plain)
        scale = np.abs(plain).max(axis=1, keepdims=True) + np.zeros(plain.shape)
        assert_close(got, plain.astype(np.float64), 1e-4, f"{what}: the twin", scale=scale)
    return x, gates, weights, got


def check_rows_keep_their_bits(case, counts, dtype, seed):
    """A row's result with other rows in its experts, in tiles of every shape, at another place."""
    rng = np.random.default_rng(seed)
    x, gates, weights, want = check(case, dtype, seed)
    for count in counts:
        rows = rng.choice(case.rows, count, replace=False)
        got, *_ = run(case, x[rows], np.ascontiguousarray(gates[:, rows]), weights)
        assert_same_bits(got, want[rows], f"experts {case} {dtype}: {count} rows, seed {seed}")


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case, dtype):
    check(case, dtype, seed=case.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case, dtype):
    check(case, dtype, fresh_seed())


@pytest.mark.simulator
def test_rows_keep_their_bits_small():
    check_rows_keep_their_bits(Case(9, 4, 2, 16, 8), (1, 2, 4), "f32", seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(257, 16, 8, 1024, 512), Case(257, 16, 4, 256, 96)], ids=str)
def test_bf16_rows_keep_their_bits_large(case):
    """Products whose K is not split, and is."""
    check_rows_keep_their_bits(case, (1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 130), "bf16", fresh_seed())


def check_tiles_give_the_same_bits(case, sizes, monkeypatch, seed):
    """bf16 weights with each size of tile."""
    x, gates, weights, want = check(case, "bf16", seed)
    for rows in sizes:
        monkeypatch.setattr(experts, "MMA_ROWS", (rows,))
        got, *_ = run(case, x, gates, weights)
        assert_same_bits(got, want, f"experts {case}: tiles of {rows} rows, seed {seed}")


@pytest.mark.simulator
def test_tiles_give_the_same_bits_small(monkeypatch):
    check_tiles_give_the_same_bits(Case(9, 1, 1, 8, 8), (64,), monkeypatch, seed=5)


@pytest.mark.gpu
def test_tiles_give_the_same_bits_large(monkeypatch):
    check_tiles_give_the_same_bits(Case(150, 16, 8, 1024, 512), (8, 16, 32, 64), monkeypatch, fresh_seed())
    check_tiles_give_the_same_bits(Case(150, 16, 4, 256, 96), (8, 16, 32, 64), monkeypatch, fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", [Case(65, 16, 4, 256, 96), Case(65, 5, 2, 33, 17), Case(128, 8, 2, 1024, 768)], ids=str
)
def test_rows_keep_their_bits_large(case, dtype):
    check_rows_keep_their_bits(case, (1, 2, 3, 4, 7, 16, 33, 64), dtype, fresh_seed())


def crossed_gates(kind, case):
    """Gates that a random draw seldom makes."""
    gates = np.zeros((case.experts, case.rows), np.float32)
    if kind == "all rows to the last expert":
        gates[-1] = 0.5
    elif kind == "every row to the first and the last":
        gates[[0, -1]] = 0.25
    elif kind == "the last row alone":
        gates[1, -1] = 2
    elif kind == "tiny and huge gates":
        gates[0], gates[1] = 1e-38, 1e4
    return gates


KINDS = (
    "all rows to the last expert",
    "every row to the first and the last",
    "the last row alone",
    "tiny and huge gates",
    "nothing",
)


@pytest.mark.simulator
@pytest.mark.parametrize("kind", KINDS)
def test_crossed_gates_small(kind):
    case = Case(5, 3, 2, 8, 8)
    check(case, "f32", 3, crossed_gates(kind, case))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_crossed_gates_large(kind, dtype):
    for case in (Case(65, 64, 2, 256, 96), Case(9, 3, 2, 40, 33)):
        check(case, dtype, fresh_seed(), crossed_gates(kind, case))
