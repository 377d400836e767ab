"""The helper that judges text: it must find what is cut and what overlaps, and nothing else."""

from matplotlib.figure import Figure
from plots.layout import layout_faults


def figure():
    made = Figure(figsize=(4, 3), layout="constrained")
    axes = made.add_subplot()
    axes.set(xlabel="x (ms)", ylabel="y (tokens)", xlim=(0, 1), ylim=(0, 1))
    return made, axes


def test_a_plain_figure_has_no_fault():
    made, _ = figure()
    assert layout_faults(made) == []


def test_text_outside_is_found():
    made, axes = figure()
    axes.text(0.9, 0.5, "far beyond the edge").set_in_layout(False)
    assert layout_faults(made) == ["cut: 'far beyond the edge'"]


def test_text_on_text_is_found():
    made, axes = figure()
    axes.text(0.3, 0.5, "one")
    axes.text(0.32, 0.51, "other")
    assert layout_faults(made) == ["overlap: 'one' and 'other'"]


def test_crowded_tick_labels_are_found():
    made, axes = figure()
    axes.set_xticks([0.5, 0.52], ["tick", "tock"])
    assert layout_faults(made) == ["overlap: 'tick' and 'tock'"]


def test_ticks_out_of_view_and_empty_text_do_not_count():
    made, axes = figure()
    axes.set_xticks([0.5, 0.5001, 2.0], ["here", "", "not drawn"])
    axes.set_xlim(0, 1)
    assert layout_faults(made) == []
