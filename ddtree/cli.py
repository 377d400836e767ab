"""The command line: `python -m ddtree COMMAND`. It parses, calls a room and prints; decisions are made elsewhere.

Exit codes: 0 done, 1 the check the command makes failed, 2 wrong usage or bad input with one line on stderr.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from ddtree import __version__
from ddtree.checkpoint import convert
from ddtree.cli_bench import bench_group
from ddtree.cli_keep import keep_rounds
from ddtree.cli_memory import memory_of, memory_options, refuse_memory_options
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
    shape_option,
    temperatures_option,
)
from ddtree.cli_plot import plot_command
from ddtree.cli_study import study_group
from ddtree.cli_train import train_group
from ddtree.compare import ACCEPTANCE_NOTE, best_rows, compare, fair_pairs, format_table, plan, report
from ddtree.config import METHODS
from ddtree.demo import run_demo
from ddtree.engine_memory import format_memory
from ddtree.errors import DdtreeError, UsageError
from ddtree.generate import generate
from ddtree.inspect import describe, verify
from ddtree.inspect import format_table as format_arrays
from ddtree.ops import is_launch_error
from ddtree.prompts import load_prompts


class _Commands(click.Group):
    """Commands whose reader may leave (`ddtree .. | head`): click alone would exit 1, which is a failed check."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is left is flushed there at the end
            raise UsageError("the output was closed before all was written") from None


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="ddtree")
def cli() -> None:
    """DDTree speculative decoding of MLA + MoE transformers: which draft tree should be verified?"""


@cli.command("generate")
@click.argument("prompt", required=False)
@click.option("--prompt-file", help="Read the prompt from a file; - reads stdin.")
@click.option("--method", default="tree", show_default=True, help=f"One of {', '.join(METHODS)}.")
@click.option(
    "--budget", type=int, default=32, show_default=True, help="Most nodes of a tree, root not counted."
)
@shape_option
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy.")
@decode_options
@model_options
@click.option("--trace", help="Write every round to this JSON Lines file.")
@json_option
def generate_command(
    prompt: str | None, prompt_file: str | None, method: str, budget: int, temperature: float, **options: Any
) -> None:
    """Continue PROMPT and stream the text as rounds commit it."""
    text = _read_prompt(prompt, prompt_file)
    bundle = bundle_of(options)
    config = decode_config(bundle, method, budget, temperature, options)
    engine = engine_of(bundle, budget, options)
    if options["as_json"]:
        result = generate(engine, text, config, options["trace"])
        click.echo(json.dumps(result | {"backend": describe_backend(engine)}, indent=1))
        return
    result = generate(engine, text, config, options["trace"], _Stream(text))
    click.echo()
    say(
        f"[{len(result['token_ids'])} tokens, ended by {result['finish']}; {result['rounds']} rounds, "
        f"{result['mean_acceptance'] or 0:.2f} tokens a round with the bonus token, "
        f"{result['tokens_per_second'] or 0:.1f} tokens/s; {describe_backend(engine)}]"
    )


class _Stream:
    """Prints pieces of text as they come, the dimmed prompt before the first."""

    def __init__(self, prompt: str):
        self.prompt = click.style(prompt, dim=True)

    def __call__(self, piece: str) -> None:
        click.echo(self.prompt + piece, nl=False)
        self.prompt = ""


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise UsageError("prompt: give either PROMPT or --prompt-file")
    if prompt_file is None:
        return prompt
    try:
        return sys.stdin.read() if prompt_file == "-" else Path(prompt_file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{prompt_file}: cannot read the prompt: {error}") from None


@cli.command("compare")
@click.option(
    "--budget", "budgets", type=int, multiple=True, default=(32,), show_default=True, help="May be repeated."
)
@shape_option
@temperatures_option
@decode_options
@model_options
@prompts_option
@click.option("--limit", type=click.IntRange(min=1), help="Use the first N prompts only.")
@click.option("--trace", help="Write every round of every row to this JSON Lines file.")
@click.option("--tables", is_flag=True, help="With --trace, on numpy: the drafter's top-K tables too.")
@json_option
def compare_command(
    budgets: tuple[int, ...], temperatures: tuple[float, ...], prompts: str, limit: int | None, **options: Any
) -> None:
    """Decode prompts by ar, chain and tree; exit 1 if any token differs from ar's.

    A chain as long as the drafter allows and a tree of one node more are always among the rows: the fair pair.
    """
    chosen = load_prompts(prompts)[:limit]
    bundle = bundle_of(options)
    configs = [decode_config(bundle, "tree", budget, t, options) for t in temperatures for budget in budgets]
    if bundle.drafter_config is None:
        raise UsageError(f"{bundle.path}: the bundle has no drafter to compare with; name one with --drafter")
    rows = plan(
        bundle.drafter_config.horizon, budgets, dict.fromkeys(c.sampling for c in configs), configs[0]
    )
    engine = engine_of(bundle, max(row.config.budget for row in rows), options)
    bar, total = LateBar("compare", "decode"), len(rows) * len(chosen)
    with keep_rounds(engine, chosen, options["trace"], options["tables"]) as keep:
        compare(engine, chosen, rows, lambda *decoded: (keep(*decoded), bar.step(total)))
    records = report(rows)
    equal = all(record["tokens_equal"] for record in records)
    if options["as_json"]:
        names = ("shape", "max_new_tokens", "top_k", "top_p", "seed")
        document = {"backend": describe_backend(engine)} | {name: options[name] for name in names}
        document |= {"prompts": len(chosen), "tokens_equal": equal}
        click.echo(json.dumps(document | {"rows": records, "best": best_rows(records)}, indent=1))
    else:
        click.echo(
            f"{describe_backend(engine)}, {len(chosen)} prompts\n{format_table(records)}\n{ACCEPTANCE_NOTE}"
        )
        pairs = fair_pairs(records, bundle.drafter_config.horizon)
        click.echo(f"\nThe fair pair, as many rows verified:\n{format_table(pairs)}")
        click.echo(f"\nEach method at its own best budget:\n{format_table(best_rows(records))}")
    sys.exit(0 if equal else 1)


@cli.command("inspect")
@click.argument("path", required=False)
@click.option("--verify", "check", is_flag=True, help="Check every array's checksum.")
@click.option("--memory", is_flag=True, help="Show what an engine of the model PATH would take on a GPU.")
@memory_options
@json_option
def inspect_command(path: str | None, check: bool, memory: bool, as_json: bool, **options: Any) -> None:
    """Show the arrays, dtypes, shapes, bytes, parameters and meta of a KDTR file.

    With --memory, PATH is a bundle folder or a target, by default the shipped model; neither its weights nor a GPU
    are touched.
    """
    if memory:
        report = memory_of(path, check, options)
        click.echo(json.dumps(report.to_json(), indent=1) if as_json else format_memory(report))
        return
    refuse_memory_options(path, options)
    description = describe(path)
    if check:
        with tqdm(total=len(description["arrays"]), desc="verify", unit="array") as bar:
            description["arrays_verified"] = verify(path, lambda info: bar.update())
    click.echo(json.dumps(description, indent=1) if as_json else format_arrays(description))
    if check and not as_json:
        click.echo(f"checksums of {description['arrays_verified']} arrays verified")


@cli.command("convert")
@click.argument("source")
@click.argument("output")
@json_option
def convert_command(source: str, output: str, as_json: bool) -> None:
    """Convert a Hugging Face folder to OUTPUT.kdtr, or a .kdtr file back to a Hugging Face folder."""
    summary = convert(source, output)
    click.echo(json.dumps(summary, indent=1) if as_json else _lines(summary))


cli.add_command(bench_group)
cli.add_command(plot_command)
cli.add_command(study_group)
cli.add_command(train_group)


@cli.command("demo")
@click.option(
    "--out", default="out/demo", show_default=True, help="Folder for the figure, the trace and the table."
)
@model_options
def demo_command(out: str, **options: Any) -> None:
    """Generate from a few prompts, compare the methods, and draw one round's tree. Exit 1 if tokens differ."""
    bundle = bundle_of(options)
    equal = run_demo(lambda budget: engine_of(bundle, budget, options), Path(out), click.echo)
    sys.exit(0 if equal else 1)


def _lines(summary: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in summary.items())


def main() -> None:
    """Run the command line; any error a user can cause is one line on stderr and exit code 2."""
    sys.exit(_exit_code(lambda: cli.main(prog_name="ddtree", standalone_mode=False)))


def _exit_code(run: Callable[[], Any]) -> int:
    try:
        run()
    except SystemExit as stop:
        return stop.code
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return 2
    except click.ClickException as error:
        return _refuse(error.format_message().rstrip(".") + "; see --help")
    except (DdtreeError, OSError) as error:
        return _refuse(str(error))
    except ValueError as error:
        if not is_launch_error(error):
            raise
        return _refuse(str(error))
    except MemoryError:
        return _refuse("not enough memory; lower --budget, or use a smaller model")
    except (KeyboardInterrupt, click.Abort):
        say("interrupted")
        return 130
    return 0


def _refuse(message: str) -> int:
    say("ddtree: " + " ".join(message.split()))
    return 2
