"""The kinds of figure that `ddtree plot` draws: what each needs, and how it comes out of the files given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ddtree import plots
from ddtree.bench_layers import WORST
from ddtree.bundle import DEFAULT_MODEL, Bundle, open_bundle
from ddtree.cli_options import say
from ddtree.cli_plot_inputs import Inputs, name_of, name_of_runs, one_temperature, rounds_of, shape_of
from ddtree.compare import name_of_method
from ddtree.errors import UsageError
from ddtree.study_experts_table import sharing_by_model
from ddtree.study_routing import KIND as ROUTING
from ddtree.study_routing import routing_layers
from ddtree.study_tables import (
    calibration,
    cost_curve,
    departure,
    mean_budget_curve,
    point_of_rounds,
    points_of_records,
    seen_rounds,
    sibling_table,
)

MAX_BUDGET = 64  # of the curves that are built from tables
TREE_NODES = 16  # about as many as a figure of a tree shows well


@dataclass(frozen=True)
class Kind:
    """`needs` is what its files must hold, in words; `build` makes the figure or raises UsageError."""

    needs: str
    build: Callable[[Inputs], Figure]


def _tree(inputs: Inputs) -> Figure:
    """One round's tree: the one asked for, or that whose path left the spine most."""
    _, runs = inputs.one_setting(TREE_NODES)
    wanted, index = inputs.options["prompt"], inputs.options["index"]
    rounds = [
        (run.settings["prompt_id"], this)
        for run in runs
        if wanted in (None, run.settings["prompt_id"])
        for this in seen_rounds(run.rounds)
        if index in (None, this.index)
    ]
    if not rounds:
        raise UsageError("the trace has no such round after a prefill")
    prompt_id, this = max(rounds, key=lambda item: departure(item[1].tree, item[1].path))
    name = _token_names(inputs)
    title = inputs.options["title"] or f"Draft tree of round {this.index}, prompt {prompt_id}"
    return plots.tree_figure(
        this.tree, this.path, name(this.bonus), [name(t) for t in this.tree.token_ids], title
    )


def _token_names(inputs: Inputs) -> Callable[[int], str]:
    """Names of tokens: their text where the bundle is the trace's own, else their ids, which is said."""
    asked = inputs.options["model"]
    bundle = open_bundle(asked or DEFAULT_MODEL)
    if not _same_target(bundle, inputs.headers):
        if asked:
            raise UsageError(f"{asked}: another target than the one that was traced")
        say(
            "plot: the trace is not of the shipped model; tokens are shown as ids (name their bundle with --model)"
        )
        return lambda token: str(int(token))
    return lambda token: plots.token_label(bundle.decode([int(token)]))


def _same_target(bundle: Bundle, headers: list[dict[str, Any]]) -> bool:
    mine = bundle.sha256()["target"]
    return all(header["model_sha256"].get("target") == mine for header in headers)


def _acceptance(inputs: Inputs) -> Figure:
    lengths = {
        name_of_runs(setting, runs): [len(this.tokens) for this in seen_rounds(rounds_of(runs))]
        for setting, runs in inputs.by_setting().items()
        if setting[0] != "ar"
    }
    return plots.acceptance_histogram(lengths, inputs.options["title"])


def _budgets(inputs: Inputs) -> Figure:
    records, first, title = inputs.records(), inputs.documents[0], inputs.options["title"]
    if not title and "prompts" in first:
        where = f" on one {first['gpu']}" if first.get("gpu") else ""
        title = f"What a budget brings: {first['prompts']} prompts{where} (acceptance: {plots.CONVENTION})"
    return plots.budget_curves(records, inputs.options["over_ar"], title)


def _stages(inputs: Inputs) -> Figure:
    if inputs.runs:
        stages = {
            name_of_runs(setting, runs): point_of_rounds(rounds_of(runs))[1]
            for setting, runs in inputs.by_setting().items()
        }
    else:
        stages = {_name(record): record["stage_ms"] for record in inputs.records()}
    return plots.stage_bars(stages, inputs.options["title"])


def _name(record: dict[str, Any]) -> str:
    return name_of((name_of_method(record), record["budget"], record["temperature"]))


def _layers(inputs: Inputs) -> Figure:
    document = inputs.document("ddtree layer bench")[0]
    return plots.layer_bars(document, inputs.options["rows"], inputs.options["title"])


def _parity(inputs: Inputs) -> Figure:
    """A series a document, most often a dtype: at the most rows that it was checked with, or those asked for."""
    errors: dict[str, Any] = {}
    for document in inputs.document("ddtree layer bench"):
        fitting = [r for r in document["parity"] or () if inputs.options["rows"] in (None, r["rows"])]
        for record in sorted(fitting, key=lambda record: record["rows"])[-1:]:
            errors[f"{record['backend']} {record['dtype']}, {record['rows']} rows"] = record["steps"]
    limit = WORST["f32"] if any(" f32" in label for label in errors) else None
    return plots.parity_figure(errors, limit, inputs.options["title"])


def _routing(inputs: Inputs) -> Figure:
    document = inputs.document(ROUTING)[0]
    return plots.routing_map(
        _chosen_layers(inputs), document.get("tokens"), inputs.options["title"], document["values"]
    )


def _load(inputs: Inputs) -> Figure:
    return plots.load_bars(_chosen_layers(inputs), inputs.options["title"])


def _chosen_layers(inputs: Inputs) -> dict[int, np.ndarray]:
    layers, asked = routing_layers(inputs.document(ROUTING)[0]), inputs.options["layers"]
    return {layer: gates for layer, gates in layers.items() if not asked or layer in asked}


def _experts(inputs: Inputs) -> Figure:
    """Rows of `study routing`, or its summaries, by model; of a layer where one is asked for, else over all."""
    records = sharing_by_model(inputs.named("routing_"))
    asked, temperature = inputs.options["layers"] or (None,), inputs.options["temperature"]
    kept = {
        name: [s for s in mine if s.layer in asked and temperature in (None, s.temperature)]
        for name, mine in records.items()
    }
    if not any(kept.values()):
        there = ", ".join(
            f"{t:g}" for t in sorted({s.temperature for mine in records.values() for s in mine})
        )
        raise UsageError(
            "expected rows of study routing, or its --json, with a layer and temperature as asked for"
            + (f"; temperatures there: {there}" if there else "")
        )
    return plots.experts_figure(kept, inputs.options["title"])


def _training(inputs: Inputs) -> Figure:
    """Logs of records of training, by the files' names."""
    runs = {name: document["logs"] for name, document in inputs.named("train_") if document.get("logs")}
    return plots.training_figure(runs, inputs.options["title"])


def _roofline(inputs: Inputs) -> Figure:
    return plots.roofline_figure(inputs.document("ddtree kernel bench")[0], inputs.options["title"])


def _calibration(inputs: Inputs) -> Figure:
    setting, runs = inputs.one_setting()
    bins = calibration(rounds_of(runs))
    title = (
        inputs.options["title"]
        or f"Calibration, {name_of_runs(setting, runs)}: {int(bins.counts.sum())} drafted nodes"
    )
    return plots.calibration_figure(bins, title)


def _siblings(inputs: Inputs) -> Figure:
    setting, runs = inputs.one_setting()
    table = sibling_table(rounds_of(runs))
    said = f"{int(table.reached[0])} rounds, {table.first_misses} first misses"
    title = f"Siblings, {name_of_runs(setting, runs)}: {said}"
    return plots.sibling_figure(table, inputs.options["title"] or title)


def _expected(inputs: Inputs) -> Figure:
    setting, runs = inputs.one_setting()
    budgets = range(1, (inputs.options["max_budget"] or MAX_BUDGET) + 1)
    curve = mean_budget_curve(rounds_of(runs), budgets, shape_of(runs))
    title = f"Acceptance length by budget ({plots.CONVENTION}), roots of {name_of_runs(setting, runs)}"
    return plots.expected_figure(curve, inputs.options["title"] or title)


def _cost(inputs: Inputs) -> Figure:
    """Costs and speeds of one temperature: out of a trace (every budget, by its tables) or a comparison."""
    if inputs.runs:
        return _cost_of_trace(inputs)
    records = inputs.records()
    temperature = one_temperature(
        {record["temperature"] for record in records if record["stage_ms"]} or {0.0}
    )
    mine = [
        r
        for r in records
        if r["temperature"] == temperature and r["method"] in ("ar", "tree") and r["stage_ms"]
    ]
    shapes = {record.get("shape") or "best_first" for record in mine if record["method"] == "tree"}
    if len(shapes) > 1:
        raise UsageError(
            f"there are trees of several shapes ({', '.join(sorted(shapes))}): plot files of one alone"
        )
    acceptance = {record["budget"]: record["mean_acceptance"] for record in mine}
    measured = {record["budget"]: record["tokens_per_second"] for record in mine if record["budget"]}
    title = inputs.options["title"] or f"Which budget pays: tree, {name_of(('ar', 0, temperature))[4:]}"
    return plots.cost_figure(cost_curve(points_of_records(mine, temperature)), acceptance, measured, title)


def _cost_of_trace(inputs: Inputs) -> Figure:
    setting, runs = inputs.one_setting()
    groups = {
        s: seen_rounds(rounds_of(each))
        for s, each in inputs.by_setting().items()
        if (s[0] == "ar" or (s[0] == "tree" and shape_of(each) == shape_of(runs))) and s[2] == setting[2]
    }
    groups = {s: seen for s, seen in groups.items() if seen}
    cost = cost_curve([point_of_rounds(rounds_of(inputs.by_setting()[s])) for s in groups])
    most = int(min(inputs.options["max_budget"] or MAX_BUDGET, setting[1]))
    curve = mean_budget_curve(rounds_of(runs), range(1, most + 1), shape_of(runs))
    acceptance = dict(zip(curve.budgets.tolist(), curve.actual.tolist(), strict=True))
    acceptance |= {0: 1.0} if any(s[0] == "ar" for s in groups) else {}
    measured = {
        s[1]: sum(len(this.tokens) for this in seen) / sum(sum(this.seconds.values()) for this in seen)
        for s, seen in groups.items()
        if s[1]
    }
    title = inputs.options["title"] or f"Which budget pays, at the roots of {name_of_runs(setting, runs)}"
    return plots.cost_figure(cost, acceptance, measured, title)


TRACE = "a trace (generate or compare --trace)"
TABLES = "a trace with tables (generate --trace, compare --trace --tables)"
COMPARISON = "a document of compare --json or bench decode --json"
KINDS = {
    "tree": Kind(TRACE, _tree),
    "acceptance": Kind(TRACE, _acceptance),
    "budgets": Kind(COMPARISON, _budgets),
    "stages": Kind(f"{TRACE}, or {COMPARISON}", _stages),
    "layers": Kind("a document of bench layers --json, from a GPU", _layers),
    "parity": Kind("documents of bench layers --json", _parity),
    "routing": Kind("a routing document (study routing --gates)", _routing),
    "load": Kind("a routing document (study routing --gates)", _load),
    "experts": Kind("rows of study routing --out, or its --json", _experts),
    "training": Kind("records of training with their logs (data/results/train_*.json)", _training),
    "roofline": Kind("a document of bench kernels --json", _roofline),
    "calibration": Kind(TRACE, _calibration),
    "siblings": Kind(TABLES, _siblings),
    "expected": Kind(TABLES, _expected),
    "cost": Kind(f"{TABLES}, or {COMPARISON}", _cost),
}
