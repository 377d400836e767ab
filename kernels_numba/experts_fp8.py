"""The grouped expert product of fp8 weights, which stay bytes in memory. Four kernels, as `experts`.

    out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])), weight = e4m3 * scale

Inputs of products are rounded to bf16, which holds every e4m3; 128 products of a row are summed in f32, and the sum is
multiplied by its scale and added to the column's, in the order of K. A NaN of the weights makes its column NaN.
"""

from numba import types

from kernels_numba.checks import check
from kernels_numba.experts_int4 import check_experts, launch, specs_of


def experts_fp8(x, gates, gate, up, down, hidden, out, pair_out, plan, num_chosen, stream=0):
    """out[i] = sum over e of gates[e, i] * down_e(silu(gate_e(x[i])) * up_e(x[i])). Raises LaunchError.

    gate, up and down are pairs (values u8[E, N, K], scales f32[E, ceil(N / 128), ceil(K / 128)]): a value is the byte
    of an e4m3; K is a multiple of 16. All else as `experts`.
    """
    arrays = x, gates, hidden, out, pair_out, plan
    sizes = check_experts("experts_fp8", arrays, gate[0].shape[0], num_chosen, 16)
    _, size, width, num_experts = sizes
    for name, pair, rows, length in (
        ("gate", gate, width, size),
        ("up", up, width, size),
        ("down", down, size, width),
    ):
        check(f"experts_fp8: {name}", pair[0], "uint8", (num_experts, rows, length))
        blocks = num_experts, -(-rows // 128), -(-length // 128)
        check(f"experts_fp8: scales of {name}", pair[1], "float32", blocks)
    if out.size:
        arrays = x, gates, gate, up, down, hidden, out, pair_out, plan
        launch("fp8", arrays, sizes, num_chosen, stream)


SPECS = list(specs_of("fp8", types.uint8, types.float32))
