"""Figures of the notebooks: every mark is drawn where its number says."""

import io

import numpy as np
from plots.examples import layer_document
from plots.layout import assert_readable

from ddtree.lab_figures import (
    EXACT,
    bytes_figure,
    error_figure,
    growth_figure,
    layers_figure,
    local_error_figure,
)
from ddtree.lab_tree import grow


def drawn(figure) -> object:
    """The figure's axes, once it has been rendered."""
    figure.savefig(io.BytesIO())
    return figure.axes[0]


def test_errors_and_their_bound() -> None:
    axes = drawn(error_figure({"one": np.array([[0.5, 0.01]]), "two": np.zeros(3), "none": np.zeros(0)}))
    assert [label.get_text() for label in axes.get_yticklabels()] == ["one", "two", "none"]
    values = {float(x) for line in axes.lines for x in np.atleast_1d(line.get_xdata())}
    assert {0.5, 0.01, 1.0, EXACT} <= values


def test_a_growing_tree() -> None:
    steps = list(grow(np.array([[-0.5, -1.0], [-0.25, -2.0]], np.float32), 4))
    axes = drawn(growth_figure(steps))
    taken = next(line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) == 4)
    assert taken.get_ydata().tolist() == [step.weight for step in steps]
    assert [text.get_text() for text in axes.texts] == ["0", "00", "1", "10"]


def test_errors_by_operation() -> None:
    axes = drawn(local_error_figure({"f32": {"add": [0.0, 1e-8]}, "bf16": {"add": [1e-3], "linear": [2e-3]}}))
    values = {float(x) for line in axes.lines for x in np.atleast_1d(line.get_xdata())}
    assert {1e-8, 1e-3, 2e-3, 1e-9} <= values  # 1e-9: the left edge, where 0 stands
    assert [label.get_text() for label in axes.get_yticklabels()] == ["add", "linear"]


def test_layers_of_several_forwards() -> None:
    one, many = layer_document(num_layers=3)["times"]
    figure = layers_figure({"1 row": one, "16 rows": many})
    assert_readable(figure)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["1 row", "16 rows"]
    for axes in figure.axes:
        assert sorted(bar.get_height() for bar in axes.patches) == [4.0, 55.0, 300.0, 309.0, 318.0]


def test_bytes_of_cache() -> None:
    axes = drawn(bytes_figure({"a model": {"latent": 2048, "heads": 10240}}))
    assert [text.get_text() for text in axes.texts] == ["2.0", "10.0"]
