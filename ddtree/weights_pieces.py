"""Host arrays in pieces of bounded size, and their conversion to what a backend computes with. It knows no names."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
BITS = np.dtype(np.uint16)  # the form of bf16 in a backend's memory
AS_BITS = {BF16: BITS, np.dtype(ml_dtypes.float8_e4m3fn): np.dtype(np.uint8)}


def stored_bits(values: np.ndarray) -> np.ndarray:
    """bf16 as u16 and e4m3 as u8, another dtype as it is; no bytes are copied."""
    return values.view(AS_BITS.get(values.dtype, values.dtype))


def pieces(values: np.ndarray, most: int) -> Iterator[tuple[int, np.ndarray]]:
    """Views of `values`, in row-major order, of at most `most` elements each: (place of its first element, view).

    `values` may have any strides; no bytes are copied. A piece has its elements one after another in row-major order.
    """
    assert most > 0
    if 0 < values.size <= most:
        yield 0, values
    elif values.size:
        row = values.size // len(values)
        step = max(1, most // row)
        for first in range(0, len(values), step):
            for place, piece in pieces(values[first : first + step] if row <= most else values[first], most):
                yield first * row + place, piece


def convert(values: np.ndarray, out: np.ndarray) -> None:
    """out = values in out's format, of the same shape: a float dtype, or u16 for the bits of bf16, nearest even.

    Equal formats are copied bit for bit. NumPy's casts run through a small buffer, so that nothing is allocated.
    """
    if values.dtype == BF16 and out.dtype == BITS:
        np.copyto(out, values.view(BITS))
    elif values.dtype == BF16 and out.dtype == np.float32:
        np.left_shift(values.view(BITS), 16, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    else:
        np.copyto(out.view(BF16) if out.dtype == BITS else out, values, casting="unsafe")
