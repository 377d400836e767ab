"""Replay many: any shape, budget and depth walked along recorded continuations, without a model.

From the first token on: build the tree from the recorded table at the root, accept along the true continuation, add
the bonus token, cut at the tokens wanted, and go on at the next root: the rounds that a decode would have had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddtree.errors import UsageError
from ddtree.shapes import get_shape, is_conditional
from ddtree.study_fast import accepted_length, best_first
from ddtree.study_journal import Journal
from ddtree.study_recordings import Recording
from ddtree.study_rows import Counts, Setting, row_of, shape_sha256, totals, write_rows
from ddtree.study_workers import LOCAL, Part, Work, on_workers
from ddtree.tree import DraftTree
from ddtree.versions import package_version

__all__ = [
    "LOCAL",
    "Cell",
    "Journal",
    "check_settings",
    "count",
    "replay",
    "replay_rounds",
    "totals",
    "write_rows",
]


@dataclass(frozen=True, eq=False)
class Replayed:
    """One round: its root's place in the continuation, the tree, and the tokens it commits, bonus included."""

    root: int
    tree: DraftTree
    tokens: np.ndarray


def replay_rounds(
    recording: Recording,
    shape: str,
    budget: int,
    depth: int | None = None,
    context: Mapping[str, Any] | None = None,
) -> Iterator[Replayed]:
    """The rounds after the prefill that a decode of these settings has; `depth` bounds its trees below the horizon.

    `context` is what `get_shape` takes (cost, template, ..); the true continuation is given at each root to a shape
    that cannot do without. Where a stop token ends the recording, a decode's path may go on past it in the tree before
    it is cut; the tokens are the same. Raises what `check_settings` raises.
    """
    depth = recording.horizon if depth is None else depth
    check_settings([recording], [shape], [budget], [depth], context)
    return _rounds(recording, builder_of(shape, context), budget, depth)


Builder = Callable[..., DraftTree]


def builder_of(shape: str, context: Mapping[str, Any] | None = None) -> Callable[[np.ndarray], Builder]:
    """What makes a shape's `build` for a root with that continuation; UsageError as in `get_shape`."""
    context = dict(context or {})
    if shape == "best_first":
        return lambda continuation: best_first
    get_shape(shape, continuation=[0], **context)
    try:
        build = get_shape(shape, **context)
    except UsageError:  # it lacks the continuation and nothing else
        return lambda continuation: get_shape(shape, continuation=continuation, **context)
    return lambda continuation: build


def _rounds(
    recording: Recording, build_for: Callable[[np.ndarray], Builder], budget: int, depth: int
) -> Iterator[Replayed]:
    tokens, root = recording.tokens, 0
    while root < len(tokens) - 1:
        after, token = tokens[root + 1 :], int(tokens[root])
        max_depth = min(depth, recording.max_depth(root)) if budget else 0
        if max_depth:
            build = build_for(after)
            table = recording.table_for(build, root, budget)
            tree = build(*table, budget, max_depth, root_token=token)
            length = accepted_length(tree.parents, tree.token_ids, after)
        else:
            tree, length = DraftTree.root_only(token), 1
        yield Replayed(root, tree, after[:length])
        root += length


def check_settings(
    recordings: Iterable[Recording],
    shapes: Iterable[str],
    budgets: Iterable[int],
    depths: Iterable[int],
    context: Mapping[str, Any] | None = None,
) -> None:
    """Raise UsageError for an unknown shape, or a shape, budget or depth that a recording's tables cannot decide."""
    builds = {shape: builder_of(shape, context)(np.zeros(1, np.int32)) for shape in shapes}
    conditional = [shape for shape, build in builds.items() if is_conditional(build)]
    budgets, depths = list(budgets), list(depths)
    if min(budgets, default=0) < 0 or min(depths, default=0) < 0:
        raise UsageError("budget, depth: neither may be negative")
    for recording in recordings:
        if conditional and recording.conditional is None:
            raise UsageError(
                f"shape: {conditional[0]} needs the scores of a branch head, and {recording.path.parent} has none; "
                "record with a drafter that has one"
            )
        most = recording.most_budget if len(conditional) < len(builds) else None
        if most is not None and max(budgets, default=0) > most:
            raise UsageError(
                f"budget: {recording.path.parent} holds the {most} likeliest tokens of each position, found budget "
                f"{max(budgets)}; record with --k {max(budgets)}"
            )
        if max(depths, default=0) > recording.horizon:
            raise UsageError(
                f"depth: the drafter proposes at most {recording.horizon} tokens, found {max(depths)}"
            )


def replay(
    recordings: Sequence[Recording],
    shapes: Sequence[str] = ("best_first",),
    budgets: Sequence[int] = (32,),
    depths: Sequence[int] | None = None,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
    context: Mapping[str, Any] | None = None,
    scheduler: str = LOCAL,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """One row for each recording, shape, budget and depth (default: the horizon), in that order.

    With workers > 1 as many Dask processes on this machine share the cells (a recording and a setting); with the
    address of a Dask scheduler, its workers do, and they must see the recordings under the same path. The rows are the
    same. A script that asks for processes keeps its own code under `if __name__ == "__main__"`, as multiprocessing
    wants.
    `progress(rows done, total)` hears when work begins, of the rows that are there already, and then of what is added.
    `context` is as in `replay_rounds`, and goes to workers by pickle. A `journal` keeps rows as they come, gives those
    that it holds, and writes the whole file; it knows shapes by name, so it takes no context. Raises UsageError as
    `check_settings`, `on_workers` and `Journal` do.
    """
    if not recordings or workers < 1:
        raise UsageError("replay: expected at least one recording and one worker")
    if journal and context:
        raise UsageError("replay: a journal cannot tell one context from another; name shapes as NAME:VALUE")
    depths = [max(each.horizon for each in recordings)] if depths is None else depths
    settings = list(product(dict.fromkeys(shapes), dict.fromkeys(budgets), dict.fromkeys(depths)))
    check_settings(recordings, shapes, budgets, depths, context)
    known = {shape: shape_sha256(shape, context) for shape in dict.fromkeys(shapes)}
    version = package_version("ddtree")
    cells = [Cell(recording, *setting) for recording in recordings for setting in settings]
    keys = [(cell.recording.sha256, *cell.setting, version, known[cell.shape]) for cell in cells]
    with journal or nullcontext():
        found = journal.begin(keys) if journal else {}
        rows = [found.get(key) for key in keys]
        missing = [place for place, row in enumerate(rows) if row is None]
        sent = {shape: findable(shape, context) for shape in known}
        work = partial(count, context=context, known={sent[shape]: known[shape] for shape in known})
        left = [cells[place]._replace(shape=sent[cells[place].shape]) for place in missing]
        parts = spread(work, left, workers, scheduler)
        with closing(parts):
            for places, counts in parts:
                new = []
                for each, counted in zip(places, counts, strict=True):
                    cell = cells[missing[each]]
                    made_by = {"version": version, "shape_sha256": known[cell.shape]}
                    new.append(row_of(cell.recording, cell.setting, counted, made_by))
                    rows[missing[each]] = new[-1]
                if journal and new:
                    journal.add(new)
                if progress:
                    progress(len(new) if places else len(cells) - len(missing), len(cells))
        if journal:
            journal.finish(rows)
    return rows


def findable(shape: str, context: Mapping[str, Any] | None = None) -> str:
    """A shape's name, the file after its colon by its absolute path: a worker may stand in another folder."""
    bare, _, value = shape.partition(":")
    try:
        if not Path(value or ".").is_file():
            return shape
        found = f"{bare}:{Path(value).absolute()}"
        builder_of(found, context)
    except (UsageError, OSError):  # a number, say, that also names a file
        return shape
    return found


def spread(work: Work, cells: Sequence[Cell], workers: int, scheduler: str) -> Iterator[Part]:
    """First nothing; then places of cells and what `work` made of them, here one by one, else as `on_workers`."""
    if cells and (workers > 1 or scheduler != LOCAL):
        yield from on_workers(work, cells, [len(cell.recording.tokens) for cell in cells], workers, scheduler)
        return
    yield [], []
    for place, counts in enumerate(work(cells)):
        yield [place], [counts]


class Cell(NamedTuple):
    """A recording and a setting: one row."""

    recording: Recording
    shape: str
    budget: int
    depth: int

    @property
    def setting(self) -> Setting:
        return self[1:]

    def __str__(self) -> str:
        return f"prompt {self.recording.prompt}, shape {self.shape}, budget {self.budget}, depth {self.depth}"


def count(
    cells: Iterable[Cell], context: Mapping[str, Any] | None = None, known: Mapping[str, str] | None = None
) -> Iterator[Counts]:
    """The counts of each cell's replay. UsageError for a shape whose `shape_sha256` is not the one that is `known`."""
    builders: dict[str, Callable[[np.ndarray], Builder]] = {}
    for cell in cells:
        shape, looping = cell.shape, cell.recording.looping
        if shape not in builders:
            builders[shape] = builder_of(shape, context)
            if known and shape_sha256(shape, context) != known[shape]:
                raise UsageError(f"shape: {shape}: its code or file is not the one that the sweep began with")
        rounds, nodes, inside, inside_tokens = 0, 0, 0, 0
        for this in _rounds(cell.recording, builders[shape], cell.budget, cell.depth):
            rounds += 1
            nodes += this.tree.num_nodes
            if looping[this.root]:
                inside += 1
                inside_tokens += len(this.tokens)
        yield rounds, nodes, inside, inside_tokens
