"""The gate against a literal loop over one token's experts; both routes; ties, -inf, and biases that must not leak."""

import math
from dataclasses import replace

import numpy as np
import pytest
from compare_arrays import assert_close, assert_within_ulps
from hypothesis import given, settings
from hypothesis import strategies as st
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.gate import GateRule, gate_device, gate_host

ROUTES = {"host": gate_host, "device": gate_device}
RULES = [
    GateRule(8, 8, 4, True, 2.5, "noaux_tc"),  # DeepSeek-V3
    GateRule(8, 1, 1, True, 2.827, "noaux_tc"),  # Kimi K2
    GateRule(2, 4, 1, False, 1.0, "noaux_tc"),
    GateRule(6, 1, 1, False, 1.0, "greedy"),
    GateRule(1, 4, 2, True, 1.0, "greedy"),  # greedy knows no groups
    GateRule(6, 8, 3, False, 16.0, "group_limited_greedy"),  # DeepSeek-V2
    GateRule(3, 4, 2, True, 1.0, "group_limited_greedy"),
]
EXPERTS = 32


def literal(logits, bias, rule, dtype):
    """One token's {expert: weight}: f64 scores rounded to dtype once, then the rules word by word."""
    row = [float(x) for x in logits]
    if rule.topk_method == "noaux_tc":
        exact = [1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    else:
        exps = [math.exp(x - max(row)) for x in row]
        exact = [e / math.fsum(exps) for e in exps]
    scores = [dtype(s) for s in exact]
    ranked = [s + dtype(b) for s, b in zip(scores, bias, strict=True)] if bias is not None else list(scores)
    size = len(row) // rule.n_group
    groups = [range(g * size, (g + 1) * size) for g in range(rule.n_group)]
    if rule.topk_method != "greedy":
        count = 2 if rule.topk_method == "noaux_tc" else 1
        strength = [sum(sorted((ranked[e] for e in group), reverse=True)[:count]) for group in groups]
        kept = sorted(range(rule.n_group), key=lambda g: (-strength[g], g))[: rule.topk_group]
    else:
        kept = range(rule.n_group)
    candidates = [e for g in kept for e in groups[g]]
    chosen = sorted(candidates, key=lambda e: (-ranked[e], e))[: rule.num_experts_per_tok]
    total = math.fsum(exact[e] for e in chosen) + 1e-20 if rule.norm_topk_prob else 1.0
    return {e: exact[e] / total * rule.routed_scaling_factor for e in chosen}


def run_both(logits, bias, rule, what):
    """Gates by both routes into NaN; they choose the same experts with weights within 4 ulp."""
    gates = {}
    for name, route in ROUTES.items():
        gates[name] = np.full((logits.shape[1], len(logits)), np.nan, logits.dtype)
        route(logits, bias, rule, gates[name])
    np.testing.assert_array_equal(gates["host"] != 0, gates["device"] != 0, f"{what}: chosen experts")
    assert_within_ulps(gates["device"], gates["host"], 4, f"{what}: device against host")
    return gates["host"]


def check(logits, bias, rule, what):
    """Both routes against the literal loop."""
    dtype = logits.dtype.type
    gates = run_both(logits, bias, rule, what)
    want = np.zeros(gates.shape)
    for row in range(len(logits)):
        weights = literal(logits[row], bias, rule, dtype)
        wrong = [e for e in range(logits.shape[1]) if gates[e, row] != 0 and e not in weights]
        assert not wrong, f"{what}: row {row} chose {wrong}, want {sorted(weights)}"
        for expert, weight in weights.items():
            want[expert, row] = weight
    tiny = float(np.finfo(dtype).tiny)
    bound = 30 * float(np.finfo(dtype).eps)
    assert_close(gates, want, bound, what, scale=np.abs(want) + tiny / bound)


def grid(rng, m):
    """Logits on a coarse grid, so equals are many and unequals far apart; never a and -a, whose scores sum to 1."""
    return rng.integers(-20, 20, size=(m, EXPERTS)) / 8 + 1 / 32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", ODD_SIZES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_literal_rule_with_many_ties(rule, m, dtype):
    rng = np.random.default_rng(m)
    logits = grid(rng, m).astype(DTYPES[dtype])
    logits[1::5] = 0.375  # all equal: the lowest experts of the lowest groups
    logits[2::5] = np.sort(logits[2::5], axis=1)
    bias = None
    if rule.topk_method == "noaux_tc":
        bias = (rng.integers(-3, 3, size=EXPERTS) * 0.37).astype(np.float32)
    assert any(len(set(row.tolist())) < EXPERTS for row in logits)
    check(logits, bias, rule, f"{rule} {dtype}")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([-3.0, 0.125, 0.25, 1.0, 5.5]), min_size=12, max_size=12),
    st.sampled_from(range(7)),
)
def test_literal_rule_of_any_ties(row, which):
    rule = RULES[which]
    rule = replace(
        rule, num_experts_per_tok=2, n_group=4 if rule.n_group > 1 else 1, topk_group=min(rule.topk_group, 2)
    )
    bias = np.zeros(12, np.float32) if rule.topk_method == "noaux_tc" else None
    check(np.array([row]), bias, rule, str(rule))


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_routes_agree_on_arbitrary_logits(rule):
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal((300, EXPERTS)) * 3).astype(np.float32)
    logits[::7] *= 1e4
    logits[3::9] = np.round(logits[3::9])
    bias = rng.standard_normal(EXPERTS).astype(np.float32) if rule.topk_method == "noaux_tc" else None
    gates = run_both(logits, bias, rule, str(rule))
    assert ((gates != 0).sum(axis=0) <= rule.num_experts_per_tok).all()
    if rule.norm_topk_prob:
        some = gates.sum(axis=0) > 0
        want = np.full(int(some.sum()), rule.routed_scaling_factor)
        assert_close(gates.sum(axis=0)[some], want, 1e-5, "normalised weights")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_extreme_logits_without_a_warning(rule, dtype):
    """Saturated scores tie; -inf is a score of 0; the lower expert wins."""
    logits = np.zeros((4, EXPERTS), DTYPES[dtype])
    logits[0] = np.where(np.arange(EXPERTS) % 3 == 0, 1e4, -1e4)
    logits[1, 5:] = -np.inf
    logits[2] = 1e4
    logits[3, ::2] = -1e4
    bias = np.zeros(EXPERTS, np.float32) if rule.topk_method == "noaux_tc" else None
    check(logits, bias, rule, f"{rule} {dtype}")


@pytest.mark.parametrize("route", ROUTES)
def test_bias_chooses_and_never_weighs(route):
    """A bias of 1e4 decides; the weights keep the scores' last bit, which (score + bias) - bias would not."""
    rule = GateRule(2, 1, 1, False, 1.0, "noaux_tc")
    logits = np.linspace(-3, 3, 8, dtype=np.float32)[None]
    bias = np.zeros(8, np.float32)
    bias[[1, 2]] = 1e4
    gates = np.full((8, 1), np.nan, np.float32)
    ROUTES[route](logits, bias, rule, gates)
    assert np.flatnonzero(gates[:, 0]).tolist() == [1, 2]
    want = 1 / (1 + np.exp(-logits[0, 1:3].astype(np.float64)))
    assert_close(gates[1:3, 0], want, 4 * EPS["f32"], "weights", elementwise=True)


@pytest.mark.parametrize("route", ROUTES)
def test_bias_is_added_to_the_score_and_in_full(route):
    """A bias that bf16 would round away (1 + 2^-10), or that only tells when added to scores, not to logits."""
    rule = GateRule(1, 1, 1, False, 1.0, "noaux_tc")
    gates = np.full((3, 1), np.nan, np.float32)
    ROUTES[route](np.zeros((1, 3), np.float32), np.array([1, 1 + 2**-10, 1], np.float32), rule, gates)
    assert np.flatnonzero(gates[:, 0]).tolist() == [1]
    ROUTES[route](np.array([[0, 5, 9]], np.float32), np.array([0.9, 0, 0], np.float32), rule, gates)
    assert np.flatnonzero(gates[:, 0]).tolist() == [0]  # .5 + .9 > 1; on logits .9 would lose to 9


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("method", "want"), [("noaux_tc", [4, 5]), ("group_limited_greedy", [0, 1])])
def test_groups_are_ranked_by_their_two_best_or_by_their_best(route, method, want):
    """Group 0 has the single best expert, group 1 the better pair."""
    logits = np.array([[3, -9, -9, -9, 2, 2, -9, -9]], np.float32)
    bias = np.zeros(8, np.float32) if method == "noaux_tc" else None
    gates = np.full((8, 1), np.nan, np.float32)
    ROUTES[route](logits, bias, GateRule(2, 2, 1, False, 1.0, method), gates)
    assert np.flatnonzero(gates[:, 0]).tolist() == want


@pytest.mark.parametrize("route", ROUTES)
def test_negative_scores_of_other_groups_never_come_back(route):
    """Every biased score of the kept group is below 0, the unselected groups' mask value in other code."""
    logits = np.array([[1, 1, 0, 0, 9, 9, 9, 9]], np.float32)
    bias = np.array([-1, -1, -1, -1, -5, -5, -5, -5], np.float32)
    gates = np.full((8, 1), np.nan, np.float32)
    ROUTES[route](logits, bias, GateRule(3, 2, 1, False, 1.0, "noaux_tc"), gates)
    assert np.flatnonzero(gates[:, 0]).tolist() == [0, 1, 2]
