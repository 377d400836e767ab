"""Options that several commands share, and how their values become configs and engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from tqdm import tqdm

from ddtree.bundle import DEFAULT_MODEL, Bundle, open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.engine import Engine
from ddtree.ops import BACKENDS, find_backend
from ddtree.prompts import DEFAULT_PROMPTS

LOAD_BAR_DELAY = 2.0  # seconds


def stack(*options: Callable) -> Callable:
    """One decorator out of several, shown in the order given."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = stack(
    click.option(
        "--model",
        default=str(DEFAULT_MODEL),
        show_default="the shipped model",
        help="A bundle folder or target file.",
    ),
    click.option("--drafter", help="A drafter file; default: drafter.kdtr in the bundle folder, if there."),
    click.option(
        "--backend", default="numpy", show_default=True, help=f"One of {', '.join(BACKENDS)}, auto."
    ),
    click.option("--dtype", default="f32", show_default=True, help="numpy: f32 or f64; cuda: f32 or bf16."),
    click.option(
        "--route", default="device", show_default=True, help="Where MoE gates are made: device or host."
    ),
    click.option(
        "--gemm",
        default="invariant",
        show_default=True,
        help="What multiplies matrices: invariant, or on cuda cublas, without row invariance.",
    ),
    click.option(
        "--graphs/--no-graphs",
        default=True,
        show_default=True,
        help="cuda: replay captured rounds or launch eagerly.",
    ),
)
temperatures_option = click.option(
    "--temperature",
    "temperatures",
    type=float,
    multiple=True,
    default=(0.0,),
    show_default=True,
    help="May be repeated; 0 is greedy.",
)
prompts_option = click.option(
    "--prompts", default=str(DEFAULT_PROMPTS), show_default="the 64 shipped ones", help="A JSON Lines file."
)
decode_options = stack(
    click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Never exceeded."),
    click.option(
        "--top-k", type=int, default=0, show_default=True, help="Keep the k likeliest tokens; 0 is off."
    ),
    click.option(
        "--top-p", type=float, default=1.0, show_default=True, help="Keep this much probability; 1 is off."
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="Of the position-keyed random numbers."
    ),
)

shape_option = click.option(
    "--shape",
    default=DecodeConfig.shape,
    show_default=True,
    help="Of trees: a name that study --shapes lists, or NAME:VALUE.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout, nothing else."
)


def say(text: str) -> None:
    """A line for the person watching: stderr, so that stdout holds results alone."""
    click.echo(text, err=True)


class LateBar:
    """A progress bar that shows itself at the first step, so that what is refused before leaves one line alone.

    With a `delay` it waits that many seconds, and what is done before shows none.
    """

    def __init__(self, what: str, unit: str, delay: float = 0, scaled: bool = False):
        self.what, self.unit, self.delay, self.scaled, self.bar = what, unit, delay, scaled, None

    def step(self, total: int, count: int = 1) -> None:
        """`count` more of `total` are done."""
        if self.bar is None:
            self.bar = tqdm(
                total=total, desc=self.what, unit=self.unit, delay=self.delay, unit_scale=self.scaled
            )
        self.bar.update(count)
        if self.bar.n >= total:
            self.bar.close()

    def add(self, count: int, total: int) -> None:
        """The same, as a callback of an Engine."""
        self.step(total, count)

    def close(self) -> None:
        """Leave the bar as it is, whatever was done."""
        if self.bar is not None:
            self.bar.close()


def bundle_of(options: dict[str, Any]) -> Bundle:
    """Open the bundle that the model options name."""
    return open_bundle(options["model"], options["drafter"])


def backend_of(options: dict[str, Any]) -> str:
    """The backend that the model options name, or the one that `auto` finds."""
    return find_backend() if options["backend"] == "auto" else options["backend"]


def engine_of(bundle: Bundle, max_budget: int, options: dict[str, Any]) -> Engine:
    """Open an engine for trees of at most `max_budget` nodes; a load of more than a moment shows a bar."""
    names = ("dtype", "route", "gemm", "graphs", "max_context")
    choice = {name: options[name] for name in names if name in options}
    backend = backend_of(options)
    bar = LateBar("load", "B", LOAD_BAR_DELAY, scaled=True)
    try:
        return Engine(bundle, backend=backend, max_budget=max_budget, progress=bar.add, **choice)
    finally:
        bar.close()


def describe_backend(engine: Engine) -> str:
    """The backend that the caller picked, in words: every result says it."""
    ops, runner = engine.ops, engine.runner
    launches = "" if runner is None else ", CUDA graphs" if runner.graphs else ", eager"
    gemm = "gemm invariant" if ops.gemm == "invariant" else f"gemm {ops.gemm} (no row invariance)"
    return f"backend {ops.name} ({ops.device}), {ops.dtype_name}, MoE route {ops.route}, {gemm}{launches}"


def decode_config(
    bundle: Bundle, method: str, budget: int, temperature: float, options: dict[str, Any]
) -> DecodeConfig:
    """The decode settings that the options name; decoding stops at the model's own end-of-text tokens."""
    return DecodeConfig(
        method=method,
        budget=budget,
        max_new_tokens=options["max_new_tokens"],
        sampling=SamplingConfig(temperature, options["top_k"], options["top_p"], options["seed"]),
        stop_token_ids=bundle.config.eos_token_ids,
        shape=options.get("shape", DecodeConfig.shape),
    )
