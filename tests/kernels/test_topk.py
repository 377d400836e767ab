"""Top-k against the NumPy twin: ids integer for integer, log-probabilities within the stated eps, row by row alone."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels import selection
from kernels.device import to_device
from kernels.selection import Guarded, between_poison
from seeds import fresh_seed

from kernels_numba import topk
from kernels_numba.checks import LaunchError

EPS = np.finfo(np.float32).eps
INF, NAN = np.inf, np.nan

# The simulator's f32 arithmetic is NumPy's, which warns where the GPU does not: inf - inf, and a gap beyond f32.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def launch(logits, k):
    """(token_ids, log_probs) of the kernels, on poisoned scratch and outputs and between poisoned neighbours."""
    rows, vocab = logits.shape
    groups = (rows, topk.num_groups(vocab))
    token_ids, log_probs = Guarded((rows, k), np.int32), Guarded((rows, k), np.float32)
    keys, sums = Guarded(groups, np.uint64), Guarded(groups, np.float32)
    topk.topk_log_softmax(between_poison(logits), k, token_ids.array, log_probs.array, keys.array, sums.array)
    keys.read(), sums.read()
    return token_ids.read(), log_probs.read()


def exact_log_probs(logits, token_ids):
    """The formula in f64, NaN throughout a row with a NaN, a +inf or nothing finite."""
    wide = logits.astype(np.float64)
    greatest = wide.max(axis=1, keepdims=True)
    with np.errstate(all="ignore"):
        norm = np.log(np.exp(wide - greatest).sum(axis=1, keepdims=True))
        exact = np.take_along_axis(wide, token_ids.astype(np.int64), axis=1) - greatest - norm
        exact[np.broadcast_to(~np.isfinite(norm), exact.shape)] = NAN
    exact[exact < -np.finfo(np.float32).max] = -INF  # what f32 does not hold
    return exact


def check_topk(logits, k, what, alone=True):
    """The kernels against the twin and the formula; each row's bits alone against its bits among others."""
    logits = np.ascontiguousarray(logits, np.float32)
    token_ids, log_probs = launch(logits, k)
    want_ids, want = selection.topk_log_softmax(logits, k)
    np.testing.assert_array_equal(token_ids, want_ids, f"{what}: token_ids")
    exact = exact_log_probs(logits, token_ids)
    bound = 40 + 2 * np.log(logits.shape[1]) + 2 * np.abs(exact)
    assert_close(log_probs, exact, EPS, f"{what}: log_probs", scale=bound)
    # The twin subtracts one f64 logsumexp, whose rounding is that of the greatest logit.
    greatest = np.abs(np.nan_to_num(logits.max(axis=1, keepdims=True), posinf=0, neginf=0))
    assert_close(want, exact, EPS, f"{what}: the twin", scale=np.abs(exact) + 4e-9 * greatest + 1e-9)
    assert not (np.diff(log_probs, axis=1) > 0).any(), f"{what}: log_probs rise"
    for row in range(len(logits) if alone else 0):
        single = launch(logits[row : row + 1], k)
        assert_same_bits(single[0][0], token_ids[row], f"{what}: ids of row {row} alone")
        assert_same_bits(single[1][0], log_probs[row], f"{what}: log_probs of row {row} alone")
    return log_probs


def plain(rng, rows, vocab):
    return rng.standard_normal((rows, vocab)) * 5


def rounded(rng, rows, vocab):
    """Ties across every boundary."""
    return np.round(rng.standard_normal((rows, vocab)) * 2)


def as_bf16(rng, rows, vocab):
    """Logits that a bf16 matmul wrote: many equal ones among the greatest."""
    bits = plain(rng, rows, vocab).astype(np.float32).view(np.uint32)
    return (bits & 0xFFFF0000).view(np.float32)


def equal(rng, rows, vocab):
    return np.full((rows, vocab), rng.standard_normal())


def clustered(rng, rows, vocab):
    """The greatest stand side by side: in few groups, in one chunk."""
    logits = plain(rng, rows, vocab)
    start = int(rng.integers(max(vocab - vocab // 8, 1)))
    logits[:, start : start + vocab // 8 + 1] += 40
    return logits


def rising(rng, rows, vocab):
    return np.sort(plain(rng, rows, vocab), axis=1)


def mostly_inf(rng, rows, vocab):
    """Three finite logits a row, so that most of the chosen are -inf."""
    logits = np.full((rows, vocab), -INF)
    for row in logits:
        row[rng.integers(vocab, size=3)] = rng.standard_normal(3)
    return logits


def signed_zeros(rng, rows, vocab):
    return np.where(rng.random((rows, vocab)) < 0.5, 0.0, -0.0) - (rng.random((rows, vocab)) < 0.3)


def wide(rng, rows, vocab):
    """Outliers, subnormals and the ends of f32 side by side."""
    return rng.choice([3e38, -3e38, 1e-42, -1e-42, 1e4, -1e4, 0.0, 1.0], (rows, vocab))


KINDS = [plain, rounded, as_bf16, equal, clustered, rising, mostly_inf, signed_zeros, wide]
SMALL = [(1, 1, 1), (2, 3, 2), (1, 31, 31), (1, 33, 32), (3, 65, 5), (1, 300, 3), (1, 511, 32)]
LARGE = [
    *((15, 163840, k) for k in (1, 16, 64, 512, 1024)),
    *((32, 129280, k) for k in (64, 1024)),
    *((3, vocab, 64) for vocab in (65, 255, 257, 1023, 8191, 8193, 32767, 32768, 50001, 163839)),
    *((2, k, k) for k in (1, 2, 3, 31, 33, 64, 1000, 1024)),
    (2, 1025, 1024),
    (1, topk.MAX_VOCAB, 512),
]


@pytest.mark.simulator
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("rows", "vocab", "k"), [(1, 150, 20)])
def test_every_kind_small(kind, rows, vocab, k):
    logits = kind(np.random.default_rng(vocab), rows, vocab)
    check_topk(logits, k, f"{kind.__name__} {rows} x {vocab}, k {k}", alone=False)


@pytest.mark.simulator
@pytest.mark.parametrize(("rows", "vocab", "k"), SMALL)
def test_small(rows, vocab, k):
    check_topk(
        plain(np.random.default_rng(vocab), rows, vocab), k, f"{rows} x {vocab}, k {k}", alone=rows > 1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    ("rows", "vocab", "k"), [(15, 163840, 64), (2, 163840, 512), (3, 50001, 33), (2, 1025, 1024), (2, 40, 40)]
)
def test_every_kind_large(kind, rows, vocab, k):
    seed = fresh_seed()
    logits = kind(np.random.default_rng(seed), rows, vocab)
    check_topk(logits, k, f"{kind.__name__} {rows} x {vocab}, k {k}, seed {seed}", alone=rows <= 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab", "k"), LARGE)
def test_large(rows, vocab, k):
    seed = fresh_seed()
    logits = as_bf16(np.random.default_rng(seed), rows, vocab)
    check_topk(logits, k, f"{rows} x {vocab}, k {k}, seed {seed}", alone=rows <= 15)


def bad_rows(vocab):
    """Rows that decide nothing, and one that does, of which the last two give NaN and finite values."""
    logits = np.zeros((6, vocab), np.float32)
    logits[0, vocab // 2] = NAN
    logits[1] = NAN
    logits[2] = -INF
    logits[3, -1] = INF
    logits[4, : vocab // 2], logits[4, vocab // 2 :] = NAN, -INF
    logits[5] = np.arange(vocab)
    return logits


def check_bad_rows(vocab, k):
    log_probs = check_topk(bad_rows(vocab), k, f"bad rows of {vocab}, k {k}", alone=False)
    assert np.isnan(log_probs[:5]).all() and np.isfinite(log_probs[5]).all()


@pytest.mark.simulator
def test_bad_rows_small():
    check_bad_rows(37, 5)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "k"), [(37, 37), (163840, 64), (163840, 1024)])
def test_bad_rows_large(vocab, k):
    check_bad_rows(vocab, k)


@pytest.mark.simulator
def test_nothing_asked_is_legal():
    assert launch(np.zeros((3, 5), np.float32), 0)[0].shape == (3, 0)
    assert launch(np.zeros((0, 5), np.float32), 2)[0].shape == (0, 2)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def call(logits=(2, 9), k=3, ids=(2, 3), log_probs=(2, 3), groups=None, dtype=np.int32):
        groups = groups or (2, topk.num_groups(9))
        topk.topk_log_softmax(
            to_device(np.zeros(logits, np.float32)),
            k,
            to_device(np.zeros(ids, dtype)),
            to_device(np.zeros(log_probs, np.float32)),
            to_device(np.zeros(groups, np.uint64)),
            to_device(np.zeros(groups, np.float32)),
        )

    call()
    too_long = topk.MAX_VOCAB + 1
    for words in (
        {"k": -1},
        {"k": 10, "ids": (2, 10), "log_probs": (2, 10)},
        {"logits": (1, 200), "k": topk.MAX_K + 1},
        {"logits": (2, too_long), "groups": (2, topk.num_groups(too_long))},
        {"ids": (2, 4)},
        {"log_probs": (3, 3)},
        {"groups": (2, 1)},
        {"dtype": np.int64},
        {"logits": (9,)},
    ):
        with pytest.raises(LaunchError, match="topk_log_softmax"):
            call(**words)
