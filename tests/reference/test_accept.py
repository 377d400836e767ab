"""The walk and the move: every child order, overlap, poison, and nothing written when nothing moves."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import CapacityError
from ddtree.reference.accept import accept, compact

#        0
#     1     2        tokens 10, 11
#   3   4     5      tokens 10, 12 | 10
PARENTS = np.array([-1, 0, 0, 1, 1, 2], np.int32)
TOKENS = np.array([10, 10, 11, 10, 12, 10], np.int32)


def walk(target_tokens, num_nodes=5):
    """Accept on the tree above into garbage; return (length, bonus, path)."""
    path = np.full(len(PARENTS), -777, np.int32)
    length, bonus = accept(PARENTS, TOKENS, np.array(target_tokens, np.int32), num_nodes, path)
    return length, bonus, path.tolist()


@pytest.mark.parametrize(
    ("target_tokens", "want"),
    [
        ([99, 0, 0, 0, 0, 0], (1, 99, [0, -1, -1, -1, -1, -1])),
        ([10, 12, 0, 0, 7, 0], (3, 7, [0, 1, 4, -1, -1, -1])),
        ([10, 11, 0, 0, 0, 0], (2, 11, [0, 1, -1, -1, -1, -1])),  # 11 hangs from the root, not from row 1
        ([11, 0, 10, 0, 0, 10], (3, 10, [0, 2, 5, -1, -1, -1])),
        ([11, 0, -1, 0, 0, 0], (2, -1, [0, 2, -1, -1, -1, -1])),  # no token is a sentinel
    ],
)
def test_the_walk(target_tokens, want):
    assert walk(target_tokens) == want


def test_rows_past_num_nodes_are_not_read():
    assert walk([11, 0, 10, 0, 0, 0], num_nodes=4) == (2, 10, [0, 2, -1, -1, -1, -1])
    assert walk([10, 0, 0, 0, 0, 0], num_nodes=0) == (1, 10, [0, -1, -1, -1, -1, -1])


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_the_walk_agrees_with_a_dictionary_of_children(data):
    num_nodes = data.draw(st.integers(0, 12))
    parents, tokens, children = [-1], [0], [{}]
    for row in range(1, num_nodes + 1):
        parent = data.draw(st.integers(0, row - 1))
        free = sorted(set(range(14)) - set(children[parent]))
        token = data.draw(st.sampled_from(free))
        children[parent][token] = row
        parents.append(parent)
        tokens.append(token)
        children.append({})
    target_tokens = data.draw(st.lists(st.integers(0, 13), min_size=num_nodes + 1, max_size=num_nodes + 1))
    row, want = 0, [0]
    while target_tokens[row] in children[row]:
        row = children[row][target_tokens[row]]
        want.append(row)
    path = np.full(num_nodes + 1, -777, np.int32)
    arrays = (np.array(values, np.int32) for values in (parents, tokens, target_tokens))
    assert accept(*arrays, num_nodes, path) == (len(want), target_tokens[row])
    assert path.tolist() == want + [-1] * (num_nodes + 1 - len(want))


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 5), st.sets(st.integers(1, 12)))
def test_every_cache_gets_the_path_and_keeps_the_rest(context_len, rows):
    """Poison in what was rejected must not reach what is kept, though sources and targets overlap."""
    path = [0, *sorted(rows)]
    capacity = context_len + 13
    caches = [np.arange(capacity * width, dtype=np.float32).reshape(capacity, width) for width in (1, 5)]
    before = [cache.copy() for cache in caches]
    for cache, old in zip(caches, before, strict=True):
        for row in set(range(13)) - set(path):
            cache[context_len + row] = old[context_len + row] = np.nan
    moved = compact(caches, context_len, np.array(path, np.int32))
    assert moved == sum(row != place for place, row in enumerate(path))
    for cache, old in zip(caches, before, strict=True):
        kept = context_len + len(path)
        np.testing.assert_array_equal(cache[:context_len], old[:context_len])
        np.testing.assert_array_equal(cache[context_len:kept], old[context_len + np.array(path)])
        assert np.isfinite(cache[:kept]).all()
        np.testing.assert_array_equal(cache[kept:], old[kept:])


@pytest.mark.parametrize("path", [[0], [0, 1], [0, 1, 2, 3]])
def test_a_path_in_place_writes_nothing(path):
    cache = np.zeros((8, 2), np.float32)
    cache.flags.writeable = False  # a write would raise
    assert compact([cache, cache], 4, path) == 0


def test_rows_in_place_are_not_written_when_later_rows_move():
    class Recorder(np.ndarray):
        def __setitem__(self, key, value):
            written.append(key)
            super().__setitem__(key, value)

    written = []
    compact([np.zeros((9, 2)).view(Recorder)], 2, [0, 1, 3, 6])
    assert written == [slice(4, 6)]


def test_a_row_past_the_end_of_any_cache_is_refused_before_any_write():
    caches = [np.arange(10.0).reshape(10, 1), np.arange(9.0).reshape(9, 1)]
    with pytest.raises(CapacityError, match="row 9 of cache 1, which has 9 rows"):
        compact(caches, 4, [0, 2, 5])
    assert caches[0][:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("path", [[], [1], [0, 2, 2], [0, 3, 1]])
def test_a_path_that_is_none_is_a_mistake(path):
    with pytest.raises(AssertionError):
        compact([np.zeros((9, 1))], 0, path)
