"""Top-k with log-probabilities, argmax, and the check for rows that decide nothing.

One order everywhere: greater logit first, equal logits by the lower id, a NaN counted as -inf. So every id
written is in range, whatever the row holds. Knows rows of numbers, not what drafted or scored them.
"""

import numpy as np

from ddtree.errors import ConfigError


def topk_log_softmax(logits, k, out_token_ids, out_log_probs):
    """Write each row's k greatest logits as ids and natural-log probabilities over the whole row.

    logits [L, V] f32 or f64, k in 0..V, out_token_ids i32 [L, k], out_log_probs f32 [L, k].
    log_prob = f32(logit - logsumexp), in f64 inside, one row at a time; -inf for a -inf logit, and NaN
    throughout a row that has a NaN, a +inf or nothing finite. Raises ConfigError when k is not in 0..V.
    """
    num_rows, vocab = logits.shape
    if not 0 <= k <= vocab:
        raise ConfigError(f"topk_log_softmax: k is {k}, wanted 0..{vocab} (the vocabulary)")
    assert out_token_ids.shape == out_log_probs.shape == (num_rows, k)
    for row in range(num_rows):
        values = logits[row].astype(np.float64)
        token_ids = top_ids(logits[row], k)
        out_token_ids[row] = token_ids
        with np.errstate(over="ignore"):  # a gap wider than f32 holds is a log-probability of -inf
            out_log_probs[row] = values[token_ids] - log_sum_exp(values)


def log_sum_exp(values):
    """Return log(sum(exp(row))) of each row of f64 [.., V], f64 [.., 1], shifted by its maximum.

    NaN where the maximum is not finite, as of a row without a column.
    """
    greatest = values.max(axis=-1, keepdims=True, initial=-np.inf)
    greatest = np.where(np.isfinite(greatest), greatest, np.nan)
    with np.errstate(divide="ignore"):  # of rows without a column
        return greatest + np.log(np.exp(values - greatest).sum(axis=-1, keepdims=True))


def top_ids(values, k):
    """Return the ids i64 [k] of the k greatest of values [V] in order: a stable sort's first k, found faster."""
    keys = -values
    keys[np.isnan(keys)] = np.inf
    if k >= keys.size:
        return np.argsort(keys, kind="stable")
    if k == 0:
        return np.zeros(0, np.int64)
    boundary = np.partition(keys, k - 1)[k - 1]
    inside = np.flatnonzero(keys < boundary)
    tied = np.flatnonzero(keys == boundary)[: k - inside.size]
    chosen = np.concatenate((inside, tied))  # equal keys still stand by rising id
    return chosen[np.argsort(keys[chosen], kind="stable")]


def argmax(logits, out):
    """Write the id of each row's greatest logit, the lower id among equals, to out i32 [M]; logits [M, V].

    A bad row (see `row_is_bad`) gets an in-range id too. Raises ConfigError for an empty vocabulary.
    """
    num_rows, vocab = logits.shape
    assert out.shape == (num_rows,)
    if num_rows and not vocab:
        raise ConfigError("argmax: the vocabulary is empty, wanted at least one logit a row")
    if not num_rows:
        return
    best = np.argmax(logits, axis=1)  # a row with a NaN gives the NaN's place
    for row in np.flatnonzero(np.isnan(logits[np.arange(num_rows), best])):
        best[row] = np.argmax(np.where(np.isnan(logits[row]), -np.inf, logits[row]))
    out[:] = best


def row_is_bad(logits, out):
    """Write to out bool [M] whether a row of logits [M, V] has a NaN or no finite value."""
    assert out.shape == (logits.shape[0],)
    out[:] = np.isnan(logits).any(axis=1) | ~np.isfinite(logits).any(axis=1)
