"""The tree figure: every token drawn once, the accepted path in its colour, the acceptance convention stated."""

import io

import numpy as np
import pytest
from matplotlib.colors import to_hex

from ddtree.plots import ACCEPTED, BONUS, token_label, tree_figure
from ddtree.tree import DraftTree


def small_tree():
    parents = np.array([-1, 0, 1, 0, 3, 3], np.int32)
    depths = np.array([0, 1, 2, 1, 2, 2], np.int32)
    return DraftTree(np.arange(6, dtype=np.int32), parents, depths, -np.arange(6.0))


def test_tokens_path_and_convention():
    figure = tree_figure(small_tree(), [0, 3, 5], "!", list("abcdef"), "a title with $math_ signs")
    (axes,) = figure.axes
    colours = {text.get_text(): to_hex(text.get_bbox_patch().get_edgecolor()).upper() for text in axes.texts}
    assert sorted(colours) == ["!", *"abcdef"]
    assert {token for token, colour in colours.items() if colour == ACCEPTED} == set("adf")
    assert colours["!"] == BONUS
    assert "5 nodes" in axes.get_title("left") and "length 3 (bonus token included)" in axes.get_title("left")
    spots = {text.get_text(): text.get_position() for text in axes.texts}
    assert len(set(spots.values())) == len(spots), "no two tokens stand on one another"
    assert [spots[token][0] for token in "abcdef!"] == [0, 1, 2, 1, 2, 2, 3]


@pytest.mark.parametrize("path", [[0], [0, 1, 2]])
def test_the_bonus_token_never_covers_a_node(path):
    figure = tree_figure(small_tree(), path, "!", list("abcdef"))
    spots = [text.get_position() for text in figure.axes[0].texts]
    assert len(set(spots)) == len(spots)


def test_a_root_only_tree_and_odd_labels_can_be_drawn():
    figure = tree_figure(DraftTree.root_only(3), [0], "$x_", ["\\frac{"])
    figure.savefig(io.BytesIO(), format="png")


@pytest.mark.parametrize(
    ("text", "label"),
    [(" a", "·a"), ("\n        x", "⏎·×8x"), ("\t", "⇥"), ("", ""), ("x" * 20, "x" * 13 + "…")],
)
def test_token_label_shows_white_space(text, label):
    assert token_label(text) == label
