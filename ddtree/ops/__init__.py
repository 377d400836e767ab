"""The one seam between the model and the arithmetic: `get_ops(backend)` gives an object with every operation.

A backend offers memory (`empty`, `put`, `get`) and the operations of `ddtree.reference` under the same names and
signatures. The caller names the backend; nothing falls back in silence.
"""

import sys
from typing import Any

from ddtree.errors import UsageError
from ddtree.ops.graphs import require_gpu, simulated
from ddtree.ops.numpy_ops import NumpyOps

BACKENDS = ("numpy", "cuda")


def get_ops(
    backend: str = "numpy", dtype: str = "f32", route: str = "device", gemm: str = "invariant"
) -> Any:
    """The operations of `backend` in `dtype` (numpy: f32, f64; cuda: f32, bf16), MoE gates by `route`.

    `gemm` names what makes the plain products: `invariant`, or on cuda `cublas`, which has no row invariance. Raises
    UsageError for a name that is not offered, and for cuda where there is neither a GPU nor the simulator.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    if backend == "numpy":
        return NumpyOps(dtype, route, gemm)
    if not simulated():
        require_gpu("backend cuda")
    from ddtree.ops.cuda_ops import CudaOps  # Numba's CUDA parts load only where they are wanted

    return CudaOps(dtype, route, gemm)


def is_launch_error(error: Exception) -> bool:
    """Whether a kernel refused its arguments; loads no kernel to find out."""
    checks = sys.modules.get("kernels_numba.checks")
    return checks is not None and isinstance(error, checks.LaunchError)


def find_backend() -> str:
    """What `auto` stands for: cuda where a GPU and the extra `gpu` are, numpy elsewhere."""
    try:
        require_gpu("backend auto")
    except UsageError:
        return "numpy"
    return "cuda"


__all__ = ["BACKENDS", "NumpyOps", "find_backend", "get_ops", "is_launch_error"]
