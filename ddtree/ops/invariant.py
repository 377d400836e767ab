"""Plain matrix products by `kernels_numba.linear`, whose rows keep their bits, with the scratch that they want."""

from __future__ import annotations

import weakref
from typing import Any

from ddtree.ops.device_memory import DeviceMemory
from kernels_numba import linear

SCRATCH = "linear"


class InvariantProducts:
    """`linear` and `head_linear` as `kernels_numba.linear` has them; scratch is the memory's."""

    def __init__(self, memory: DeviceMemory):
        self.memory = weakref.proxy(memory)  # which owns this object

    def linear(self, x: Any, weight: Any, out: Any, stream: Any = 0) -> None:
        """out = x @ weight.T; x f32[M, K], weight f32[N, K] or bf16 bits u16[N, K], out f32[M, N]. LaunchError."""
        linear.linear(x, weight, out, self._scratch(weight, x.shape[0], 1, *weight.shape), stream)

    def head_linear(self, x: Any, weight: Any, out: Any, stream: Any = 0) -> None:
        """out[i, h] = weight[h] @ x[i, h]; x f32[M, H, A], weight [H, B, A], out f32[M, H, B]. LaunchError."""
        linear.head_linear(x, weight, out, self._scratch(weight, x.shape[0], *weight.shape), stream)

    def _scratch(self, weight: Any, rows: int, heads: int, width: int, length: int) -> Any:
        count = linear.linear_scratch(rows, heads, width, length) if str(weight.dtype) == "uint16" else 0
        return self.memory.scratch(SCRATCH, count) if count else None
