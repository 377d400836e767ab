"""A backend that only counts: the arrays a GPU would hold, without the GPU, its memory or the file's bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ddtree.ops.device_memory import DeviceMemory
from ddtree.ops.numpy_ops import NumpyOps


class Counted:
    """The shape and dtype of an array that does not exist; slices and views of it likewise."""

    def __init__(self, shape: tuple[int, ...], dtype: Any):
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=object)) * self.dtype.itemsize

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> Counted:
        return Counted(np.broadcast_to(np.int8(0), self.shape)[key].shape, self.dtype)

    def view(self, dtype: Any) -> Counted:
        """The same bytes as another dtype: the last axis grows or shrinks."""
        last = self.shape[-1] * self.dtype.itemsize // np.dtype(dtype).itemsize
        return Counted((*self.shape[:-1], last), dtype)


class PlanOps(DeviceMemory):
    """Allocates Counted arrays for the backend cuda; `allocated` is the sum of their bytes. It computes nothing."""

    device = "none"
    gate_rule = staticmethod(NumpyOps.gate_rule)

    def __init__(self, dtype: str = "f32", route: str = "device", gemm: str = "invariant"):
        super().__init__(dtype, route, gemm)
        self.allocated = 0

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> Counted:
        array = Counted(shape, dtype)
        self.allocated += array.nbytes
        return array

    def pinned(self, shape: tuple[int, ...], dtype: Any = np.float32) -> Counted:
        return Counted(shape, dtype)

    def write(self, array: Any, values: np.ndarray) -> None:
        """Nothing: there is no memory."""

    def clear(self, array: Any) -> None:
        """Nothing: there is no memory."""

    def _filled(self, array: Any, values: np.ndarray) -> Any:
        return array

    @contextmanager
    def uploads(self) -> Iterator[None]:
        yield None
