"""Softmax attention of query rows in f64, with how far f32 arithmetic may be from it."""

import numpy as np

EPS = float(np.finfo(np.float32).eps)
EXP_ULPS = 4  # of exp itself, and of the subtraction before it


def softmax_average(queries, keys, values, scale, score_chain, value_chain):
    """(averages, allowed), f64 [H, D]: softmax(scale * queries @ keys.T) @ values and its first-order bound / eps.

    queries [H, W], keys [N, W], values [N, D]. A sum of products in f32 whose longest chain of roundings is n is off
    by at most n x eps x the sum of magnitudes. So a score is off by (score_chain + 2) x eps x scale |query| . |key|, a
    weight by that share of itself and EXP_ULPS x eps, and each weight's error moves the average by weight x (|value| +
    |average|). The sums over keys add value_chain.
    """
    queries, keys, values = (np.asarray(array, np.float64) for array in (queries, keys, values))
    scores = scale * (queries @ keys.T)
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    averages = weights @ values
    loose = weights * (
        (score_chain + 2) * scale * (np.abs(queries) @ np.abs(keys).T) + EXP_ULPS + value_chain
    )
    return averages, loose @ np.abs(values) + loose.sum(axis=1, keepdims=True) * np.abs(averages)
