"""The one seam between the model and the arithmetic: `get_ops(backend)` gives an object with every operation.

A backend offers memory (`empty`, `put`, `get`) and the operations of `ddtree.reference` under the same names and
signatures. The caller names the backend; nothing falls back in silence.
"""

from typing import Any

from ddtree.errors import UsageError
from ddtree.ops.numpy_ops import NumpyOps

BACKENDS = ("numpy",)


def get_ops(backend: str = "numpy", dtype: str = "f32", route: str = "device") -> Any:
    """The operations of `backend` in `dtype` (f32 or f64), MoE gates by `route` (device or host).

    Raises UsageError for a name that is not offered.
    """
    if backend not in BACKENDS:
        raise UsageError(f"backend: expected one of {', '.join(BACKENDS)}, found {backend!r}")
    return NumpyOps(dtype, route)


__all__ = ["BACKENDS", "NumpyOps", "get_ops"]
