"""The grouped expert product: each row through its chosen experts and the shared ones, summed in that order."""

from collections.abc import Callable

import numpy as np

from ddtree.quantised import QuantisedMatrix
from ddtree.reference.linear import linear
from ddtree.reference.pointwise import swiglu

Weight = np.ndarray | QuantisedMatrix


def experts(
    x: np.ndarray,
    gates: np.ndarray,
    w_gate: Weight,
    w_up: Weight,
    w_down: Weight,
    hidden: np.ndarray,
    out: np.ndarray,
    product: Callable[[np.ndarray, Weight, np.ndarray], None] = linear,
) -> None:
    """out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])), experts in index order.

    x and out [M, H], gates [E, M] (zero where not chosen), w_gate and w_up [E + S, I, H], w_down [E + S, H, I], all
    plain or all quantised; the S shared experts behind the gates' E take every row with gate 1. hidden [at least the
    number of chosen pairs, I] is scratch: the pairs' activations in expert order. `product` is what multiplies, as
    `linear` does.
    """
    out[...] = 0
    start = 0
    gates = np.concatenate([gates, np.ones((w_gate.shape[0] - len(gates), len(x)), gates.dtype)])
    for expert in np.flatnonzero(gates.any(axis=1)):
        rows = np.flatnonzero(gates[expert])
        pair, inputs = hidden[start : start + len(rows)], x[rows]
        up = np.empty_like(pair)
        product(inputs, w_gate[expert], pair)
        product(inputs, w_up[expert], up)
        swiglu(pair, up, pair)
        product(pair, w_down[expert], inputs)
        out[rows] += gates[expert, rows, None] * inputs
        start += len(rows)
