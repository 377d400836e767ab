"""The device gate: the experts of both NumPy routes, weights as f64 has them; ties, groups, biases, extremes, NaN."""

from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from conftest import SIMULATED
from kernels.gates import EXTREME, apart, check_equal, launch, margins
from seeds import fresh_seed

from ddtree.reference.gate import GateRule
from kernels_numba import gate
from kernels_numba.checks import LaunchError

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
FAR_APART = 3745060111  # V3's weights by an H200 and by NumPy's f32 once were 5 ulp apart: in row 136, -3.6 and 1.4 off


def check(rule, experts, m, seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):  # a draw with too few such rows says little: take another
        logits, bias = apart(rng, m, experts)
        bias = bias if rule.topk_method == "noaux_tc" else None
        clear = margins(logits, bias, rule)
        decided = clear.mean() > 0.8 or (m < 20 and clear.any())
        if decided:
            break
    assert decided, "few rows are decided clearly: choose other grids"
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


def check_arbitrary(rule, experts, seed, rows=slice(None)):
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal((300, experts)) * 3).astype(np.float32)
    bias = (rng.standard_normal(experts) / 3).astype(np.float32) if rule.topk_method == "noaux_tc" else None
    clear = margins(logits, bias, rule)
    assert clear.mean() > 0.9, "the draw says little"
    check_equal(logits[clear][rows], bias, rule, f"{rule} of {experts}, seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize(("rule", "experts"), RULES, ids=str)
def test_arbitrary_logits(rule, experts):
    check_arbitrary(rule, experts, fresh_seed())


@pytest.mark.simulator
def test_weights_far_from_the_hosts_small():
    check_arbitrary(V3, 256, FAR_APART, rows=slice(136, 137))


@pytest.mark.gpu
def test_weights_far_from_the_hosts_large():
    check_arbitrary(V3, 256, FAR_APART)


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
