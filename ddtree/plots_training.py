"""Figure of training logs: the loss of each stage over its steps, a line a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddtree.plots_style import (
    GREY,
    LINES,
    SERIES,
    count_axis,
    figure_heading,
    heading,
    label_axes,
    legend_below,
    new_figure,
    require,
)

STAGES = {"target": "Target", "drafter": "Drafter, labels weighted by distance", "branch": "Branch head"}
EARLY = 0.05  # of the steps
Log = Sequence[Mapping[str, Any]]


def training_figure(runs: Mapping[str, Mapping[str, Log]], title: str = "") -> Figure:
    """Losses in nats by step, cut off above what comes after the first steps: a panel a stage of STAGES, a line a run.

    `runs` are logs by the run's name and the stage: records with `step` and `loss`. The branch head's also have
    `marginal`, the drafter's own loss on the same rows, drawn dotted. UsageError where no run has a log of a stage.
    """
    stages = [stage for stage in STAGES if any(logs.get(stage) for logs in runs.values())]
    require(stages, "there is no log of training")
    figure = new_figure(4.2 * len(stages) + 1, 4.0)
    panels = dict(zip(stages, figure.subplots(1, len(stages), squeeze=False)[0], strict=True))
    for index, (name, logs) in enumerate(runs.items()):
        style = {"color": SERIES[index % 7], "lw": 1.4}
        for stage in filter(logs.get, stages):
            steps = [record["step"] for record in logs[stage]]
            loss = [record["loss"] for record in logs[stage]]
            panels[stage].plot(steps, loss, ls=LINES[index % 3], label=name, **style)
            if stage == "branch":
                marginal = [record["marginal"] for record in logs[stage]]
                panels[stage].plot(steps, marginal, ls=":", **style)
    named = {}
    for stage, axes in panels.items():
        heading(axes, STAGES[stage])
        label_axes(axes, "step", "training loss, nats")
        axes.set_ylim(0, 1.1 * max(_settled(logs[stage]) for logs in runs.values() if logs.get(stage)))
        count_axis(axes.xaxis, 5)
        axes.grid(axis="y", color="#DDDDDD", lw=0.6)
        handles, labels = axes.get_legend_handles_labels()
        named |= dict(zip(labels, handles, strict=True))
    if "branch" in panels:
        named["dotted: without the head"] = Line2D([], [], color=GREY, ls=":", lw=1.4)
    legend_below(figure, list(named.values()), list(named), 5)
    figure_heading(figure, title or "Training losses")
    return figure


def _settled(log: Log) -> float:
    """The greatest loss after the first steps, which would press all others flat."""
    late = [record for record in log if record["step"] >= EARLY * log[-1]["step"]]
    return max(max(record["loss"], record.get("marginal", 0.0)) for record in late)
