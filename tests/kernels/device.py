"""Arrays on the device (or in the simulator) for kernel tests: copies, poisoned outputs, bf16 as bits."""

import ml_dtypes
import numpy as np
from numba import cuda

POISON_BYTE = 0xFF  # every float format reads NaN, every signed integer -1, every index far out of bounds


def to_device(array):
    """A contiguous copy on the device, of a copy here: Numba misreads the odd strides an axis of one may have."""
    return cuda.to_device(np.array(array, order="C"))


def poisoned(shape, dtype=np.float32):
    """A device array whose every byte is 0xFF."""
    host = np.empty(shape, dtype)
    host.reshape(-1).view(np.uint8)[:] = POISON_BYTE
    return cuda.to_device(host)


def to_host(array):
    """A host copy."""
    return array.copy_to_host()


def scalar(value):
    """A device i32[1], the form of context_len and its like."""
    return cuda.to_device(np.array([value], np.int32))


def bf16_bits(values):
    """f32 values rounded to bf16, as u16 bits."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)


def bf16_values(bits):
    """The f32 values behind bf16 bits."""
    return np.asarray(bits, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)
