"""Errors of a forward's named steps between two engines: of arithmetic, and of quantisation.

Steps are those that `ddtree.bench_layers.observe` returns. Against f64 of the same weights an error is arithmetic's; of
quantised weights in f64 against the weights that they were made from, it is quantisation's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

STEP_OF_LAYER = "layer"

Steps = Mapping[tuple[str, int], np.ndarray]


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """||got - want|| / ||want|| in f64."""
    wide = np.asarray(want, np.float64)
    return float(np.linalg.norm(got - wide) / max(np.linalg.norm(wide), np.finfo(np.float64).tiny))


def step_errors(mine: Steps, theirs: Steps) -> list[dict[str, Any]]:
    """The relative error of each step: records of step, layer, error."""
    return [
        {"step": step, "layer": layer, "error": relative_error(mine[step, layer], want)}
        for (step, layer), want in theirs.items()
    ]


def layer_errors(mine: Steps, theirs: Steps) -> list[float]:
    """The relative error of the hidden states behind each layer, in order."""
    of_layer = sorted(layer for step, layer in theirs if step == STEP_OF_LAYER)
    return [relative_error(mine[STEP_OF_LAYER, n], theirs[STEP_OF_LAYER, n]) for n in of_layer]


def experts_differing(mine: Steps, theirs: Steps) -> int:
    """Pairs of row and expert that one chose and the other did not."""
    gates = [(mine[key], want) for key, want in theirs.items() if key[0] == "gates"]
    return sum(int(((got != 0) != (want != 0)).sum()) // 2 for got, want in gates)
