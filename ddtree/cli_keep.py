"""What `compare --trace` writes: the rounds of every decode, as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ddtree.compare import Row
from ddtree.decode import Round
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.prompts import Prompt
from ddtree.trace import write_trace

Keep = Callable[[Row, Prompt, list[Round]], None]


@contextmanager
def keep_rounds(engine: Engine, prompts: list[Prompt], path: str | None, tables: bool) -> Iterator[Keep]:
    """What compare's `on_decode` calls: it adds a decode to the trace at `path`, or nowhere when that is None.

    Raises UsageError for tables without a trace, or on a device, whose rounds leave the drafter's table there.
    """
    if tables and path is None:
        raise UsageError("tables: they go into a trace; name one with --trace")
    if tables and engine.runner:
        raise UsageError(
            "tables: a round on the device leaves the drafter's table there; use --backend numpy"
        )
    if path is None:
        yield lambda row, prompt, rounds: None
        return
    with write_trace(path, engine) as writer:

        def keep(row: Row, prompt: Prompt, rounds: list[Round]) -> None:
            writer.run(prompt.id, engine.bundle.encode(prompt.text), row.config, prompts.index(prompt))
            for this in rounds:
                writer.round(this, with_table=tables)

        yield keep
