"""The state between rounds: reports, refusals of bad rows, positions, and the step to the next round."""

import numpy as np
import pytest
from kernels.device import poisoned, scalar, to_device, to_host

from kernels_numba import round_state
from kernels_numba.checks import LaunchError
from kernels_numba.round_state import HEAD, report_size

BOTH = [pytest.param(9, marks=pytest.mark.simulator), pytest.param(513, marks=pytest.mark.gpu)]
HERE = [pytest.param(None, marks=pytest.mark.simulator), pytest.param(None, marks=pytest.mark.gpu)]


def a_round(rows, num_nodes, path, bad_rows, seed=0):
    """Random arrays of a tree and its walk, settled; returns (arrays, result, report) on the host."""
    rng = np.random.default_rng(seed)
    names = ("target_tokens", "token_ids", "parents", "depths")
    arrays = {name: rng.integers(0, 1 << 17, rows).astype(np.int32) for name in names}
    arrays["path"] = np.full(rows, -1, np.int32)
    arrays["path"][: len(path)] = path
    arrays["log_weights"] = -rng.random(rows) * 1e-300 - rng.random(rows)
    bad = np.zeros(rows, np.uint8)
    bad[bad_rows] = 1
    d = {name: to_device(array) for name, array in arrays.items()}
    result, report = to_device(np.array([len(path), 77], np.int32)), poisoned((report_size(rows),), np.int32)
    round_state.settle(
        d["path"],
        d["target_tokens"],
        to_device(bad),
        scalar(num_nodes),
        d["token_ids"],
        d["parents"],
        d["depths"],
        d["log_weights"],
        result,
        report,
    )
    return arrays, to_host(result).tolist(), to_host(report)


@pytest.mark.parametrize("rows", BOTH)
def test_a_settled_report_holds_the_tree_and_the_walk(rows):
    path = [0, 2, rows - 2]
    arrays, result, report = a_round(rows, rows - 1, path, [1])
    assert result == [3, 77]
    assert report[:HEAD].tolist() == [3, 77, rows - 1, 1, -1]
    fields = report[HEAD:][: 5 * rows].reshape(5, rows)
    for name, got in zip(("target_tokens", "path", "token_ids", "parents", "depths"), fields, strict=True):
        assert got.tolist() == arrays[name].tolist(), name
    np.testing.assert_array_equal(report[HEAD + 5 * rows :].copy().view(np.float64), arrays["log_weights"])


@pytest.mark.parametrize("rows", BOTH)
def test_a_bad_row_on_the_walk_commits_nothing(rows):
    _, result, report = a_round(rows, rows - 1, [0, 3, rows - 1], [1, 3, rows - 1])
    assert result[0] == 0
    assert report[[0, 2, 3, 4]].tolist() == [0, rows - 1, 1, 3]


@pytest.mark.parametrize("rows", BOTH)
def test_bad_padding_rows_do_not_count(rows):
    _, result, report = a_round(rows, 3, [0, 2], [4, rows - 1])
    assert result == [2, 77] and report[[2, 3, 4]].tolist() == [3, 0, -1]


@pytest.mark.parametrize("here", HERE)
@pytest.mark.parametrize(
    ("length", "wanted", "context", "depth"),
    [(3, 20, 10, 7), (3, 5, 10, 1), (3, 3, 10, 0), (1, 30, 96, 2), (0, 9, 10, 7), (2, 90, 98, 0)],
)
def test_advance(here, length, wanted, context, depth):
    state = [scalar(value) for value in (context, wanted, -5)]
    tree, block = to_device(np.array([4, 5], np.int32)), to_device(np.array([6, 1], np.int32))
    round_state.advance(to_device(np.array([length, 9], np.int32)), 7, 100, *state, tree, block)
    assert [int(to_host(array)[0]) for array in state] == [context + length, wanted - length, depth]
    root = 9 if length else None
    assert to_host(tree).tolist() == [root or 4, 5] and to_host(block).tolist() == [root or 6, 1]


@pytest.mark.parametrize("here", HERE)
def test_a_chunk_is_decided_by_its_last_row(here):
    tokens, bad = to_device(np.array([11, 12, 13, 14], np.int32)), to_device(np.array([1, 0, 1, 1], np.uint8))
    for count, want in ((2, [2, 12, 0, 0, -1]), (3, [3, 13, 0, 0, 2])):
        result, report = poisoned((2,), np.int32), poisoned((HEAD,), np.int32)
        round_state.finish_chunk(scalar(count), tokens, bad, result, report)
        assert to_host(report).tolist() == want and to_host(result).tolist() == want[:2]


@pytest.mark.parametrize("rows", BOTH)
def test_positions_are_one_further_than_the_rows(rows):
    depths = np.arange(rows, dtype=np.int32) % 5
    out = poisoned((rows,), np.int32)
    round_state.next_positions(to_device(depths), scalar(40), out)
    assert to_host(out).tolist() == (41 + depths).tolist()


@pytest.mark.parametrize("here", HERE)
def test_stamps_rise(here):
    times = to_device(np.zeros(3, np.uint64))
    for slot in range(3):
        round_state.stamp(times, slot)
    stamps = to_host(times)
    assert 0 < stamps[0] <= stamps[1] <= stamps[2]


@pytest.mark.simulator
def test_wrong_arguments_launch_nothing():
    with pytest.raises(LaunchError, match="slot 3 of 3"):
        round_state.stamp(to_device(np.zeros(3, np.uint64)), 3)
    with pytest.raises(LaunchError, match="depths"):
        round_state.next_positions(to_device(np.zeros(3, np.int64)), scalar(0), poisoned((3,), np.int32))
    with pytest.raises(LaunchError, match="report"):
        round_state.finish_chunk(
            scalar(1), scalar(0), poisoned((1,), np.uint8), poisoned((2,), np.int32), poisoned((2,), np.int32)
        )
