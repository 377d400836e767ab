"""SwiGLU, out = gate * sigmoid(gate) * up, and the plain sum, out = x + y: a thread an element, grid-stride loops."""

from numba import cuda, float32, types

from kernels_numba.checks import check
from kernels_numba.primitives import SIMULATED, after_previous, exp
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
MAX_BLOCKS = 4 if SIMULATED else 1024


@cuda.jit
def swiglu_kernel(gate, up, out):
    """out = gate / (1 + exp(-gate)) * up over flat arrays of one length; out may be gate."""
    after_previous()
    for i in range(cuda.grid(1), out.shape[0], cuda.gridsize(1)):
        value = gate[i]
        out[i] = value / (float32(1) + exp(-value)) * up[i]


@cuda.jit
def add_kernel(x, y, out):
    """out = x + y over flat arrays of one length; out may be either."""
    after_previous()
    for i in range(cuda.grid(1), out.shape[0], cuda.gridsize(1)):
        out[i] = x[i] + y[i]


def blocks_for(count):
    """Blocks of THREADS for `count` elements, at most MAX_BLOCKS and at least one."""
    return max(1, min(-(-count // THREADS), MAX_BLOCKS))


def swiglu(gate, up, out, stream=0):
    """out = gate * sigmoid(gate) * up; f32 arrays of one shape, out may be gate. Raises LaunchError."""
    for name, array in (("gate", gate), ("up", up), ("out", out)):
        check(f"swiglu: {name}", array, "float32", gate.shape)
    swiglu_kernel[blocks_for(gate.size), THREADS, stream](gate.reshape(-1), up.reshape(-1), out.reshape(-1))


def add(x, y, out, stream=0):
    """out = x + y; f32 arrays of one shape, out may be x or y. Raises LaunchError."""
    for name, array in (("x", x), ("y", y), ("out", out)):
        check(f"add: {name}", array, "float32", x.shape)
    add_kernel[blocks_for(x.size), THREADS, stream](x.reshape(-1), y.reshape(-1), out.reshape(-1))


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec("swiglu", swiglu_kernel, (_FLAT,) * 3, THREADS),
    KernelSpec("add", add_kernel, (_FLAT,) * 3, THREADS),
]
