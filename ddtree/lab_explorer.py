"""The explorer of tree shapes: sliders over recorded roots, and one picture that follows them. It runs no model.

ipywidgets and IPython are imported where they are used, so that a room without a notebook can import this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from ddtree.lab_picture import NameOf, Picture, png_of
from ddtree.lab_shapes import Root, mean_curve, walked_rows
from ddtree.study_rounds import departure


class Explorer:
    """Sliders `budget`, `depth`, `prompt` and `position`, and a picture that follows them.

    `roots` are of recordings, by prompt; a prompt without one is left out. The means of all roots are computed here
    for every depth, so that a step of a slider costs one tree and one picture.
    """

    def __init__(
        self, roots: Mapping[str, Sequence[Root]], name_of: NameOf, most: int = 64, budget: int = 16
    ):
        from ipywidgets import IntSlider, Layout, SelectionSlider, VBox

        self.roots = roots = {prompt: mine for prompt, mine in roots.items() if mine}
        everything = [root for mine in roots.values() for root in mine]
        horizon = everything[0].horizon
        self.picture = Picture(horizon, most, name_of)
        self.means = [mean_curve(everything, most, depth) for depth in range(1, horizon + 1)]
        look = {"layout": Layout(width="36em")}
        self.budget = IntSlider(budget, 1, most, description="budget", **look)
        self.depth = IntSlider(horizon, 1, horizon, description="depth", **look)
        self.prompt = SelectionSlider(options=list(roots), description="prompt", **look)
        self.position = IntSlider(0, 0, len(roots[self.prompt.value]) - 1, description="position", **look)
        self.controls = VBox([self.budget, self.depth, self.prompt, self.position])
        self.handle: Any = None
        self.prompt.observe(self._new_prompt, "value")
        for slider in (self.budget, self.depth, self.position):
            slider.observe(self._moved, "value")

    @property
    def root(self) -> Root:
        """The root that the sliders choose."""
        return self.roots[self.prompt.value][self.position.value]

    def figure(self) -> Figure:
        """What the sliders ask for; the same Figure each time, drawn anew."""
        root, budget, depth = self.root, self.budget.value, self.depth.value
        title = f"{self.prompt.value}, position {root.position}: budget {budget}, depth at most {depth}"
        return self.picture.draw(root, budget, depth, self.means[depth - 1], title)

    def to_most_telling(self) -> None:
        """Move to the root whose accepted path leaves the spine most often, then goes furthest, at this budget."""
        places = [(prompt, number) for prompt, mine in self.roots.items() for number in range(len(mine))]
        prompt, number = max(places, key=lambda place: self._telling(self.roots[place[0]][place[1]]))
        self.prompt.value = prompt
        self.position.value = number

    def _telling(self, root: Root) -> tuple[int, int]:
        tree = root.tree(self.budget.value, self.depth.value)
        return departure(tree, walked_rows(tree, root.continuation))

    def show(self) -> None:
        """Display sliders and picture; the picture changes in place while a kernel runs, and stays when none does."""
        from IPython.display import display

        display(self.controls)
        self.handle = display(self._image(), display_id=True)

    def _image(self) -> Any:
        from IPython.display import Image

        return Image(png_of(self.figure()), format="png")

    def _moved(self, change: Any = None) -> None:
        if self.handle is not None:
            self.handle.update(self._image())

    def _new_prompt(self, change: Any) -> None:
        """Another prompt has its own number of roots; its first is shown, with one picture for both sliders' moves."""
        showing, self.handle = self.handle, None
        self.position.value = 0
        self.position.max = len(self.roots[self.prompt.value]) - 1
        self.handle = showing
        self._moved()
