"""What the tree-verify attention refuses, and calls at the edge of nothing."""

import numpy as np
import pytest
from compare_arrays import assert_close
from kernels.attention_tree import Case, launch, make, textbook
from kernels.device import poisoned, scalar, to_device, to_host
from kernels.softmax import EPS

from kernels_numba.attention import attention, attention_scratch
from kernels_numba.checks import LaunchError


def arguments(case):
    """Arguments of a launch that would run."""
    tree, queries, caches = make(case)
    arrays = [to_device(array) for array in (*queries, *caches, tree.lineage(), tree.depths)]
    scratch = poisoned(attention_scratch(case.rows, case.heads, case.rank, len(caches[0])))
    return [*arrays, scalar(case.context_len), 0.1, poisoned(queries[0].shape), scratch]


WRONG = [
    (0, lambda a: to_device(np.zeros(a.shape, np.float64)), "q_latent: expected dtype float32"),
    (0, lambda a: poisoned((*a.shape[:2], 12)), "R: expected a multiple of 8, found 12"),
    (1, lambda a: poisoned((a.shape[0] + 1, *a.shape[1:])), "q_rope: expected shape"),
    (1, lambda a: poisoned((*a.shape[:2], 4)), "P: expected a multiple of 8, found 4"),
    (2, lambda a: poisoned((a.shape[0], a.shape[1] + 8)), "latent_cache: expected shape"),
    (3, lambda a: poisoned(a.shape, np.uint16), "rope_cache: expected dtype float32, found uint16"),
    (3, lambda a: poisoned((a.shape[0] - 1, a.shape[1])), "rope_cache: expected shape"),
    (4, lambda a: poisoned(a.shape, np.int64), "lineage: expected dtype int32"),
    (5, lambda a: poisoned(a.shape[0] + 1, np.int32), "depths: expected shape"),
    (6, lambda a: poisoned(2, np.int32), "context_len: expected shape"),
    (8, lambda a: poisoned((*a.shape[:2], a.shape[2] + 8)), "out: expected shape"),
    (9, lambda a: poisoned(a.size - 1), "scratch: expected"),
]


@pytest.mark.simulator
@pytest.mark.parametrize(("position", "change", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_refuses(position, change, message):
    given = arguments(Case(3, rows=2, heads=2))
    given[position] = change(given[position])
    with pytest.raises(LaunchError, match=f"attention: {message}"):
        attention(*given)
    assert np.isnan(to_host(given[8])).all() or position == 8, "launched all the same"


@pytest.mark.simulator
def test_refuses_keys_too_wide_for_shared_memory():
    given = arguments(Case(3))
    given[0], given[8] = (poisoned((1, 1, 4096)) for _ in range(2))
    given[2] = poisoned((len(given[2]), 4096))
    with pytest.raises(LaunchError, match=r"attention: R \+ P: expected sixteen keys to fit .*, found 4104"):
        attention(*given)


@pytest.mark.simulator
def test_no_rows_is_nothing_to_do():
    given = arguments(Case(3))
    given[0], given[1], given[8] = (poisoned((0, *given[i].shape[1:])) for i in (0, 1, 8))
    given[4], given[5] = poisoned((0, 1), np.int32), poisoned(0, np.int32)
    attention(*given)


@pytest.mark.simulator
def test_a_missing_ancestor_is_noticed():
    """The check is sharp: a wrong ancestor moves the result by far more than is allowed, where it has some weight."""
    case = Case(3, rows=4, tree="chain")
    tree, queries, caches = make(case, seed=1)
    wrong = tree.lineage()
    wrong[-1, 1] = wrong[-1, 0]
    got = launch(case, queries, caches, wrong, tree.depths, case.context_len)
    want, allowed = textbook(case, tree, queries, caches)
    assert_close(got[:-1], want[:-1], EPS, "the others", scale=allowed[:-1])
    assert (np.abs(got - want)[-1] > 100 * EPS * allowed[-1]).any()
    with pytest.raises(AssertionError, match=r"the worst, \[3, "):
        assert_close(got, want, EPS, "wrong lineage", scale=allowed)
