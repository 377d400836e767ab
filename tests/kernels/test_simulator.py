"""The simulator put right: `cuda` in a module is the simulator's until the last of its callers has left."""

import contextlib
from types import FunctionType

import pytest
from numba import cuda

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
