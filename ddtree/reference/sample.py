"""Draws one token a row by temperature, top-k, top-p and the row's position-keyed uniform number.

The order of candidates is (-logit, id): (-probability, id) without the rounding of exp, so that it is the same
wherever it is computed. A NaN counts as -inf. Knows rows of numbers, not which of them will be kept.
"""

import math

import numpy as np

from ddtree.errors import ConfigError
from ddtree.reference.philox import uniform

CHUNK_ELEMENTS = 1 << 20  # logits worked on at once; a row's result does not depend on it


def sample(logits, positions, temperature, top_k, top_p, seed, sequence, out):
    """Write to out i32 [M] a token for each row of logits [M, V], f32 or f64; each depends on its row alone.

    positions i32 [M]: of the token drawn, that is the row's own position + 1. top_k 0 and top_p 1.0 are off.
    top_p keeps the shortest prefix that reaches it of what top_k left, renormalised. The token has a
    probability above 0; +inf logits share all of it; a row with nothing above -inf still gets an id in range.
    Raises ConfigError for settings out of range and for an empty vocabulary.
    """
    num_rows, vocab = logits.shape
    assert len(positions) == num_rows and out.shape == (num_rows,)
    if not (0 < temperature < math.inf and top_k >= 0 and 0 < top_p <= 1):
        raise ConfigError(
            f"sample: temperature {temperature}, top_k {top_k}, top_p {top_p}: wanted a finite temperature > 0, "
            "top_k >= 0 and 0 < top_p <= 1"
        )
    if num_rows and not vocab:
        raise ConfigError("sample: the vocabulary is empty, wanted at least one logit a row")
    uniforms = uniform(seed, positions, sequence)
    step = max(1, CHUNK_ELEMENTS // max(1, vocab))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        out[rows] = _draw(logits[rows], uniforms[rows], temperature, top_k or vocab, top_p)


def _draw(logits, uniforms, temperature, top_k, top_p):
    """Return ids i64 [M] drawn from logits [M, V] by inverse CDF at uniforms f64 [M]."""
    keys = -logits.astype(np.float64, order="C")
    keys[np.isnan(keys)] = np.inf
    order = np.argsort(keys, axis=1, kind="stable")[:, :top_k]
    keys = np.take_along_axis(keys, order, axis=1)
    weights = np.exp(-_tempered_gap(keys, temperature))
    cumulative = np.cumsum(weights, axis=1)  # sequential in each row, so free of its neighbours
    if top_p < 1.0:
        num_kept = 1 + (cumulative < top_p * cumulative[:, -1:]).sum(axis=1, keepdims=True)
        kept = np.take_along_axis(cumulative, num_kept - 1, axis=1)
    else:
        kept = cumulative[:, -1:]
    # kept >= 1 and u <= 1 - 2^-24: the point lies below kept, where the sum still rises
    rank = (cumulative <= uniforms[:, None] * kept).sum(axis=1, keepdims=True)
    return np.take_along_axis(order, rank, axis=1)[:, 0]


def _tempered_gap(keys, temperature):
    """Return (key - row's least key) / temperature, 0 where equal, for keys f64 [M, k] in rising order."""
    least = keys[:, :1]
    gap = np.zeros_like(keys)
    with np.errstate(over="ignore"):  # a gap past f64 is a probability of 0
        np.subtract(keys, least, out=gap, where=keys != least)  # equal infinities have no difference
        gap /= temperature
    return gap
