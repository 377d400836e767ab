"""The tree on the GPU, bit for bit the twin's: published trees, ties of every kind, tables that end anywhere."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import selection
from kernels.device import scalar, to_device
from kernels.selection import CASES, TREES, Guarded, between_poison, fixture_table, tree_shapes
from seeds import fresh_seed

from kernels_numba import tree_build
from kernels_numba.checks import LaunchError
from kernels_numba.primitives_tree import GROUP

INF, NAN = np.inf, np.nan
TIE_HEAVY = st.sampled_from([0.0, -0.0, -0.25, -0.5, -1.0, -2.0, -INF])
ENDING = st.sampled_from([0.0, -0.5, -1.5, -INF, INF, NAN, 1.0])
WIDE = st.floats(-(2.0**100), 0, width=32)


def launch(token_ids, log_probs, budget, max_depth):
    """The kernel's outputs by name, its inputs and outputs between poisoned neighbours."""
    out = {name: Guarded(*form) for name, form in tree_shapes(budget, len(log_probs)).items()}
    arrays = [guarded.array for guarded in out.values()]
    depth = between_poison(np.array([max_depth], np.int32))
    tree_build.build_tree(between_poison(token_ids), between_poison(log_probs), budget, depth, *arrays)
    return {name: guarded.read() for name, guarded in out.items()}


def check_tree(log_probs, budget, max_depth=99, token_ids=None, what=""):
    """Every output of the kernel against the twin's, in every bit."""
    log_probs = np.ascontiguousarray(log_probs, np.float32)
    if token_ids is None:
        token_ids = np.arange(1000, 1000 + log_probs.size, dtype=np.int32).reshape(log_probs.shape)
    want = selection.build_tree(token_ids, log_probs, budget, max_depth)
    got = launch(np.ascontiguousarray(token_ids), log_probs, budget, max_depth)
    for name, array in want.items():
        bits = f"i{array.dtype.itemsize}"
        np.testing.assert_array_equal(got[name].view(bits), array.view(bits), f"{what}: {name}")
    return int(want["num_nodes"][0])


def tables(values, max_depth, max_width):
    """Tables [L, K], descending unless a NaN stands in the way."""
    shapes = st.tuples(st.integers(1, max_depth), st.integers(1, max_width))
    return shapes.flatmap(
        lambda shape: st.lists(
            st.lists(values, min_size=shape[1], max_size=shape[1]).map(lambda row: sorted(row, reverse=True)),
            min_size=shape[0],
            max_size=shape[0],
        )
    )


def log_softmax_table(rng, depths, width, step=0.0):
    """A drafter's table: descending log-probabilities of random rows, rounded to multiples of `step` if given."""
    logits = rng.standard_normal((depths, max(width, 2))) * rng.uniform(0.5, 6, (depths, 1))
    if step:
        logits = np.round(logits / step) * step
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return -np.sort(-log_probs, axis=1)[:, :width].astype(np.float32)


@pytest.mark.simulator
@pytest.mark.parametrize("case", CASES[::2], ids=lambda case: case["id"])
def test_published_trees_cut_short(case):
    """A smaller budget takes the first nodes of the same tree, from the table's first columns."""
    budget = min(case["budget"], 7)
    with np.load(TREES / "trees.npz") as arrays:
        token_ids, log_probs = fixture_table(arrays, case)
    check_tree(log_probs[:, :budget], budget, token_ids=token_ids[:, :budget], what=case["id"])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_trees(case):
    with np.load(TREES / "trees.npz") as arrays:
        token_ids, log_probs = fixture_table(arrays, case)
        want = {name: arrays[f"{case['id']}_{name}"] for name in ("tokens", "parents", "depths")}
        want["weights"] = arrays[f"{case['id']}_logw"] if f"{case['id']}_logw" in arrays else np.zeros(0)
    num_nodes = check_tree(log_probs, case["budget"], token_ids=token_ids, what=case["id"])
    assert num_nodes == case.get("stats", {}).get("finite_prefix", 0)
    got = launch(token_ids, log_probs, case["budget"], len(log_probs))
    used = slice(1, num_nodes + 1)
    assert got["token_ids"][used].tolist() == want["tokens"][:num_nodes].tolist()
    assert got["depths"][used].tolist() == want["depths"][:num_nodes].tolist()
    assert got["parents"][: num_nodes + 1].tolist() == want["parents"][: num_nodes + 1].tolist()
    assert got["log_weights"][used].tobytes() == want["weights"][:num_nodes].tobytes()


@pytest.mark.simulator
@settings(max_examples=60)
@given(tables(TIE_HEAVY, 4, 3), st.integers(0, 12), st.integers(0, 5))
def test_ties_small(table, budget, max_depth):
    check_tree(table, budget, max_depth)


@pytest.mark.simulator
@settings(max_examples=40)
@given(tables(st.one_of(WIDE, ENDING), 4, 3), st.integers(0, 8), st.integers(0, 5))
def test_rounding_and_ends_small(table, budget, max_depth):
    check_tree(table, budget, max_depth)


@pytest.mark.gpu
@settings(max_examples=500)
@given(tables(TIE_HEAVY, 6, 5), st.integers(0, 130), st.integers(0, 7))
def test_ties_large(table, budget, max_depth):
    check_tree(table, budget, max_depth)


@pytest.mark.gpu
@settings(max_examples=500)
@given(tables(st.one_of(WIDE, ENDING), 8, 8), st.integers(0, 130), st.integers(0, 9))
def test_rounding_and_ends_large(table, budget, max_depth):
    check_tree(table, budget, max_depth)


def tied_table(rng, depths, width, most=4):
    """Multiples of a quarter, so that sums are exact and many are equal, in groups of slots far apart."""
    return np.sort(rng.integers(-most, 1, (depths, width)) * 0.25)[:, ::-1]


@pytest.mark.simulator
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_more_nodes_than_a_group_holds(seed):
    budget = 2 * GROUP + 5
    assert check_tree(tied_table(np.random.default_rng(seed), 8, 3, 12), budget) == budget


@pytest.mark.gpu
@pytest.mark.parametrize("most", [1, 4, 40])
@pytest.mark.parametrize(
    ("depths", "width", "budget"), [(15, 64, 512), (8, 3, 1024), (6, 5, 1024), (32, 300, 300)]
)
def test_ties_across_groups(depths, width, budget, most):
    seed = fresh_seed()
    table = tied_table(np.random.default_rng(seed), depths, width, most)
    check_tree(table, budget, what=f"{depths} x {width}, budget {budget}, most {most}, seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("step", [0.0, 0.25, 2.0])
@pytest.mark.parametrize(
    ("depths", "width", "budget"),
    [
        (15, 64, 64),
        (15, 512, 512),
        (15, 256, 256),
        (7, 33, 31),
        (31, 65, 63),
        (32, 1024, 1024),
        (1, 1024, 1024),
        (32, 1, 1024),
        (16, 2, 1023),
        (15, 1000, 100),
    ],
)
def test_drafter_tables(depths, width, budget, step):
    seed = fresh_seed()
    table = log_softmax_table(np.random.default_rng(seed), depths, width, step)
    check_tree(table, budget, what=f"{depths} x {width}, budget {budget}, step {step}, seed {seed}")


@pytest.mark.gpu
@pytest.mark.parametrize("value", [0.0, -0.0, -1.0, -0.1])
@pytest.mark.parametrize(("depths", "width", "budget"), [(5, 4, 300), (32, 64, 200), (3, 1024, 1024)])
def test_one_value_everywhere(depths, width, budget, value):
    """Every candidate ties with every other of its depth; with 0, with all."""
    check_tree(np.full((depths, width), value), budget, what=f"{depths} x {width} of {value}")


EDGES = [
    *(([[-1, -2]] * 3, 9, max_depth) for max_depth in (-1, 0, 1, 2, 3, 9)),
    *(([[-1, -1]] * 2, budget, 9) for budget in (0, 1, 5, 6, 7, 12)),  # 6 prefixes in all
    *(([[-1], [-2], [-3]], budget, 9) for budget in (2, 3, 4)),
    (np.zeros((0, 3)), 4, 9),
    (np.zeros((3, 0)), 4, 9),
    (np.zeros((0, 0)), 0, 0),
    *(([[bad, bad], [-1, -2]], 5, 9) for bad in (-INF, NAN, INF)),
    *(([[-1, -2], [bad, bad], [-1, -1]], 6, 9) for bad in (-INF, NAN, INF)),
    *(([[-1, bad, -1], [-1, bad, -1]], 6, 9) for bad in (-INF, NAN, INF)),
    ([[-(2.0**53), -(2.0**54)], [-1, -2]], 3, 9),  # a sibling's sum is not the direct one
    ([[-3.1, -4.0], [-1.2e-16, -2.4e-16]], 3, 9),  # it subtracts before it adds
    ([[-(2.0**24), -(2.0**25)], [-1, -2]], 3, 9),  # sums are wider than f32
    ([[-0.0, 0.0], [-0.0, -0.0]], 6, 9),  # a zero keeps its sign and ties with the other
    ([[-1e-9, -2e-9], [-5.0, -5.0], [-1e-9, -1e-9]], 12, 9),  # successors that round up
]


def check_edges(table, budget, max_depth):
    if max_depth < 0:  # the twin refuses it; on the device it is a depth of 0
        arrays = launch(np.zeros((3, 2), np.int32), np.array(table, np.float32), budget, max_depth)
        assert arrays["num_nodes"].tolist() == [0] and (arrays["parents"] == -1).all()
    else:
        check_tree(table, budget, max_depth)


def check_leftovers(budget):
    """A tree in the arrays of a larger one: every row past it is rewritten, whatever stood there."""
    log_probs = np.full((3, 2), -1.0, np.float32)
    token_ids = np.arange(6, dtype=np.int32).reshape(3, 2)
    shapes = tree_shapes(budget, 3)
    arrays = {name: to_device(np.full(*form[:1], 7, form[1])) for name, form in shapes.items()}
    for max_depth in (3, 1, 0):
        tree_build.build_tree(
            to_device(token_ids), to_device(log_probs), budget, scalar(max_depth), *arrays.values()
        )
        want = selection.build_tree(token_ids, log_probs, budget, max_depth)
        want["token_ids"][0] = 7  # the root's is the caller's
        for name, array in want.items():
            assert_same_bits(arrays[name].copy_to_host(), array, f"{name} at max_depth {max_depth}")


@pytest.mark.simulator
def test_nothing_is_left_of_a_larger_tree_small():
    check_leftovers(6)


@pytest.mark.gpu
def test_nothing_is_left_of_a_larger_tree_large():
    check_leftovers(1000)


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
    def call(
        depths=2, width=3, budget=4, rows=5, max_depth=1, log_probs=np.float32, weights=np.float64, columns=3
    ):
        vectors = [to_device(np.zeros(rows, np.int32)) for _ in range(3)]
        tree_build.build_tree(
            to_device(np.zeros((depths, width), np.int32)),
            to_device(np.zeros((depths, width), log_probs)),
            budget,
            to_device(np.zeros(max_depth, np.int32)),
            *vectors,
            to_device(np.zeros(rows, weights)),
            to_device(np.zeros((rows, columns), np.int32)),
            scalar(0),
        )

    call()
    most = tree_build.MAX_BUDGET
    for words in (
        {"budget": -1, "rows": 0},
        {"budget": most + 1, "rows": most + 2},
        {"rows": 4},
        {"depths": tree_build.MAX_DEPTHS + 1, "columns": tree_build.MAX_DEPTHS + 2},
        {"max_depth": 2},
        {"log_probs": np.float64},
        {"weights": np.float32},
        {"columns": 2},
    ):
        with pytest.raises(LaunchError, match="build_tree"):
            call(**words)
