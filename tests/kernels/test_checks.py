"""What launchers refuse before they launch, and in which words."""

import numpy as np
import pytest

from kernels_numba.checks import LaunchError, check, require

ARRAY = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize(
    ("array", "dtypes", "shape"),
    [
        (ARRAY, "float32", (3, 4)),
        (ARRAY, ("uint16", "float32"), (None, 4)),
        (ARRAY[1:], "float32", (2, 4)),
        (ARRAY[:1, :2], "float32", (1, 2)),  # one row has no stride to be wrong
        (ARRAY[:0], "float32", (None, 4)),
        (ARRAY[:, :0], "float32", (3, None)),
        (np.zeros((3, 1), np.float32), "float32", (3, 1)),
        (np.zeros((2, 1, 3), bool), "bool", (2, None, None)),
    ],
)
def test_right_arrays_pass(array, dtypes, shape):
    check("x", array, dtypes, shape)


@pytest.mark.parametrize(
    ("array", "dtypes", "shape", "message"),
    [
        (ARRAY, "float64", (3, 4), "^x: expected dtype float64, found float32$"),
        (ARRAY, ("int32", "uint16"), (3, 4), "^x: expected dtype int32 or uint16, found float32$"),
        ([[0.0]], "float32", (1, 1), "^x: expected dtype float32, found <class 'list'>$"),
        (ARRAY, "float32", (3, 5), r"^x: expected shape \(3, 5\), found \(3, 4\)$"),
        (ARRAY, "float32", (None,), r"^x: expected shape \(None,\), found \(3, 4\)$"),
        (ARRAY.reshape(-1), "float32", (3, 4), r"^x: expected shape \(3, 4\), found \(12,\)$"),
        (ARRAY[:, :2], "float32", (3, 2), r"^x: expected a C-contiguous array, found strides \(16, 4\)$"),
        (ARRAY[::2], "float32", (2, 4), "C-contiguous"),
        (ARRAY.T, "float32", (4, 3), "C-contiguous"),
        (ARRAY[:, :1], "float32", (3, 1), "C-contiguous"),
        (ARRAY[::-1], "float32", (3, 4), "C-contiguous"),
        (np.broadcast_to(ARRAY[0], (3, 4)), "float32", (3, 4), "C-contiguous"),
    ],
)
def test_wrong_arrays_are_named(array, dtypes, shape, message):
    with pytest.raises(LaunchError, match=message):
        check("x", array, dtypes, shape)


def test_require():
    require(True, "never")
    with pytest.raises(LaunchError, match="told so"):
        require(False, "told so")
