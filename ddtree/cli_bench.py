"""`ddtree bench ..`: measurements. It parses, calls the bench and prints; exit codes are those of `ddtree.cli`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ddtree import bench_decode, bench_draft, bench_layers
from ddtree.bench import failures, format_kernel_table, run_kernel_bench
from ddtree.bench_estimate import draft_costs, estimate, format_estimate
from ddtree.bench_random import WEIGHTS, open_random
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
    shape_option,
    temperatures_option,
)
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.prompts import load_prompts

EQUALITY_BUDGET = 63  # of the tree that holds the autoregressive tokens

config_option = click.option(
    "--config",
    help="In place of --model, random weights of this shape: a config.json, or a name in data/configs.",
)
weights_option = click.option(
    "--weights",
    type=click.Choice(WEIGHTS),
    help="With --config: how its weights are stored; int4: routed experts alone, fp8: all matrices of layers.  "
    "[default: bf16]",
)


@click.group("bench")
def bench_group() -> None:
    """Measure on this machine: correctness first, then time."""


@bench_group.command("kernels")
@click.option("--only", help="Only the cases whose name contains this.")
@click.option("--quick", is_flag=True, help="Small sizes: does everything run?")
@json_option
def bench_kernels_command(only: str | None, quick: bool, as_json: bool) -> None:
    """Check every kernel against its NumPy reference, then time it as a graph node and as a launch from Python.

    Exit 1 when a kernel fails its check.
    """
    bar = LateBar("bench kernels", "case")
    document = run_kernel_bench(only, quick, lambda record, number, total: bar.step(total))
    _finish(document, format_kernel_table, as_json, not failures(document))


@bench_group.command("layers")
@click.option(
    "--rows",
    multiple=True,
    type=click.IntRange(min=1),
    default=(1, 16, 64),
    show_default=True,
    help="Rows of the forward; may be repeated.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(min=1),
    default=(128,),
    show_default=True,
    help="Committed positions before it; may be repeated.",
)
@click.option("--layers", type=int, help="With --config: the first layers only.")
@click.option("--draft", help="With --config: what a draft costs, from this document of bench draft --json.")
@click.option(
    "--from",
    "recorded",
    help="Time nothing: print the estimate of this document of bench layers --json. Takes --draft and --config.",
)
@config_option
@weights_option
@model_options
@json_option
def bench_layers_command(
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    layers: int | None,
    draft: str | None,
    recorded: str | None,
    config: str | None,
    weights: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Hold every step of a forward to NumPy in f64; time the forward, its layers and its operations on the GPU.

    With --config it ends with an estimate: rounds of the whole model, of which a few layers may have been timed, and
    the memory that 1, 8 and 16 GPUs need. Exit 1 when f32 errs by more than 1e-4 of its norm at a layer.
    """
    drafted = None if draft is None else _document(draft)
    if recorded is not None:
        _refuse_besides("from", "recorded", "draft", "config", "as_json")
        document = _document(recorded)
        with _in_their_form(recorded, draft):
            document["estimate"] = estimate(document, config, drafted)
        _finish(document, lambda found: format_estimate(found["estimate"]), as_json, True)
    if draft is not None and config is None:
        raise UsageError("draft: only a model of --config has a whole to be estimated")
    if layers is not None and config is None:
        raise UsageError("layers: only a model of random weights (--config) can be cut")
    _check_weights(config, weights)
    bundle = open_random(config, layers, weights=weights or WEIGHTS[0]) if config else bundle_of(options)
    _refuse_large(bundle, options)
    if draft is not None:
        with _in_their_form(draft):
            draft_costs(open_random(config), contexts, drafted)  # refused before anything is timed
    longest = max(contexts) + bench_layers.MORE_POSITIONS
    engine = engine_of(bundle, max(rows) - 1, options | {"max_context": longest})
    say(describe_backend(engine))
    bar = LateBar("bench layers", "forward")
    document = bench_layers.run_layer_bench(engine, rows, contexts, bar.step)
    if config and document["times"]:
        try:
            with _in_their_form("this bench", draft):
                document["estimate"] = estimate(document, config, drafted)
        except UsageError as error:  # what was timed is kept
            say(f"no estimate of the whole model: {error}")
    _finish(document, bench_layers.format_layer_table, as_json, bench_layers.passed(document))


@bench_group.command("decode")
@click.option(
    "--budget",
    "budgets",
    type=int,
    multiple=True,
    default=(16, 64),
    show_default=True,
    help="May be repeated.",
)
@shape_option
@temperatures_option
@decode_options
@config_option
@weights_option
@model_options
@prompts_option
@click.option(
    "--limit", type=click.IntRange(min=1), help="Use the first N prompts only; default: all, 2 with --config."
)
@json_option
def bench_decode_command(
    budgets: tuple[int, ...],
    temperatures: tuple[float, ...],
    config: str | None,
    weights: str | None,
    prompts: str,
    limit: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Rounds of ar, chain and tree: speed, stages, what the host spends, and graphs against eager launches.

    With --config, whose random drafts are never right, a tree that holds the autoregressive tokens is verified
    besides. Exit 1 when a token, a logit or a cache row is not autoregressive decoding's.
    """
    _check_weights(config, weights)
    bundle = open_random(config, weights=weights or WEIGHTS[0]) if config else bundle_of(options)
    chosen = load_prompts(prompts)[: limit or (2 if config else None)]
    configs = [decode_config(bundle, "tree", budget, t, options) for t in temperatures for budget in budgets]
    if bundle.drafter_config is None:
        raise UsageError(f"{bundle.path}: there is no drafter, without which only ar can decode")
    if config:
        _refuse_large(bundle, options)
    largest = max(*budgets, bundle.drafter_config.horizon + 1, EQUALITY_BUDGET)

    def open_engine(graphs: bool) -> Engine:
        engine = engine_of(bundle, largest, options | {"graphs": graphs and options["graphs"]})
        say(describe_backend(engine))
        return engine

    samplings = list(dict.fromkeys(each.sampling for each in configs))
    equality = (EQUALITY_BUDGET, *budgets) if config else ()
    document = bench_decode.run_decode_bench(
        open_engine, chosen, budgets, samplings, configs[0], equality, LateBar("bench decode", "decode").step
    )
    _finish(document, bench_decode.format_decode_table, as_json, bench_decode.passed(document))


@bench_group.command("draft")
@click.option(
    "--config",
    required=True,
    help="A name in data/configs, or a config.json with its -drafter.json beside it.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=click.IntRange(min=1),
    default=(128, 8192),
    show_default=True,
    help="Positions the drafter has learned; may be repeated.",
)
@click.option("--dtype", type=click.Choice(("f32", "bf16")), default="bf16", show_default=True)
@json_option
def bench_draft_command(config: str, contexts: tuple[int, ...], dtype: str, as_json: bool) -> None:
    """Time a drafter of random weights on the GPU: a pass over its block, and learning what a round commits."""
    bundle = open_random(config)
    document = bench_draft.run_draft_bench(
        bundle, contexts, dtype, progress=LateBar("bench draft", "context").step
    )
    _finish(document, bench_draft.format_draft_table, as_json, True)


def _document(path: str) -> dict[str, Any]:
    """The JSON object that a file holds, all of its numbers finite."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
        json.dumps(found, allow_nan=False)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot read the document: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return found


@contextmanager
def _in_their_form(*paths: str | None) -> Iterator[None]:
    """Turn what reading documents of another form ends in into UsageError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        where, found = ", ".join(filter(None, paths)), f"{type(error).__name__}: {error}"
        raise UsageError(f"{where}: not in the form that bench --json writes: {found}") from error


def _refuse_besides(option: str, *allowed: str) -> None:
    """Raise UsageError for an option on the command line that `option` leaves nothing to do."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        if given and parameter.name not in allowed:
            raise UsageError(f"--{option} times nothing: leave out {parameter.opts[-1]}")


def _check_weights(config: str | None, weights: str | None) -> None:
    if weights is not None and config is None:
        raise UsageError(
            "weights: only those of a random model (--config) can be chosen; a file's are as they are"
        )


def _refuse_large(bundle: Any, options: dict[str, Any]) -> None:
    """Raise UsageError, before any weight is made, for a model too large for the NumPy backend."""
    count = bench_layers.num_parameters(bundle.config)
    if backend_of(options) == "numpy" and count > bench_layers.MOST_PARAMETERS:
        raise UsageError(
            f"{bundle.path}: {count:,} parameters are too many for the backend numpy here (at most "
            f"{bench_layers.MOST_PARAMETERS:,}); use --backend cuda"
        )


def _finish(document: dict[str, Any], as_text: Callable[[dict], str], as_json: bool, passed: bool) -> None:
    click.echo(json.dumps(document, indent=1) if as_json else as_text(document))
    sys.exit(0 if passed else 1)
