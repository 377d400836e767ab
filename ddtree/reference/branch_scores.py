"""Conditional scores of a depth's candidates given the parent token: what a branch-aware tree builder reads."""

import numpy as np

from ddtree.reference.topk import log_sum_exp


def branch_scores(
    token_ids: np.ndarray,
    log_probs: np.ndarray,
    root_token: int,
    hidden: np.ndarray,
    embedding: np.ndarray,
    head: np.ndarray,
    parent: np.ndarray,
    gate: np.ndarray,
    child: np.ndarray,
    out: np.ndarray,
) -> None:
    """out[d, i, j] = log-probability of candidate j at depth d + 1 below candidate i of depth d, f32 [L, K, K].

    With E the target's embedding and W its head (both [V, H]), h_d the drafter's normed hidden state whose product
    with W are depth d's logits, P, G and C the head's `branch.parent.weight`, `branch.gate.weight` and
    `branch.child.weight` (each [R, H]):

        s_d(p, c) = sum over r of (P E[p])_r * (1 + G h_d)_r * (C W[c])_r
        out_d(p, c) = l_d(c) + s_d(p, c) - logsumexp_c(l_d(c) + s_d(p, c)) + logsumexp_c(l_d(c))

    where l_d is the marginal log_probs [L, K] of the candidates token_ids [L, K], best first, and both sums run over
    the K candidates: below every parent a depth's candidates hold together what they hold in the marginal, so path sums
    stay comparable with the marginal's. Depth 1 has one parent, the root: out[0, 0]; the other rows of out[0] are -inf.
    hidden [L, H]. Candidates whose log_probs are -inf stay at -inf. Everything is summed in f64.
    """
    num_depths, width = log_probs.shape
    assert token_ids.shape == log_probs.shape and out.shape == (num_depths, width, width)
    assert hidden.shape == (num_depths, parent.shape[1]) and parent.shape == gate.shape == child.shape
    wide = [array.astype(np.float64) for array in (hidden, parent, gate, child)]
    hidden, parent, gate, child = wide
    out[0, 1:] = -np.inf
    for depth in range(num_depths):
        parents = np.array([root_token]) if depth == 0 else token_ids[depth - 1]
        left = embedding[parents].astype(np.float64) @ parent.T * (1 + gate @ hidden[depth])
        scores = left @ (head[token_ids[depth]].astype(np.float64) @ child.T).T + log_probs[depth]
        total = log_sum_exp(log_probs[depth].astype(np.float64))
        for row, values in enumerate(scores):
            out[depth, row] = values - log_sum_exp(values) + total
