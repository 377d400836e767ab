"""Copies of whole rows: out[i] = table[token_ids[i]], and out[:, column : column + H] = x.

In 16-byte accesses where every row starts on 16 bytes, else element by element.
"""

import functools

from numba import cuda, int32, int64, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.primitives import (
    SIMULATED,
    after_previous,
    bf16_to_float,
    float_from_bits,
    load4,
    load8,
    store4,
)
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 128


@functools.cache
def make_embed(bf16, wide):
    """The gather from an f32 or bf16 table; `wide`: H is a multiple of 8, table and out are flat."""

    @cuda.jit
    def embed_kernel(token_ids, vocab, table, width, out):
        """Block (row, part) copies a part of one row, or writes NaN when its id is not in 0..vocab - 1."""
        after_previous()
        row = cuda.blockIdx.x
        i = int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        if wide:
            i *= int32(8)
        token = token_ids[row]
        if i < width:
            target = int64(row) * width + i
            source = int64(token) * width + i
            if token < 0 or token >= vocab:
                nan = float_from_bits(uint32(0x7FC00000))
                if wide:
                    store4(out, target, nan, nan, nan, nan)
                    store4(out, target + 4, nan, nan, nan, nan)
                else:
                    out[target] = nan
            elif wide:
                if bf16:
                    a, b, c, d, e, f, g, h = load8(table, source)
                else:
                    a, b, c, d = load4(table, source)
                    e, f, g, h = load4(table, source + 4)
                store4(out, target, a, b, c, d)
                store4(out, target + 4, e, f, g, h)
            elif bf16:
                out[target] = bf16_to_float(table[source])
            else:
                out[target] = table[source]

    return embed_kernel


@functools.cache
def make_copy_columns(wide):
    """The column copy; `wide`: the widths and the column are multiples of 4. x and out are flat."""

    @cuda.jit
    def copy_columns_kernel(x, x_width, column, out, out_width):
        """Block (row, part) copies a part of one row of x to out[row, column:]."""
        after_previous()
        row = int64(cuda.blockIdx.x)
        i = int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        if wide:
            i *= int32(4)
        if i < x_width:
            target = row * out_width + column + i
            if wide:
                a, b, c, d = load4(x, row * x_width + i)
                store4(out, target, a, b, c, d)
            else:
                out[target] = x[row * x_width + i]

    return copy_columns_kernel


def grid(rows, units):
    """Blocks of THREADS: a row by the parts of its `units`."""
    return rows, -(-units // THREADS)


def embed(token_ids, table, out, stream=0):
    """out[i] = table[token_ids[i]]; token_ids i32 [M], table [V, H] f32 or bf16 (u16 bits), out f32 [M, H].

    A row whose id is out of range becomes NaN. Raises LaunchError.
    """
    check("embed: token_ids", token_ids, "int32", (None,))
    check("embed: table", table, ("float32", "uint16"), (None, None))
    rows, (vocab, width) = token_ids.shape[0], table.shape
    check("embed: out", out, "float32", (rows, width))
    if out.size:
        wide = width % 8 == 0
        kernel = make_embed(str(table.dtype) == "uint16", wide)
        launch = kernel[grid(rows, width // 8 if wide else width), THREADS, stream]
        launch(token_ids, int32(vocab), table.reshape(-1), int32(width), out.reshape(-1))


def copy_columns(x, column, out, stream=0):
    """out[:, column : column + H] = x; f32 x [M, H] and out [M, W], column a host integer. Raises LaunchError."""
    check("copy_columns: x", x, "float32", (None, None))
    rows, width = x.shape
    check("copy_columns: out", out, "float32", (rows, None))
    room = out.shape[1]
    require(
        0 <= column <= room - width,
        f"copy_columns: column: expected 0..{room - width} for {width} columns into {room}, found {column}",
    )
    if x.size:
        wide = width % 4 == 0 and room % 4 == 0 and column % 4 == 0
        launch = make_copy_columns(wide)[grid(rows, width // 4 if wide else width), THREADS, stream]
        launch(x.reshape(-1), int32(width), int32(column), out.reshape(-1), int32(room))


_IDS, _FLAT, _BITS = (types.Array(dtype, 1, "C") for dtype in (types.int32, types.float32, types.uint16))
_COPY = (_FLAT, types.int32, types.int32, _FLAT, types.int32)
SPECS = [
    KernelSpec(
        f"embed{'_bf16' if bf16 else ''}{'' if wide else '_odd'}",
        make_embed(bf16, wide),
        (_IDS, types.int32, _BITS if bf16 else _FLAT, types.int32, _FLAT),
        THREADS,
    )
    for bf16 in (False, True)
    for wide in (True, False)
] + [
    KernelSpec("copy_columns", make_copy_columns(True), _COPY, THREADS),
    KernelSpec("copy_columns_odd", make_copy_columns(False), _COPY, THREADS),
]
