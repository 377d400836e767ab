"""Device memory by Numba: allocation with errors that say what was wanted, and uploads through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba import cuda
from numba.cuda.cudadrv import driver

from ddtree.errors import DeviceMemoryError
from ddtree.ops.device_memory import DeviceMemory
from ddtree.ops.graphs import simulated
from ddtree.weights_pieces import convert

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class CudaMemory(DeviceMemory):
    """Arrays on a GPU, or in the simulator; every copy goes to `stream`."""

    def __init__(self, dtype: str = "f32", route: str = "device", gemm: str = "invariant"):
        super().__init__(dtype, route, gemm)
        self.stream: Any = 0

    @property
    def device(self) -> str:
        """The GPU's name, or the simulator's."""
        name = "simulator" if simulated() else cuda.get_current_device().name
        return name.decode() if isinstance(name, bytes) else str(name)

    def free_memory(self) -> int | None:
        """Bytes free on the device; None in the simulator, which has as many as it likes."""
        if simulated():
            return None
        context = cuda.current_context()
        context.memory_manager.deallocations.clear()  # what Numba means to free counts as free
        return int(context.get_memory_info().free)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype, what: str) -> Any:
        with self._out_of_memory(f"{what} {list(shape)} of {dtype}", shape, dtype, "device"):
            return cuda.device_array(shape, dtype)

    def pinned(self, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        dtype = np.dtype(dtype)
        with self._out_of_memory("pinned memory", shape, dtype, "host"):
            return cuda.pinned_array(shape, dtype)

    @contextmanager
    def _out_of_memory(self, what: str, shape: tuple[int, ...], dtype: np.dtype, kind: str) -> Iterator[None]:
        """Turn an allocation that failed for want of memory into DeviceMemoryError."""
        try:
            yield
        except Exception as error:
            if getattr(error, "code", None) != OUT_OF_MEMORY and not isinstance(error, MemoryError):
                raise
            free = self.free_memory() if kind == "device" else None
            raise DeviceMemoryError(
                f"{kind} memory: {what} needs {int(np.prod(shape, dtype=object)) * dtype.itemsize:,} bytes, "
                f"{'fewer' if free is None else f'{free:,}'} are free on {self.device if kind == 'device' else kind}; "
                "lower --budget or the context, use --dtype bf16, or end what else runs there"
            ) from error

    def write(self, array: Any, values: np.ndarray) -> None:
        array.copy_to_device(values, stream=self.stream)

    def read(self, array: Any) -> np.ndarray:
        """A host copy of a device array; waits for the stream."""
        values = array.copy_to_host(stream=self.stream)
        self.wait()
        return values

    def wait(self) -> None:
        """Wait for all that was put on the stream; on the default one, 0, for the device.

        A copy to the device on the default stream may return before it has arrived there.
        """
        if self.stream:
            self.stream.synchronize()
        else:
            cuda.synchronize()

    def clear(self, array: Any) -> None:
        if simulated():
            array[...] = 0
        elif array.size:
            driver.device_memset(array, 0, array.size * array.dtype.itemsize, stream=self.stream)

    def recover(self) -> None:
        """After a call that was cut short: wait for what was launched, and make scratch what it was when made."""
        self.frozen = False
        self.wait()
        for array in self.scratches.values():
            self.clear(array)

    @contextmanager
    def uploads(self) -> Iterator[Callable[[Any, int, np.ndarray], None]]:
        staging = Staging(self)
        try:
            yield staging
        finally:
            staging.wait()


class Staging:
    """Two pinned buffers that host values pass through: one is filled while the other is copied from."""

    def __init__(self, memory: CudaMemory):
        self.stream = memory.stream
        self.buffers = [memory.pinned((memory.chunk_bytes,), np.uint8) for _ in range(2)]
        self.copied: list[Any] = [None, None]  # an event for each: its last copy is done
        self.turn = 0

    def __call__(self, array: Any, start: int, values: np.ndarray) -> None:
        """Copy `values`, converted, to the elements start.. of a contiguous device array; may return before."""
        turn, dtype = self.turn, np.dtype(array.dtype)
        if self.copied[turn] is not None:
            self.copied[turn].synchronize()
        staged = self.buffers[turn][: values.size * dtype.itemsize].view(dtype)
        convert(values, staged.reshape(values.shape))
        array.reshape(-1)[start : start + values.size].copy_to_device(staged, stream=self.stream)
        self.copied[turn] = cuda.event()
        self.copied[turn].record(self.stream)
        self.turn = 1 - turn

    def wait(self) -> None:
        """Wait for the copies that are under way."""
        for event in self.copied:
            if event is not None:
                event.synchronize()
