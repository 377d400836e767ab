"""The walk against the twin, integer for integer: wrong tokens, deep chains, tokens that stand elsewhere."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import selection
from kernels.device import scalar, to_device
from kernels.selection import Guarded, between_poison
from seeds import fresh_seed

from kernels_numba import accept
from kernels_numba.checks import LaunchError


def launch(parents, token_ids, target_tokens, num_nodes):
    """(path, result) of the kernel, inputs and outputs between poisoned neighbours."""
    path, result = Guarded(parents.shape, np.int32), Guarded(2, np.int32)
    rows = [between_poison(array) for array in (parents, token_ids, target_tokens)]
    accept.accept(*rows, scalar(num_nodes), path.array, result.array)
    return path.read(), result.read()


def check_accept(parents, token_ids, target_tokens, num_nodes=None, what=""):
    """The kernel's path and result against the twin's; returns the length."""
    arrays = [np.array(array, np.int32) for array in (parents, token_ids, target_tokens)]
    num_nodes = len(parents) - 1 if num_nodes is None else num_nodes
    want = selection.accept(*arrays, num_nodes)
    got = launch(*arrays, num_nodes)
    np.testing.assert_array_equal(got[0], want[0], f"{what}: path")
    np.testing.assert_array_equal(got[1], want[1], f"{what}: length and bonus")
    return int(want[1][0])


def random_tree(rng, num_nodes, vocab, chain):
    """Parents before children, siblings with distinct tokens; `chain` is how often a node hangs from the last."""
    parents, tokens, taken = [-1], [int(rng.integers(vocab))], set()
    while len(parents) <= num_nodes:
        parent = len(parents) - 1 if rng.random() < chain else int(rng.integers(len(parents)))
        token = int(rng.integers(vocab))
        if (parent, token) not in taken:
            taken.add((parent, token))
            parents.append(parent)
            tokens.append(token)
    return parents, tokens


def targets_along(rng, parents, tokens, vocab, hit):
    """Target tokens that name a child of their row with probability `hit`, else anything."""
    children = [[] for _ in parents]
    for row, parent in enumerate(parents[1:], 1):
        children[parent].append(tokens[row])
    return [
        int(rng.choice(children[row])) if children[row] and rng.random() < hit else int(rng.integers(vocab))
        for row in range(len(parents))
    ]


def check_random(seed, num_nodes, vocab, chain, hit, padding):
    """A random tree, then `padding` unused rows that would go on with the path if they were read."""
    rng = np.random.default_rng(seed)
    parents, tokens = random_tree(rng, num_nodes, vocab, chain)
    targets = targets_along(rng, parents, tokens, vocab, hit)
    last = int(
        selection.accept(*(np.array(a, np.int32) for a in (parents, tokens, targets)), num_nodes)[0].max()
    )
    parents += [last] * padding
    tokens += [targets[last]] * padding
    targets += [7] * padding
    what = f"seed {seed}, {num_nodes} nodes, vocabulary {vocab}"
    return check_accept(parents, tokens, targets, num_nodes, what)


def random_cases(num_nodes, vocab):
    """Seed, nodes, vocabulary, how deep, how often the target is a child's token, and rows that are not used."""
    often = st.sampled_from([0.0, 0.5, 0.95, 1.0])
    return st.tuples(st.integers(0, 2**32 - 1), num_nodes, vocab, often, often, st.integers(0, 5))


@pytest.mark.simulator
@settings(max_examples=40)
@given(random_cases(st.integers(0, 35), st.sampled_from([40, 60, 1000])))
def test_random_trees_small(case):
    check_random(*case)


@pytest.mark.gpu
@settings(max_examples=300)
@given(
    random_cases(
        st.one_of(st.integers(0, 1000), st.sampled_from([31, 32, 33, 63, 64, 65, 511, 512, 513, 1019])),
        st.sampled_from([1024, 5000, 163840]),
    )
)
def test_random_trees_large(case):
    check_random(*case)


#        0
#     1     2        tokens 10, 11
#   3   4     5      tokens 10, 12 | 10
PARENTS, TOKENS = [-1, 0, 0, 1, 1, 2], [10, 10, 11, 10, 12, 10]
WALKS = [
    ([99, 0, 0, 0, 0, 0], 5, 1),
    ([10, 12, 0, 0, 7, 0], 5, 3),
    ([10, 11, 0, 0, 0, 0], 5, 2),  # 11 hangs from the root, not from row 1
    ([11, 0, 10, 0, 0, 10], 5, 3),
    ([11, 0, -1, 0, 0, 0], 5, 2),  # no token is a sentinel
    ([11, 0, 10, 0, 0, 0], 4, 2),  # row 5 is not used
    ([10, 0, 0, 0, 0, 0], 0, 1),
]


def check_walks():
    for targets, num_nodes, length in WALKS:
        assert check_accept(PARENTS, TOKENS, targets, num_nodes, str(targets)) == length
    assert check_accept([-1], [3], [8]) == 1
    # Rows of an envelope that the tree does not fill: parent -1, token 0.
    assert check_accept([-1, 0, -1, -1], [5, 0, 0, 0], [0, 0, 0, 0], 1) == 2
    assert (
        check_accept([-1, 0, 0, 1, 2], [1, 4, 4, 5, 5], [4, 5, 5, 0, 0]) == 3
    )  # of equal siblings the first


@pytest.mark.simulator
def test_walks_small():
    check_walks()


@pytest.mark.gpu
def test_walks_large():
    check_walks()


def check_a_shorter_path():
    """A path in the array of a longer one: the rest of it is -1 again."""
    parents, tokens = (to_device(np.array(array, np.int32)) for array in (PARENTS, TOKENS))
    path, result = to_device(np.full(6, 7, np.int32)), to_device(np.full(2, 7, np.int32))
    for targets, want in (([10, 12, 0, 0, 7, 0], [0, 1, 4]), ([99] * 6, [0])):
        accept.accept(parents, tokens, to_device(np.array(targets, np.int32)), scalar(5), path, result)
        assert path.copy_to_host().tolist() == want + [-1] * (6 - len(want))
        assert result.copy_to_host().tolist() == [len(want), targets[want[-1]]]


@pytest.mark.simulator
def test_a_shorter_path_small():
    check_a_shorter_path()


@pytest.mark.gpu
def test_a_shorter_path_large():
    check_a_shorter_path()


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [1, 33, 512, 1024])
def test_the_deepest_chain(depth):
    parents = list(range(-1, depth))
    assert check_accept(parents, [5] * (depth + 1), [5] * (depth + 1)) == depth + 1
    assert check_accept(parents, [5] * (depth + 1), [5] * depth + [6], max(depth - 1, 0)) == depth
    seed = fresh_seed()
    check_random(seed, depth, 5000, 1.0, 1.0, 0)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def call(rows=3, tokens=3, path=3, result=2, num_nodes=1, dtype=np.int32):
        accept.accept(
            to_device(np.full(rows, -1, dtype)),
            to_device(np.zeros(tokens, np.int32)),
            to_device(np.zeros(rows, np.int32)),
            to_device(np.zeros(num_nodes, np.int32)),
            to_device(np.zeros(path, np.int32)),
            to_device(np.zeros(result, np.int32)),
        )

    call()
    most = accept.MAX_ROWS + 1
    for words in (
        {"rows": 0, "tokens": 0, "path": 0},
        {"rows": most, "tokens": most, "path": most},
        {"tokens": 4},
        {"path": 2},
        {"result": 1},
        {"num_nodes": 2},
        {"dtype": np.int64},
    ):
        with pytest.raises(LaunchError, match="accept"):
            call(**words)
