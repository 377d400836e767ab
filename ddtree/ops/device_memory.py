"""Which arrays a GPU backend keeps, in which formats; how their bytes are had is a subclass's affair.

Scratch belongs to this object. Until `reserve` it grows with the calls; afterwards a call that wants more is refused,
and so is one in a captured round (`frozen`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import CapacityError, UsageError
from ddtree.quantised import MATRIX_TYPES, QuantisedMatrix, arrays_of
from ddtree.weights_pieces import BITS, convert

DTYPES = ("f32", "bf16")
ROUTES = ("device", "host")
GEMMS = ("invariant", "cublas")
CUBLAS_WORKSPACE = 32 << 20  # bytes; what NVIDIA recommends from sm_90 on
FP8_MULTIPLE = 16  # K of fp8 matrices, for 16-byte loads
CHUNK_BYTES = 32 << 20  # of each of the two staging buffers


class DeviceMemory:
    """Arrays in `dtype`, the scratch of every operation, and what a run is described by (`route`, `gemm`)."""

    name = "cuda"
    chunk_bytes = CHUNK_BYTES
    on_upload: Callable[[int], None] | None = (
        None  # told the bytes of each piece of a file that is on its way
    )

    def __init__(self, dtype: str = "f32", route: str = "device", gemm: str = "invariant"):
        for what, found, offered in (
            ("dtype", dtype, DTYPES),
            ("route", route, ROUTES),
            ("gemm", gemm, GEMMS),
        ):
            if found not in offered:
                raise UsageError(
                    f"{what}: expected one of {', '.join(offered)} on the backend cuda, found {found!r}"
                )
        self.dtype_name, self.route, self.gemm = dtype, route, gemm
        self.frozen = self.reserved = False
        self.scratches: dict[str, Any] = {}

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> Any:
        """An uninitialised array; `what` names it in the error. Raises DeviceMemoryError."""
        raise NotImplementedError

    def pinned(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """An uninitialised host array that the GPU copies to while the host goes on."""
        raise NotImplementedError

    def write(self, array: Any, values: np.ndarray) -> None:
        """Copy host values of the same shape and dtype into an array, in the order of the stream."""
        raise NotImplementedError

    def uploads(self) -> AbstractContextManager[Callable[[Any, int, np.ndarray], None] | None]:
        """Gives upload(array, start, values): values of any dtype and strides, at most `chunk_bytes` of the array.

        They go to the elements start.. of a contiguous array, converted on the way. None from a backend that only
        counts: there is nothing to read then. All have arrived when the block ends.
        """
        raise NotImplementedError

    def empty(self, shape: tuple[int, ...], dtype: Any = np.float32, what: str = "an array") -> Any:
        """An uninitialised array, f32 unless `dtype` says otherwise."""
        return self.allocate(tuple(shape), np.dtype(dtype), what)

    def empty_f32(self, shape: tuple[int, ...]) -> Any:
        """An uninitialised f32 array, whatever the mode."""
        return self.empty(shape)

    def empty_matrix(self, shape: tuple[int, ...]) -> Any:
        """An uninitialised array in the matmul format: f32, or bf16 bits."""
        return self.empty(shape, BITS if self.dtype_name == "bf16" else np.float32, "a weight")

    @staticmethod
    def multiplies(stored: str, shape: tuple[int, ...]) -> bool:
        """Whether `linear` takes a matrix [N, K] stored as fp8 or int4: INT4 has a kernel for experts alone."""
        return stored == "fp8" and shape[-1] % FP8_MULTIPLE == 0

    def empty_quantised(self, shape: tuple[int, ...], stored: str) -> QuantisedMatrix:
        """An uninitialised fp8 or int4 matrix [.., N, K]. UsageError unless products are in bf16 and take such a K."""
        if self.dtype_name != "bf16":
            raise UsageError(
                f"dtype: {stored} weights need bf16 on the backend cuda, found {self.dtype_name}: use --dtype bf16"
            )
        if stored == "fp8" and shape[-1] % FP8_MULTIPLE:
            raise UsageError(
                f"fp8 experts: the backend cuda takes inputs in multiples of {FP8_MULTIPLE}, found {shape[-1]}"
            )
        sizes = arrays_of(shape, stored)
        return MATRIX_TYPES[stored](*(self.empty(size, dtype, "a weight") for size, dtype in sizes))

    def empty_cache(self, shape: tuple[int, ...]) -> Any:
        """An uninitialised cache, in the same format."""
        return self.empty(shape, BITS if self.dtype_name == "bf16" else np.float32, "a cache")

    def put(self, array: np.ndarray) -> Any:
        """A matrix in the matmul format, rounded to nearest even."""
        return self._filled(self.empty_matrix(array.shape), array)

    def put_exact(self, array: np.ndarray) -> Any:
        """What stays f32 in every mode: norms, router, bias, rotary tables."""
        return self._filled(self.empty(array.shape), array)

    def integers(self, array: np.ndarray) -> Any:
        """An i32 copy."""
        return self._filled(self.empty(array.shape, np.int32), array)

    def _filled(self, array: Any, values: np.ndarray) -> Any:
        staged = np.empty(array.shape, array.dtype)
        convert(np.asarray(values), staged)
        self.write(array, staged)
        return array

    def scratch(self, name: str, count: int, dtype: Any = np.float32) -> Any:
        """A flat array of at least `count` elements that no other name shares; zero when it is made."""
        found = self.scratches.get(name)
        if found is None or found.shape[0] < count:
            held = 0 if found is None else found.shape[0]
            if self.frozen or self.reserved:
                raise CapacityError(
                    f"scratch {name}: {count} elements are wanted, {held} were reserved; "
                    "open the engine for a larger budget"
                )
            found = self.scratches[name] = self.empty((count,), dtype, f"scratch {name}")
            self.clear(found)
        return found

    def clear(self, array: Any) -> None:
        """Make every byte of an array zero."""
        raise NotImplementedError

    @staticmethod
    def check_sizes(
        config: ModelConfig,
        drafter: DrafterConfig | None,
        max_budget: int,
        prefill_chunk: int = 1,
        dtype: str = "f32",
        gemm: str = "invariant",
    ) -> None:
        """Raise UsageError unless the kernels can run a model of these configs with trees of `max_budget` nodes."""
        from ddtree.ops.limits import check_sizes  # which loads the kernels

        check_sizes(config, drafter, max_budget, prefill_chunk, dtype, gemm)

    def reserve(
        self,
        config: ModelConfig,
        drafter: DrafterConfig | None,
        max_rows: int,
        capacity: int,
        fp8: bool = True,
    ) -> None:
        """Take the scratch of the largest calls at once; no later call takes any, or is refused with CapacityError.

        `fp8` says whether `linear` may meet fp8 matrices (`ddtree.checkpoint_formats.holds_fp8`).
        """
        from ddtree.ops.scratch import largest_scratch  # which loads the kernels

        cublas = self.gemm == "cublas"
        gemm = self.gemm if self.dtype_name == "bf16" else ""
        for name, (count, dtype) in largest_scratch(config, drafter, max_rows, capacity, gemm, fp8).items():
            self.scratch(name, count, dtype)
        if cublas:
            self.scratch("gemm workspace", CUBLAS_WORKSPACE, np.uint8)
        self.reserved = True
