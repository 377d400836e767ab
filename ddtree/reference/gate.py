"""The MoE gate: which experts a token goes to, and with which weight. Two routes that choose the same experts.

`noaux_tc` (DeepSeek-V3, Kimi K2): sigmoid scores, selection on scores + bias, groups ranked by their two best.
`greedy` and `group_limited_greedy` (DeepSeek-V2): softmax scores, no bias, groups ranked by their best.
Lower index wins every tie.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GateRule:
    """How tokens choose experts: k of them, from the best `topk_group` of `n_group` groups."""

    num_experts_per_tok: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    topk_method: str


def gate_host(logits: np.ndarray, bias: np.ndarray | None, rule: GateRule, gates: np.ndarray) -> None:
    """Gates by whole-array sorts; logits [M, E], bias f32[E] or None, gates [E, M], zero where not chosen."""
    scores = _scores(logits, rule)
    ranked = scores if bias is None else scores + bias.astype(scores.dtype)
    allowed = _allowed_by_sort(ranked, rule)
    order = np.argsort(-np.where(allowed, ranked, -np.inf), axis=1, kind="stable")
    chosen = order[:, : rule.num_experts_per_tok]
    weights = np.take_along_axis(scores, chosen, axis=1)
    _store(chosen, weights, rule, gates)


def gate_device(logits: np.ndarray, bias: np.ndarray | None, rule: GateRule, gates: np.ndarray) -> None:
    """The same gates as a kernel finds them: repeated maxima, no sort. Shapes as for `gate_host`."""
    scores = _scores(logits, rule)
    ranked = scores.copy() if bias is None else scores + bias.astype(scores.dtype)
    if rule.topk_method != "greedy" and rule.topk_group < rule.n_group:
        best_per_group = 2 if rule.topk_method == "noaux_tc" else 1
        groups = ranked.reshape(len(ranked), rule.n_group, -1)
        values, _ = _repeated_maxima(groups, best_per_group)
        strength = values[..., 0] if best_per_group == 1 else values[..., 0] + values[..., 1]
        _, kept = _repeated_maxima(strength, rule.topk_group)
        keep = np.zeros(strength.shape, bool)
        np.put_along_axis(keep, kept, True, axis=1)
        ranked = np.where(keep[..., None], groups, -np.inf).reshape(ranked.shape)
    _, chosen = _repeated_maxima(ranked, rule.num_experts_per_tok)
    _store(chosen, np.take_along_axis(scores, chosen, axis=1), rule, gates)


def _scores(logits: np.ndarray, rule: GateRule) -> np.ndarray:
    if rule.topk_method == "noaux_tc":
        with np.errstate(over="ignore"):  # exp(-logit) = inf makes the score 0, as it should
            return 1 / (1 + np.exp(-logits))
    exps = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exps / exps.sum(axis=1, keepdims=True)


def _allowed_by_sort(ranked: np.ndarray, rule: GateRule) -> np.ndarray:
    """bool[M, E]: the expert lies in one of the best groups."""
    if rule.topk_method == "greedy" or rule.topk_group == rule.n_group:
        return np.ones(ranked.shape, bool)
    groups = np.sort(ranked.reshape(len(ranked), rule.n_group, -1), axis=2)
    strength = groups[..., -1] + groups[..., -2] if rule.topk_method == "noaux_tc" else groups[..., -1]
    best = np.argsort(-strength, axis=1, kind="stable")[:, : rule.topk_group]
    keep = np.zeros(strength.shape, bool)
    np.put_along_axis(keep, best, True, axis=1)
    return np.repeat(keep, ranked.shape[1] // rule.n_group, axis=1)


def _repeated_maxima(values: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` greatest along the last axis, by taking the first maximum and striking it out."""
    rest, taken = values.copy(), []
    free = np.ones(values.shape, bool)
    for _ in range(count):
        index = np.where(free, rest, -np.inf).argmax(axis=-1)[..., None]
        # when only -inf is left, argmax may point at a taken one: the first free one has the lower index
        index = np.where(np.take_along_axis(free, index, -1), index, free.argmax(axis=-1)[..., None])
        np.put_along_axis(free, index, False, axis=-1)
        taken.append(index)
    chosen = np.concatenate(taken, axis=-1)
    return np.take_along_axis(values, chosen, axis=-1), chosen


def _store(chosen: np.ndarray, weights: np.ndarray, rule: GateRule, gates: np.ndarray) -> None:
    """Normalise in the order of choice, scale, and scatter into gates [E, M]."""
    if rule.norm_topk_prob:
        total = np.zeros(len(weights), weights.dtype)
        for column in range(weights.shape[1]):
            total += weights[:, column]
        weights = weights / (total + weights.dtype.type(1e-20))[:, None]
    weights = weights * weights.dtype.type(rule.routed_scaling_factor)
    gates[...] = 0
    gates[chosen.T, np.arange(len(weights))] = weights.T
