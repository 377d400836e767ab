"""Numba's simulator, put right on import: threads of a block share each shared array, and take turns sooner.

The simulator makes a shared array when the first thread asks for it, and two that ask at once may get one each: about
one launch of a hundred then computed nonsense. Its threads wait for each other by polling, which costs Python's switch
interval, 5 ms, a turn: a shorter one makes tests of many barriers ten times faster. Shared memory is poisoned before a
kernel writes it.

While a function runs, the simulator stands in the place of `cuda` among the names of the function's module. That of
Numba itself (numba-cuda's no longer) puts `cuda` back when any thread leaves, though others still run there.
"""

import collections
import contextlib
import sys
import threading

import numpy as np
from numba import cuda, types
from numba.cuda.simulator import kernel, kernelapi
from numba.np.numpy_support import as_dtype

SWITCH_SECONDS = 1e-5
POISON_BYTE = 0xFF  # what shared memory holds before it is written: NaN, or -1

_array = kernelapi.FakeCUDAShared.array


def _shared_array(self, shape, dtype, alignment=None):
    """As FakeCUDAShared.array: one array for each source line that asks. `setdefault` lets one thread win."""
    if alignment is not None or (isinstance(shape, int) and shape == 0):
        return _array(self, shape, dtype, alignment)
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


kernel.swapped_cuda_module = _swapped
kernelapi.FakeCUDAShared.array = _shared_array
sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
