"""Cases of the matrix products: linear layers and the absorb products, at Kimi K2's and the shipped model's sizes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ddtree.bench_data import EPS, bf16, generator, normal, poisoned, require_close, stored, values_of
from ddtree.bench_kernels import Case, Work

LARGE = 1 << 26  # bytes of weight from which there is one copy on the device, shared by the cases that use it
CHECKED_COLUMNS = 512  # of a large weight, chosen at random


def cases(quick: bool) -> list[Case]:
    """Kimi's dense MLP and absorb products in bf16; the shipped model's MLP and head in both dtypes."""
    if quick:
        sizes = [(m, n, k) for m in (1, 2, 3, 5, 9) for n, k in ((33, 64), (17, 35))]
        found = [linear(*size, dtype) for dtype in ("f32", "bf16") for size in sizes]
        return found + [head_linear(m, 3, 17, 40, dtype) for dtype in ("f32", "bf16") for m in (1, 6)]
    found = [linear(m, 18432, 7168, "bf16") for m in (1, 16, 64, 65, 128, 256)]
    found += [linear(m, 7168, k, "bf16") for k in (18432, 8192) for m in (1, 17, 65)]
    found += [linear(m, n, 7168, "bf16") for n in (576, 1536) for m in (1, 17, 65)]
    found += [linear(m, n, k, "bf16") for n, k in ((768, 2048), (2048, 2048)) for m in (1, 64)]
    found += [linear(m, n, 256, dtype) for n in (768, 2048) for dtype in ("f32", "bf16") for m in (1, 16, 64)]
    return found + [head_linear(m, 64, b, a, "bf16") for b, a in ((512, 128), (128, 512)) for m in (1, 64)]


@functools.lru_cache(maxsize=1)
def _large_weight(width: int, length: int, dtype: str) -> tuple[np.ndarray, Any]:
    """A weight on the host and on the device, kept while cases of the same weight follow one another."""
    from numba import cuda

    weight = stored(normal(generator(f"{width}x{length}"), width, length, scale=length**-0.5), dtype)
    return weight, cuda.to_device(weight)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The f64 values of a product's f32 input: in bf16 mode it is rounded as it is read."""
    return values_of(bf16(x) if dtype == "bf16" else x)


def unit_of(length: int, dtype: str) -> str:
    """What computes a product: tensor cores where weights are bf16 and their rows whole 16-byte pieces."""
    return "mma" if dtype == "bf16" and length % 8 == 0 else "fma"


def scratch_of(rows: int, heads: int, width: int, length: int, dtype: str) -> np.ndarray:
    """Poisoned scratch for a product; one element where it wants none."""
    from kernels_numba import linear as kernels

    return poisoned(max(1, kernels.linear_scratch(rows, heads, width, length) if dtype == "bf16" else 0))


def linear(rows: int, width: int, length: int, dtype: str) -> Case:
    name = f"linear {dtype} {rows}x{length}x{width}"
    item = 2 if dtype == "bf16" else 4
    large = width * length * item >= LARGE

    def prepare() -> Work:
        from kernels_numba import linear as kernels

        rng = generator(name)
        x = normal(rng, rows, length)
        arrays, shared = {"x": x, "out": poisoned(rows, width)}, {}
        arrays["scratch"] = scratch_of(rows, 1, width, length, dtype)
        columns = np.arange(width)
        if large:
            weight, shared["weight"] = _large_weight(width, length, dtype)
            columns = np.sort(rng.choice(width, CHECKED_COLUMNS, replace=False))
        else:
            weight = stored(normal(rng, width, length, scale=length**-0.5), dtype)
            arrays["weight"] = weight

        def check(found: Any) -> None:
            wide, part = rounded(x, dtype), values_of(weight[columns])
            scale = np.abs(wide) @ np.abs(part).T
            # any order of `length` products and sums in f32; on tensor cores 9 EPS a step of 16
            require_close("out", found["out"][:, columns], wide @ part.T, (length + 8) * EPS, scale)

        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.linear(d.x, d.weight, d.out, d.scratch, s),
            check,
            shared,
            f"{len(columns)} of {width} columns" if large else "all",
        )

    moved = width * length * item + 4 * rows * (length + width)
    return Case(name, "linear.linear", moved, 2 * rows * width * length, prepare, unit_of(length, dtype))


def head_linear(rows: int, heads: int, width: int, length: int, dtype: str) -> Case:
    name = f"head_linear {dtype} {rows}x{heads}x{length}x{width}"

    def prepare() -> Work:
        from kernels_numba import linear as kernels

        rng = generator(name)
        x = normal(rng, rows, heads, length)
        weight = stored(normal(rng, heads, width, length, scale=length**-0.5), dtype)

        def check(found: Any) -> None:
            wide, part = rounded(x, dtype).transpose(1, 0, 2), values_of(weight).transpose(0, 2, 1)
            scale = (np.abs(wide) @ np.abs(part)).transpose(1, 0, 2)
            require_close("out", found["out"], (wide @ part).transpose(1, 0, 2), (length + 8) * EPS, scale)

        arrays = {"x": x, "weight": weight, "out": poisoned(rows, heads, width)}
        arrays["scratch"] = scratch_of(rows, heads, width, length, dtype)
        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.head_linear(d.x, d.weight, d.out, d.scratch, s),
            check,
        )

    moved = heads * (width * length * (2 if dtype == "bf16" else 4) + 4 * rows * (length + width))
    flops = 2 * rows * heads * width * length
    return Case(name, "linear.head_linear", moved, flops, prepare, unit_of(length, dtype))
