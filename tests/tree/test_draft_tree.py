"""DraftTree: its forms agree with one another and with published trees, and each broken invariant is named."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.errors import ConfigError
from ddtree.tree import DraftTree

TREES = Path(__file__).parents[1] / "fixtures" / "trees"
CASES = json.loads((TREES / "trees.json").read_text())["cases"]


def tree(
    token_ids=(7, 1, 2, 1, 3),
    parents=(-1, 0, 0, 1, 1),
    depths=(0, 1, 1, 2, 2),
    log_weights=(0, -1, -2, -3, -4),
):
    """Make a DraftTree from plain numbers."""
    return DraftTree(
        *(np.array(values, np.int32) for values in (token_ids, parents, depths)),
        np.array(log_weights, np.float64),
    )


@st.composite
def random_trees(draw):
    """Draw valid trees of up to 24 nodes."""
    num_nodes = draw(st.integers(0, 24))
    parents = [-1, *(draw(st.integers(0, row - 1)) for row in range(1, num_nodes + 1))]
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    return tree(range(num_nodes + 1), parents, depths, [-float(row) / 3 for row in range(num_nodes + 1)])


def test_what_it_offers():
    small = tree().validate()
    assert (small.num_nodes, small.max_depth) == (4, 2)
    assert small.lineage().tolist() == [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 1, 3], [0, 1, 4]]
    assert small.lineage(5)[3].tolist() == [0, 1, 3, -1, -1]
    assert small.lineage().dtype == np.int32
    assert [small.children(row).tolist() for row in range(5)] == [[1, 2], [3, 4], [], [], []]
    assert small.path(4) == [0, 1, 4] and small.path(0) == [0]
    with pytest.raises(ConfigError, match="width is 2, wanted at least max_depth"):
        small.lineage(2)


def test_a_root_alone_is_a_tree():
    root = tree([5], [-1], [0], [0.0]).validate()
    assert (root.num_nodes, root.max_depth) == (0, 0)
    assert root.visible.tolist() == [[True]] and root.lineage(3).tolist() == [[0, -1, -1]]
    assert root.children(0).tolist() == []


@settings(deadline=None, max_examples=100)
@given(random_trees())
def test_lineage_path_and_visibility_are_one_thing(drawn):
    lineage, visible = drawn.validate().lineage(), drawn.visible
    for row in range(drawn.num_nodes + 1):
        path = drawn.path(row)
        assert lineage[row].tolist() == path + [-1] * (lineage.shape[1] - len(path))
        assert np.flatnonzero(visible[row]).tolist() == path  # parents precede children, so a path rises
        assert len(path) == drawn.depths[row] + 1
    again = DraftTree.from_json(json.loads(json.dumps(drawn.to_json())))
    assert again.to_json() == drawn.to_json()
    assert again.log_weights.tobytes() == drawn.log_weights.tobytes()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_published_visibility(case):
    with np.load(TREES / "trees.npz") as arrays:
        tokens, parents, depths, bits = (
            arrays[f"{case['id']}_{key}"] for key in ("tokens", "parents", "depths", "visibility_bits")
        )
    rows = len(parents)
    published = tree([0, *tokens], parents, [0, *depths], np.zeros(rows)).validate()
    want = np.unpackbits(bits, count=rows * rows).reshape(rows, rows).astype(bool)
    assert published.visible.dtype == bool
    np.testing.assert_array_equal(published.visible, want)


@pytest.mark.parametrize(
    ("field", "values", "invariant"),
    [
        ("parents", (-1, 0, 0, 4, 1), "row 3: parents precede children"),
        ("parents", (-1, 0, 2, 1, 1), "row 2: parents precede children"),
        ("parents", (-1, 0, 0, 1, -1), "row 4: there is one root"),
        ("parents", (0, 0, 0, 1, 1), "row 0 is the root, parent -1"),
        ("depths", (0, 1, 1, 2, 3), "row 4: a depth is the parent's"),
        ("depths", (1, 2, 2, 3, 3), "root has depth 0"),
        ("log_weights", (-1, -1, -2, -3, -4), "root has log weight 0"),
        ("log_weights", (0, -1, -np.inf, -3, -4), "row 2: log weights are finite"),
        ("log_weights", (0, -1, np.nan, -3, -4), "row 2: log weights are finite"),
        ("token_ids", (7, 1, 1, 1, 3), "row 2: siblings have distinct tokens"),
        ("token_ids", (7, 1, 2, 3, 3), "row 4: siblings have distinct tokens"),
        ("token_ids", (7, 1, -2, 1, 3), "row 2: token ids are not negative"),
        ("token_ids", (7, 1, 2), "has 5 rows, token_ids 3"),
    ],
)
def test_a_broken_invariant_is_named(field, values, invariant):
    with pytest.raises(ConfigError, match=invariant):
        tree(**{field: values}).validate()


def test_dtypes_and_shapes_are_held_to():
    good = tree()
    for name in ("token_ids", "parents", "depths", "log_weights"):
        arrays = {key: getattr(good, key) for key in ("token_ids", "parents", "depths", "log_weights")}
        for wrong in (arrays[name].astype(np.float32), arrays[name][None], arrays[name].tolist()):
            with pytest.raises(ConfigError, match=f"{name} must be a one-dimensional"):
                DraftTree(**{**arrays, name: wrong}).validate()
    with pytest.raises(ConfigError, match="has 0 rows"):
        tree((), (), (), ()).validate()


@pytest.mark.parametrize(
    "change",
    [{"parents": None}, {"token_ids": [7, 1.5, 2, 1, 3]}, {"depths": [False, 1, 1, 2, 2]}, {"log_weights": "0"},
     {"token_ids": [7, 2**31, 2, 1, 3]}, {"log_weights": [0, 10**400, 0, 0, 0]}, {"parents": [-1, 0, 0, 1, 9]}],
)  # fmt: skip
def test_a_record_that_is_no_tree_is_refused(change):
    with pytest.raises(ConfigError, match="tree: "):
        DraftTree.from_json({**tree().to_json(), **change})
