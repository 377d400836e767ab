"""Sampling against the f64 twin: the same token, except where the number lies within a stated distance of a step.

Weights are f32 exponentials here and f64 ones there. The exponent (greatest - logit) / temperature, at most 28.4,
carries three roundings, the exponential two units in the last place, fixed point half of 2^-41 a candidate, and those
below e^-28.4 are left out; all together less than MARGIN of the sum. Which tokens are then possible is worked out in
f64. Equal logits have equal, exact weights, and there the twin's token is the only one.
"""

import numpy as np
import pytest
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference.philox import uniform
from ddtree.reference.sample import sample as twin
from kernels_numba import primitives_sample
from kernels_numba import sample as kernel
from kernels_numba.checks import LaunchError

MARGIN = 28.4 * 3 * 2.0**-24 + 2 * 2.0**-23 + 2.0**-22
SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 5, 1.0),
    (1.3, 0, 0.8),
    (0.5, 20, 0.95),
    (2.0, 1, 1.0),
    (1.0, 0, 1e-9),
    (9.0, 999, 1.0),
    (1e-30, 0, 1.0),
    (1e30, 40, 0.51),
]
SMALL = [(0, 1, 1), (1, 4, 65), (2, 2, 130), (3, 3, 33), (4, 1, 65), (5, 1, 9), (6, 2, 65), (8, 2, 70)]
LARGE = [
    *((which, rows, 2048) for which in range(len(SETTINGS)) for rows in (1, 65, 513)),
    *((which, 17, 32768) for which in range(len(SETTINGS))),
    *((which, 9, 163840) for which in range(len(SETTINGS))),
    *((3, 33, vocab) for vocab in (1, 3, 31, 33, 1023, 1024, 1025, 4097)),
]


def hard_logits(rng, rows, vocab):
    """Rows with ties, -inf, an outlier, one value throughout, NaN."""
    logits = (rng.standard_normal((rows, vocab)) * 3).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[1::4, 1::2] = -np.inf
    logits[2::5, vocab // 2] = 40
    logits[5::7] = 1.5
    logits[4::9, ::3] = np.nan
    return logits


def draw(logits, positions, temperature, top_k, top_p, seed=11, sequence=2):
    """The kernel's tokens, into poison and between guards."""
    out = poisoned(len(logits) + 2, np.int32)
    settings = to_device(kernel.pack_settings(temperature, top_k, top_p, seed, sequence))
    kernel.sample(to_device(logits), to_device(np.asarray(positions, np.int32)), settings, out[1:-1])
    got = to_host(out)
    assert got[[0, -1]].tolist() == [-1, -1]
    return got[1:-1]


def possible(row, u, temperature, top_k, top_p):
    """The ids, in order, that a number within MARGIN of u and a top_p within MARGIN of top_p may give."""
    keys = np.where(np.isnan(row), np.inf, -row.astype(np.float64))
    order = np.argsort(keys, kind="stable")[: top_k or len(row)]
    least = keys[order[0]]
    with np.errstate(over="ignore", invalid="ignore"):
        gap = np.where(keys[order] == least, 0.0, keys[order] - least) / temperature
    cumulative = np.cumsum(np.exp(-gap))
    total, last = cumulative[-1], len(order) - 1
    first_kept = last_kept = last
    if top_p < 1:
        least_mass = (top_p * (1 - MARGIN) - 2.0**-33) * total  # top_p is kept to 2^-32
        most_mass = (top_p * (1 + MARGIN) + 2.0**-33) * total
        first_kept = min(np.searchsorted(cumulative, least_mass), last)
        last_kept = min(np.searchsorted(cumulative, most_mass), last)
    low = np.searchsorted(cumulative, u * cumulative[first_kept] * (1 - MARGIN), side="right")
    high = np.searchsorted(cumulative, u * cumulative[last_kept] * (1 + MARGIN), side="right")
    return order[low : min(high, last) + 1]


def check_twin(which, rows, vocab, seed):
    """The twin's token where only one is possible, a possible one elsewhere; and such rows are few."""
    settings = SETTINGS[which]
    what = f"{settings}, {rows} x {vocab}, seed {seed}"
    rng = np.random.default_rng(seed)
    logits = hard_logits(rng, rows, vocab)
    positions = rng.integers(0, 2**31, rows)
    got, want = draw(logits, positions, *settings, seed=seed), np.empty(rows, np.int32)
    twin(logits, positions, *settings, seed, 2, want)
    numbers = uniform(seed, positions, 2)
    doubtful = 0
    for row in range(rows):
        ids = possible(logits[row], numbers[row], *settings)
        assert got[row] in ids, f"{what}: row {row} drew {got[row]}, possible are {ids}"
        if len(ids) == 1:
            assert got[row] == want[row], f"{what}: row {row} drew {got[row]}, the twin {want[row]}"
        doubtful += len(ids) > 1
    # A step is met by chance where one lies within MARGIN, and vocab of them lie on the way: see the flat rows.
    assert doubtful <= 2 + rows * min(1.0, 4 * MARGIN * vocab + 0.15), f"{what}: {doubtful} doubtful rows"
    return logits, positions


@pytest.mark.simulator
@pytest.mark.parametrize(("which", "rows", "vocab"), SMALL)
def test_twin_small(which, rows, vocab):
    check_twin(which, rows, vocab, seed=which)


@pytest.mark.gpu
@pytest.mark.parametrize(("which", "rows", "vocab"), LARGE)
def test_twin_large(which, rows, vocab):
    check_alone(*check_twin(which, rows, vocab, fresh_seed()), SETTINGS[which])


def check_alone(logits, positions, settings):
    """Rows draw alone and reversed what they drew together."""
    together = draw(logits, positions, *settings)
    reversed_rows = draw(logits[::-1], positions[::-1], *settings)
    assert reversed_rows[::-1].tolist() == together.tolist()
    for row in {0, len(logits) // 2, len(logits) - 1}:
        alone = draw(logits[row : row + 1], positions[row : row + 1], *settings)
        assert alone.tolist() == together[row : row + 1].tolist()


@pytest.mark.simulator
def test_alone_small():
    rng = np.random.default_rng(7)
    check_alone(hard_logits(rng, 3, 33), np.array([5, 2**31 - 1, 5]), SETTINGS[0])


def check_extremes(temperature, repeats, first=0):
    """Infinities, NaN and the ends of f32, at temperatures past f32: only tokens with mass, and in range.

    From row `first` on: the simulator warns where a product with the temperature passes f32, as it should in row 0.
    """
    inf, nan, top = np.inf, np.nan, np.finfo(np.float32).max
    rows = np.array(
        [
            [top, -top, 0, 1],
            [inf, 0, inf, 5],
            [-inf, -inf, 2, -inf],
            [nan, 3, -inf, nan],
            [nan] * 4,
            [-inf] * 4,
        ],
        np.float32,
    )
    everything = {0, 1, 2, 3}
    allowed = [everything if temperature == 1e300 else {0}, {0, 2}, {2}, {1}, everything, everything]
    rows, allowed = rows[first:], allowed[first:]
    logits, kinds = np.tile(rows, (repeats, 1)), len(rows)
    seen = [set() for _ in rows]
    for top_k, top_p in ((0, 1.0), (3, 0.9)):
        tokens = draw(logits, np.arange(len(logits)) // kinds, temperature, top_k, top_p)
        for row, token in enumerate(tokens.tolist()):
            kind = row % kinds
            assert token in allowed[kind], f"temperature {temperature}, row {first + kind}: {token}"
            seen[kind].add(token)
    if repeats > 100:
        assert seen == allowed


@pytest.mark.simulator
@pytest.mark.parametrize(("temperature", "first"), [(5e-324, 1), (1e300, 0)])
def test_extremes_small(temperature, first):
    check_extremes(temperature, 1, first)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-30, 1.0, 1e300])
def test_extremes_large(temperature):
    check_extremes(temperature, 200)


@pytest.mark.gpu
@pytest.mark.parametrize("which", range(len(SETTINGS)))
def test_the_distribution_is_exact(which):
    """A chi-square of 40,000 draws of one row against the f64 distribution."""
    settings, draws, vocab = SETTINGS[which], 40_000, 12
    row = hard_logits(np.random.default_rng(1), 2, vocab)[1]
    tokens = draw(np.tile(row, (draws, 1)), np.arange(draws), *settings)
    want = np.empty(draws, np.int32)
    twin(np.tile(row, (draws, 1)), np.arange(draws), *settings, 12, 2, want)  # another seed
    got, other = (np.bincount(t, minlength=vocab).astype(np.float64) for t in (tokens, want))
    common = got + other >= 10
    statistic = (np.square(got - other)[common] / (got + other)[common]).sum()
    freedom = max(1, common.sum() - 1)
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.simulator
def test_below_is_the_floor_of_the_product():
    rng = np.random.default_rng(0)
    for bits in (24, 32):
        for _ in range(200):
            fraction, mass = int(rng.integers(2**bits + 1)), int(rng.integers(2**59 + 1))
            for f, m in (
                (fraction, mass),
                (2**bits, mass),
                (fraction, 2**59),
                (0, mass),
                (2**bits - 1, 2**59),
            ):
                got = primitives_sample.below(np.uint64(f), np.uint64(bits), np.uint64(m))
                assert int(got) == (f * m) >> bits


def test_masses_fit_their_integers():
    """What the kernel relies on: limbs of MAX_VOCAB masses in 32 bits, their sum below 2^60."""
    assert primitives_sample.MAX_VOCAB * primitives_sample.LIMB_MASK < 2**32
    assert primitives_sample.ONE >> (2 * primitives_sample.LIMB) <= primitives_sample.LIMB_MASK
    assert primitives_sample.MAX_VOCAB * primitives_sample.ONE < 2**60
    smallest = primitives_sample.ONE * np.exp(-primitives_sample.FARTHEST)
    assert 1 < smallest < 1.5


def test_settings_are_packed():
    got = kernel.pack_settings(0.5, 7, 0.25, (5 << 32) | 3, 9)
    assert got.dtype == np.uint32 and got[:1].view(np.float32)[0] == 4
    assert got[1:].tolist() == [7, 2**30 - 1, 3, 5, 9]
    assert kernel.pack_settings(1, 0, 1, 0, 0)[2] == 2**32 - 1
    assert kernel.pack_settings(1, 0, 1e-300, 0, 0)[2] == 0
    for temperature in (5e-324, 1e300):
        rate = kernel.pack_settings(temperature, 0, 1, 0, 0)[:1].view(np.float32)[0]
        assert 0 < rate < np.inf
    for wrong in (
        (0, 0, 1, 0, 0),
        (-1, 0, 1, 0, 0),
        (np.inf, 0, 1, 0, 0),
        (np.nan, 0, 1, 0, 0),
        (1, -1, 1, 0, 0),
        (1, 0, 0, 0, 0),
        (1, 0, 1.1, 0, 0),
        (1, 0, np.nan, 0, 0),
        (1, 0, 1, -1, 0),
        (1, 0, 1, 2**64, 0),
        (1, 0, 1, 0, 2**32),
    ):
        with pytest.raises(LaunchError, match="sample"):
            kernel.pack_settings(*wrong)


@pytest.mark.simulator
def test_no_rows_are_legal_and_wrong_arguments_are_refused():
    def zeros(shape, dtype):
        return to_device(np.zeros(shape, dtype))

    logits, positions, out = zeros((2, 5), np.float32), zeros(2, np.int32), zeros(2, np.int32)
    settings = to_device(kernel.pack_settings(1, 0, 1, 0, 0))
    kernel.sample(logits[:0], positions[:0], settings, out[:0])
    wide = zeros((1, kernel.MAX_VOCAB + 1), np.float32)
    for arguments in (
        (zeros((2, 5), np.float64), positions, settings, out),
        (zeros((2, 0), np.float32), positions, settings, out),
        (wide, positions[:1], settings, out[:1]),
        (logits, positions[:1], settings, out),
        (logits, positions, settings[:5], out),
        (logits, positions, zeros(6, np.int32), out),
        (logits, positions, settings, zeros(2, np.int64)),
    ):
        with pytest.raises(LaunchError, match="sample"):
            kernel.sample(*arguments)
