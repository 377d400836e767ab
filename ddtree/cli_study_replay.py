"""`ddtree study record` and `ddtree study replay`: one run of the model, then any number of trees without it."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from ddtree.cli_options import (
    LateBar,
    backend_of,
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
from ddtree.prompts import load_prompts
from ddtree.study_record import DEFAULT_K, check_folder, open_recordings, record


@click.command("record")
@click.option("--out", required=True, help="The folder to record into; not inside data/.")
@prompts_option
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N prompts only.")
@temperatures_option
@click.option(
    "--k",
    type=int,
    default=DEFAULT_K,
    show_default=True,
    help="Columns of each table: the largest budget to replay.",
)
@decode_options
@model_options
@json_option
def record_command(
    out: str, prompts: str, limit: int | None, temperatures: tuple[float, ...], k: int, **options: Any
) -> None:
    """Decode prompts once, autoregressively, and keep the drafter's table at every position.

    What the folder already holds is not done again: an interrupted recording goes on where it stopped.
    """
    directory = check_folder(out)
    chosen = load_prompts(prompts)[:limit]
    if backend_of(options) != "numpy":
        raise UsageError("record: a round on a device leaves the drafter's table there; use --backend numpy")
    bundle = bundle_of(options)
    configs = [decode_config(bundle, "ar", 0, temperature, options) for temperature in temperatures]
    engine = engine_of(bundle, 0, options)
    bar = LateBar("record", "prompt")
    found = record(engine, chosen, directory, configs[0], temperatures, k, bar.step)
    tokens = sum(len(each.tokens) for each in found)
    document = {"backend": describe_backend(engine), "directory": str(directory), "recordings": len(found)}
    document |= {"prompts": len(chosen), "temperatures": list(temperatures), "tokens": tokens}
    document["bytes"] = sum(each.path.stat().st_size for each in found)
    if options["as_json"]:
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo("\n".join(f"{name}: {value}" for name, value in document.items()))


@click.command("replay")
@click.argument("directory")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    default=("best_first",),
    show_default=True,
    help="A name that study --shapes lists, or NAME:VALUE; may be repeated.",
)
@click.option(
    "--budget", "budgets", type=int, multiple=True, default=(32,), show_default=True, help="May be repeated."
)
@click.option(
    "--depth",
    "depths",
    type=int,
    multiple=True,
    show_default="as deep as the drafter proposes",
    help="No node lies deeper; may be repeated.",
)
@click.option(
    "--scheduler",
    default="local",
    show_default=True,
    help="local: processes of this machine; or the address of a running Dask scheduler, as tcp://HOST:8786.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    show_default="1, without Dask",
    help="Processes of the local scheduler that share the work.",
)
@click.option(
    "--out", help="Write a row for each prompt and setting to this JSON Lines file, kept as they come."
)
@json_option
def replay_command(
    directory: str,
    shapes: tuple[str, ...],
    budgets: tuple[int, ...],
    depths: tuple[int, ...],
    scheduler: str,
    workers: int | None,
    out: str | None,
    as_json: bool,
) -> None:
    """Walk trees of every shape, budget and depth along the recordings in DIRECTORY; runs no model.

    Workers of a scheduler elsewhere must see DIRECTORY under the same absolute path, and have the same versions; start
    them with one thread each. A worker that dies costs the piece it was at: another does it again. With --out, rows
    that are finished outlive an interruption in FILE.part: the same command again does the others alone.
    """
    # Here, for numba comes with it, which takes a moment.
    from ddtree.study_replay import LOCAL, Journal, replay, totals

    if as_json and out is not None:
        raise UsageError("replay: --json prints the rows, --out writes them to a file; give one of them")
    if scheduler != LOCAL and workers is not None:
        raise UsageError(f"replay: --workers are local processes, and {scheduler} has its own; leave one out")
    recordings = open_recordings(directory)
    bar, journal = LateBar("replay", "row"), None if out is None else Journal(out, say)
    times = [time.perf_counter()]

    def step(done: int, total: int) -> None:
        times.append(time.perf_counter())
        if done < total or len(times) > 2:  # else nothing is left to do
            bar.step(total, done)

    rows = replay(
        recordings, shapes, budgets, depths or None, workers or 1, step, scheduler=scheduler, journal=journal
    )
    if as_json:
        document = {"directory": directory, "settings": recordings[0].header, "rows": rows}
        click.echo(json.dumps(document, indent=1))
    else:
        click.echo(format_totals(totals(rows)))
        click.echo(
            "accept: tokens a round, bonus token included; no loops: over rounds that start outside a repetition"
        )
    found = journal.found.values() if journal else ()
    rounds = sum(row["rounds"] for row in rows) - sum(row["rounds"] for row in found)
    start, seconds = times[1] - times[0], times[-1] - times[1]
    speed = f"{rounds} trees in {seconds:.2f} s, {rounds / seconds if rounds else 0:.0f} trees/s"
    where = f"workers {workers or 1}" if scheduler == LOCAL else scheduler
    say(f"{speed}, {where}, after {start:.2f} s of start")


def format_totals(records: list[dict[str, Any]]) -> str:
    """The sums over prompts as text."""

    headings = ("temp", "shape", "budget", "depth", "prompts", "rounds", "nodes", "accept", "no loops")
    rows = [
        (
            f"{each['temperature']:g}",
            *(each[name] for name in ("shape", "budget", "depth", "prompts", "rounds")),
            *(dash_or(each[name]) for name in ("nodes_per_round", "mean_acceptance")),
            dash_or(each["mean_acceptance_outside_loops"]),
        )
        for each in records
    ]
    return text_table(headings, rows)


@click.command("report")
@click.argument("rows")
@click.option("--out", required=True, help="The folder for report.md and its figures.")
@click.option(
    "--recordings", help="The folder the rows were replayed from: siblings and calibration are shown too."
)
def report_command(rows: str, out: str, recordings: str | None) -> None:
    """One page with figures out of the rows that `study replay --out` wrote: which tree pays, here and at scale."""
    from ddtree.study_report import read_rows, write_report

    found = open_recordings(recordings) if recordings else []
    click.echo(f"Wrote {write_report(read_rows(rows), out, found)}.")
