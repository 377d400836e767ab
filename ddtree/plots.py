"""Every figure: data in, matplotlib Figure out. Nothing here runs a model or writes a file."""

from ddtree.plots_acceptance import acceptance_histogram, budget_curves, expected_figure
from ddtree.plots_cost import cost_figure, stage_bars
from ddtree.plots_draft import calibration_figure, sibling_figure
from ddtree.plots_experts import experts_figure
from ddtree.plots_kernels import roofline_figure
from ddtree.plots_layers import layer_bars, parity_figure
from ddtree.plots_routing import load_bars, routing_map
from ddtree.plots_shapes import shape_curves
from ddtree.plots_style import CONVENTION
from ddtree.plots_text import text_pieces, text_rounds_html
from ddtree.plots_training import training_figure
from ddtree.plots_tree import ACCEPTED, BONUS, DRAFTED, token_label, tree_figure

__all__ = [
    "ACCEPTED",
    "BONUS",
    "CONVENTION",
    "DRAFTED",
    "acceptance_histogram",
    "budget_curves",
    "calibration_figure",
    "cost_figure",
    "expected_figure",
    "experts_figure",
    "layer_bars",
    "load_bars",
    "parity_figure",
    "roofline_figure",
    "routing_map",
    "shape_curves",
    "sibling_figure",
    "stage_bars",
    "text_pieces",
    "text_rounds_html",
    "token_label",
    "training_figure",
    "tree_figure",
]
