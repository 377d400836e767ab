"""The simulator put right: `cuda` in a module is its until the last caller has left; threads meet without polling."""

import contextlib
import threading
from types import FunctionType

import numpy as np
import pytest
from numba import cuda, int32

pytestmark = pytest.mark.simulator


def test_cuda_comes_back_when_the_last_caller_leaves() -> None:
    from numba.cuda.simulator import kernel

    import kernels_numba.primitives  # noqa: F401  puts it right

    names = {"cuda": cuda, "also": cuda, "other": 1}
    function, fake = FunctionType((lambda: None).__code__, names), object()
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    first.enter_context(kernel.swapped_cuda_module(function, fake))
    second.enter_context(kernel.swapped_cuda_module(function, fake))
    first.close()
    assert names["cuda"] is names["also"] is fake
    second.close()
    assert names["cuda"] is names["also"] is cuda and names["other"] == 1


def test_it_comes_back_after_an_error() -> None:
    from numba.cuda.simulator import kernel

    names = {"cuda": cuda}
    function = FunctionType((lambda: None).__code__, names)
    with pytest.raises(ValueError, match="no"), kernel.swapped_cuda_module(function, object()):
        raise ValueError("no")
    assert names["cuda"] is cuda


def _neighbours(step: int, meets: bool) -> np.ndarray:
    """What threads read of a neighbour's word of shared memory, of three launches of one block, i32 [3, 8]."""
    import kernels_numba.primitives  # noqa: F401  puts it right

    @cuda.jit
    def read(out):
        words, i = cuda.shared.array(8, int32), cuda.threadIdx.x
        words[i] = i
        if meets:
            cuda.syncthreads()
        out[i] = words[(i + step) % 8]

    found = np.zeros((3, 8), np.int32)
    for out in found:
        read[1, 8](out)
    return found


@pytest.mark.parametrize("step", [1, -1])
def test_a_missing_barrier_shows_whichever_thread_it_lets_read_too_soon(step) -> None:
    want = (np.arange(8) + step) % 8
    assert (_neighbours(step, meets=True) == want).all()
    assert (_neighbours(step, meets=False) != want).any()


def test_threads_that_have_returned_are_not_waited_for() -> None:
    import kernels_numba.primitives  # noqa: F401

    @cuda.jit
    def leave(out):
        i = cuda.threadIdx.x
        for turn in range(4):
            if turn == i:
                return
            out[i] += 1
            cuda.syncthreads()

    out = np.zeros(6, np.int32)
    leave[1, 6](out)
    assert out.tolist() == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("failing", [0, 3, 7])
def test_an_error_of_one_thread_is_the_launch_s_and_ends_the_others(failing) -> None:
    import kernels_numba.primitives  # noqa: F401

    @cuda.jit
    def fail(out):
        i = cuda.threadIdx.x
        cuda.syncthreads()
        if i == failing:
            raise ValueError("mine")
        cuda.syncthreads()
        out[i] = 1

    out, before = np.zeros(8, np.int32), threading.active_count()
    with pytest.raises(ValueError, match=rf"tid=\[{failing}, 0, 0\].*mine"):
        fail[1, 8](out)
    assert not out.any() and threading.active_count() == before
