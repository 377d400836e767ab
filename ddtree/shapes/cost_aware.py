"""Cost-aware: the first nodes of best-first, as many as give the most tokens for their time (CaDDTree, 2606.01813)."""

import json
from pathlib import Path

import numpy as np

from ddtree.bundle import DATA
from ddtree.errors import ConfigError, UsageError
from ddtree.reference.tree_build import take_best
from ddtree.shapes._nodes import check_bounds, tree_of

ARGUMENT = "cost"
DEFAULT_COST = DATA / "results" / "h200" / "decode.json"
DRAFTING = ("draft", "build")


def make(cost=DEFAULT_COST):
    """Return the `build` that maximises (1 + sum of exp(path sums)) / cost(rows) over the sizes up to the budget.

    `cost` gives the time of a drafted round that verifies so many rows (root and nodes), in any unit: a function,
    a study's CostCurve, or a file that `bench decode --json` wrote. It may rise and fall as it likes, as every size is
    tried. Sizes whose cost is not a finite number above 0 are not chosen. One that knows its `stages` is asked for
    draft and build at two rows at least: a table in hand is already drafted.
    """
    cost = _curve_of(cost) if isinstance(cost, (str, Path)) else _after_draft(cost)
    known = []  # costs of 1, 2, .. rows, as far as they were asked for

    def build(token_ids, log_probs, budget, max_depth, *, root_token):
        """Return the best-paying prefix of the best-first DraftTree, the smaller at a tie; as in ddtree.shapes."""
        check_bounds("cost_aware", budget, max_depth)
        paths, parents, weights = take_best(log_probs[:max_depth, :budget].tolist(), budget)
        while len(known) <= len(paths):
            known.append(float(cost(len(known) + 1)))
        size = best_size(weights, known[: len(paths) + 1]) if paths else 0
        return tree_of(token_ids, paths[:size], parents[:size], weights[:size], root_token)

    return build


def best_size(weights, costs):
    """Return how many of the nodes in order pay best; weights [n] are path sums, costs [n + 1] those of 1, 2, .. rows.

    Raises ConfigError when no cost is a finite number above 0.
    """
    costs = np.asarray(costs, float)
    expected = np.cumsum(np.exp([0.0, *weights]))
    usable = np.isfinite(costs) & (costs > 0)
    if not usable.any():
        raise ConfigError(f"cost_aware: cost: unknown or not above 0 for all of 1 to {len(costs)} rows")
    return int(np.argmax(np.where(usable, expected, -np.inf) / np.where(usable, costs, 1.0)))


def _after_draft(cost):
    """Return rows -> time; a curve that knows its stages is asked as if a draft had been made."""
    if not callable(cost):
        raise UsageError(f"shape: cost_aware: cost: expected a function of rows, or a file, found {cost!r}")
    if not hasattr(cost, "stages"):
        return cost

    def total(rows):
        alone, drafted = cost.stages(rows), cost.stages(max(rows, 2))
        return sum(float((drafted if stage in DRAFTING else alone)[stage]) for stage in alone)

    return total


def _curve_of(path):
    """Return rows -> milliseconds: straight lines through a file's greedy ar and tree rounds, on along the last one."""
    points, drafting = {}, {}
    try:
        for row in json.loads(Path(path).read_text("utf-8"))["rows"]:
            if row["temperature"] == 0 and row["method"] in ("ar", "tree") and row["stage_ms"]:
                rows, stages = row["nodes_per_round"] + 1.0, row["stage_ms"]
                points[rows] = sum(stages[stage] for stage in stages if stage not in DRAFTING)
                drafting[rows] = sum(stages[stage] for stage in DRAFTING)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path}: no rounds' times to be read as `bench decode --json` writes them: {error!r}"
        ) from None
    drafting.pop(1.0, None)  # nothing was drafted there
    if len(points) < 2 or not drafting:
        raise UsageError(f"{path}: it times fewer than two sizes of greedy tree and ar rounds")
    at, verify = np.array(sorted(points)), np.array([points[rows] for rows in sorted(points)])
    drafted = np.array(sorted(drafting))
    draft = np.array([drafting[rows] for rows in sorted(drafting)])

    def milliseconds(rows):
        return _line(rows, at, verify) + _line(rows, drafted, draft)

    return milliseconds


def _line(rows, at, values):
    """Straight between points, level before the first, and on along the last stretch."""
    slope = (values[-1] - values[-2]) / (at[-1] - at[-2]) if len(at) > 1 else 0.0
    return float(np.interp(rows, at, values) + max(rows - at[-1], 0.0) * slope)
