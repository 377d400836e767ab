"""Argmax and bad rows against the NumPy twin, integer for integer: ties, NaN, infinities, and rows cut in parts."""

import numpy as np
import pytest
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference import topk
from kernels_numba import argmax
from kernels_numba.checks import LaunchError

SMALL = [(1, 1), (3, 3), (2, 33), (2, 65), (1, 150), (3, 150)]
LARGE = [
    *((rows, vocab) for rows in (1, 3, 64, 65, 513) for vocab in (2048, 32768)),
    *((rows, 163840) for rows in (1, 2, 16, 33)),
    (17, 129280),
    *((31, vocab) for vocab in (1, 3, 31, 33, 255, 256, 257, 1023, 1025, 4097)),
]
SPECIALS = np.array([-np.inf, np.inf, np.nan, -0.0, 0.0, 1.0, -1.0, 1e-42, 3e38, -3e38], np.float32)


def hard_logits(rng, rows, vocab):
    """Rows of every kind: normal, tied, of special values, of one value, with the maximum at an end."""
    logits = rng.standard_normal((rows, vocab)).astype(np.float32)
    kind = rng.integers(9, size=rows)
    logits[kind == 1] = np.round(logits[kind == 1])
    logits[kind == 2] = rng.choice(SPECIALS, logits[kind == 2].shape)
    logits[kind == 3] = rng.choice(SPECIALS, (np.count_nonzero(kind == 3), 1))
    logits[kind == 4, 0] = 50
    logits[kind == 5, -1] = 50
    logits[kind == 6, vocab // 2] = np.nan
    logits[kind == 7] = rng.choice(SPECIALS[:3], logits[kind == 7].shape)
    logits[kind == 8] = rng.choice(SPECIALS[:2], logits[kind == 8].shape)
    return logits


def run_fused(logits, scratch, dtype=np.uint8):
    """Tokens and badness by the fused kernel; checks the guards and that the scratch is zero again."""
    rows = len(logits)
    tokens, bad = poisoned(rows + 2, np.int32), poisoned(rows + 2, np.uint8)
    bad = to_device(to_host(bad).view(dtype)) if dtype is not np.uint8 else bad
    argmax.argmax_and_bad(to_device(logits), tokens[1:-1], bad[1:-1], scratch)
    tokens, bad = to_host(tokens), to_host(bad).view(np.uint8)
    assert tokens[[0, -1]].tolist() == [-1, -1] and bad[[0, -1]].tolist() == [255, 255]
    assert not to_host(scratch).any()
    return tokens[1:-1], bad[1:-1]


def check_rows(logits, what, dtype=np.uint8):
    want_tokens, want_bad = np.empty(len(logits), np.int32), np.empty(len(logits), bool)
    topk.argmax(logits, want_tokens)
    topk.row_is_bad(logits, want_bad)
    scratch = to_device(np.zeros((len(logits) + 1, 2), np.uint64))
    for _ in range(2):  # the second call finds what the first left
        tokens, bad = run_fused(logits, scratch, dtype)
        np.testing.assert_array_equal(tokens, want_tokens, f"{what}: tokens")
        np.testing.assert_array_equal(bad, want_bad, f"{what}: bad")
    alone, flags = poisoned(len(logits), np.int32), to_device(np.full(len(logits), 7, np.uint8).view(dtype))
    argmax.argmax(to_device(logits), alone)
    argmax.row_is_bad(to_device(logits), flags)
    np.testing.assert_array_equal(to_host(alone), want_tokens, f"{what}: argmax")
    np.testing.assert_array_equal(to_host(flags).view(np.uint8), want_bad, f"{what}: row_is_bad")


@pytest.mark.simulator
@pytest.mark.parametrize(("rows", "vocab"), SMALL)
def test_small(rows, vocab):
    dtype = np.bool_ if rows > 1 else np.uint8
    check_rows(hard_logits(np.random.default_rng(vocab), rows, vocab), f"{rows} x {vocab}", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "vocab"), LARGE)
def test_large(rows, vocab):
    seed = fresh_seed()
    logits = hard_logits(np.random.default_rng(seed), rows, vocab)
    check_rows(logits, f"{rows} x {vocab}, seed {seed}", np.bool_)


def check_every_kind_of_row():
    inf, nan = np.inf, np.nan
    rows = [
        [0, -inf, 0, -0.0],
        [-0.0, 0.0, -1, -inf],
        [inf, 1, inf, nan],
        [-inf] * 4,
        [nan] * 4,
        [nan, -inf, nan, -inf],
        [inf, -inf, inf, -inf],
        [-inf, -inf, -3e38, -inf],
        [1, nan, 2, 2],
        [-1e-45, -0.0, -1, 0.0],
    ]
    check_rows(np.array(rows, np.float32), "every kind of row")


@pytest.mark.simulator
def test_every_kind_of_row_small():
    check_every_kind_of_row()


@pytest.mark.gpu
def test_every_kind_of_row_large():
    check_every_kind_of_row()


def check_one_finite_value(vocab):
    """A row is good for one finite value, in whichever part of it: at the ends, and in between."""
    rows = np.full((4, vocab), -np.inf, np.float32)
    for row, place in enumerate((0, vocab // 2, vocab - 1)):
        rows[row, place] = -3.0
    for row in rows:  # alone, so that a row has the most parts
        check_rows(row[None], f"one finite value of {vocab}")


@pytest.mark.simulator
def test_one_finite_value_small():
    check_one_finite_value(150)


@pytest.mark.gpu
def test_one_finite_value_large():
    check_one_finite_value(163840)


@pytest.mark.gpu
def test_many_parts_arrive_in_any_order():
    """The maximum's place and a lone NaN, in a part of their own, in a hundred launches."""
    rng = np.random.default_rng(fresh_seed())
    scratch = to_device(np.zeros((1, 2), np.uint64))
    for _ in range(100):
        logits = rng.standard_normal((1, 163840)).astype(np.float32)
        top, lone = rng.choice(163840, 2, replace=False)
        logits[0, top], logits[0, lone] = 100, np.nan
        tokens, bad = run_fused(logits, scratch)
        assert tokens.tolist() == [top] and bad.tolist() == [1]


def test_parts_fill_the_card_and_no_more():
    for rows in (1, 3, 64, 513, 5000):
        for vocab in (1, 33, 2048, 163840):
            parts = argmax.parts_of(rows, vocab)
            assert parts >= 1 and (parts == 1 or rows * parts <= argmax.TARGET_BLOCKS)
            assert (parts - 1) * argmax.UNROLL * argmax.THREADS < vocab
    assert argmax.TARGET_BLOCKS < argmax.FIELD


@pytest.mark.simulator
def test_no_rows_are_legal_and_wrong_arguments_are_refused():
    def zeros(shape, dtype):
        return to_device(np.zeros(shape, dtype))

    logits, tokens, bad = zeros((2, 5), np.float32), zeros(2, np.int32), zeros(2, np.uint8)
    scratch = zeros((2, 2), np.uint64)
    argmax.argmax_and_bad(logits[:0], tokens[:0], bad[:0], scratch)
    argmax.argmax(logits[:0], tokens[:0])
    argmax.row_is_bad(logits[:0], bad[:0])
    for launch in (
        lambda: argmax.argmax(zeros((2, 5), np.float64), tokens),
        lambda: argmax.argmax(zeros((2, 0), np.float32), tokens),
        lambda: argmax.argmax(logits, zeros(2, np.int64)),
        lambda: argmax.argmax(logits, tokens[:1]),
        lambda: argmax.row_is_bad(logits, tokens),
        lambda: argmax.row_is_bad(logits[:, :3], bad),
        lambda: argmax.argmax_and_bad(logits, tokens, bad[:1], scratch),
        lambda: argmax.argmax_and_bad(logits, tokens, bad, scratch[:1]),
        lambda: argmax.argmax_and_bad(logits, tokens, bad, zeros((2, 2), np.int64)),
    ):
        with pytest.raises(LaunchError):
            launch()
