"""Shapes by name: this folder's, an installed package's, and what is said of those that are neither."""

import sys

import numpy as np
import pytest
from shapes.alike import alike_below_every_parent

from ddtree.errors import UsageError
from ddtree.shapes import CONTEXT, SHAPES, get_shape
from ddtree.study_budgets import budget_curve
from ddtree.tree import DraftTree

TABLE = np.array([[4, 5]], np.int32), np.array([[-0.5, -1.0]], np.float32)
OURS = ["beam", "best_first", "branch_aware", "chain", "cost_aware", "fixed", "oracle", "spine_first"]


@pytest.fixture
def package(monkeypatch, tmp_path):
    """package(entry points, source): an installed distribution with the module `others_shapes`."""

    def install(entries, source="", name="others"):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ddtree.shapes]\n" + "\n".join(entries) + "\n")
        (tmp_path / "others_shapes.py").write_text(source)
        monkeypatch.delitem(sys.modules, "others_shapes", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install
    sys.modules.pop("others_shapes", None)


SOURCE = '''"""Root only: no draft at all.

More of it.
"""
from ddtree.tree import DraftTree


def build(token_ids, log_probs, budget, max_depth, *, root_token):
    """The root, as a function."""
    return DraftTree.root_only(root_token)
'''


def test_the_shapes_are_listed_with_a_line_each():
    assert list(SHAPES)[: len(OURS)] == OURS and len(SHAPES) == len(dict(SHAPES))
    for name in OURS:
        assert 20 < len(SHAPES[name]) < 120 and SHAPES[name].endswith("."), name
    assert "tree" not in SHAPES and "_nodes" not in SHAPES
    with pytest.raises(KeyError):
        SHAPES["tree"]


def test_an_installed_packages_shapes_are_found(package):
    package(["nothing = others_shapes", "bare = others_shapes:build", "chain = others_shapes"], SOURCE)
    assert list(SHAPES) == [*OURS, "bare", "nothing"]
    assert SHAPES["nothing"] == "Root only: no draft at all." and SHAPES["bare"] == "The root, as a function."
    for name in ("nothing", "bare"):
        tree = get_shape(name, cost=len)(*TABLE, 2, 1, root_token=9)
        assert isinstance(tree, DraftTree) and tree.token_ids.tolist() == [9]
        assert budget_curve(TABLE, [4, 1], [2], name).nodes.tolist() == [0]
    assert get_shape("chain")(*TABLE, 2, 1, root_token=9).num_nodes == 1  # this folder's come first


def test_an_installed_shape_may_have_context_of_its_own(package):
    package(
        ["picky = others_shapes"],
        '"""Picky."""\nARGUMENT = "flavour"\n'
        "def make(flavour, cost=None):\n    return lambda: (flavour, cost)\n",
    )
    assert get_shape("picky", flavour="sweet", cost=None)() == ("sweet", None)
    assert get_shape("picky:so:ur")() == ("so:ur", None)
    with pytest.raises(UsageError, match="picky needs flavour: give it to get_shape"):
        get_shape("picky", flavour=None)
    with pytest.raises(UsageError, match="best_first knows no flavour"):
        get_shape("best_first", flavour="sweet")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("bad = others_shapes", "others_shapes offers neither build nor make"),
        ("bad = others_shapes:gone", "others_shapes:gone cannot be loaded: .*gone"),
        ("bad = no_such_module", "no_such_module cannot be loaded: No module named"),
    ],
)
def test_a_broken_package_is_named_and_hides_no_other(package, entry, what):
    package([entry])
    with pytest.raises(UsageError, match=f"shape: bad: {what}"):
        get_shape("bad")
    assert SHAPES["bad"].startswith("(broken) shape: bad: ") and list(SHAPES) == [*OURS, "bad"]


def test_a_name_that_two_packages_offer_is_refused(package):
    package(["twin = others_shapes"], SOURCE)
    package(["twin = others_shapes:build"], SOURCE, name="more")
    with pytest.raises(UsageError, match="twin is offered twice: others_shapes, others_shapes:build"):
        get_shape("twin")


@pytest.mark.parametrize("name", ["star", "", ":", "_nodes", None, 3])
def test_an_unknown_name_is_told_the_known_ones(name):
    with pytest.raises(UsageError, match="shape: expected one of beam, best_first, branch_aware, chain"):
        get_shape(name)


def test_context_is_offered_to_all_and_typing_errors_are_refused():
    context = {"continuation": [4], "cost": float, "template": [[0]], "width": 1, "children": 1}
    assert set(context) == set(CONTEXT)
    for name in OURS:
        build = alike_below_every_parent(get_shape(name, **context))
        assert build(*TABLE, 1, 1, root_token=9).num_nodes <= 1
    with pytest.raises(UsageError, match="cost_aware knows no cots; expected continuation, cost, "):
        get_shape("cost_aware", cots=float)
    for name, lack in {"oracle": "continuation", "fixed": "template"}.items():
        with pytest.raises(UsageError, match=f"{name} needs {lack}: "):
            get_shape(name)
    with pytest.raises(UsageError, match="chain takes nothing after a colon, found 'chain:3'"):
        get_shape("chain:3")
