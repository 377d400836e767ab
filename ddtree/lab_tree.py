"""How the best-first tree grows, step by step: what the heap holds after each node. The algorithm is
`ddtree.reference.tree_build`'s; this one shows its work.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

from ddtree.lab import text_table

Candidate = tuple[float, tuple[int, ...]]  # path sum, ranks along the path


@dataclass(frozen=True)
class Step:
    """One node taken: its row, path sum, ranks along its path, its parent's row; what it pushed; the heap then."""

    row: int
    weight: float
    ranks: tuple[int, ...]
    parent: int
    pushed: tuple[Candidate, ...]
    heap: tuple[Candidate, ...]  # best first

    @property
    def depth(self) -> int:
        return len(self.ranks)


def grow(log_probs: Sequence[Sequence[float]], budget: int) -> Iterator[Step]:
    """Take the best candidate until `budget` nodes are taken or none is left; log_probs [L][K], descending.

    A node's sibling (next rank, same parent) and its first child become candidates when it is taken, and not before.
    """
    heap: list[tuple[float, tuple[int, ...], int]] = []  # (-path sum, ranks, parent's row)
    if len(log_probs) and len(log_probs[0]) and isfinite(log_probs[0][0]):
        heap.append((-float(log_probs[0][0]), (0,), 0))
    for row in range(1, budget + 1):
        if not heap:
            return
        negated, ranks, parent = heapq.heappop(heap)
        weight, depth, rank = -negated, len(ranks), ranks[-1]
        level, pushed = log_probs[depth - 1], []
        if rank + 1 < len(level):
            sibling = weight - float(level[rank]) + float(level[rank + 1])
            pushed.append((sibling, (*ranks[:-1], rank + 1), parent))
        if depth < len(log_probs):
            pushed.append((weight + float(log_probs[depth][0]), (*ranks, 0), row))
        pushed = [candidate for candidate in pushed if isfinite(candidate[0])]
        for candidate, path, above in pushed:
            heapq.heappush(heap, (-candidate, path, above))
        shown = tuple((-value, path) for value, path, _ in sorted(heap))
        yield Step(row, weight, ranks, parent, tuple(one[:2] for one in pushed), shown)


def growth_table(steps: Sequence[Step]) -> str:
    """The steps as text; a candidate is written as the ranks along its path and its path sum."""

    def written(candidate: Candidate) -> str:
        return f"{''.join(map(str, candidate[1]))}:{candidate[0]:.2f}"

    rows = [
        (
            step.row,
            f"{''.join(map(str, step.ranks))}",
            step.parent,
            f"{step.weight:.2f}",
            " ".join(map(written, step.pushed)) or "-",
            " ".join(map(written, step.heap)) or "-",
        )
        for step in steps
    ]
    headings = ("row", "ranks", "parent", "path sum", "pushed: sibling, child", "heap afterwards, best first")
    return text_table(headings, rows)
