"""The step-by-step tree is the reference's: rows, parents, path sums; its heap is what could come next."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ddtree.lab_tree import grow, growth_table
from ddtree.reference.tree_build import build_tree

VALUES = st.sampled_from([-0.25, -0.5, -1.0, -1.5, -3.0, -np.inf])


def reference(table: np.ndarray, budget: int) -> tuple[int, np.ndarray, np.ndarray, np.ndarray]:
    """Number of nodes, parents, depths and path sums of the reference's tree, whose tokens are ranks."""
    levels, width = table.shape
    outs = [np.empty(budget + 1, kind) for kind in (np.int32, np.int32, np.int32, np.float64)]
    ranks = np.broadcast_to(np.arange(width, dtype=np.int32), table.shape).copy()
    lineage = np.empty((budget + 1, levels + 1), np.int32)
    count = build_tree(ranks, table, budget, levels, *outs, lineage)
    return count, *(out[1 : count + 1] for out in outs)


@given(
    arrays(np.float32, st.tuples(st.integers(0, 5), st.integers(1, 5)), elements=VALUES),
    st.integers(0, 40),
)
def test_it_grows_the_reference_tree(table: np.ndarray, budget: int) -> None:
    table = -np.sort(-table, axis=1)
    steps = list(grow(table[:, :budget], budget))
    count, ranks, parents, depths, weights = reference(table, budget)
    assert len(steps) == count
    assert [s.row for s in steps] == list(range(1, count + 1))
    assert [s.ranks[-1] for s in steps] == ranks.tolist()
    assert [(s.parent, s.depth) for s in steps] == list(zip(parents, depths, strict=True))
    assert np.array([s.weight for s in steps]).tobytes() == weights.tobytes()


def test_the_heap_holds_what_comes_next() -> None:
    table = -np.sort(-np.random.default_rng(3).normal(-2, 1, (4, 3)).astype(np.float32), axis=1)
    steps = list(grow(table, 30))
    for step, after in itertools.pairwise(steps):
        assert step.heap[0] == (after.weight, after.ranks)
        assert set(step.pushed) <= set(step.heap)
        assert list(step.heap) == sorted(step.heap, key=lambda one: (-one[0], one[1]))


def test_the_table_shows_every_step() -> None:
    steps = list(grow(np.array([[-0.5, -1.0]], np.float32), 5))
    lines = growth_table(steps).splitlines()
    assert len(lines) == 3 and lines[1].split() == ["1", "0", "0", "-0.50", "1:-1.00", "1:-1.00"]
    assert lines[2].split() == ["2", "1", "0", "-1.00", "-", "-"]


@pytest.mark.parametrize("table", [np.zeros((0, 3)), np.zeros((3, 0)), np.full((2, 2), np.nan)])
def test_nothing_to_grow(table: np.ndarray) -> None:
    assert list(grow(table, 4)) == []
