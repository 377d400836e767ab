"""Each shape on tables small enough to be followed by hand: nodes in order, as the ranks along their paths."""

import numpy as np
import pytest

from ddtree.errors import ConfigError, UsageError
from ddtree.shapes import get_shape
from ddtree.shapes.cost_aware import best_size
from ddtree.study_cost import cost_curve

# Path sums are exact: every log-prob is a multiple of 1/4. Token = 10 x depth + rank.
LOG_PROBS = np.array([[-0.25, -1.0, -3.0], [-0.5, -1.0, -4.0], [-2.0, -2.25, -5.0]], np.float32)
TOKENS = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]], np.int32)


def nodes(build, budget=99, max_depth=9, log_probs=LOG_PROBS):
    """The tree's nodes in order as text: '01' is rank 0, then rank 1; sums are held to the table's."""
    tree = build(TOKENS, log_probs, budget, max_depth, root_token=7).validate()
    found = []
    for row in range(1, tree.num_nodes + 1):
        ranks = [int(tree.token_ids[r]) % 10 for r in tree.path(row)[1:]]
        assert tree.log_weights[row] == sum(float(log_probs[d, r]) for d, r in enumerate(ranks))
        found.append("".join(map(str, ranks)))
    return found


def test_best_first():
    # sums -0.25, -0.75, -1, -1.25, -1.5
    assert nodes(get_shape("best_first"), 5) == ["0", "00", "1", "01", "10"]
    assert nodes(get_shape("best_first"), 5, max_depth=1) == ["0", "1", "2"]


def test_best_first_breaks_ties_by_ranks():
    even = np.array([[-1, -2, -3], [-1, -2, -3], [-1, -2, -3]], np.float32)
    # sums -1; -2: 00, 1; -3: 000, 01, 10, 2
    assert nodes(get_shape("best_first"), 7, log_probs=even) == ["0", "00", "1", "000", "01", "10", "2"]
    assert nodes(get_shape("beam"), 7, log_probs=even) == ["0", "00", "1", "000", "01", "10", "2"]


@pytest.mark.parametrize(
    ("budget", "max_depth", "want"),
    [
        (0, 9, []),
        (2, 9, ["0", "00"]),
        (6, 9, ["0", "00", "000", "1", "01", "10"]),
        (6, 2, ["0", "00", "1", "01", "10", "11"]),
        (5, 1, ["0", "1", "2"]),
    ],
)
def test_spine_first_takes_the_spine_and_then_the_best(budget, max_depth, want):
    assert nodes(get_shape("spine_first"), budget, max_depth) == want
    assert nodes(get_shape("chain"), budget, max_depth) == [
        "0" * d for d in range(1, min(budget, max_depth, 3) + 1)
    ]


def test_spine_first_goes_around_a_spine_that_ends():
    broken = LOG_PROBS.copy()
    broken[2] = -np.inf
    assert nodes(get_shape("spine_first"), 4, log_probs=broken) == ["0", "00", "1", "01"]
    broken[0] = np.nan
    assert nodes(get_shape("spine_first"), 4, log_probs=broken) == []


@pytest.mark.parametrize(
    ("width", "children", "want"),
    [
        (1, 1, ["0", "00", "000"]),
        (1, 2, ["0", "00", "1", "01", "000", "001"]),
        ("2,1", 2, ["0", "00", "1", "01", "10", "11", "000", "001"]),
        ([2, 1], 2, ["0", "00", "1", "01", "10", "11", "000", "001"]),
    ],
)
def test_beam_expands_the_best_of_each_depth(width, children, want):
    assert nodes(get_shape("beam", width=width, children=children)) == want
    assert nodes(get_shape("beam", width=width, children=children), 3) == want[:3]


def test_beam_of_a_width_after_a_colon():
    assert nodes(get_shape("beam:1", children=2)) == nodes(get_shape("beam", width=1, children=2))


@pytest.mark.parametrize(
    ("word", "value"), [("width", 0), ("width", "2,x"), ("children", 1.5), ("width", [])]
)
def test_beam_refuses_what_is_no_count(word, value):
    with pytest.raises(UsageError, match=f"beam: {word}: expected integers >= 1"):
        get_shape("beam", **{word: value})


PATHS = [[1], [0], [0, 0], [1, 2], [0, 0, 1], [2]]


@pytest.mark.parametrize(
    ("budget", "max_depth", "want"),
    [
        (9, 9, ["1", "0", "00", "12", "001", "2"]),
        (4, 9, ["1", "0", "00", "12"]),
        (4, 1, ["1", "0", "2"]),
        (0, 9, []),
    ],
)
def test_fixed_keeps_the_templates_order(budget, max_depth, want):
    assert nodes(get_shape("fixed", template=PATHS), budget, max_depth) == want


def test_fixed_leaves_out_what_the_table_lacks_and_what_hangs_on_it():
    cut = LOG_PROBS.copy()
    cut[0, 1:] = -np.inf
    assert nodes(get_shape("fixed", template=[*PATHS, [0, 3]]), log_probs=cut) == ["0", "00", "001"]


# Sizes 0..5 of best-first promise 1, 1.78, 2.25, 2.62, 2.91, 3.13 tokens.
@pytest.mark.parametrize(
    ("cost", "want"),
    [
        (lambda rows: 1.0, 5),  # rows are free: all of them
        (lambda rows: rows, 0),  # every row costs a round: none
        (lambda rows: 1 + 0.2 * rows, 3),
        (lambda rows: 1.0 if rows in (1, 5) else 9.0, 4),  # one cheap size beyond a dear one
        (lambda rows: 2.0 ** (rows // 4), 2),  # stairs: three rows before the step
        (lambda rows: float("nan") if rows != 4 else 100.0, 3),  # the only one known
        (lambda rows: 0.0 if rows > 2 else 1.0, 1),  # nothing is free
    ],
)
def test_cost_aware_takes_the_prefix_that_pays_best(cost, want):
    best = nodes(get_shape("best_first"), 5)
    assert nodes(get_shape("cost_aware", cost=cost), 5) == best[:want]


def test_cost_aware_takes_a_studys_curve_and_counts_the_draft_at_one_row():
    stages = {"draft": 5.0, "build": 1.0, "verify": 4.0, "accept": 0.0, "compact": 0.0}
    alone = stages | {"draft": 0.0, "build": 0.0}
    curve = cost_curve([(1, alone), (2, stages), (9, stages | {"verify": 8.0})])
    drafted = get_shape("cost_aware", cost=lambda rows: 10.0 + max(rows - 2, 0) * 4 / 7)
    for budget in range(6):
        assert nodes(get_shape("cost_aware", cost=curve), budget) == nodes(drafted, budget)
    assert curve(1) == 4.0 and len(nodes(drafted, 5)) == 5


def test_cost_aware_has_a_recorded_curve():
    sizes = [len(nodes(get_shape("cost_aware"), budget)) for budget in range(20)]
    assert sizes[0] == 0 and sizes == sorted(sizes) and sizes[-1] > 2


def test_cost_aware_refuses_costs_that_are_none(tmp_path):
    with pytest.raises(ConfigError, match="cost: unknown"):
        nodes(get_shape("cost_aware", cost=lambda rows: float("inf")), 5)
    assert nodes(get_shape("cost_aware", cost=lambda rows: float("inf")), 0) == []
    with pytest.raises(UsageError, match="expected a function"):
        get_shape("cost_aware", cost=3)
    for text in ("", "[]", '{"rows": [1]}', '{"rows": []}'):
        (tmp_path / "cost.json").write_text(text)
        with pytest.raises(UsageError, match=r"cost\.json: "):
            get_shape(f"cost_aware:{tmp_path / 'cost.json'}")
    assert best_size([-1.0], [1.0, 1.0 + np.exp(-1.0)]) == 0  # the smaller at a tie


@pytest.mark.parametrize(
    ("truth", "budget", "max_depth", "want"),
    [
        ([12, 20, 31, 5], 9, 9, ["2", "20", "201"]),
        ([12, 20, 31], 2, 9, ["2", "20"]),
        ([12, 20, 31], 9, 1, ["2"]),
        ([12, 99, 31], 9, 9, ["2"]),
        ([20], 9, 9, []),
        ([], 9, 9, []),
    ],
)
def test_oracle_follows_the_truth_as_far_as_the_table_has_it(truth, budget, max_depth, want):
    assert nodes(get_shape("oracle", continuation=np.array(truth, np.int64)), budget, max_depth) == want


def test_oracle_does_not_take_what_no_shape_can():
    cut = LOG_PROBS.copy()
    cut[1, 1:] = -np.inf
    assert nodes(get_shape("oracle", continuation=[10, 21]), log_probs=cut) == ["0"]
