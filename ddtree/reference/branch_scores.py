"""Log-probabilities of a depth's candidates given the token before: what a branch-aware tree is built from."""

import numpy as np

from ddtree.reference.topk import log_sum_exp


def branch_scores(
    token_ids, log_probs, block, gated, parent_table, child_table, out_places, out_log_probs
) -> None:
    """Write every depth's candidates below each candidate of the depth before, best first.

    token_ids i32 and log_probs f32 [L, P], the marginal l (natural log) of P candidates a depth; block i32 [B],
    block[0] the root's token; gated f32 [L, R]; parent_table and child_table f32 [V, R]. Outputs out_places i32 and
    out_log_probs f32 [L, P, P]: row i of depth d holds what follows candidate i of depth d - 1, descending along the
    last axis, and its place among the P of depth d; equal values by the lower place. Depth 0 follows the root: row 0;
    its other rows are -inf with places 0..P - 1.

        s_d(p, c) = sum over r of silu(parent_table[p] + gated[d])[r] * child_table[c, r]
        log_prob_d(p, c) = l_d(c) + s_d(p, c) + (logsumexp_c l_d(c) - logsumexp_c(l_d(c) + s_d(p, c)))

    So below every parent the candidates hold together what they hold in the marginal, and path sums stay comparable
    with the marginal's. A candidate whose marginal or whose score is not finite is -inf, and the others hold its share
    of the marginal. Summed in f64, rounded to f32 before the sort: where parent_table + gated or a score passes f32's
    range, a kernel that sums in f32 says -inf.
    """
    num_depths, width = log_probs.shape
    rank = gated.shape[1]
    assert token_ids.shape == (num_depths, width) and gated.shape == (num_depths, rank)
    assert parent_table.shape[1] == child_table.shape[1] == rank
    assert out_places.shape == out_log_probs.shape == (num_depths, width, width)
    out_log_probs[:1] = -np.inf
    out_places[:1] = np.arange(width)
    for depth in range(num_depths):
        parents = block[:1] if depth == 0 else token_ids[depth - 1]
        marginal = finite_or_nothing(log_probs[depth].astype(np.float64))
        with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told below
            left = combine(parent_table[parents].astype(np.float64), gated[depth].astype(np.float64))
            right = child_table[token_ids[depth]].astype(np.float64)
            # every pair in one order, so that equal rows give equal sums
            scores = np.einsum("pr,cr->pc", left, right)
            rows = finite_or_nothing(marginal + scores)
        share = log_sum_exp(marginal) - log_sum_exp(rows)
        rows += np.where(np.isfinite(share), share, 0)  # a row of nothing stays so
        with np.errstate(over="ignore"):  # a gap wider than f32 holds is a log-probability of -inf
            rows = rows.astype(np.float32)
        places = np.argsort(-rows, axis=-1, kind="stable")
        out_places[depth, : len(rows)] = places
        out_log_probs[depth, : len(rows)] = np.take_along_axis(rows, places, axis=-1)


def combine(parent, gate):
    """silu(parent + gate), elementwise, where silu(x) = x / (1 + exp(-x)); the one place of this formula in NumPy."""
    total = parent + gate
    return total / (1 + np.exp(-total))


def finite_or_nothing(values):
    """The values, -inf in place of those that are not finite."""
    return np.where(np.isfinite(values), values, -np.inf)
