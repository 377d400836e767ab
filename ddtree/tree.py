"""DraftTree: drafted tokens as a tree, its invariants, and the forms in which it is read.

Knows neither how the nodes were chosen (shapes/) nor what the target says of them.
"""

from dataclasses import dataclass

import numpy as np

from ddtree.errors import ConfigError
from ddtree.reference.tree_build import fill_lineage

DTYPES = {"token_ids": np.int32, "parents": np.int32, "depths": np.int32, "log_weights": np.float64}


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree of M = num_nodes + 1 rows in the builder's order; row 0 is the root, the last committed token.

    token_ids, parents (-1 for the root) and depths (root 0) i32 [M]; log_weights f64 [M], natural-log path sums.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    log_weights: np.ndarray

    @classmethod
    def root_only(cls, token_id):
        """Return the tree of no nodes: a round on it is one autoregressive step."""
        zero = np.zeros(1, np.int32)
        return cls(np.array([token_id], np.int32), zero - 1, zero, np.zeros(1, np.float64))

    @property
    def num_nodes(self):
        """Drafted tokens, the root not counted."""
        return len(self.token_ids) - 1

    @property
    def max_depth(self):
        """Depth of the deepest row; 0 for a root-only tree."""
        return int(self.depths.max())

    def lineage(self, width=None):
        """Return i32 [M, width]: each row's ancestor at every depth, itself at its own, -1 beyond.

        width defaults to max_depth + 1; ConfigError if it is less.
        """
        width = self.max_depth + 1 if width is None else width
        if width <= self.max_depth:
            raise ConfigError(
                f"lineage: width is {width}, wanted at least max_depth + 1 = {self.max_depth + 1}"
            )
        lineage = np.empty((len(self.parents), width), np.int32)
        fill_lineage(self.parents, self.depths, lineage)
        return lineage

    @property
    def visible(self):
        """Bool [M, M]: whether row i may attend to row j, that is, j is i or an ancestor of i."""
        return visible_rows(self.lineage())

    def children(self, row):
        """Return the rows i64 [n] whose parent is row, in the builder's order."""
        return np.flatnonzero(self.parents == row)

    def path(self, row):
        """Return the rows from the root to row, both included, as a list of ints."""
        rows = []
        while row >= 0:
            rows.append(int(row))
            row = self.parents[row]
        return rows[::-1]

    def validate(self):
        """Raise ConfigError naming the first invariant that does not hold and where; return self otherwise."""
        for name, dtype in DTYPES.items():
            array = getattr(self, name)
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ConfigError(f"tree: {name} must be a one-dimensional {np.dtype(dtype)} array")
            if len(array) != len(self.token_ids) or len(array) == 0:
                raise ConfigError(
                    f"tree: {name} has {len(array)} rows, token_ids {len(self.token_ids)}; want equal, >= 1"
                )
        rows = np.arange(1, len(self.parents))
        parents = self.parents[1:]
        _require(self.parents[:1] == -1, "row 0 is the root, parent -1")
        _require(self.depths[:1] == 0, "the root has depth 0")
        _require(self.log_weights[:1] == 0, "the root has log weight 0")
        _require(self.token_ids >= 0, "token ids are not negative")
        _require(parents >= 0, "there is one root", first_row=1)
        _require(parents < rows, "parents precede children", first_row=1)
        _require(self.depths[1:] == self.depths[parents] + 1, "a depth is the parent's + 1", first_row=1)
        _require(np.isfinite(self.log_weights), "log weights are finite")
        pairs = parents.astype(np.int64) << 32 | self.token_ids[1:]
        _, first_seen, group = np.unique(pairs, return_index=True, return_inverse=True)
        _require(first_seen[group] == rows - 1, "siblings have distinct tokens", first_row=1)
        return self

    def to_json(self):
        """Return the trace's form: a dict of plain lists under token_ids, parents, depths and log_weights."""
        return {name: getattr(self, name).tolist() for name in DTYPES}

    @classmethod
    def from_json(cls, record):
        """Return the valid tree that `to_json` made record from; ConfigError says what is wrong with it."""
        arrays = {}
        for name, dtype in DTYPES.items():
            values = record.get(name)
            kinds = (int,) if dtype is np.int32 else (int, float)
            if not isinstance(values, list) or any(type(value) not in kinds for value in values):
                raise ConfigError(
                    f"tree: {name} must be a list of {'integers' if len(kinds) == 1 else 'numbers'}"
                )
            try:
                arrays[name] = np.array(values, dtype)
            except OverflowError:
                raise ConfigError(f"tree: {name} has a value that {np.dtype(dtype)} cannot hold") from None
        return cls(**arrays).validate()


def visible_rows(lineage):
    """Return the ancestor-or-self matrix bool [M, M] behind a lineage i32 [M, D]."""
    visible = np.zeros((len(lineage), len(lineage)), bool)
    rows, depths = np.nonzero(lineage >= 0)
    visible[rows, lineage[rows, depths]] = True
    return visible


def _require(holds, invariant, first_row=0):
    """Raise ConfigError naming the invariant and the first row where holds (bool [n]) is false."""
    if not holds.all():
        raise ConfigError(f"tree: row {first_row + int(np.argmin(holds))}: {invariant}; it does not hold")
