"""The device gate against both NumPy routes: the same experts and weights; ties, groups, biases, extremes, NaN."""

from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits, assert_within_ulps
from conftest import SIMULATED
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from ddtree.reference.gate import GateRule, gate_device, gate_host
from kernels_numba import gate
from kernels_numba.checks import LaunchError
from kernels_numba.primitives import WARP

V3 = GateRule(8, 8, 4, True, 2.5, "noaux_tc")
KIMI = GateRule(8, 1, 1, True, 2.827, "noaux_tc")
RULES = [  # rule, experts
    (V3, 256),
    (KIMI, 384),
    (GateRule(16, 16, 5, True, 1.0, "noaux_tc"), 512),
    (GateRule(4, 1, 1, True, 2.5, "noaux_tc"), 16),
    (GateRule(2, 4, 1, False, 1.0, "noaux_tc"), 8),
    (GateRule(3, 3, 2, True, 1.0, "noaux_tc"), 33),
    (GateRule(6, 1, 1, False, 1.0, "greedy"), 64),
    (GateRule(1, 4, 2, True, 1.0, "greedy"), 31),  # greedy knows no groups
    (GateRule(6, 8, 3, False, 16.0, "group_limited_greedy"), 160),
    (GateRule(1, 1, 1, True, 1.0, "greedy"), 1),
    (GateRule(5, 5, 5, True, 1.0, "group_limited_greedy"), 5),
]
SMALL_RULES = [
    (GateRule(2, 4, 2, True, 2.5, "noaux_tc"), 12),
    (GateRule(3, 1, 1, True, 2.827, "noaux_tc"), 7),
    (GateRule(2, 1, 1, True, 1.0, "noaux_tc"), 4),  # the micro model
    (GateRule(2, 3, 1, False, 16.0, "group_limited_greedy"), 9),
    (GateRule(3, 2, 1, True, 1.0, "greedy"), 5),
    (GateRule(1, 1, 1, True, 1.0, "greedy"), 1),
]
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


def margins(logits, bias, rule):
    """bool[M]: in f64, the chosen experts and groups are so by more than rounding, or by a tie of equal inputs."""
    wide = logits.astype(np.float64)
    if rule.topk_method == "noaux_tc":
        scores = np.exp(-np.logaddexp(0, -wide))
    else:
        scores = np.exp(wide - wide.max(axis=1, keepdims=True))
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
    """The same experts as both routes of the reference, and their weights: for noaux_tc theirs to 4 ulp.

    NumPy's f32 softmax is itself up to 7 ulp off (exp 2.3, its sum 3), so those weights are held to f64: twice exp's 2
    ulp, the adds of the scores and of the chosen, four more roundings.
    """
    got = launch(logits, bias, rule)
    for route in (gate_host, gate_device):
        want = np.empty_like(got)
        route(logits, bias, rule, want)
        np.testing.assert_array_equal(got != 0, want != 0, f"{what}: experts chosen by {route.__name__}")
        if rule.topk_method == "noaux_tc":
            assert_within_ulps(got, want, 4, f"{what}: {route.__name__}")
    if rule.topk_method != "noaux_tc":
        wide = np.empty(got.shape)
        gate_host(logits.astype(np.float64), None, rule, wide)
        adds = len(got) / WARP + WARP.bit_length() + rule.num_experts_per_tok
        bound = (4 + (adds + 4) / 2) * np.finfo(np.float32).eps
        assert_close(got, wide, bound, f"{what}: f64", scale=np.abs(wide) + 2.0**-100)
    return got


def check(rule, experts, m, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):  # a draw with too few such rows says little: take another
        logits, bias = apart(rng, m, experts)
        bias = bias if rule.topk_method == "noaux_tc" else None
        clear = margins(logits, bias, rule)
        if clear.mean() > 0.8 or m < 20:
            break
    assert clear.mean() > 0.8 or m < 20, "few rows are decided clearly: choose other grids"
    logits = logits[clear]
    what = f"gate {rule} of {experts}, seed {seed}"
    got = check_equal(logits, bias, rule, what)
    if len(logits) > 1:
        order = rng.permutation(len(logits))[: max(1, len(logits) // 2)]
        assert_same_bits(launch(logits[order], bias, rule), got[:, order], f"{what}: rows elsewhere")


@pytest.mark.simulator
@pytest.mark.parametrize(("rule", "experts"), SMALL_RULES, ids=str)
def test_small(rule, experts):
    check(rule, experts, 5, seed=experts)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 3, 33, 65, 1000])
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_large(rule, experts, m):
    check(rule, experts, m, fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_arbitrary_logits(rule, experts):
    rng = np.random.default_rng(seed := fresh_seed())
    logits = (rng.standard_normal((300, experts)) * 3).astype(np.float32)
    bias = (rng.standard_normal(experts) / 3).astype(np.float32) if rule.topk_method == "noaux_tc" else None
    clear = margins(logits, bias, rule)
    assert clear.mean() > 0.9, "the draw says little"
    check_equal(logits[clear], bias, rule, f"{rule} of {experts}, seed {seed}")


def check_saturated(rule, experts):
    """Scores of exactly 0 and 1 tie by the dozen; -inf is a score of 0."""
    logits = np.zeros((4, experts), np.float32)
    logits[0] = np.where(np.arange(experts) % 3 == 0, EXTREME, -EXTREME)
    logits[1, experts // 2 + 1 :] = -EXTREME if SIMULATED else -np.inf
    logits[2] = EXTREME
    logits[3, ::2] = -EXTREME
    bias = np.zeros(experts, np.float32) if rule.topk_method == "noaux_tc" else None
    check_equal(logits, bias, rule, f"saturated {rule}")
    if bias is not None:
        check_equal(logits, None, rule, f"saturated {rule} without a bias")


@pytest.mark.simulator
@pytest.mark.parametrize(("rule", "experts"), SMALL_RULES[:2], ids=str)
def test_saturated_small(rule, experts):
    check_saturated(rule, experts)


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_saturated_large(rule, experts):
    check_saturated(rule, experts)


def check_zero_scores(experts):
    """Sigmoids that underflow to 0 are not divided by their sum, which is 0."""
    assert (launch(np.full((2, experts), -200, np.float32), None, KIMI) == 0).all()


@pytest.mark.simulator
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_scores_of_zero_give_gates_of_zero_small():
    check_zero_scores(8)


@pytest.mark.gpu
def test_scores_of_zero_give_gates_of_zero_large():
    check_zero_scores(384)


def check_negative_ranks(experts):
    """Every rank of the kept group is below 0, the mask value of other codes; the others stay out, bias 1e4 or not."""
    rule = GateRule(3, 2, 1, False, 1.0, "noaux_tc")
    half = experts // 2
    logits = np.concatenate([np.zeros((2, half)), np.full((2, half), 9)], axis=1).astype(np.float32)
    bias = np.where(np.arange(experts) < half, -1, -5).astype(np.float32)
    got = check_equal(logits, bias, rule, "negative ranks")
    assert np.flatnonzero(got[:, 0]).tolist() == [0, 1, 2]
    bias[[1, half + 1, half + 2]] = (
        1e4  # weights keep the scores' last bit, which (score + bias) - bias would not
    )
    got = check_equal(logits, bias, rule, "a large bias")
    assert got[1, 0] == 0 and got[half + 1, 0] > 0.999
    assert np.flatnonzero(got[:, 0]).tolist() == [half, half + 1, half + 2]


@pytest.mark.simulator
def test_negative_ranks_small():
    check_negative_ranks(8)


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [8, 64, 512])
def test_negative_ranks_large(experts):
    check_negative_ranks(experts)


def check_nan(rule, experts):
    """Rows of NaN: the launch ends, other rows keep their bits, at most k experts of those there are get a weight."""
    rng = np.random.default_rng(3)
    logits, bias = apart(rng, 4, experts)
    logits[3] = logits[0]
    bias = bias if rule.topk_method == "noaux_tc" else None
    clean = launch(logits, bias, rule)
    logits[1], logits[2, experts // 2] = np.nan, np.nan
    got = launch(logits, bias, rule)
    assert_same_bits(got[:, [0, 3]], clean[:, [0, 3]], f"{rule}: rows without NaN")
    assert ((got != 0).sum(axis=0) <= rule.num_experts_per_tok).all()
    assert (got[:, 1] != 0).sum() == rule.num_experts_per_tok  # NaN, and in range
    if bias is not None:
        clean_bias = np.full(experts, np.nan, np.float32)
        assert (launch(logits[:1], clean_bias, rule)[:, 0] != 0).sum() <= rule.num_experts_per_tok


@pytest.mark.simulator
@pytest.mark.parametrize(("rule", "experts"), SMALL_RULES[:4], ids=str)
def test_nan_small(rule, experts):
    check_nan(rule, experts)


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_nan_large(rule, experts):
    check_nan(rule, experts)


@pytest.mark.parametrize(
    ("change", "experts", "message"),
    [
        ({"topk_method": "best"}, 8, "topk_method: expected one of noaux_tc"),
        ({"num_experts_per_tok": 9}, 8, "expected to choose 1 to 8 experts, found 9"),
        ({"num_experts_per_tok": 0}, 8, "expected to choose 1 to 8 experts, found 0"),
        ({"n_group": 3, "topk_group": 1}, 8, "cannot keep 1 of 3 groups of 8 experts"),
        ({"n_group": 4, "topk_group": 5}, 8, "cannot keep 5 of 4 groups of 8 experts"),
        ({"n_group": 8, "topk_group": 4}, 8, "cannot keep 4 of 8 groups of 8 experts"),
        ({}, 513, "expected at most 512 experts, found 513"),
    ],
)
def test_rules_that_cannot_be(change, experts, message):
    rule = replace(KIMI, **change)
    with pytest.raises(LaunchError, match=message):
        gate.gate(np.zeros((2, experts), "f4"), None, rule, np.zeros((experts, 2), "f4"))


@pytest.mark.parametrize(
    ("logits", "bias", "gates", "message"),
    [
        (np.zeros((2, 9)), None, np.zeros((9, 2), "f4"), "gate: logits: expected dtype float32"),
        (np.zeros((2, 9), "f4"), None, np.zeros((2, 9), "f4"), "gate: gates: expected shape"),
        (np.zeros((2, 9), "f4"), np.zeros(8, "f4"), np.zeros((9, 2), "f4"), "gate: bias: expected shape"),
        (np.zeros((2, 9), "f4"), np.zeros(9), np.zeros((9, 2), "f4"), "gate: bias: expected dtype float32"),
    ],
)
def test_arguments_that_do_not_fit(logits, bias, gates, message):
    with pytest.raises(LaunchError, match=message):
        gate.gate(logits, bias, KIMI, gates)
