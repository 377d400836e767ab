"""One check of the expert product for every format of quantised weights: each stage against f64 from its inputs."""

import numpy as np
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from kernels.quantised import EPS, MAKE, product, rounded
from kernels.test_experts import LOUD, Case, summed

from ddtree.quantised import Fp8Matrix, Int4Matrix
from ddtree.reference.experts import experts as twin
from ddtree.reference.linear_quantised import linear_quantised
from kernels_numba.experts_plan import plan_size

MATRIX = {"int4": Int4Matrix, "fp8": Fp8Matrix}


def make(rng, case, kind, gates=None):
    """Inputs as the kernels take them, and the three weights; experts that no row chose hold scales of NaN."""
    x = rng.standard_normal((case.rows, case.hidden)).astype(np.float32)
    x[1::4] *= LOUD
    if gates is None:
        gates = np.zeros((case.experts, case.rows), np.float32)
        for row in range(case.rows):
            chosen = rng.choice(case.used or case.experts, case.chosen, replace=False)
            gates[chosen, row] = rng.random(case.chosen) + 0.1
        gates[:, 2::5] *= -1
        gates[:, 4::9] = 0  # rows that go nowhere
    e, h, i = case.experts, case.hidden, case.width
    weights = [MAKE[kind](rng, *shape) for shape in ((e, i, h), (e, i, h), (e, h, i))]
    for weight in weights:
        weight.arrays[1][~gates.any(axis=1)] = 0xFFFF if kind == "int4" else np.nan
    return x, gates, weights


def run(launcher, case, x, gates, weights):
    """(out, hidden, pair_out) of a launch into poisoned memory, every scratch of the least size, guards behind all."""
    pairs, size = len(x) * case.chosen, plan_size(len(x), case.experts, case.chosen)
    hidden, pair_out = poisoned((pairs + 1, case.width)), poisoned((pairs + 1, case.hidden))
    out, plan = poisoned((len(x) + 2, case.hidden)), poisoned(size + 1, np.int32)
    pairs_of_arrays = [tuple(to_device(array) for array in weight.arrays) for weight in weights]
    launcher(
        *(to_device(x), to_device(gates), *pairs_of_arrays),
        *(hidden[:-1], out[1:-1], pair_out[:-1], plan[:-1], case.chosen),
    )
    got, hidden, pair_out = to_host(out), to_host(hidden), to_host(pair_out)
    for name, guards in (("out", got[[0, -1]]), ("hidden", hidden[-1]), ("pair_out", pair_out[-1])):
        assert np.isnan(guards).all(), f"{case}: wrote past {name}"
    assert to_host(plan)[-1] == -1, f"{case}: wrote past plan"
    used = min(np.count_nonzero(gates), pairs)
    for name, rest in (("hidden", hidden[used:]), ("pair_out", pair_out[used:])):
        assert np.isnan(rest).all(), f"{case}: wrote to {name} of pairs there are not"
    return got[1:-1], hidden[:used], pair_out[:used]


def check_pairs(x, gates, weights, hidden, pair_out, what):
    """hidden, by expert, then row, against f64 from the inputs; pair_out against f64 from the hidden that was made."""
    w_gate, w_up, w_down = weights
    wants = [np.empty(array.shape) for array in (hidden, hidden, pair_out, pair_out)]
    want_hidden, hidden_bound, want_out, out_bound = wants
    start = 0
    for expert in np.flatnonzero(gates.any(axis=1)):
        rows = np.flatnonzero(gates[expert])
        pairs = slice(start, start + len(rows))
        start += len(rows)
        gate, gate_error = product(rounded(x[rows]), w_gate, expert)
        up, up_error = product(rounded(x[rows]), w_up, expert)
        silu = gate * np.exp(-np.logaddexp(0, -gate))
        want_hidden[pairs] = silu * up
        # The slope of silu is at most 1.1; then four roundings and exp's 2 ulp; 1e-36: exp overflows early.
        largest = np.abs(up) + up_error
        slope = (1.1 * gate_error + 1e-36) * largest
        hidden_bound[pairs] = slope + np.abs(silu) * (up_error + 12 * EPS * largest) + 1e-44
        factors = gates[expert, rows, None].astype(np.float64)
        made, error = product(rounded(hidden[pairs]), w_down, expert)
        want_out[pairs] = factors * made
        out_bound[pairs] = np.abs(factors) * (error + EPS * np.abs(made)) + 1e-44
    assert_close(hidden, want_hidden, 1, f"{what}: hidden", scale=hidden_bound)
    assert_close(pair_out, want_out, 1, f"{what}: pair_out", scale=out_bound)


def check(launcher, case, kind, seed, gates=None):
    """All stages of one launch; returns what it was launched with, and the output."""
    rng = np.random.default_rng(seed)
    x, gates, weights = make(rng, case, kind, gates)
    what = f"experts {kind} {case}, seed {seed}"
    got, hidden, pair_out = run(launcher, case, x, gates, weights)
    check_pairs(x, gates, weights, hidden, pair_out, what)
    assert_same_bits(got, summed(gates, pair_out), f"{what}: sums over experts")
    return x, gates, weights, got


def check_rows_keep_their_bits(launcher, case, counts, kind, seed):
    """A row's result with other rows in its experts, in tiles of every shape, at another place."""
    rng = np.random.default_rng(seed)
    x, gates, weights, want = check(launcher, case, kind, seed)
    for count in counts:
        rows = rng.choice(case.rows, count, replace=False)
        got, *_ = run(launcher, case, x[rows], np.ascontiguousarray(gates[:, rows]), weights)
        assert_same_bits(got, want[rows], f"experts {kind} {case}: {count} rows, seed {seed}")


def check_shared(launcher, case, kind, shared, seed):
    """Experts behind the gates' last take every row with gate 1, as gates that say so do."""
    rng = np.random.default_rng(seed)
    chosen = case.chosen + shared
    whole = Case(case.rows, case.experts + shared, chosen, case.hidden, case.width)
    said = np.zeros((whole.experts, case.rows), np.float32)
    for row in range(case.rows):
        said[rng.choice(case.experts, case.chosen, replace=False), row] = 0.5
    said[case.experts :] = 1
    x, _, weights = make(rng, whole, kind, said)
    want, *_ = run(launcher, whole, x, said, weights)
    pairs = case.rows * chosen
    out, hidden, pair_out = (
        poisoned(shape) for shape in (x.shape, (pairs, case.width), (pairs, case.hidden))
    )
    plan = poisoned(plan_size(case.rows, whole.experts, chosen), np.int32)
    arrays = [tuple(to_device(array) for array in weight.arrays) for weight in weights]
    gates = to_device(said[: case.experts])
    launcher(to_device(x), gates, *arrays, hidden, out, pair_out, plan, chosen)
    assert_same_bits(to_host(out), want, f"{case} {kind}, {shared} shared, seed {seed}")


def check_twin(launcher, case, kind, seed):
    """The output beside that of the NumPy twin in bf16 mode, which rounds at the same places."""
    rng = np.random.default_rng(seed)
    x, gates, weights = make(rng, case, kind)
    got, *_ = run(launcher, case, x, gates, weights)
    matrices = [MATRIX[kind](*weight.arrays) for weight in weights]

    def multiply(rows, weight, out):
        linear_quantised(bf16_values(bf16_bits(rows)), weight, out)

    hidden, want = np.empty((np.count_nonzero(gates), case.width), np.float32), np.empty_like(x)
    with np.errstate(over="ignore"):  # of exp, for activations that are 0
        twin(x, gates, *matrices, hidden, want, multiply)
    # an activation that f32 sums carry across a rounding boundary of bf16 moves by 2^-8 of itself
    scale = np.abs(want).max(axis=1, keepdims=True) + np.zeros(want.shape)
    assert_close(got, want.astype(np.float64), 2e-3, f"{case} {kind}: the twin, seed {seed}", scale=scale)
