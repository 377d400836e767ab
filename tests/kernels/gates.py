"""What gates must be: drawn logits whose choice is clear, the experts of both NumPy routes, weights to their bounds."""

from dataclasses import replace

import numpy as np
from compare_arrays import assert_close, assert_same_bits
from conftest import SIMULATED
from kernels.device import poisoned, to_device, to_host

from ddtree.reference.gate import gate_device, gate_host
from kernels_numba import gate
from kernels_numba.primitives import WARP

EXTREME = 60 if SIMULATED else 1e4  # the simulator's exp warns where it overflows


def apart(rng, m, experts):
    """Logits and a bias on grids, so that equals are many and unequals stay unequal however exp is rounded."""
    logits = rng.integers(-20, 20, size=(m, experts)) / 8 + 1 / 32
    logits[1::5] = 0.375  # all equal: the lowest experts of the lowest groups
    logits[2::5] = np.sort(logits[2::5], axis=1)
    logits[3::11] *= EXTREME / 3
    bias = rng.integers(-3, 3, size=experts) * 0.37
    return logits.astype(np.float32), bias.astype(np.float32)


def is_clear(rows, count):
    """bool[M]: the `count` greatest of a row of values [M, N] or tuples [M, N, ..] lead by far or tie exactly."""
    totals = rows.reshape(*rows.shape[:2], -1)
    order = np.argsort(-totals.sum(axis=2), axis=1, kind="stable")
    if count == rows.shape[1]:
        return np.ones(len(rows), bool)
    last, next_one = (
        np.take_along_axis(totals, order[:, i, None, None], axis=1)[:, 0] for i in (count - 1, count)
    )
    gap = last.sum(axis=1) - next_one.sum(axis=1)
    return (gap > 1e-6 * np.abs(last).max(axis=1)) | (last == next_one).all(axis=1)


def sigmoid(logits):
    """1 / (1 + exp(-logits)) in f64, without a warning where exp overflows."""
    return np.exp(-np.logaddexp(0, -logits.astype(np.float64)))


def margins(logits, bias, rule):
    """bool[M]: in f64, the chosen experts and groups are so by more than rounding, or by a tie of equal inputs."""
    wide = logits.astype(np.float64)
    sigmoids = rule.topk_method == "noaux_tc"
    scores = sigmoid(logits) if sigmoids else np.exp(wide - wide.max(axis=1, keepdims=True))
    ranked = scores if bias is None else scores + bias
    if rule.topk_method == "greedy" or rule.topk_group == rule.n_group:
        return is_clear(ranked, rule.num_experts_per_tok)
    groups = ranked.reshape(len(wide), rule.n_group, -1)
    best = np.sort(groups, axis=2)[..., -2 if rule.topk_method == "noaux_tc" else -1 :]
    kept = np.argsort(-best.sum(axis=2), axis=1, kind="stable")[:, : rule.topk_group]
    mask = np.full(groups.shape, -1e9)
    np.put_along_axis(mask, kept[..., None], np.take_along_axis(groups, kept[..., None], axis=1), axis=1)
    return is_clear(best, rule.topk_group) & is_clear(mask.reshape(ranked.shape), rule.num_experts_per_tok)


def launch(logits, bias, rule):
    """The gates of a launch, guards around them."""
    m, experts = logits.shape
    guarded = poisoned((experts + 2, m))
    logits = to_device(np.concatenate([logits, np.full((1, experts), np.nan, np.float32)]))[:-1]
    gate.gate(logits, None if bias is None else to_device(bias), rule, guarded[1:-1])
    got = to_host(guarded)
    assert np.isnan(got[[0, -1]]).all(), "wrote past the gates"
    return got[1:-1]


def check_equal(logits, bias, rule, what):
    """The same experts as both routes of the reference, and the weights of `check_sigmoid` or `check_softmax`."""
    got = launch(logits, bias, rule)
    for route in (gate_host, gate_device):
        want = np.empty_like(got)
        route(logits, bias, rule, want)
        np.testing.assert_array_equal(got != 0, want != 0, f"{what}: experts chosen by {route.__name__}")
    (check_sigmoid if rule.topk_method == "noaux_tc" else check_softmax)(got, logits, bias, rule, what)
    return got


def check_sigmoid(got, logits, bias, rule, what):
    """noaux_tc: the chosen scores within (3 - 2 s) eps of f64, eps = 2**-23, and the weights the very bits they give.

    s = 1 / (1 + e), e = exp(-logit). The kernel's exp is within 2 eps (tests/kernels/test_primitives.py holds it to
    that), and ds / s = -(1 - s) de / e: 2 (1 - s) eps. The add and the division round to nearest, half an eps each.
    What follows is rounded to nearest too, so NumPy must agree to the bit: adds in the order of choice, a division, a
    product. The reference's weights in f32 are no measure: with its own exp (2.5 ulp in NumPy) they may be 11.5 eps off
    where a row has 8 experts, the kernel's 10.5 (twice a score's 3, seven adds, a division, a product), so 22 apart.
    """
    scores = launch(logits, bias, replace(rule, norm_topk_prob=False, routed_scaling_factor=1.0))
    exact = np.where(got != 0, sigmoid(logits).T, 0)
    scale = (3 - 2 * exact) * (exact + 2.0**-100)  # below 2**-126 f32 has fewer bits, or none
    assert_close(scores, exact, np.finfo(np.float32).eps, f"{what}: scores", scale=scale)
    ranked = np.where(scores != 0, scores if bias is None else scores + bias[:, None], -np.inf)
    chosen = np.argsort(-ranked, axis=0, kind="stable")[: rule.num_experts_per_tok]
    total, want = np.zeros(len(logits), np.float32), scores
    for each in np.take_along_axis(scores, chosen, axis=0):
        total += each
    if rule.norm_topk_prob:
        want = want / (total + np.float32(1e-20))
    assert_same_bits(got, want * np.float32(rule.routed_scaling_factor), f"{what}: weights of these scores")


def check_softmax(got, logits, bias, rule, what):
    """The weights to f64: twice exp's 2 ulp, the adds of the scores and of the chosen, four more roundings.

    NumPy's f32 softmax is itself up to 7 ulp off (exp 2.3, its sum 3).
    """
    wide = np.empty(got.shape)
    gate_host(logits.astype(np.float64), bias, rule, wide)
    adds = len(got) / WARP + WARP.bit_length() + rule.num_experts_per_tok
    bound = (4 + (adds + 4) / 2) * np.finfo(np.float32).eps
    assert_close(got, wide, bound, f"{what}: f64", scale=np.abs(wide) + 2.0**-100)
