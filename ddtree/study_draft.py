"""How good a drafter is, from recorded rounds: is it calibrated, where does it first miss, what follows?

Data in, numbers out; it runs no model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ddtree.errors import UsageError
from ddtree.study_rounds import AnyRound, Seen, seen_rounds, with_tables
from ddtree.study_summary import share_interval

# Predicted probabilities span decades: two bins each from 1e-4 up, and one for all below
LOG_BINS = np.concatenate([[0.0], 10.0 ** np.linspace(-4, 0, 9)])
Z95 = 1.959963984540054  # of the normal distribution, two-sided 95%


def wilson(hits: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper end of Wilson's 95% interval of a share, trials taken as independent; NaN without a trial."""
    with np.errstate(invalid="ignore", divide="ignore"):
        share = hits / counts
        middle = (share + Z95**2 / (2 * counts)) / (1 + Z95**2 / counts)
        half = Z95 * np.sqrt(share * (1 - share) / counts + Z95**2 / (4 * counts**2)) / (1 + Z95**2 / counts)
    return np.maximum(middle - half, 0.0), np.minimum(middle + half, 1.0)


@dataclass(frozen=True)
class Calibration:
    """Drafted nodes by predicted path probability: `edges` [B + 1]; per bin f64 [B] all else.

    `predicted` is the mean prediction, `observed` the share of nodes accepted, `low` and `high` its 95% interval
    (Wilson, nodes taken as independent, which siblings and ancestors are not). Empty bins hold NaN and count 0.
    """

    edges: np.ndarray
    counts: np.ndarray
    predicted: np.ndarray
    observed: np.ndarray
    low: np.ndarray
    high: np.ndarray


def calibration(rounds: Iterable[AnyRound], bins: int | Sequence[float] = LOG_BINS) -> Calibration:
    """Hold every drafted node's exp(path log-prob) to whether the target accepted it.

    `bins` is how many of equal width between 0 and 1, or their edges; a bin holds its upper edge. A node counts as
    accepted when it lies on the accepted path, whether or not a stop token cut the path. UsageError without a node.
    """
    edges = np.linspace(0, 1, bins + 1) if isinstance(bins, int) else np.asarray(bins, float)
    predictions, hits = [], []
    for this in seen_rounds(rounds):
        accepted = np.zeros(len(this.tree.token_ids), bool)
        accepted[this.path] = True
        predictions.append(np.exp(this.tree.log_weights[1:]))
        hits.append(accepted[1:])
    if not sum(map(len, hits)):
        raise UsageError("rounds: none drafted a node, so there is nothing to calibrate")
    predicted, hit = np.concatenate(predictions), np.concatenate(hits)
    which = np.clip(np.searchsorted(edges, predicted) - 1, 0, len(edges) - 2)
    size = len(edges) - 1
    counts, accepted = (np.bincount(which, weights, size) for weights in (None, hit))
    with np.errstate(invalid="ignore"):
        mean, observed = np.bincount(which, predicted, size) / counts, accepted / counts
    return Calibration(edges, counts, mean, observed, *wilson(accepted, counts))


@dataclass(frozen=True)
class SiblingTable:
    """Where the target's token stood in the drafter's table, at every depth that the spine reached right.

    Row d - 1 is depth d. `hits` [L, R]: rounds whose token at that depth was the drafter's rank 0, 1, .. R - 1; rank 0
    keeps to the spine, any other is the round's first miss. `beyond` [L]: rounds whose token ranked later, or was not
    in the table. `followed` and `child_right` [L, R]: of those hits, how many had a next depth and token to look at,
    and how often the drafter's top-1 there was right. `decodes` are the tables of the decodes, a prompt each, that this
    one sums: intervals are 95%, by bootstrap over them, NaN where fewer than two had something to see.
    """

    hits: np.ndarray
    beyond: np.ndarray
    followed: np.ndarray
    child_right: np.ndarray
    decodes: tuple[SiblingTable, ...] = ()

    @property
    def reached(self) -> np.ndarray:
        """Rounds [L] whose spine was right above each depth, with a known token there."""
        return self.hits.sum(1) + self.beyond

    @property
    def first_misses(self) -> int:
        """Rounds whose spine missed at some depth."""
        return int(self.hits[:, 1:].sum() + self.beyond.sum())

    def share_of_misses(self) -> np.ndarray:
        """Of the first misses, the share [R] that rank r would have caught; NaN at rank 0, or without a miss."""
        share = self.hits.sum(0) / self.first_misses if self.first_misses else self.hits.sum(0) * np.nan
        return np.where(np.arange(len(share)) == 0, np.nan, share)

    def continuation(self) -> np.ndarray:
        """For a hit of rank r, how often [R] the top-1 one deeper is right too; NaN where none could be seen."""
        with np.errstate(invalid="ignore"):
            return self.child_right.sum(0) / self.followed.sum(0)

    def interval_of_misses(self) -> tuple[np.ndarray, np.ndarray]:
        """Both ends [R + 1] of the interval of `share_of_misses`, and last of what ranked later."""

        def caught(table: SiblingTable) -> np.ndarray:
            return np.append(table.hits.sum(0), table.beyond.sum())

        low, high = self._interval(caught, lambda table: np.full(len(caught(table)), table.first_misses))
        low[0] = high[0] = np.nan
        return low, high

    def interval_of_continuation(self) -> tuple[np.ndarray, np.ndarray]:
        """Both ends [R] of the interval of `continuation`."""
        return self._interval(lambda table: table.child_right.sum(0), lambda table: table.followed.sum(0))

    def interval_of_children(self) -> tuple[np.ndarray, np.ndarray]:
        """Both ends [L, R] of the interval of child_right / followed."""
        return self._interval(lambda table: table.child_right, lambda table: table.followed)

    def _interval(self, part: Counted, whole: Counted) -> tuple[np.ndarray, np.ndarray]:
        parts, wholes = (
            np.reshape([counted(each) for each in self.decodes], (len(self.decodes), *counted(self).shape))
            for counted in (part, whole)
        )
        return share_interval(parts, wholes)


Counted = Callable[[SiblingTable], np.ndarray]


def sibling_table(rounds: Iterable[AnyRound], ranks: int = 4) -> SiblingTable:
    """Follow each round's continuation down the drafter's table while its top-1 is right, and one depth past the miss.

    It needs tables, and a decode's rounds together and in order; the tree does not matter, so chains and trees of any
    budget give the same. UsageError without a table.
    """
    seen = with_tables(rounds)
    depths = max(len(this.table[0]) for this in seen)
    decodes: list[list[Seen]] = []
    for this in seen:
        if not decodes or this.index <= decodes[-1][-1].index:
            decodes.append([])
        decodes[-1].append(this)
    tables = tuple(_sibling_counts(each, depths, ranks) for each in decodes)
    sums = (np.sum([getattr(each, name) for each in tables], axis=0) for name in COUNTS)
    return SiblingTable(*sums, tables)


COUNTS = ("hits", "beyond", "followed", "child_right")


def _sibling_counts(seen: Sequence[Seen], depths: int, ranks: int) -> SiblingTable:
    hits, followed, child_right = (np.zeros((depths, ranks), np.int64) for _ in range(3))
    beyond = np.zeros(depths, np.int64)
    for this in seen:
        token_ids, truth = this.table[0], this.continuation
        for depth in range(min(len(token_ids), len(truth))):
            places = np.flatnonzero(token_ids[depth] == truth[depth])
            rank = int(places[0]) if len(places) else ranks
            if rank >= ranks:
                beyond[depth] += 1
                break
            hits[depth, rank] += 1
            if depth + 1 < min(len(token_ids), len(truth)):
                followed[depth, rank] += 1
                child_right[depth, rank] += token_ids[depth + 1, 0] == truth[depth + 1]
            if rank:
                break
    return SiblingTable(hits, beyond, followed, child_right)
