"""The explorer: sliders choose the root and its tree, the picture follows them and is readable whatever they say."""

import numpy as np
import pytest
from plots.layout import assert_readable

from ddtree.lab_explorer import Explorer
from ddtree.lab_picture import Picture, png_of
from ddtree.lab_shapes import Root, mean_curve

pytest.importorskip("ipywidgets", reason="ipywidgets is in the extra `notebooks`")

HORIZON, RANKS, MOST = 5, 8, 32


def made_up_root(seed: int, position: int = 0) -> Root:
    """A random table whose continuation takes rank 0, rank 1, rank 0 and then what no table holds."""
    rng = np.random.default_rng(seed)
    token_ids = np.array([rng.permutation(90)[:RANKS] for _ in range(HORIZON)], np.int32)
    log_probs = -np.sort(rng.exponential(2.0, (HORIZON, RANKS)).cumsum(1), axis=1).astype(np.float32)
    followed = [token_ids[0, 0], token_ids[1, 1], token_ids[2, 0], 99, 99, 99]
    return Root(position, 3, token_ids, log_probs, np.array(followed, np.int32), False)


@pytest.fixture
def explorer() -> Explorer:
    first = [made_up_root(10), made_up_root(2, 1), made_up_root(3, 2)]
    roots = {"first": first, "second": [made_up_root(4), made_up_root(8, 1)], "short": []}
    return Explorer(roots, lambda token: f"token {token}", MOST, 6)


class Shown:
    """Stands for IPython's display handle."""

    def __init__(self) -> None:
        self.images: list[bytes] = []

    def update(self, image) -> None:
        self.images.append(image.data)


def test_each_slider_changes_the_picture_once(explorer: Explorer) -> None:
    explorer.handle = shown = Shown()
    first = png_of(explorer.figure())
    for name, value in (("budget", 30), ("depth", 2), ("position", 2), ("prompt", "second")):
        getattr(explorer, name).value = value
    assert len(shown.images) == 4 and len({first, *shown.images}) == 5
    assert (explorer.position.value, explorer.position.max) == (0, 1) and explorer.root.position == 0
    explorer.prompt.value, explorer.depth.value, explorer.budget.value = "first", HORIZON, 6
    assert shown.images[-1] == first, "the picture depends on where the sliders stand alone"
    assert explorer.position.max == 2


def test_sliders_are_named_as_they_are_looked_for(explorer: Explorer) -> None:
    names = [slider.description for slider in explorer.controls.children]
    assert names == ["budget", "depth", "prompt", "position"]
    assert explorer.prompt.options == ("first", "second"), "a prompt without a root has nothing to show"
    assert (explorer.budget.min, explorer.budget.max, explorer.depth.max) == (1, MOST, HORIZON)


def test_the_most_telling_root_leaves_the_spine(explorer: Explorer) -> None:
    explorer.budget.value = MOST
    explorer.to_most_telling()
    telling = [explorer._telling(root) for mine in explorer.roots.values() for root in mine]
    assert explorer._telling(explorer.root) == max(telling) > telling[0]


@pytest.mark.parametrize("budget", [1, 2, 8, MOST])
@pytest.mark.parametrize("depth", [1, HORIZON])
def test_the_picture_shows_the_tree_and_the_curves(budget: int, depth: int) -> None:
    root = made_up_root(5)
    picture, mean = Picture(HORIZON, MOST, str), mean_curve([root, made_up_root(6)], MOST, depth)
    for last in (1, budget):  # what is drawn second owes nothing to what was drawn first
        figure = picture.draw(root, last, depth, mean, "A title with a $ in it")
    tree = root.tree(budget, depth)
    rows = sum(len(line.get_xdata()) for line in picture.tree_axes.lines[1:3])
    assert rows == tree.num_nodes + 1
    assert f"{tree.num_nodes} nodes" in picture.said.get_text()
    assert picture.mean.taken.get_ydata()[0] == mean.actual[budget]
    assert picture.mine.line.get_xdata()[0] == budget
    picture.tree_axes.set_visible(False)  # its token labels stand as close as the tree asks
    assert_readable(figure)


def test_a_bonus_token_stands_beside_what_was_drafted() -> None:
    root, picture = made_up_root(7), Picture(HORIZON, MOST, str)
    picture.draw(root, MOST, HORIZON, mean_curve([root], MOST, HORIZON), "")
    link, drafted, accepted, bonus = picture.tree_axes.lines
    spot = (float(bonus.get_xdata()[0]), float(bonus.get_ydata()[0]))
    assert link.get_xydata()[-1].tolist() == list(spot)
    others = {tuple(place) for line in (drafted, accepted) for place in line.get_xydata().tolist()}
    assert spot not in others and len(accepted.get_xdata()) == 4 and spot[0] == 4
