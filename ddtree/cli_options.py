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


def _stack(*options: Callable) -> Callable:
    """One decorator out of several, shown in the order given."""

    def decorate(command: Callable) -> Callable:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


model_options = _stack(
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
        "--graphs/--no-graphs",
        default=True,
        show_default=True,
        help="cuda: replay captured rounds or launch eagerly.",
    ),
)
decode_options = _stack(
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


def say(text: str) -> None:
    """A line for the person watching: stderr, so that stdout holds results alone."""
    click.echo(text, err=True)


class LateBar:
    """A progress bar that shows itself at the first step, so that what is refused before leaves one line alone."""

    def __init__(self, what: str, unit: str):
        self.what, self.unit, self.bar = what, unit, None

    def step(self, total: int) -> None:
        """One more of `total` is done."""
        if self.bar is None:
            self.bar = tqdm(total=total, desc=self.what, unit=self.unit)
        self.bar.update()
        if self.bar.n >= total:
            self.bar.close()


def bundle_of(options: dict[str, Any]) -> Bundle:
    """Open the bundle that the model options name."""
    return open_bundle(options["model"], options["drafter"])


def engine_of(bundle: Bundle, max_budget: int, options: dict[str, Any]) -> Engine:
    """Open an engine for trees of at most `max_budget` nodes."""
    choice = {name: options[name] for name in ("dtype", "route", "graphs")}
    backend = find_backend() if options["backend"] == "auto" else options["backend"]
    return Engine(bundle, backend=backend, max_budget=max_budget, **choice)


def describe_backend(engine: Engine) -> str:
    """The backend that the caller picked, in words: every result says it."""
    ops, runner = engine.ops, engine.runner
    launches = "" if runner is None else ", CUDA graphs" if runner.graphs else ", eager"
    return f"backend {ops.name} ({ops.device}), {ops.dtype_name}, MoE route {ops.route}{launches}"


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
    )
