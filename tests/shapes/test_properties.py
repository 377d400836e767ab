"""What holds for every table, ties and ends included: bounds, prefixes, the best ratio, and no one beats the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddtree.reference.tree_build import build_tree
from ddtree.shapes import get_shape
from ddtree.study_budgets import walk

NAMES = (
    "best_first",
    "chain",
    "spine_first",
    "fixed:medusa64",
    "fixed:sequoia64",
    "beam",
    "beam:2",
    "cost_aware",
)


@st.composite
def tables(draw):
    """Token ids and log-probs [L, K] in descending order: many ties, some tails of -inf or NaN, others irregular."""
    depths, width = draw(st.integers(0, 6)), draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = (
        rng.integers(0, 3, (depths, width)) / 4
        if draw(st.booleans())
        else rng.exponential(1, (depths, width))
    )
    log_probs = -np.cumsum(steps, axis=1).astype(np.float32)
    for level in range(depths if draw(st.booleans()) else 0):
        log_probs[level, rng.integers(0, 2 * width + 1) :] = rng.choice([-np.inf, np.nan])
    token_ids = np.argsort(rng.random((depths, 9)), axis=1)[:, :width].astype(np.int32)
    return token_ids, log_probs


bounds = st.integers(0, 40), st.integers(0, 8)


@pytest.mark.parametrize("name", NAMES)
@given(tables(), *bounds)
def test_a_valid_tree_within_bounds_and_the_same_again(name, table, budget, max_depth):
    trees = [get_shape(name)(*table, budget, max_depth, root_token=3).validate() for _ in range(2)]
    assert trees[0].num_nodes <= budget and trees[0].max_depth <= min(max_depth, len(table[0]))
    for field in ("token_ids", "parents", "depths", "log_weights"):
        assert getattr(trees[0], field).tobytes() == getattr(trees[1], field).tobytes()


@given(tables(), *bounds)
def test_best_first_is_the_reference_builders(table, budget, max_depth):
    tokens, parents, depths = np.full((3, budget + 1), 3, np.int32)
    weights, lineage = np.empty(budget + 1), np.empty((budget + 1, len(table[0]) + 1), np.int32)
    count = 1 + build_tree(*table, budget, max_depth, tokens, parents, depths, weights, lineage)
    tree = get_shape("best_first")(*table, budget, max_depth, root_token=3)
    for got, want in zip(
        (tree.token_ids, tree.parents, tree.depths, tree.log_weights),
        (tokens, parents, depths, weights),
        strict=True,
    ):
        assert got.tobytes() == want[:count].tobytes()


@given(tables(), *bounds)
def test_spine_first_begins_with_the_chain_and_then_follows_best_first(table, budget, max_depth):
    chain, mixed, best = (
        get_shape(name)(*table, budget, max_depth, root_token=3)
        for name in ("chain", "spine_first", "best_first")
    )
    rows = slice(0, chain.num_nodes + 1)
    assert mixed.num_nodes == best.num_nodes
    for field in ("token_ids", "parents", "depths", "log_weights"):
        np.testing.assert_array_equal(getattr(mixed, field)[rows], getattr(chain, field))
    spine = {(int(d), w) for d, w in zip(chain.depths, chain.log_weights, strict=True)}
    rest = mixed.log_weights[chain.num_nodes + 1 :]
    assert (np.diff(rest) <= 0).all()
    want = [
        w for d, w in zip(best.depths.tolist(), best.log_weights.tolist(), strict=True) if (d, w) not in spine
    ]
    others = [
        w
        for d, w in zip(mixed.depths[rows.stop :].tolist(), rest.tolist(), strict=True)
        if (d, w) not in spine
    ]
    assert others == want[: len(others)]


costs = st.lists(st.floats(0.01, 100) | st.just(float("nan")), min_size=41, max_size=41)


@given(tables(), *bounds, costs)
def test_cost_aware_has_the_best_ratio_of_all_prefixes(table, budget, max_depth, cost):
    cost[0] = 1.0  # something is known
    tree = get_shape("cost_aware", cost=lambda rows: cost[rows - 1])(*table, budget, max_depth, root_token=3)
    best = get_shape("best_first")(*table, budget, max_depth, root_token=3)
    rows = slice(0, tree.num_nodes + 1)
    assert tree.token_ids.tolist() == best.token_ids[rows].tolist()
    assert tree.log_weights.tobytes() == best.log_weights[rows].tobytes()
    ratios = np.cumsum(np.exp(best.log_weights)) / cost[: best.num_nodes + 1]
    assert np.isfinite(ratios[tree.num_nodes])
    assert not (ratios > ratios[tree.num_nodes]).any()
    assert not (ratios[: tree.num_nodes] == ratios[tree.num_nodes]).any()


def plain_beam(log_probs, budget, max_depth, width, children):
    """The beam as its definition reads: tuples, sorted; [(path, sum)] in order."""
    table = log_probs[:max_depth].tolist()
    everyone, open_nodes = [], [((), 0.0)]
    for level in table:
        found = []
        for path, weight in open_nodes:
            total = weight + level[0] if level else np.nan
            for rank in range(min(children, budget, len(level))):
                if rank:
                    total = total - level[rank - 1] + level[rank]
                if not np.isfinite(total):
                    break
                found.append(((*path, rank), total))
        found.sort(key=lambda node: (-node[1], node[0]))
        open_nodes = found[:width]
        everyone += found
    everyone.sort(key=lambda node: (-node[1], node[0]))
    return everyone[:budget]


@given(tables(), *bounds, st.integers(1, 5), st.integers(1, 5))
def test_beam_is_its_definition_bit_for_bit(table, budget, max_depth, width, children):
    build = get_shape("beam", width=width, children=children)
    tree = build(*table, budget, max_depth, root_token=3)
    want = plain_beam(table[1], budget, max_depth, width, children)
    paths = [
        tuple(table[0][d].tolist().index(tree.token_ids[r]) for d, r in enumerate(tree.path(row)[1:]))
        for row in range(1, tree.num_nodes + 1)
    ]
    assert paths == [path for path, _ in want]
    np.testing.assert_array_equal(tree.log_weights[1:], [weight for _, weight in want])


@given(tables(), *bounds)
def test_a_beam_that_expands_everything_is_best_first(table, budget, max_depth):
    token_ids, log_probs = table[0], np.float32(np.round(table[1] * 4) / 4)  # exact sums
    beam = get_shape("beam", width=10**6, children=6)(
        token_ids, log_probs, budget, min(max_depth, 4), root_token=3
    )
    best = get_shape("best_first")(token_ids, log_probs, budget, min(max_depth, 4), root_token=3)
    assert beam.to_json() == best.to_json()


@given(tables(), *bounds, st.data())
def test_no_shape_accepts_more_than_the_oracle(table, budget, max_depth, data):
    truth = [
        data.draw(st.sampled_from([*level, 99])) if len(level) else 99 for level in table[0].tolist()
    ] + [99]
    context = {"continuation": truth, "cost": lambda rows: 1 + rows / 8}
    oracle = get_shape("oracle", **context)(*table, budget, max_depth, root_token=3).validate()
    most = walk(oracle, truth)
    assert most == oracle.num_nodes + 1
    for name in NAMES:
        assert walk(get_shape(name, **context)(*table, budget, max_depth, root_token=3), truth) <= most


def test_a_child_above_its_parent_is_never_before_it():
    """A log-prob above 0 is no drafter's, and still makes a tree."""
    token_ids, log_probs = np.array([[1, 2], [3, 4]], np.int32), np.array([[-2, -3], [1, -1]], np.float32)
    for name in NAMES:
        for budget in range(7):
            get_shape(name)(token_ids, log_probs, budget, 2, root_token=0).validate()
