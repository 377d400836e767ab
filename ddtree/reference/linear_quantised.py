"""Matrix products with quantised weights: fp8 and INT4 as `ddtree.quantised` holds them.

    f64        the exact values of the weight, then the plain product
    otherwise  out[n] = sum over groups g of K, in order: scale[n, g] * (sum over k in g of x[k] * q[n, k])

q are nibbles less 8 or e4m3's values, groups 32 or 128 long. In bf16 mode the caller rounds x: x * q is exact then, as
it is on the GPU's tensor cores, sums are f32, and a group's scale multiplies its sum once.
"""

import numpy as np

from ddtree.quantised import QuantisedMatrix, dequantised, group_of, scales_by_row, unscaled


def linear_quantised(x: np.ndarray, weight: QuantisedMatrix, out: np.ndarray) -> None:
    """out = x @ weight.T, one matrix-vector product a row; x [M, K], weight a quantised [N, K], out [M, N]."""
    if out.dtype == np.float64:
        np.matmul(x[:, None, :], dequantised(weight).T, out=out[:, None, :])
        return
    scales = np.ascontiguousarray(scales_by_row(weight).T)  # [groups, N]
    values, rows = (in_groups(array, group_of(weight)) for array in (unscaled(weight), x))
    values = np.ascontiguousarray(values.transpose(1, 0, 2))  # [groups, N, elements]
    for row, result in zip(rows, out, strict=True):
        total = np.zeros(weight.shape[0], out.dtype)
        for scale, products in zip(scales, np.matmul(values, row[:, :, None])[:, :, 0], strict=True):
            total += scale * products
        result[...] = total


def in_groups(array: np.ndarray, group: int) -> np.ndarray:
    """[rows, K] as [rows, groups, group], with zeros where the last group is shorter."""
    rows, length = array.shape
    whole = np.zeros((rows, -(-length // group) * group), array.dtype)
    whole[:, :length] = array
    return whole.reshape(rows, whole.shape[1] // group, group)  # -1 could be anything where there are no rows
