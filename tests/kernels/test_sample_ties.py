"""Sampling where the token is known exactly: equal logits, the tail behind one that has nearly all mass, zeros."""

import numpy as np
import pytest
from kernels.test_sample import draw

from ddtree.reference.philox import uniform


def check_ties(rows, vocab, top_k, top_p, kept):
    """Equal logits, of which `kept` are left: the token is floor(u x kept), to the integer."""
    tokens = draw(np.full((rows, vocab), -3.5, np.float32), np.arange(rows), 0.7, top_k, top_p)
    want = np.floor(uniform(11, np.arange(rows), 2) * kept).astype(int)
    assert tokens.tolist() == want.tolist(), f"{vocab} equal logits, top_k {top_k}, top_p {top_p}"


@pytest.mark.simulator
def test_ties_small():
    check_ties(12, 4, 0, 0.5, 2)
    check_ties(3, 40, 24, 0.5, 12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("vocab", "top_k", "top_p", "kept"),
    [
        (163840, 0, 1.0, 163840),
        (163840, 5000, 0.5, 2500),
        (163840, 0, 0.25, 40960),
        (2048, 1, 1.0, 1),
        (4, 0, 0.5, 2),
    ],
)
def test_ties_large(vocab, top_k, top_p, kept):
    """Wider than a block can sort: narrowed down to the id."""
    check_ties(300, vocab, top_k, top_p, kept)


def check_the_tail(vocab):
    """One logit has nearly all of the mass; numbers close to 1 draw from the rest, e^-13 of it each."""
    row = np.full((1, vocab), -13.0, np.float32)
    row[0, vocab // 2] = 0
    late = np.arange(200_000)
    late = late[uniform(11, late, 2) > 1 - 0.5 * vocab * np.exp(-13)][:6]
    assert len(late) > 2
    tokens = draw(np.repeat(row, len(late), axis=0), late, 1.0, 0, 1.0)
    assert (tokens != vocab // 2).all()


@pytest.mark.simulator
def test_the_tail_small():
    check_the_tail(60)


@pytest.mark.gpu
def test_the_tail_large():
    check_the_tail(163840 // 8)


def check_signed_zeros(repeats):
    """0.0 and -0.0 are one logit: the order is that of the ids."""
    logits = np.tile(np.array([[-0.0, 0.0, -0.0, 0.0]], np.float32), (repeats, 1))
    tokens = draw(logits, np.arange(repeats), 1.0, 3, 1.0)
    want = np.floor(uniform(11, np.arange(repeats), 2) * 3).astype(int)
    assert tokens.tolist() == want.tolist()


@pytest.mark.simulator
def test_signed_zeros_small():
    check_signed_zeros(6)


@pytest.mark.gpu
def test_signed_zeros_large():
    check_signed_zeros(500)
