"""Branch scores on the device against the f64 twin: sizes, ranks, ties, what is not finite; sorted, in one order."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels import selection
from kernels.device import to_device
from kernels.selection import Guarded, between_poison
from seeds import fresh_seed

from kernels_numba import branch_scores
from kernels_numba.checks import LaunchError

EPS = float(np.finfo(np.float32).eps)
INF, NAN = np.inf, np.nan


def case(seed, depths, width, rank, vocab, scale=1.0):
    """The arguments of random rows: token_ids, log_probs, block, gated, parent_table, child_table."""
    rng = np.random.default_rng(seed)
    token_ids = np.stack([rng.permutation(vocab)[:width] for _ in range(depths)]).astype(np.int32)
    log_probs = -np.sort(rng.exponential(3, (depths, width)), axis=1).astype(np.float32)
    block = rng.integers(0, vocab, 4).astype(np.int32)
    gated, parent, child = (
        (scale * rng.standard_normal((rows, rank))).astype(np.float32) for rows in (depths, vocab, vocab)
    )
    return token_ids, log_probs, block, gated, parent, child / np.float32(np.sqrt(rank))


def launch(arguments):
    """The kernel's (places, log_probs), its inputs and outputs between poisoned neighbours."""
    depths, width = arguments[0].shape
    places, log_probs = (Guarded((depths, width, width), dtype) for dtype in (np.int32, np.float32))
    branch_scores.branch_scores(*map(between_poison, arguments), places.array, log_probs.array)
    return places.read(), log_probs.read()


def by_candidate(places, log_probs):
    """Sorted rows put back into the order of the candidates."""
    out = np.full(log_probs.shape, NAN, np.float32)
    np.put_along_axis(out, places, log_probs, axis=-1)
    return out


def allowed(arguments):
    """How far f32 may be off, of each pair [L, P, P] in eps: its own score, and the worst score of its row's sums."""
    token_ids, log_probs, block, gated, parent, child = (np.asarray(a, np.float64) for a in arguments)
    token_ids, rank = token_ids.astype(int), gated.shape[1]
    above = np.concatenate((np.broadcast_to(block.astype(int)[:1], token_ids[:1].shape), token_ids[:-1]))
    left = np.abs(parent[above]) + np.abs(gated)[:, None]
    terms = np.einsum("lpr,lcr->lpc", left, np.abs(child[token_ids]))
    terms[~np.isfinite(terms)] = 0  # of pairs that are -inf
    sizes = np.abs(np.where(np.isfinite(log_probs), log_probs, 0))[:, None, :]
    # a chain of R / 4 fma, four chains, silu's four roundings and exp; the score joined to the marginal
    error = (rank / 4 + 10) * terms + 2 * (sizes + terms)
    # each of both sums: its worst term, 16 exponentials of 2 ulp whose arguments were rounded, additions, a logarithm
    sums = error.max(axis=2, keepdims=True) + 3 * (sizes + terms).max(axis=2, keepdims=True) + 24
    return error + 2 * sums


def check(arguments, what):
    """The kernel against the twin: the same log-probabilities, sorted; returns the kernel's (places, log_probs)."""
    places, log_probs = launch(arguments)
    width = log_probs.shape[-1]
    assert (np.sort(places, axis=-1) == np.arange(width)).all(), f"{what}: a row of places is no permutation"
    apart, tied = log_probs[..., :-1] > log_probs[..., 1:], log_probs[..., :-1] == log_probs[..., 1:]
    assert (apart | (tied & (places[..., :-1] < places[..., 1:]))).all(), f"{what}: not sorted"
    want = by_candidate(*selection.branch_scores(*arguments)).astype(np.float64)
    assert_close(by_candidate(places, log_probs), want, EPS, what, scale=allowed(arguments))
    return places, log_probs


SMALL = [(3, 4, 8, 20), (2, 16, 6, 40), (1, 1, 1, 1), (2, 3, 31, 3), (1, 5, 256, 9), (4, 2, 4, 7)]
LARGE = [
    *((15, 16, rank, 2048) for rank in (1, 3, 4, 31, 32, 33, 63, 64, 65, 128, 255, 256)),
    *((7, width, 64, 300) for width in (1, 2, 3, 5, 8, 15)),
    (32, 16, 64, 16),
    (1, 16, 64, 163840),
]


@pytest.mark.simulator
@pytest.mark.parametrize("scale", [1.0, 40.0])  # silu on either side of where it is 0 or its argument
@pytest.mark.parametrize("sizes", SMALL)
def test_sizes_small(sizes, scale):
    check(case(1, *sizes, scale), f"{sizes}, scale {scale}")


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0, 40.0])
@pytest.mark.parametrize("sizes", LARGE)
def test_sizes_large(sizes, scale):
    seed = fresh_seed()
    check(case(seed, *sizes, scale), f"{sizes}, scale {scale}, seed {seed}")


def check_ties(seed, depths, width, rank, vocab):
    """Candidates alike but for their ids stand by the lower one; the places are the twin's where values are apart."""
    rng = np.random.default_rng(seed)
    token_ids, log_probs, block, gated, parent, child = case(seed, depths, width, rank, vocab)
    child = child[:2][rng.integers(0, 2, vocab)]
    arguments = token_ids, np.floor(log_probs / 2), block, gated, parent, child
    places, found = check(arguments, f"ties, seed {seed}")
    want_places, want = selection.branch_scores(*arguments)
    tied, apart = want[..., :-1] == want[..., 1:], want[..., :-1] > want[..., 1:] + 1e-3
    assert tied[1:].any() and (found[..., :-1] == found[..., 1:])[tied].all()
    clear = (tied | apart).all(axis=-1)
    assert clear.mean() > 0.8
    np.testing.assert_array_equal(places[clear], want_places[clear])


@pytest.mark.simulator
def test_ties_small():
    check_ties(2, 3, 8, 4, 30)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 2, 4, 16])
def test_ties_large(rank):
    """Of one seed: with others, all rows may be tied but for a rounding, which says nothing of places."""
    check_ties(3, 15, 16, rank, 500)


def check_silent(sizes):
    """A head that says nothing leaves the marginal in every bit, and its order."""
    arguments = case(4, *sizes)
    arguments[5][:] = 0
    places, log_probs = launch(arguments)
    want = np.repeat(arguments[1][:, None], sizes[1], axis=1)
    want[0, 1:] = -INF
    assert_same_bits(log_probs, want, f"{sizes}")
    assert (places == np.arange(sizes[1])).all()


@pytest.mark.simulator
def test_a_silent_head_leaves_the_marginal_small():
    check_silent((3, 4, 4, 9))


@pytest.mark.gpu
def test_a_silent_head_leaves_the_marginal_large():
    check_silent((15, 16, 64, 2048))


def check_not_finite(depths, width, rank, vocab):
    """NaN and infinities in each input fall on what they touch; the rest has the twin's log-probabilities."""
    for where in ("marginal", "row", "gate", "parent", "child"):
        for bad in (NAN, INF, -INF):
            arguments = case(5, depths, width, rank, vocab)
            token_ids, log_probs, _, gated, parent, child = arguments
            if where == "marginal":
                log_probs[1, -1] = bad
            elif where == "row":
                log_probs[1] = bad
            elif where == "gate":
                gated[1, rank // 2] = bad
            else:
                table = parent if where == "parent" else child
                table[token_ids[1, 0], rank // 2] = bad
            with np.errstate(invalid="ignore"):
                places, found = check(arguments, f"{bad} in {where}")
            assert not np.isnan(found).any() and not np.isposinf(found).any()
            lost = np.isneginf(by_candidate(places, found))
            lost[0, 1:] = False
            if where == "marginal":
                assert lost[1, :, -1].all() and lost.sum() == width
            elif where in ("row", "gate"):
                assert lost[1].all() and lost.sum() == width * width
            elif where == "parent":
                assert lost[2, 0].all()
            else:
                assert lost[1, :, 0].all()


@pytest.mark.simulator
def test_what_is_not_finite_is_left_out_small():
    check_not_finite(3, 3, 4, 40)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [5, 64])
def test_what_is_not_finite_is_left_out_large(rank):
    check_not_finite(15, 16, rank, 4000)


@pytest.mark.gpu
def test_one_result_every_time():
    arguments = [to_device(array) for array in case(6, 15, 16, 64, 4096)]
    first = None
    for _ in range(20):
        out = [Guarded((15, 16, 16), dtype) for dtype in (np.int32, np.float32)]
        branch_scores.branch_scores(*arguments, *(guarded.array for guarded in out))
        found = [guarded.read() for guarded in out]
        first = first or found
        for name, got, want in zip(("places", "log_probs"), found, first, strict=True):
            assert_same_bits(got, want, name)


@pytest.mark.simulator
def test_nothing_to_score_is_no_launch():
    token_ids, log_probs, block, gated, *tables = case(0, 3, 4, 8, 20)
    for places, out in (
        launch((token_ids[:0], log_probs[:0], block, gated[:0], *tables)),
        launch((token_ids[:, :0], log_probs[:, :0], block, gated, *tables)),
    ):
        assert places.size == out.size == 0


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def call(places=np.int32, out=np.float32, square=4, **changed):
        names = ("token_ids", "log_probs", "block", "gated", "parent", "child")
        arguments = dict(zip(names, case(0, 2, 4, 8, 20), strict=True)) | changed
        outputs = (np.zeros((2, square, 4), dtype) for dtype in (places, out))
        branch_scores.branch_scores(*map(to_device, (*arguments.values(), *outputs)))

    call()
    wide = case(0, 2, 17, 8, 20)
    for words in (
        {"token_ids": np.zeros((2, 4), np.int64)},
        {"log_probs": np.zeros((2, 3), np.float32)},
        {"block": np.zeros(0, np.int32)},
        {"gated": np.zeros((3, 8), np.float32)},
        {"gated": np.zeros((2, 9), np.float32)},
        {"parent": np.zeros((20, 8))},
        {"child": np.zeros((19, 8), np.float32)},
        {"places": np.int64},
        {"out": np.float64},
        {"square": 3},
        dict(
            zip(
                ("gated", "parent", "child"), (np.zeros((n, 257), np.float32) for n in (2, 9, 9)), strict=True
            )
        ),
        dict(
            zip(("gated", "parent", "child"), (np.zeros((n, 0), np.float32) for n in (2, 9, 9)), strict=True)
        ),
    ):
        with pytest.raises(LaunchError, match="branch_scores"):
            call(**words)
    outputs = np.zeros((2, 17, 17), np.int32), np.zeros((2, 17, 17), np.float32)
    with pytest.raises(LaunchError, match="17 candidates a depth, at most 16"):
        branch_scores.branch_scores(*map(to_device, (*wide, *outputs)))
