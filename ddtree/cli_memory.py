"""The options of `inspect --memory`, and the report they name."""

from __future__ import annotations

from typing import Any

import click

from ddtree.bundle import DEFAULT_MODEL, open_bundle
from ddtree.cli_options import stack
from ddtree.engine_memory import MemoryReport, plan_memory
from ddtree.engine_parts import PREFILL_CHUNK, EngineSizes
from ddtree.errors import UsageError
from ddtree.ops.plan_ops import PlanOps

DEFAULTS = {"budget": 32, "dtype": "f32", "gemm": "invariant"}  # where an option is not given

memory_options = stack(
    click.option("--drafter", help="With --memory: a drafter file; default: drafter.kdtr in the folder."),
    click.option("--budget", type=int, show_default="32", help="With --memory: most nodes of a tree."),
    click.option("--context", type=int, show_default="the model's", help="With --memory: most positions."),
    click.option("--dtype", show_default="f32", help="With --memory: f32 or bf16."),
    click.option("--gemm", show_default="invariant", help="With --memory: invariant or cublas."),
)


def memory_of(path: str | None, check: bool, options: dict[str, Any]) -> MemoryReport:
    """The report of an engine as the options want it; UsageError for sizes or names that are not offered."""
    if check:
        raise UsageError("inspect: --memory reads no array to --verify; give one of the two")
    given = DEFAULTS | {name: value for name, value in options.items() if value is not None}
    bundle = open_bundle(path or DEFAULT_MODEL, given.get("drafter"))
    longest = bundle.config.max_position_embeddings
    sizes = EngineSizes.checked(longest, given["budget"], given.get("context"), PREFILL_CHUNK)
    call = given["budget"], PREFILL_CHUNK, given["dtype"], given["gemm"]
    PlanOps.check_sizes(bundle.config, bundle.drafter_config, *call)
    return plan_memory(bundle, sizes, given["dtype"], given["gemm"])


def refuse_memory_options(path: str | None, options: dict[str, Any]) -> None:
    """Raise UsageError where the options, without --memory, name an engine, or no file is named."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        raise UsageError(f"inspect: {', '.join(given)}: these go with --memory")
    if path is None:
        raise UsageError("inspect: give a KDTR file, or --memory")
