"""What is wrong with a drawn figure's text: cut by the figure's edge, or on top of other text."""

from itertools import combinations

from matplotlib.backends.backend_agg import FigureCanvasAgg

SLACK = 1.0  # pixels that two boxes may share, or stand over the edge


def layout_faults(figure):
    """A line for each text that leaves the figure and for each pair that overlaps, as the Agg backend draws them."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = {id(text): text for text in visible_texts(figure)}.values()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in texts]
    edge = figure.bbox
    faults = [
        f"cut: {name!r}"
        for name, box in boxes
        if min(box.x0, box.y0) < -SLACK or box.x1 > edge.x1 + SLACK or box.y1 > edge.y1 + SLACK
    ]
    for (name, box), (other, beside) in combinations(boxes, 2):
        across = min(box.x1, beside.x1) - max(box.x0, beside.x0)
        up = min(box.y1, beside.y1) - max(box.y0, beside.y0)
        if across > SLACK and up > SLACK:
            faults.append(f"overlap: {name!r} and {other!r}")
    return faults


def visible_texts(figure):
    """Every text that is drawn and not empty: titles, labels, ticks in view, legends, annotations."""
    found = [*figure.texts, *(text for legend in figure.legends for text in legend.get_texts())]
    found += [text for text in (figure._suptitle, figure._supxlabel, figure._supylabel) if text is not None]
    for axes in figure.axes:
        if not axes.get_visible():
            continue
        found += [*axes.texts, axes.title, axes._left_title, axes._right_title]
        if axes.get_legend():
            found += axes.get_legend().get_texts()
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            inside = [tick for tick in ticks if low <= tick.get_loc() <= high]
            found += [axis.label, axis.offsetText]
            found += [label for tick in inside for label in (tick.label1, tick.label2)]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


def assert_readable(figure):
    """The figure's text is whole and apart, and every visible axis that shows ticks says what it shows."""
    assert not (faults := layout_faults(figure)), "\n" + "\n".join(faults)
