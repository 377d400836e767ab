"""Quantised matrices as checkpoints store them: fp8 in blocks of 128 x 128, INT4 in groups of 32, and their values.

    fp8     value[n, k] = e4m3(values[n, k]) * scales[n // 128, k // 128]       DeepSeek-V3's `weight_scale_inv`
    int4    value[n, k] = (nibble[n, k] - 8) * scales[n, k // 32]               compressed-tensors, pack-quantized

A word of `packed` holds eight nibbles along K, the lowest first. Both have the last two axes [N, K] and perhaps stacked
experts before them; arrays are those of any backend. It knows no files, no names and no models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

BLOCK = 128  # rows and columns that share a scale in fp8; at the ends blocks are smaller
GROUP = 32  # of K, that share a scale in INT4
NIBBLES = 8  # values a word
MIDDLE = 8  # the nibble of 0

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)  # by byte; NaN at 0x7f and 0xff


@dataclass(frozen=True, eq=False)
class Int4Matrix:
    """packed i32[..., N, K / 8] and scales u16[..., N, K / 32], the bits of bf16."""

    packed: Any
    scales: Any

    dtype_name = "int4"

    def __post_init__(self) -> None:
        *outer, words = self.packed.shape
        assert tuple(self.scales.shape) == (*outer, words * NIBBLES // GROUP), (
            f"{self.packed.shape} {self.scales.shape}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., N, K]."""
        *outer, words = self.packed.shape
        return (*outer, words * NIBBLES)

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self.packed, self.scales

    def __getitem__(self, key: Any) -> Int4Matrix:
        """Of a stack, one matrix or several."""
        return Int4Matrix(self.packed[key], self.scales[key])


@dataclass(frozen=True, eq=False)
class Fp8Matrix:
    """values u8[..., N, K], the bytes of e4m3, and scales f32[..., ceil(N / 128), ceil(K / 128)]."""

    values: Any
    scales: Any

    dtype_name = "fp8"

    def __post_init__(self) -> None:
        assert tuple(self.scales.shape) == fp8_scales_shape(self.values.shape), (
            f"{self.values.shape} {self.scales.shape}"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [..., N, K]."""
        return tuple(self.values.shape)

    @property
    def arrays(self) -> tuple[Any, Any]:
        return self.values, self.scales

    def __getitem__(self, key: Any) -> Fp8Matrix:
        """Of a stack, one matrix or several."""
        return Fp8Matrix(self.values[key], self.scales[key])


QuantisedMatrix = Int4Matrix | Fp8Matrix
MATRIX_TYPES = {"fp8": Fp8Matrix, "int4": Int4Matrix}


def fp8_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of an fp8 matrix [..., N, K]."""
    *outer, rows, length = shape
    return (*outer, -(-rows // BLOCK), -(-length // BLOCK))


def arrays_of(shape: tuple[int, ...], dtype_name: str) -> tuple[tuple[tuple[int, ...], Any], ...]:
    """(shape, dtype) of the two arrays of a quantised matrix [..., N, K]; K is a multiple of 32 for INT4."""
    if dtype_name == "fp8":
        return (shape, np.uint8), (fp8_scales_shape(shape), np.float32)
    *outer, length = shape
    assert length % GROUP == 0, f"K = {length}"
    return ((*outer, length // NIBBLES), np.int32), ((*outer, length // GROUP), np.uint16)


def rows_of(matrix: QuantisedMatrix, first: int, last: int) -> QuantisedMatrix:
    """Rows first .. last - 1 of a matrix [N, K]; of an fp8 one `first` is a multiple of 128."""
    if isinstance(matrix, Int4Matrix):
        return matrix[first:last]
    assert first % BLOCK == 0
    scales = matrix.scales[first // BLOCK : -(-last // BLOCK)]
    return Fp8Matrix(matrix.values[first:last], scales)


def nibbles_of(packed: np.ndarray) -> np.ndarray:
    """The nibbles u8[..., 8 W] of packed words [..., W], in the order of K."""
    words = np.ascontiguousarray(packed).view(np.uint32)[..., None]
    nibbles = (words >> np.arange(0, 4 * NIBBLES, 4, dtype=np.uint32)) & np.uint32(15)
    return nibbles.astype(np.uint8).reshape(*packed.shape[:-1], -1)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    """f32 of the bits of bf16."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def unscaled(matrix: QuantisedMatrix) -> np.ndarray:
    """A host matrix before its scales, exactly: e4m3's values, or nibbles less 8; f32[..., N, K]."""
    if isinstance(matrix, Fp8Matrix):
        return E4M3_VALUES[matrix.values]
    return nibbles_of(matrix.packed).astype(np.float32) - np.float32(MIDDLE)


def group_of(matrix: QuantisedMatrix) -> int:
    """Elements of K that share a scale."""
    return BLOCK if isinstance(matrix, Fp8Matrix) else GROUP


def scales_by_row(matrix: QuantisedMatrix) -> np.ndarray:
    """A host matrix's scales with a row for each of its own: f32[..., N, ceil(K / group)]."""
    if isinstance(matrix, Fp8Matrix):
        return np.repeat(matrix.scales, BLOCK, axis=-2)[..., : matrix.shape[-2], :]
    return bf16_values(matrix.scales)


def dequantised(matrix: QuantisedMatrix) -> np.ndarray:
    """The exact values of a host matrix, f64[..., N, K]: 24 bits of scale times 4 bits fit."""
    scales = np.repeat(scales_by_row(matrix).astype(np.float64), group_of(matrix), axis=-1)
    return unscaled(matrix) * scales[..., : matrix.shape[-1]]
