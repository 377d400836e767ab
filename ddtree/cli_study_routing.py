"""`ddtree study routing`: which experts the rows of draft trees go to, and how many they share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from ddtree.bundle import Bundle
from ddtree.cli_options import (
    LateBar,
    bundle_of,
    decode_config,
    decode_options,
    describe_backend,
    engine_of,
    json_option,
    model_options,
    prompts_option,
    say,
    temperatures_option,
)
from ddtree.errors import UsageError
from ddtree.lab import dash_or, text_table
from ddtree.plots import token_label
from ddtree.prompts import load_prompts
from ddtree.study_experts import Sharing, summarise_routing
from ddtree.study_experts_table import routing_summary
from ddtree.study_journal import Journal
from ddtree.study_overlap import RELATIONS
from ddtree.study_routing import routing_document
from ddtree.study_routing_record import (
    Planned,
    RoutedRound,
    first_verify,
    plan_decodes,
    plan_trees,
    record_routing,
)
from ddtree.study_routing_rows import ROUTED
from ddtree.trace import PACKAGES
from ddtree.versions import package_version

BUDGETS = (4, 8, 16, 32, 64)


@click.command("routing")
@click.option("--out", help="Write a row for each prompt, tree and MoE layer to this JSON Lines file.")
@click.option(
    "--gates",
    "gates_file",
    help="Write the gates of the first verify to this file, for plot routing and load.",
)
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=("best_first", "chain"),
    show_default=True,
    help="chain, or a shape that study --shapes lists; may be repeated.",
)
@click.option(
    "--budget",
    "budgets",
    type=click.IntRange(min=1),
    multiple=True,
    default=BUDGETS,
    show_default=True,
    help="May be repeated; a chain has as many nodes as the drafter proposes at most.",
)
@prompts_option
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N prompts only.")
@temperatures_option
@decode_options
@model_options
@json_option
def routing_command(
    out: str | None,
    gates_file: str | None,
    shapes: tuple[str, ...],
    budgets: tuple[int, ...],
    prompts: str,
    limit: int | None,
    temperatures: tuple[float, ...],
    **options: Any,
) -> None:
    """Decode through draft trees and count the experts that each verify's rows touch, and share by kinship.

    --json prints a summary that plot experts draws, too. On cuda add --no-graphs: captured graphs hand out no gates.
    With --out, rows of finished decodes outlive an interruption in FILE.part: the same command again does the others
    alone.
    """
    _check_folder(out)
    _check_folder(gates_file)
    chosen = load_prompts(prompts)[:limit]
    bundle = bundle_of(options)
    configs = [decode_config(bundle, "tree", max(budgets), each, options) for each in temperatures]
    engine = engine_of(bundle, max(budgets), options)
    trees = plan_trees(engine.horizon, shapes, budgets)
    plan = plan_decodes(engine, chosen, trees, configs[0], temperatures)
    bar, journal = LateBar("routing", "decode"), None if out is None else Journal(out, say, ROUTED)
    rows = record_routing(engine, plan, bar.step, journal)
    if gates_file is not None and (found := first_verify(engine, plan)):
        Path(gates_file).write_text(json.dumps(_gates_of(bundle, *found)) + "\n", "utf-8")
    sharing = summarise_routing(rows)  # which may find no full tree: what was decoded is kept by then
    if options["as_json"]:
        about = {
            "versions": {name: package_version(name) for name in PACKAGES},
            "backend": describe_backend(engine),
            "model_sha256": bundle.sha256(),
            "prompts": len(chosen),
            "max_new_tokens": options["max_new_tokens"],
            **{name: options[name] for name in ("top_k", "top_p", "seed")},
        }
        click.echo(json.dumps(routing_summary(sharing, about)))
        return
    say(describe_backend(engine))
    click.echo(format_sharing(sharing))


def _check_folder(path: str | None) -> None:
    """Refuse before any work what could not be written after it."""
    if path is not None and (not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise UsageError(f"{path!r}: cannot write there; name a file in a folder that exists")


def _gates_of(bundle: Bundle, planned: Planned, this: RoutedRound) -> dict[str, Any]:
    """The routing document of one verify."""
    tree = this.round.tree
    labels = [token_label(bundle.decode([int(token)])) for token in tree.token_ids]
    where = {"prompt": planned.prompt.id, "round": this.round.index, "parents": tree.parents.tolist()}
    return routing_document(this.gates) | {"tokens": labels} | where


def format_sharing(sharing: list[Sharing]) -> str:
    """The means over layers as text, a line a tree and a column a quantity."""
    mine = [each for each in sharing if each.layer is None]
    headings = ("temp", "shape", "budget", "rows", "experts", "from", "to", "even", "by load")
    headings += ("effective rows", "from", "to")
    lines = [
        (
            f"{each.temperature:g}",
            each.shape,
            each.budget,
            each.rows,
            *(f"{value:.2f}" for value in (each.touched, each.touched_low, each.touched_high)),
            *(f"{value:.2f}" for value in (each.independent, each.by_load)),
            *(dash_or(value) for value in (each.effective, each.effective_low, each.effective_high)),
        )
        for each in mine
    ]
    pairs = [
        (
            f"{each.temperature:g}",
            each.shape,
            each.budget,
            *(dash_or(each.shared[name]) for name in RELATIONS),
        )
        for each in mine
    ]
    k, experts = mine[0].experts_per_token, mine[0].experts
    return "\n".join(
        [
            text_table(headings, lines),
            f"experts: distinct of {experts} a verify and layer, mean; even: if rows chose {k} evenly, independently;",
            "by load: independently, by the layers' own loads; effective rows: even ones that touch as many;",
            "from, to: the 95% interval over prompts of what stands to the left",
            "",
            text_table(("temp", "shape", "budget", *RELATIONS), pairs),
            f"experts that two rows of one verify share, by kinship; independent rows share {k * k / experts:.2f}",
        ]
    )
