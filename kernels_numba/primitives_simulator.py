"""Numba's simulator, put right on import: threads of a block share each shared array, and wait without polling.

The simulator makes a shared array when the first thread asks for it, and two that ask at once may get one each: about
one launch of a hundred then computed nonsense. Its threads wait for each other by polling, for which they take the
interpreter from one another: here the last to come to a barrier wakes the others. So a thread mostly runs from barrier
to barrier at one go; blocks start their threads from the first and from the last in turn, that a missing barrier shows
whichever of two threads it lets read too soon. Shared memory is poisoned before a kernel writes it.

While a function runs, the simulator stands in the place of `cuda` among the names of the function's module. That of
Numba itself (numba-cuda's no longer) puts `cuda` back when any thread leaves, though others still run there.
"""

import collections
import contextlib
import functools
import itertools
import sys
import threading

import numpy as np
from numba import cuda, types
from numba.cuda.simulator import kernel, kernelapi
from numba.np.numpy_support import as_dtype

POISON_BYTE = 0xFF  # what shared memory holds before it is written: NaN, or -1

_array = kernelapi.FakeCUDAShared.array


def _shared_array(self, shape, dtype, _alignment=None):
    """As FakeCUDAShared.array: one array for each source line that asks. `setdefault` lets one thread win."""
    if isinstance(shape, int) and shape == 0:  # dynamic
        return _array(self, shape, dtype)
    frame = sys._getframe(1)
    made = self._allocations.get((frame.f_code, frame.f_lineno))
    if made is None:
        made = np.empty(shape, as_dtype(dtype) if isinstance(dtype, types.Type) else dtype)
        made.reshape(-1).view(np.uint8)[:] = POISON_BYTE
        made = self._allocations.setdefault((frame.f_code, frame.f_lineno), made)
    return made


_swapping = threading.Lock()
_inside: collections.Counter[int] = collections.Counter()  # calls under way, by module
_names: dict[int, list[str]] = {}


@contextlib.contextmanager
def _swapped(fn, fake):
    """`fake` for `cuda` in the module of fn, from the first call that enters to the last that leaves."""
    names, module = fn.__globals__, id(fn.__globals__)
    with _swapping:
        if not _inside[module]:
            _names[module] = [name for name, value in names.items() if value is cuda]
            names.update(dict.fromkeys(_names[module], fake))
        _inside[module] += 1
    try:
        yield
    finally:
        with _swapping:
            _inside[module] -= 1
            if not _inside[module]:
                names.update(dict.fromkeys(_names[module], cuda))


class _Thread(kernel.BlockThread):
    """A thread of a block that waits on a lock of its own."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.gate = threading.Lock()
        self.gate.acquire()

    def run(self):
        try:
            super().run()
        finally:
            self._manager.leave(self)

    def syncthreads(self):
        self._manager.meet(self)
        if self.abort:
            raise RuntimeError("abort flag set on syncthreads call")


class _Block(kernel.BlockManager):
    """Runs the threads of a block. Those that have returned are not waited for at a barrier, as on a GPU."""

    turn = itertools.count()

    def run(self, grid_point, *arguments):
        """Run them to their ends; raises what the first of them that failed raised."""
        points = list(np.ndindex(*self._block_dim))
        self.lock, self.waiting, self.running = threading.Lock(), [], len(points)
        target = functools.partial(self._f, *arguments)
        self.threads = [_Thread(target, self, grid_point, point, self._debug) for point in points]
        for thread in self.threads[:: -1 if next(self.turn) & 1 else 1]:
            thread.start()
        for thread in self.threads:
            thread.join()
        failed = [thread.exception for thread in self.threads if thread.exception and not thread.abort]
        if failed:
            error, traceback = failed[0]
            raise error.with_traceback(traceback)

    def meet(self, thread):
        """Wait for all that run; the last wakes the others."""
        with self.lock:
            self.waiting.append(thread)
            self._wake()
        thread.gate.acquire()

    def leave(self, thread):
        """A thread has returned, or failed: then all others end at their next barrier."""
        with self.lock:
            self.running -= 1
            if thread.exception and not thread.abort:
                for other in self.threads:
                    other.abort = other.exception is None
            self._wake()

    def _wake(self):
        if self.waiting and len(self.waiting) == self.running:
            for thread in self.waiting:
                thread.gate.release()
            self.waiting = []


kernel.swapped_cuda_module = _swapped
kernelapi.FakeCUDAShared.array = _shared_array
kernel.BlockManager = _Block
