"""Published statements held to rows made by hand: each answer where the rows say so, none without rows."""

import numpy as np
import pytest

from ddtree.study_cost import cost_curve
from ddtree.study_draft import SiblingTable
from ddtree.study_published import acceptance_ratio, peak, saturation, siblings, tree_over_chain

HORIZON = 15
STAGES = dict.fromkeys(("draft", "build", "verify", "accept", "compact"), 0.0)


def rows_of(shape, budget, rounds, nodes=None):
    """One row a prompt of 61 tokens; `rounds` by prompt."""
    return [
        {
            "shape": shape, "budget": budget, "depth": HORIZON, "temperature": 0.0, "trace_sha256": str(i),
            "tokens": 61, "rounds": count, "nodes": count * (budget if nodes is None else nodes),
            "prompt": str(i), "sequence": i, "rounds_outside_loops": 0, "tokens_outside_loops": 0,
        }
        for i, count in enumerate(rounds)
    ]  # fmt: skip


def cost(one, many):
    """Milliseconds of a round of 1 and of 65 rows, a line between."""
    return cost_curve([(n, STAGES | {"verify": ms}) for n, ms in ((1.0, one), (65.0, many))])


CHAIN = {16: (20, 30), 64: (20, 30)}
TREE = {4: (24, 34), 16: (18, 28), 64: (14, 22)}


@pytest.fixture
def rows():
    chain = [row for budget, rounds in CHAIN.items() for row in rows_of("chain", budget, rounds, HORIZON)]
    return chain + [row for budget, rounds in TREE.items() for row in rows_of("best_first", budget, rounds)]


def test_ratios_are_paired_by_prompt():
    above, below = rows_of("best_first", 16, (10, 40)), rows_of("chain", 16, (20, 80))[::-1]
    assert acceptance_ratio(above, below) == (2.0, 2.0, 2.0), "each prompt's ratio is 2, so every draw's is"
    mean, low, high = acceptance_ratio(rows_of("best_first", 16, (10, 40)), rows_of("chain", 16, (20, 40)))
    assert (low, high) == (1.0, 2.0) and mean == 60 / 50
    alike = [[row | {"prompt": "one name", "sequence": 0} for row in each] for each in (above, below)]
    assert acceptance_ratio(*alike) == (2.0, 2.0, 2.0), "a pair is of one recording"


def test_there_is_no_claim_about_fewer_than_two_shared_prompts(rows):
    """Trees of some prompts and chains of others, as of two files put together, or one prompt alone."""
    apart = [row for row in rows if (row["shape"] == "chain") == (row["trace_sha256"] == "0")]
    alone = [row for row in rows if row["trace_sha256"] == "0"]
    for few in (apart, alone):
        assert saturation(few, HORIZON) is None and tree_over_chain(few, cost(1.0, 1.0), HORIZON) is None
    assert saturation(rows, HORIZON) and tree_over_chain(rows, cost(1.0, 1.0), HORIZON)


def test_saturation(rows):
    found = saturation(rows, HORIZON)
    assert found.holds == "yes" and "tree x 1.278 (1.273 to 1.286), chain x 1.000" in found.measured
    level = [row | {"rounds": 20, "tokens": 61} if row["shape"] == "best_first" else row for row in rows]
    assert saturation(level, HORIZON).holds == "no"
    rising = [row | {"rounds": 10} if (row["shape"], row["budget"]) == ("chain", 64) else row for row in rows]
    assert saturation(rising, HORIZON).holds == "no"
    mixed = [
        row | {"rounds": (14, 40)[row["sequence"]]} if (row["shape"], row["budget"]) == ("best_first", 64) else row
        for row in rows
    ]  # fmt: skip
    assert saturation(mixed, HORIZON).holds == "undecided"
    assert saturation([row for row in rows if row["budget"] != 64], HORIZON) is None


@pytest.mark.parametrize(("many", "best", "holds"), [(1.0, 64, "no"), (1.8, 16, "yes"), (8.0, 4, "no")])
def test_the_peak(rows, many, best, holds):
    found = peak(rows, cost(1.0, many))
    said = f"best at {best} (95% {best} to {best}; of draws over prompts {best} in 100%): "
    assert found.measured.startswith(said) and found.holds == holds


def test_a_peak_that_other_prompts_would_move(rows):
    """One prompt is fastest at 16 nodes, the other at 64: each is drawn twice in a quarter of the draws."""
    rounds = {4: (24, 34), 16: (12, 28), 64: (14, 14)}
    mixed = [row for budget, each in rounds.items() for row in rows_of("best_first", budget, each)]
    found = peak(mixed, cost(1.0, 1.2))
    assert found.holds == "undecided" and found.measured.startswith("best at 64 (95% 16 to 64; ")
    assert peak([row for row in rows if row["trace_sha256"] == "0"], cost(1.0, 1.8)) is None, "one prompt"
    assert peak([row for row in rows if row["budget"] != 16], cost(1.0, 1.8)) is None, "two budgets"


def test_a_tree_over_a_chain(rows):
    found = tree_over_chain(rows, cost(1.0, 1.0), HORIZON)
    assert found.holds == "no" and found.measured.startswith("budget 16: 1.09 times (1.07 to 1.11)")
    mixed = [
        row | {"rounds": (18, 33)[row["sequence"]]} if row["shape"] == "best_first" else row for row in rows
    ]
    assert tree_over_chain(mixed, cost(1.0, 1.0), HORIZON).holds == "undecided"
    slower = [row | {"rounds": 2 * row["rounds"]} if row["shape"] == "best_first" else row for row in rows]
    assert tree_over_chain(slower, cost(1.0, 1.0), HORIZON).holds == "yes"
    assert tree_over_chain([row for row in rows if row["shape"] == "chain"], cost(1.0, 1.0), HORIZON) is None
    assert "; each at its best (64 and 16 nodes): 1.39 times" in found.measured
    single = tree_over_chain([row for row in rows if row["budget"] == 16], cost(1.0, 1.0), HORIZON)
    assert single.measured == "budget 16: 1.09 times (1.07 to 1.11)", "there is no best of one"


def table(*decodes):
    """The sum of decodes of one depth: hits by rank, later ones, hits with a child, and those whose child was right."""
    tables = tuple(SiblingTable(*(np.array([counts]) for counts in each)) for each in decodes)
    names = ("hits", "beyond", "followed", "child_right")
    return SiblingTable(*(np.sum([getattr(each, name) for each in tables], axis=0) for name in names), tables)


def test_siblings():
    low = ((500, 30, 10, 5), 55, (500, 30, 9, 5), (380, 5, 1, 0))
    high = ((500, 44, 10, 5), 41, (500, 44, 9, 5), (370, 12, 1, 0))
    found = siblings(table(low, high))
    assert found.holds == "yes" and found.measured == (
        "37% (30 to 44) of 200 first misses; its child 23% (17 to 27) of 74, on the spine 75% (74 to 76)"
    ), "each prompt drawn twice"
    alike = siblings(table(low, low, low))
    assert alike.holds == "yes, at another rate" and "30% (30 to 30) of 300 first" in alike.measured
    often = siblings(table(low, ((500, 44, 10, 5), 41, (500, 44, 9, 5), (370, 24, 1, 0))))
    assert often.holds == "yes", "the interval holds the published rate"
    equal = ((500, 37, 10, 5), 48, (500, 36, 9, 5), (370, 27, 1, 0))
    assert siblings(table(low, equal)).holds == "undecided", (
        "the child may be as good as the spine's elsewhere"
    )
    assert siblings(table(equal, equal)).holds == "no"
    sampled = [
        ((w, 20, 9, 9), 60, (s, 20, 9, 9), (r, c, 1, 0))
        for w, s, r, c in ((100, 90, 30, 2), (500, 400, 320, 8))
    ]
    assert siblings(table(*sampled)).measured.endswith(
        "its child 25% (10 to 40) of 40, on the spine 71% (33 to 80)"
    )
    assert siblings(table(*sampled)).holds == "yes, at another rate", (
        "of each prompt, though the intervals overlap"
    )
    assert siblings(table(low)) is None, "one prompt says nothing of others"
    nothing = ((500, 0, 0, 0), 0, (500, 0, 0, 0), (400, 0, 0, 0))
    assert siblings(table(nothing, nothing)) is None
