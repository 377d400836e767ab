"""`ddtree plot KIND FILE.. -o FIGURE`: it reads files, asks the room of figures for one, and writes it whole or not."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import click

from ddtree.cli_options import json_option, say
from ddtree.cli_plot_inputs import Inputs, read_inputs
from ddtree.cli_plot_kinds import KINDS
from ddtree.errors import UsageError

FORMATS = ("png", "svg", "pdf")
DPI = 150


@click.command("plot")
@click.argument("kind", required=False)
@click.argument("files", nargs=-1)
@click.option("-o", "--output", help=f"The figure to write; its suffix is one of {', '.join(FORMATS)}.")
@click.option("--list", "list_kinds", is_flag=True, help="Print the kinds of figure and what each needs.")
@click.option("--title", default="", help="In place of the figure's own heading.")
@click.option("--method", help="Of a trace or comparison: these runs only, ar, chain or tree.")
@click.option(
    "--budget", type=int, help="Of a trace: these runs only; default: the largest, for a tree near 16."
)
@click.option("--temperature", type=float, help="Of a trace, comparison or experts: these runs only.")
@click.option("--prompt", help="tree: the prompt's id.")
@click.option(
    "--round", "index", type=int, help="tree: the round's index; default: where the tree helped most."
)
@click.option("--max-budget", type=click.IntRange(min=1), help="expected, cost: the largest budget to build.")
@click.option("--over-ar", is_flag=True, help="budgets: speed as a multiple of ar's.")
@click.option("--rows", type=int, help="layers: rows of the forward; default: the first measured.")
@click.option(
    "--layer", "layers", type=int, multiple=True, help="routing, load, experts: this layer; may be repeated."
)
@click.option("--model", help="tree: the bundle whose tokenizer names the tokens; default: the shipped one.")
@json_option
def plot_command(
    kind: str | None,
    files: tuple[str, ...],
    output: str | None,
    list_kinds: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Draw a figure of KIND from traces and result documents (FILES); --list says what each kind needs."""
    if list_kinds:
        known = {name: each.needs for name, each in KINDS.items()}
        width = max(map(len, known))
        lines = "\n".join(f"{name:{width}}  {needs}" for name, needs in known.items())
        click.echo(json.dumps(known, indent=1) if as_json else lines)
        return
    if kind not in KINDS:
        found = "no kind was given" if kind is None else f"unknown kind {kind!r}"
        raise UsageError(f"plot: {found}; give one of {', '.join(KINDS)}")
    if not files:
        raise UsageError(f"plot {kind}: give a file with {KINDS[kind].needs}")
    path = _checked_output(output)
    inputs = read_inputs(files, options)
    _write(_draw(kind, inputs), path)
    if as_json:
        click.echo(json.dumps({"kind": kind, "inputs": list(files), "output": str(path)}, indent=1))
    else:
        say(f"Wrote {path}.")


def _checked_output(output: str | None) -> Path:
    if output is None:
        raise UsageError("plot: name the figure to write with -o")
    path = Path(output)
    if path.suffix.removeprefix(".").lower() not in FORMATS:
        raise UsageError(f"{output}: a figure's suffix is one of {', '.join(FORMATS)}")
    return path


def _draw(kind: str, inputs: Inputs) -> Any:
    """The figure; whatever a file holds in another form than its writer's is a UsageError."""
    try:
        return KINDS[kind].build(inputs)
    except UsageError as error:
        raise UsageError(f"{', '.join(inputs.paths)}: {error}") from None
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError) as error:
        raise UsageError(
            f"{', '.join(inputs.paths)}: not in the form that plot {kind} reads ({KINDS[kind].needs}): "
            f"{type(error).__name__}: {error}"
        ) from error


def _write(figure: Any, path: Path) -> None:
    """Draw into memory first, then replace the file: a figure is there whole or not at all."""
    image = io.BytesIO()
    kind = path.suffix.removeprefix(".").lower()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(image, format=kind, dpi=DPI, metadata=undated.get(kind))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(image.getvalue())
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path}: cannot write the figure: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)
