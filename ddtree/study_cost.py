"""What a round costs by the rows it verifies, and the budget that pays: from measured stage times, no model run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.bundle import DATA
from ddtree.decode import STAGES
from ddtree.errors import UsageError
from ddtree.study_rounds import AnyRound, seen_rounds

DRAFTING = ("draft", "build")  # stages that a round without a draft does not have

MEASURED = DATA / "results" / "h200" / "decode.json"  # rounds of the shipped model
SLACK = 1.15  # of the most rows measured, as far as the curve goes

Point = tuple[float, Mapping[str, float]]  # rows verified, and milliseconds by stage


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds of a round by the rows it verifies (root and nodes), a straight line between measured rows.

    `rows` f64[P] ascending and `stage_ms` {stage: f64[P]} are the measurements. One row is a round without a draft;
    between it and the fewest rows measured with one, draft and build cost what they cost there. The mean of a budget's
    rows lies below budget + 1, for a decode's last trees are cut: the last stretch goes on for 15%. Rows outside that
    cost NaN.
    """

    rows: np.ndarray
    stage_ms: dict[str, np.ndarray]

    def stages(self, rows: Any) -> dict[str, np.ndarray]:
        """Milliseconds by stage of rounds of that many rows, f64 of the shape of `rows`."""
        rows, drafted = np.asarray(rows, float), self.rows > 1
        outside = (rows < self.rows[0]) | (rows > SLACK * self.rows[-1])
        found = {}
        for stage, measured in self.stage_ms.items():
            if stage in DRAFTING and drafted.any():
                alone = np.nan if drafted.all() else measured[0]
                line = np.where(rows > 1, straight_line(rows, self.rows[drafted], measured[drafted]), alone)
            else:
                line = straight_line(rows, self.rows, measured)
            found[stage] = np.where(outside, np.nan, line)
        return found

    def __call__(self, rows: Any) -> np.ndarray:
        """Milliseconds of a round of that many rows, all stages together."""
        return np.sum(list(self.stages(rows).values()), axis=0)

    def drafted(self, rows: Any) -> np.ndarray:
        """Milliseconds of a round that drafted, whatever it verifies then: one row alone has its draft to pay, too."""
        rows = np.asarray(rows, float)
        stages, paid = self.stages(rows), self.stages(np.maximum(rows, 2))
        return np.sum([(paid if stage in DRAFTING else stages)[stage] for stage in stages], axis=0)


def straight_line(rows: np.ndarray, measured: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Straight between measurements, level before the first, and on along the last stretch."""
    slope = np.diff(values)[-1:] / np.diff(measured)[-1:]
    beyond = np.maximum(rows - measured[-1], 0) * (slope[0] if len(slope) else 0.0)
    return np.interp(rows, measured, values) + beyond


def cost_curve(points: Iterable[Point]) -> CostCurve:
    """The curve through measured points; those of equal rows are averaged. UsageError without a point."""
    grouped: dict[float, list[Mapping[str, float]]] = defaultdict(list)
    for rows, stage_ms in points:
        grouped[float(rows)].append(stage_ms)
    if not grouped:
        raise UsageError("cost: no stage times to make a curve of")
    rows = sorted(grouped)
    columns = {
        stage: np.array([np.mean([each[stage] for each in grouped[n]]) for n in rows]) for stage in STAGES
    }
    return CostCurve(np.array(rows), columns)


def points_of_records(
    records: Sequence[Mapping[str, Any]], temperature: float, method: str = "tree"
) -> list[Point]:
    """Points of one temperature out of compare's records: the method's, and ar's single row; those untimed left out."""
    return [
        (record["nodes_per_round"] + 1, record["stage_ms"])
        for record in records
        if record["method"] in ("ar", method) and record["temperature"] == temperature and record["stage_ms"]
    ]


def point_of_rounds(rounds: Iterable[AnyRound]) -> Point:
    """The point of one setting's rounds: mean rows verified, mean milliseconds by stage; UsageError without a round."""
    seen = seen_rounds(rounds)
    if not seen:
        raise UsageError("cost: there is no round after the prefill to take times from")
    rows = float(np.mean([this.tree.num_nodes + 1 for this in seen]))
    return rows, {stage: 1e3 * float(np.mean([s.seconds[stage] for s in seen])) for stage in STAGES}


def measured_cost(temperature: float) -> CostCurve:
    """What rounds of the shipped model cost on the recorded GPU, greedy or sampled."""
    return cost_curve(points_of_records(_measured(), measured_temperature(temperature)))


def measured_temperature(temperature: float) -> float:
    """The temperature of the rounds that `measured_cost` takes: 0, or the one that was timed above it."""
    return next(t for each in _measured() if ((t := each["temperature"]) > 0) == (temperature > 0))


def _measured() -> list[dict[str, Any]]:
    return json.loads(MEASURED.read_text("utf-8"))["rows"]


def drafted_curve(rows: Sequence[float], verify_ms: Any, draft_ms: float, other_ms: float = 0.0) -> CostCurve:
    """The curve of rounds whose verify of `rows` [P], one row first, takes verify_ms f64[P]; a draft costs the same.

    `other_ms` is what building, accepting and compacting take together, booked as build: a round without a draft has
    none of it.
    """
    drafted = np.where(np.asarray(rows) > 1, 1.0, 0.0)
    stages = dict.fromkeys(STAGES, 0.0 * drafted)
    stages |= {
        "draft": draft_ms * drafted,
        "build": other_ms * drafted,
        "verify": np.asarray(verify_ms, float),
    }
    return CostCurve(np.asarray(rows, float), stages)


def speed_of_sizes(sizes: Any, tokens: float, cost: CostCurve) -> float:
    """Tokens per second of rounds that committed `tokens` together, each costed by its own `sizes` (nodes, no root).

    The cost of a mean size is not the mean cost where the curve bends: a shape whose trees differ in size is told
    wrong by it. Every round is taken to have drafted. NaN where one lies outside the curve.
    """
    return float(1e3 * tokens / np.sum(cost.drafted(np.asarray(sizes, float) + 1)))


@dataclass(frozen=True)
class BestBudget:
    """The budget of most tokens per second, and `tokens_per_second` {budget: f64}, NaN where the cost is unknown."""

    budget: int
    tokens_per_second: dict[int, float]


def best_budget(acceptance: Mapping[int, float], cost: CostCurve) -> BestBudget:
    """Tokens per second of each budget, and the best; the lower budget wins a tie.

    `acceptance` is tokens a round (bonus token included) by budget; a tree of budget B is taken to verify B + 1 rows.
    Raises UsageError when the curve covers none of the budgets.
    """
    speeds = {int(b): float(1e3 * tokens / cost(int(b) + 1)) for b, tokens in sorted(acceptance.items())}
    known = {budget: speed for budget, speed in speeds.items() if np.isfinite(speed)}
    if not known:
        raise UsageError(
            f"cost: measured for {cost.rows[0]:g} to {cost.rows[-1]:g} rows, which no budget here has"
        )
    return BestBudget(max(known, key=known.__getitem__), speeds)
