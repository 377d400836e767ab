"""The parts of a report's page on one temperature: figures and tables out of replayed rows. It runs no model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ddtree.errors import UsageError
from ddtree.lab import counted
from ddtree.plots_draft import calibration_figure, sibling_figure
from ddtree.plots_shapes import depth_curves, label_of_shape, shape_curves
from ddtree.shapes import get_shape, is_conditional
from ddtree.study_cost import CostCurve, measured_temperature
from ddtree.study_draft import SiblingTable, calibration, sibling_table
from ddtree.study_published import claims
from ddtree.study_recordings import Recording
from ddtree.study_report_scale import adaptive_lines
from ddtree.study_report_text import interval, table_of
from ddtree.study_rerun import recorded_rounds
from ddtree.study_summary import NO, OPEN, YES, Summary, best_budget, best_of, peak_of

CALIBRATED = 64  # nodes of the trees that the calibration looks at, or as many as the rows have
DPI = 150


@dataclass(frozen=True)
class Part:
    """Rows and summaries of one temperature, what a round costs there, its name in words, and the figures' suffix."""

    rows: Sequence[Mapping[str, Any]]
    summaries: Sequence[Summary]
    cost: CostCurve
    name: str
    suffix: str

    @property
    def deepest(self) -> int:
        return max(each.depth for each in self.summaries)

    @property
    def deep(self) -> list[Summary]:
        """Those of the greatest depth."""
        return [each for each in self.summaries if each.depth == self.deepest]

    def _deep_rows(self) -> list[Mapping[str, Any]]:
        return [row for row in self.rows if row["depth"] == self.deepest]

    def lines(self, folder: Path, recordings: Sequence[Recording]) -> list[str]:
        """The part in Markdown; its figures are written into `folder`."""
        title = f"{self.name}, depth at most {self.deepest}, at the measured cost of a round"
        curves = shape_curves(self.deep, self.cost, title.capitalize())
        lines = [*self._figure(folder, "shapes", curves, title), *self._best(), ""]
        lines += [*self._equal_budget(), "", *self._depths(folder)]
        table = None
        if recordings:
            longest = min(min(each.horizon, each.most_budget or each.horizon) for each in recordings)
            table = sibling_table(recorded_rounds(recordings, "chain", longest))
            lines += [*adaptive_lines(recordings, self.cost), *self._drafter(folder, table, recordings)]
        return [*lines, *self._published(table), ""]

    def _measured_at(self) -> str:
        """The temperature of the rounds that were timed, where it is another."""
        mine, timed = self.summaries[0].temperature, measured_temperature(self.summaries[0].temperature)
        return "" if mine == timed else f" and temperature {timed:g}"

    def _figure(self, folder: Path, stem: str, figure: Figure, title: str) -> list[str]:
        name = f"{stem}_{self.suffix}.png"
        figure.savefig(folder / name, dpi=DPI)
        return [f"![{title}]({name})", ""]

    def _best(self) -> list[str]:
        """Each shape at its own best budget, where it has several, and whether a draft pays."""
        alone, best = float(1e3 / self.cost(1)), best_of(self.deep, self.cost)
        measured = ", ".join(f"{rows:.3g}" for rows in self.cost.rows)
        lines = [
            f"A round's cost was measured at {measured} rows (means){self._measured_at()}; between them it is a "
            f"straight line, which is a guess. Each shape at {best_budget(self.deep)} (the oracle knows the future: an "
            "upper bound):",
            "",
        ]
        cells = []
        for shape, (each, speed) in sorted(best.items(), key=lambda item: -item[1][1]):
            outside = "-" if each.outside_loops is None else f"{each.outside_loops:.2f}"
            accepted = interval(each.acceptance, each.low, each.high)
            found = label_of_shape(shape), each.budget, f"{each.nodes:.1f}", accepted, outside, f"{speed:.0f}"
            cells.append((*found, f"{speed / alone:.2f}"))
        headings = ("shape", "budget", "nodes", "tokens a round", "outside loops", "tokens/s")
        lines += table_of((*headings, "over autoregressive"), cells)
        if unpriced := [f"`{shape}`" for shape in best if _reads_head(shape)]:
            said = (
                "reads a branch head, and no round that was timed had one: its tokens/s are an upper bound."
            )
            lines += ["", f"{', '.join(unpriced)} {said}"]
        real = {shape: found for shape, found in best.items() if shape != "oracle"}
        if real:
            winner = max(real, key=lambda shape: real[shape][1])
            each, speed = real[winner]
            low, high = (speed / alone * end / each.acceptance for end in (each.low, each.high))
            words = {YES: "pays", NO: "does not pay", OPEN: "neither pays nor fails to, surely"}
            verdict = words[each.exceeds(each.acceptance * alone / speed)]
            said = f"{winner} {speed:.0f} tokens/s, alone {alone:.0f}; times {interval(speed / alone, low, high)}"
            lines += ["", f"Here a draft {verdict}: {said}."]
            peak = peak_of(self._deep_rows(), winner, self.cost)
            lines += [f"Its fastest budget is {peak}."] if peak and len(peak.speeds) > 1 else []
        return lines

    def _equal_budget(self) -> list[str]:
        """Chain and best-first tree side by side at each budget; nothing without both."""
        at = {(each.shape, each.budget): each for each in self.deep}
        cells = []
        for budget in sorted({each.budget for each in self.deep}):
            chain, tree = at.get(("chain", budget)), at.get(("best_first", budget))
            if chain and tree:
                speeds = chain.speed(self.cost), tree.speed(self.cost)
                cells.append(
                    (
                        budget,
                        *(f"{each.nodes:.1f}" for each in (chain, tree)),
                        *(interval(each.acceptance, each.low, each.high) for each in (chain, tree)),
                        *(f"{speed:.0f}" for speed in speeds),
                        f"{speeds[1] / speeds[0]:.2f}",
                    )
                )
        headings = ("budget", "chain nodes", "tree nodes", "chain tokens a round", "tree tokens a round")
        headings += ("chain tokens/s", "tree tokens/s", "tree over chain")
        return (
            ["At equal budget, the nodes really verified beside it:", "", *table_of(headings, cells)]
            if cells
            else []
        )

    def _depths(self, folder: Path) -> list[str]:
        """Acceptance and speed by depth at the largest budget, where the rows hold several depths."""
        most = max(each.budget for each in self.summaries)
        mine = [each for each in self.summaries if each.budget == most]
        if len({each.depth for each in mine}) < 2:
            return []
        title = f"{self.name}, budget {most}, by depth"
        return self._figure(folder, "depths", depth_curves(mine, self.cost, title.capitalize()), title)

    def _drafter(self, folder: Path, table: SiblingTable, recordings: Sequence[Recording]) -> list[str]:
        """Siblings and calibration."""
        budget = min(max(each.budget for each in self.summaries), CALIBRATED)
        bins = calibration(recorded_rounds(recordings, "best_first", budget))
        rounds = counted(int(table.reached[0]), "chain round")
        said = f"{rounds}, {counted(table.first_misses, 'first miss', 'first misses')}"
        lines = [f"The drafter's table at the roots of {said}, and what followed a hit of each rank:", ""]
        lines += [*_siblings_table(table), ""]
        lines += self._figure(
            folder, "siblings", sibling_figure(table, f"Siblings, {self.name}: {said}"), "siblings"
        )
        title = f"Calibration, {self.name}, best_first trees of {counted(budget, 'node')}"
        return lines + self._figure(folder, "calibration", calibration_figure(bins, title), title)

    def _published(self, table: SiblingTable | None) -> list[str]:
        """Published statements beside what we measure."""
        found = claims(self._deep_rows(), self.cost, self.deepest, table)
        cells = [(each.statement, each.published, each.measured, each.holds) for each in found]
        if not cells:
            return []
        return [
            "What was published, and what we measure:",
            "",
            *table_of(("statement", "published", "here", "holds"), cells),
        ]


def _reads_head(shape: str) -> bool:
    try:
        return is_conditional(get_shape(shape, continuation=[0]))
    except UsageError:  # rows may be of a shape that is not installed here
        return False


def _siblings_table(table: SiblingTable) -> list[str]:
    of_misses, of_children = table.interval_of_misses(), table.interval_of_continuation()
    later = table.beyond.sum() / max(table.first_misses, 1)
    cells = []
    for rank, (hits, child) in enumerate(zip(table.hits.sum(0), table.continuation(), strict=True)):
        caught = _percent(table.share_of_misses()[rank], of_misses, rank) if rank else "the spine"
        cells.append((rank, int(hits), caught, _percent(child, of_children, rank)))
    cells.append(("later, or not in the table", int(table.beyond.sum()), _percent(later, of_misses, -1), "-"))
    return table_of(("rank", "hits", "of first misses", "top-1 one deeper right"), cells)


def _percent(share: float, ends: tuple[np.ndarray, np.ndarray], place: int) -> str:
    """A share in percent with its interval over prompts, where there are both."""
    low, high = (100 * end[place] for end in ends)
    if share != share:
        return "-"
    return f"{100 * share:.1f}%" + ("" if low != low else f" ({low:.0f} to {high:.0f})")
