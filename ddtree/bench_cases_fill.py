"""Cases of random weights made on the device."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddtree.bench_data import poisoned, require_equal, stored
from ddtree.bench_kernels import Case, Work
from ddtree.reference import fill as reference_fill

CHECKED = 1 << 20  # elements that the reference makes too


def cases(quick: bool) -> list[Case]:
    """Sixteen expert matrices of Kimi K2; quick: few elements, not a multiple of four."""
    shape = (3, 5, 7) if quick else (16, 2048, 7168)
    return [fill(shape, dtype) for dtype in ("f32", "bf16")]


def fill(shape: tuple[int, ...], dtype: str) -> Case:
    name = f"fill {dtype} {'x'.join(map(str, shape))}"
    size, seed, index = math.prod(shape), 1, 2

    def prepare() -> Work:
        from kernels_numba import fill as kernels

        want = np.empty(min(size, CHECKED), np.float32)
        reference_fill.fill(want, seed, index, 0.5)

        def check(found: Any) -> None:
            require_equal("out", found["out"].reshape(-1)[: want.size], stored(want, dtype))

        arrays = {"out": poisoned(*shape, dtype=np.uint16 if dtype == "bf16" else np.float32)}
        checked = "all" if want.size == size else f"{want.size} of {size} elements"
        return Work(
            arrays, ("out",), lambda d, s: kernels.fill(d.out, seed, index, 0.5, s), check, checked=checked
        )

    return Case(name, "fill.fill", size * (2 if dtype == "bf16" else 4), 0, prepare)
