"""The branch-aware tree on the GPU, bit for bit the twin's: ties of every kind, rows that end anywhere, equal rows."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import selection
from kernels.device import scalar, to_device
from kernels.selection import Guarded, between_poison, tree_shapes
from seeds import fresh_seed

from kernels_numba import tree_build, tree_build_branch
from kernels_numba.checks import LaunchError
from kernels_numba.primitives_tree import GROUP, MAX_BUDGET, MAX_DEPTHS

INF, NAN = np.inf, np.nan
TIE_HEAVY = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -2.0, -INF])
ENDING = st.one_of(st.floats(-(2.0**100), 0, width=32), st.sampled_from([0.0, -0.5, -INF, INF, NAN, 1.0]))


def launch(build, table, budget, max_depth):
    """A kernel's outputs by name, its inputs and outputs between poisoned neighbours."""
    out = {name: Guarded(*form) for name, form in tree_shapes(budget, len(table[0])).items()}
    arrays = [guarded.array for guarded in out.values()]
    build(*map(between_poison, table), budget, between_poison(np.array([max_depth], np.int32)), *arrays)
    return {name: guarded.read() for name, guarded in out.items()}


def random_places(seed, depths, width):
    """Token ids [L, P], each its own, and places i32 [L, P, P], a permutation a row."""
    rng = np.random.default_rng(seed)
    places = rng.permuted(np.broadcast_to(np.arange(width, dtype=np.int32), (depths, width, width)), axis=2)
    return np.arange(1000, 1000 + depths * width, dtype=np.int32).reshape(depths, width), places


def check_tree(log_probs, budget, max_depth=99, places_seed=0, what=""):
    """Every output of the kernel against the twin's, in every bit; returns the number of nodes."""
    log_probs = np.ascontiguousarray(log_probs, np.float32)
    token_ids, places = random_places(places_seed, *log_probs.shape[:2])
    table = token_ids, np.ascontiguousarray(places), log_probs
    got = launch(tree_build_branch.build_branch_tree, table, budget, max_depth)
    for name, array in selection.build_branch_tree(*table, budget, max_depth).items():
        assert_same_bits(got[name], array, f"{what}, places {places_seed}: {name}")
    return int(got["num_nodes"][0])


def tables(values, most_depths, most_width):
    """Tables [L, P, P], descending along the last axis unless a NaN stands in the way."""
    shapes = st.tuples(st.integers(1, most_depths), st.integers(1, most_width))

    def table(shape):
        depths, width = shape
        row = st.lists(values, min_size=width, max_size=width).map(lambda row: sorted(row, reverse=True))
        rows = st.lists(row, min_size=depths * width, max_size=depths * width)
        return rows.map(lambda rows: np.array(rows).reshape(depths, width, width))

    return shapes.flatmap(table)


def random_table(seed, depths, width, step=0.0, none=0.0):
    """A random table of log-probabilities, in multiples of `step` if given, a share `none` of them -inf."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((depths, width, width)) * rng.uniform(0.5, 6, (depths, width, 1))
    log_probs = logits - np.logaddexp.reduce(logits, axis=2, keepdims=True)
    if step:
        log_probs = np.round(log_probs / step) * step
    log_probs[rng.random(log_probs.shape) < none] = -INF
    return -np.sort(-log_probs, axis=2)


@pytest.mark.simulator
@settings(max_examples=50)
@given(tables(TIE_HEAVY, 4, 3), st.integers(0, 12), st.integers(0, 5), st.integers(0, 99))
def test_ties_small(table, budget, max_depth, seed):
    check_tree(table, budget, max_depth, seed)


@pytest.mark.simulator
@settings(max_examples=30)
@given(tables(ENDING, 4, 3), st.integers(0, 8), st.integers(0, 5), st.integers(0, 99))
def test_rounding_and_ends_small(table, budget, max_depth, seed):
    check_tree(table, budget, max_depth, seed)


@pytest.mark.gpu
@settings(max_examples=400)
@given(tables(TIE_HEAVY, 5, 4), st.integers(0, 130), st.integers(0, 7), st.integers(0, 1 << 20))
def test_ties_large(table, budget, max_depth, seed):
    check_tree(table, budget, max_depth, seed)


@pytest.mark.gpu
@settings(max_examples=400)
@given(tables(ENDING, 6, 4), st.integers(0, 130), st.integers(0, 7), st.integers(0, 1 << 20))
def test_rounding_and_ends_large(table, budget, max_depth, seed):
    check_tree(table, budget, max_depth, seed)


@pytest.mark.simulator
@pytest.mark.parametrize(
    ("depths", "width", "budget"), [(3, 16, 9), (15, 2, 2 * GROUP + 5), (1, 16, 20), (6, 1, 9)]
)
def test_sizes_small(depths, width, budget):
    for step in (0.0, 1.0):
        num_nodes = check_tree(random_table(3, depths, width, step), budget, what=f"{depths} x {width}")
        assert num_nodes == min(budget, depths * width if 1 in (depths, width) else budget)


@pytest.mark.gpu
@pytest.mark.parametrize("none", [0.0, 0.6])
@pytest.mark.parametrize("step", [0.0, 0.25, 2.0])
@pytest.mark.parametrize(
    ("depths", "width", "budget"),
    [
        (15, 16, 64),
        (15, 16, 256),
        (7, 16, 1024),
        (32, 16, 1024),
        (32, 1, 64),
        (1, 16, 64),
        (4, 3, 130),
        (15, 15, 0),
    ],
)
def test_sizes_large(depths, width, budget, step, none):
    seed = fresh_seed()
    what = f"{depths} x {width}, budget {budget}, step {step}, none {none}, seed {seed}"
    check_tree(random_table(seed, depths, width, step, none), budget, places_seed=seed, what=what)


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -0.1])
def test_one_value_everywhere(value):
    """Every candidate ties with every other of its depth; with 0, with all."""
    for budget in (*range(65), 1024):
        check_tree(np.full((5, 4, 4), value), budget, what=f"budget {budget} of {value}")


def check_alike(depths, width, budget, max_depth, step, seed):
    """Rows alike for every parent, in candidate order: the kernel's tree is build_tree's of that row."""
    row = random_table(seed, depths, width, step, none=0.1)[:, 0].astype(np.float32)
    token_ids = np.random.default_rng(seed).integers(0, 1 << 17, (depths, width)).astype(np.int32)
    cube = np.zeros((width, 1), np.int32) + np.arange(width, dtype=np.int32)
    places = np.repeat(cube[None], depths, axis=0)
    rows = np.repeat(row[:, None], width, axis=1)
    got = launch(tree_build_branch.build_branch_tree, (token_ids, places, rows), budget, max_depth)
    want = launch(tree_build.build_tree, (token_ids, row), budget, max_depth)
    for name, array in want.items():
        assert_same_bits(got[name], array, f"{depths} x {width}, budget {budget}, seed {seed}: {name}")


@pytest.mark.simulator
@pytest.mark.parametrize(("budget", "max_depth"), [(0, 3), (1, 3), (9, 3), (9, 2), (40, 3)])
def test_rows_alike_give_the_plain_tree_small(budget, max_depth):
    check_alike(3, 4, budget, max_depth, 0.5, 7)


@pytest.mark.gpu
@pytest.mark.parametrize("step", [0.0, 0.5])
@pytest.mark.parametrize("budget", [0, 1, 16, 64, 256, 1024])
def test_rows_alike_give_the_plain_tree_large(budget, step):
    for depths, width, max_depth in ((15, 16, 15), (15, 16, 4), (7, 3, 9)):
        check_alike(depths, width, budget, max_depth, step, fresh_seed())


EDGES = [
    *((random_table(1, 3, 2, 0.5), 9, max_depth) for max_depth in (-1, 0, 1, 2, 3, 9)),
    (np.zeros((0, 3, 3)), 4, 9),
    (np.zeros((3, 0, 0)), 4, 9),
    (np.full((2, 3, 3), NAN), 4, 9),
    (np.array([[[-1.0, -2], [-INF, -INF]], [[-INF, -INF], [-1, -3]]]), 5, 9),  # only one parent has children
    (
        np.array([[[-(2.0**53), -(2.0**54)]] * 2, [[-1.0, -2]] * 2]),
        3,
        9,
    ),  # a sibling's sum is not the direct one
    (np.array([[[-3.1, -4.0]] * 2, [[-1.2e-16, -2.4e-16]] * 2]), 3, 9),  # it subtracts before it adds
    (np.array([[[-(2.0**24), -(2.0**25)]] * 2, [[-1.0, -2]] * 2]), 3, 9),  # sums are wider than f32
]


def check_edges(table, budget, max_depth):
    if max_depth < 0:  # the twin refuses it; on the device it is a depth of 0
        ids, places = random_places(0, *table.shape[:2])
        of = ids, np.ascontiguousarray(places), table.astype(np.float32)
        got = launch(tree_build_branch.build_branch_tree, of, budget, max_depth)
        assert got["num_nodes"].tolist() == [0] and (got["parents"] == -1).all()
    else:
        for seed in range(3):
            check_tree(table, budget, max_depth, seed)


@pytest.mark.simulator
@pytest.mark.parametrize(("table", "budget", "max_depth"), EDGES)
def test_edges_small(table, budget, max_depth):
    check_edges(table, budget, max_depth)


@pytest.mark.gpu
@pytest.mark.parametrize(("table", "budget", "max_depth"), EDGES)
def test_edges_large(table, budget, max_depth):
    check_edges(table, budget, max_depth)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def call(depths=2, width=3, rows=3, budget=4, dtype=np.float32, places=np.int32, columns=3):
        ints = [to_device(np.zeros(5, np.int32)) for _ in range(3)]
        tree_build_branch.build_branch_tree(
            to_device(np.zeros((depths, width), np.int32)),
            to_device(np.zeros((depths, rows, width), places)),
            to_device(np.full((depths, rows, width), -1, dtype)),
            budget,
            scalar(1),
            *ints,
            to_device(np.zeros(5, np.float64)),
            to_device(np.zeros((5, columns), np.int32)),
            scalar(0),
        )

    call()
    for words in (
        {"width": 17, "rows": 17},
        {"rows": 2},
        {"depths": MAX_DEPTHS + 1, "columns": MAX_DEPTHS + 2},
        {"budget": 5},
        {"budget": MAX_BUDGET + 1},
        {"dtype": np.float64},
        {"places": np.int64},
        {"columns": 2},
    ):
        with pytest.raises(LaunchError, match="build_branch_tree"):
            call(**words)
