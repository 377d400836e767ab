"""What a file's weights come through on their way to a backend's memory: as stored, or as their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from ddtree.checkpoint_formats import MATRICES, format_of
from ddtree.kdtr import KdtrFile
from ddtree.quantised import BLOCK, E4M3, MATRIX_TYPES, NIBBLES, QuantisedMatrix, dequantised, rows_of
from ddtree.weights_pieces import pieces, stored_bits

Part = Callable[[np.ndarray], np.ndarray]


class WeightReader:
    """Moves a file's arrays into a backend's memory: matrices in its matmul format or quantised, the rest exactly.

    Arrays go piece by piece to where they will lie, so that the host holds no copy of them. `upload` is None where
    the backend only counts; then the file's arrays are not read.
    """

    def __init__(self, file: KdtrFile, ops: Any, upload: Callable[[Any, int, np.ndarray], None] | None):
        self.file, self.ops, self.upload = file, ops, upload

    @property
    def names(self) -> Container[str]:
        """The names of the arrays there are."""
        return self.file

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape of an array of the file."""
        return self.file.info(name).shape

    def format(self, name: str) -> str:
        """How the weight `name` is stored: plain, fp8 or int4."""
        return format_of(name, self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a weight, however it is stored."""
        if self.format(name) != "int4":
            return self.stored_shape(name)
        *outer, words = self.stored_shape(f"{name}_packed")
        return (*outer, words * NIBBLES)

    def matrix(self, *names: str) -> Any:
        """A matrix for `ops.linear`, the rows of one weight or of several of one K in turn.

        Quantised where the backend multiplies that and all are stored so, no block of scales holding rows of two of
        them; else in the matmul format.
        """
        stored, ends = self.format(names[0]), self._ends(names)
        shape = (ends[-1], *self.shape(names[0])[1:])
        alike = all(self.format(name) == stored for name in names)
        apart = stored != "fp8" or all(end % BLOCK == 0 for end in ends[:-1])
        if stored != "plain" and alike and apart and self.ops.multiplies(stored, shape):
            whole = self.ops.empty_quantised(shape, stored)
            for name, first, last in zip(names, [0, *ends], ends, strict=False):
                self.place(rows_of(whole, first, last), name)
            return whole
        return self._in_turn(self.ops.empty_matrix(shape), names, ends)

    def exact(self, *names: str) -> Any:
        """A weight that no backend rounds, or several in turn along the first axis."""
        ends = self._ends(names)
        return self._in_turn(self.ops.empty((ends[-1], *self.shape(names[0])[1:])), names, ends)

    def _ends(self, names: Sequence[str]) -> list[int]:
        """Where each weight's rows end when they lie one after another."""
        return list(itertools.accumulate(self.shape(name)[0] for name in names))

    def _in_turn(self, out: Any, names: Sequence[str], ends: list[int]) -> Any:
        for name, first, last in zip(names, [0, *ends], ends, strict=False):
            self.fill(out[first:last], name)
        return out

    def fill(self, out: Any, name: str, start: int = 0, part: Part | None = None) -> Any:
        """Put a weight's values, or `part` of them, to the elements start.. of `out`; returns `out`.

        A quantised weight is dequantised on the way: f64 values, rounded as any other array is.
        """
        if self.format(name) == "plain":
            return self.copy(out, name, start, part)
        if self.upload is None:
            return out
        stored = self.format(name)
        matrix = MATRIX_TYPES[stored](*(stored_bits(self.file[name + end]) for end in MATRICES[stored]))
        rows, length = matrix.shape
        step = rows if part else max(1, self.ops.chunk_bytes // (8 * length * BLOCK)) * BLOCK
        for first in range(0, rows, step):
            values = dequantised(rows_of(matrix, first, min(first + step, rows)))
            sent = values if part is None else part(values)
            self._send(out, start + first * length, sent, False)
            self._tell(sum(array.nbytes for array in matrix.arrays) * sent.size // (rows * length))
        return out

    def place(
        self, out: QuantisedMatrix, name: str, expert: int = 0, part: Part | None = None
    ) -> QuantisedMatrix:
        """Put both arrays of a quantised weight as stored, or `part` of each, to the matrices expert.. of a stack.

        `out` may also be a single matrix; returns it.
        """
        for array, ending in zip(out.arrays, MATRICES[out.dtype_name], strict=True):
            self.copy(array, name + ending, expert * math.prod(array.shape[-2:]), part)
        return out

    def copy(self, out: Any, name: str, start: int = 0, part: Part | None = None) -> Any:
        """Put an array of the file, or `part` of it, to the elements start.. of `out`; returns `out`."""
        if self.upload is not None:
            values = self.file[name]
            if values.dtype == E4M3:
                values = stored_bits(values)
            self._send(out, start, values if part is None else part(values))
        return out

    def _send(self, out: Any, start: int, values: np.ndarray, tell: bool = True) -> None:
        for place, piece in pieces(values, self.ops.chunk_bytes // out.dtype.itemsize):
            self.upload(out, start + place, piece)
            if tell:
                self._tell(piece.nbytes)

    def _tell(self, num_bytes: int) -> None:
        if self.ops.on_upload is not None:
            self.ops.on_upload(num_bytes)
