"""Replay many: any shape, budget and depth walked along recorded continuations, without a model.

From the first token on: build the tree from the recorded table at the root, accept along the true continuation, add
the bonus token, cut at the tokens wanted, and go on at the next root: the rounds that a decode would have had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ddtree.errors import UsageError
from ddtree.shapes import get_shape
from ddtree.study_fast import accepted_length, best_first
from ddtree.study_recordings import Recording
from ddtree.tree import DraftTree

CHUNKS = 4  # pieces of work a worker gets, at least: the last ones to finish leave little idle

Setting = tuple[str, int, int]  # shape, budget, depth
Counts = tuple[int, int, int, int]  # rounds, nodes, rounds inside loops and their tokens


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
            table = recording.table(root, budget)
            tree = build_for(after)(*table, budget, max_depth, root_token=token)
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
    """Raise UsageError for an unknown shape, or a budget or depth that a recording's tables cannot decide."""
    for shape in shapes:
        builder_of(shape, context)
    budgets, depths = list(budgets), list(depths)
    if min(budgets, default=0) < 0 or min(depths, default=0) < 0:
        raise UsageError("budget, depth: neither may be negative")
    for recording in recordings:
        most = recording.most_budget
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
) -> list[dict[str, Any]]:
    """One row for each recording, shape, budget and depth (default: the horizon), in that order.

    With workers > 1 as many processes share the recordings; the rows are the same. A script that asks for them keeps
    its own code under `if __name__ == "__main__"`, as multiprocessing wants. `progress(rows done, total)` hears of
    each piece of work; `context` is as in `replay_rounds`, and goes to workers by pickle. Raises UsageError as
    `check_settings` does, or when a worker dies.
    """
    if not recordings or workers < 1:
        raise UsageError("replay: expected at least one recording and one worker")
    depths = [max(each.horizon for each in recordings)] if depths is None else depths
    settings = list(product(dict.fromkeys(shapes), dict.fromkeys(budgets), dict.fromkeys(depths)))
    check_settings(recordings, shapes, budgets, depths, context)
    pieces = _pieces(recordings, settings, workers)
    rows: list[dict[str, Any]] = []
    for (recording, part), counts in zip(
        pieces, _map(partial(count, context=context), pieces, workers), strict=True
    ):
        rows += [_row(recording, *setting, *counted) for setting, counted in zip(part, counts, strict=True)]
        if progress:
            progress(len(part), len(recordings) * len(settings))
    return rows


Piece = tuple[Recording, list[Setting]]


def _pieces(recordings: Sequence[Recording], settings: list[Setting], workers: int) -> list[Piece]:
    """The work in the rows' order: a recording with all its settings, cut where there are few recordings."""
    cuts = min(len(settings), -(-CHUNKS * workers // len(recordings))) if workers > 1 else 1
    bounds = [len(settings) * cut // cuts for cut in range(cuts + 1)]
    parts = [settings[low:high] for low, high in pairwise(bounds)]
    return [(recording, part) for recording in recordings for part in parts]


def _map(work: Callable[[Piece], list[Counts]], pieces: list[Piece], workers: int) -> Iterator[list[Counts]]:
    """What `work` makes of each piece, in order; workers are fresh processes with one BLAS thread each."""
    if workers == 1:
        yield from map(work, pieces)
        return
    one_thread = partial(threadpool_limits, 1)
    try:
        with ProcessPoolExecutor(workers, get_context("spawn"), one_thread) as pool:
            yield from pool.map(work, pieces)
    except BrokenProcessPool:
        raise UsageError("workers: a worker process ended before its work; ask for fewer --workers") from None


def count(piece: Piece, context: Mapping[str, Any] | None = None) -> list[Counts]:
    """The counts of one recording's replays, one a setting: all that a worker sends back."""
    recording, settings = piece
    looping = recording.looping
    builders = {shape: builder_of(shape, context) for shape in dict.fromkeys(each[0] for each in settings)}
    counts = []
    for shape, budget, depth in settings:
        rounds, nodes, inside, inside_tokens = 0, 0, 0, 0
        for this in _rounds(recording, builders[shape], budget, depth):
            rounds += 1
            nodes += this.tree.num_nodes
            if looping[this.root]:
                inside += 1
                inside_tokens += len(this.tokens)
        counts.append((rounds, nodes, inside, inside_tokens))
    return counts


def _row(
    recording: Recording,
    shape: str,
    budget: int,
    depth: int,
    rounds: int,
    nodes: int,
    inside: int,
    inside_tokens: int,
) -> dict[str, Any]:
    """What one replay amounts to; tokens count the first, which the prefill gives. Lengths count the bonus token."""
    committed = len(recording.tokens) - 1

    def mean(total: int, count: int) -> float | None:
        return total / count if count else None

    return {
        "shape": shape,
        "budget": budget,
        "depth": depth,
        "temperature": recording.temperature,
        "prompt": recording.prompt,
        "kind": recording.kind,
        "sequence": recording.sequence,
        "rounds": rounds,
        "tokens": len(recording.tokens),
        "mean_acceptance": mean(committed, rounds),
        "nodes": nodes,
        "nodes_per_round": mean(nodes, rounds),
        "loop_tokens": int(recording.looping.sum()),
        "rounds_inside_loops": inside,
        "tokens_inside_loops": inside_tokens,
        "mean_acceptance_inside_loops": mean(inside_tokens, inside),
        "rounds_outside_loops": rounds - inside,
        "tokens_outside_loops": committed - inside_tokens,
        "mean_acceptance_outside_loops": mean(committed - inside_tokens, rounds - inside),
        "trace_sha256": recording.sha256,
    }


def totals(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows summed over prompts, for each shape, budget, depth and temperature; means weigh rounds equally."""
    keys = ("temperature", "shape", "budget", "depth")
    counts = ("rounds", "tokens", "nodes", "rounds_outside_loops", "tokens_outside_loops")
    sums: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        total = sums.setdefault(
            key, dict(zip(keys, key, strict=True)) | dict.fromkeys((*counts, "prompts"), 0)
        )
        total["prompts"] += 1
        for name in counts:
            total[name] += row[name]
    for total in sums.values():
        rounds, outside = total["rounds"], total["rounds_outside_loops"]
        total["mean_acceptance"] = (total["tokens"] - total["prompts"]) / rounds if rounds else None
        total["nodes_per_round"] = total["nodes"] / rounds if rounds else None
        total["mean_acceptance_outside_loops"] = total["tokens_outside_loops"] / outside if outside else None
    return list(sums.values())


def write_rows(path: Path | str, rows: Iterable[dict[str, Any]]) -> None:
    """Write rows as JSON Lines to a file that replaces `path` when it is whole; UsageError if it cannot."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp") if path.name else path
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot write the rows: it is no regular file")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path}: cannot write the rows: {error.strerror}") from None
