"""Embedding gather and matrix products whose rows never see each other.

Every product is one matrix-vector product of a fixed shape for each row, issued by `np.matmul`'s batch loop. BLAS
may choose another summation order for another number of rows, and even for another place in a tile of a fixed
shape; with one row a call there is nothing to choose, so a row keeps its bits whoever rides along.
"""

import numpy as np

from ddtree.quantised import Fp8Matrix, Int4Matrix, QuantisedMatrix
from ddtree.reference.linear_quantised import linear_quantised


def embed(token_ids: np.ndarray, table: np.ndarray, out: np.ndarray) -> None:
    """Gather rows: out[i] = table[token_ids[i]]; token_ids i32[M], table [V, H], out [M, H]."""
    np.take(table, token_ids, axis=0, out=out, mode="raise")


def linear(x: np.ndarray, weight: np.ndarray | QuantisedMatrix, out: np.ndarray) -> None:
    """out = x @ weight.T, row by row; x [M, K], weight [N, K], plain or quantised, out [M, N]."""
    if isinstance(weight, Int4Matrix | Fp8Matrix):
        linear_quantised(x, weight, out)
        return
    np.matmul(x[:, None, :], weight.T, out=out[:, None, :])


def head_linear(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
    """out[i, h] = weight[h] @ x[i, h], the absorb products; x [M, H, A], weight [H, B, A], out [M, H, B]."""
    np.matmul(x[:, :, None, :], weight.transpose(0, 2, 1), out=out[:, :, None, :])
