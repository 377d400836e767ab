"""Command line of training: a target, its tokenizer and its drafter from a folder of text files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ddtree.cli_options import say, stack
from ddtree.errors import UsageError
from ddtree.train.presets import PRESETS

train_options = stack(
    click.option(
        "--data", help="A folder of text files.", show_default="the standard library of this interpreter"
    ),
    click.option(
        "--out", required=True, help="Folder for bundles, checkpoints and logs; a run goes on there."
    ),
    click.option("--preset", default="small", show_default=True, help=f"One of {', '.join(PRESETS)}."),
    click.option("--device", default="cuda", show_default=True, help="cuda or cpu."),
    click.option("--seed", type=click.IntRange(min=0, max=2**32), default=0, show_default=True),
    click.option(
        "--minutes", type=click.FloatRange(min=0), help="Stop cleanly after so many; the same call goes on."
    ),
)


@click.group("train")
def train_group() -> None:
    """Train a small target, its tokenizer and its DFlash drafter (extra `train`: PyTorch)."""


def _run(options: dict[str, Any], stage: Callable[[Any, Any], Any]) -> None:
    """Check a call's settings and run stage(stages, work); PyTorch is imported here and not before."""
    if options["preset"] not in PRESETS:
        raise UsageError(f"preset: expected one of {', '.join(PRESETS)}, found {options['preset']!r}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError('train needs PyTorch: pip install -e ".[train]"')
    from ddtree.train import device, stages

    with device.memory_errors():
        stage(stages, stages.start(**options | {"preset": PRESETS[options["preset"]], "say": say}))


@train_group.command("tokenizer")
@train_options
def tokenizer_command(**options: Any) -> None:
    """A byte-level BPE and the corpus in its ids."""
    _run(options, lambda stages, work: stages.train_tokenizer(work))


@train_group.command("target")
@train_options
def target_command(**options: Any) -> None:
    """The target, after the tokenizer."""
    _run(options, lambda stages, work: stages.train_target(work))


@train_group.command("drafter")
@click.option("--target", help="A bundle folder or target file.", show_default="target.kdtr in --out")
@train_options
def drafter_command(target: str | None, **options: Any) -> None:
    """A drafter for a target: a bank of its continuations, then the drafter."""
    path = Path(target) if target else None
    _run(options, lambda stages, work: stages.train_drafter(work, path))


@train_group.command("branch")
@click.option("--target", help="A bundle folder or target file.", show_default="target.kdtr in --out")
@click.option("--drafter", help="The drafter's file.", show_default="drafter.kdtr beside the target")
@train_options
def branch_command(target: str | None, drafter: str | None, **options: Any) -> None:
    """A branch head for a drafter that stays as it is."""
    paths = [Path(path) if path else None for path in (target, drafter)]
    _run(options, lambda stages, work: stages.train_branch(work, *paths))


@train_group.command("all")
@train_options
def all_command(**options: Any) -> None:
    """Tokenizer, target, drafter and its branch head: a bundle."""
    _run(options, lambda stages, work: all(stage(work) for stage in stages.ALL))
