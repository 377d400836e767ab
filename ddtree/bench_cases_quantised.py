"""Cases of products with quantised weights: Kimi-K2.6's INT4 experts, DeepSeek-V3's fp8 experts, an fp8 MLP's matrix.

All experts are on the device, made there by repeating DISTINCT of them. Routing is random, and the bytes are those of
the experts that it touches, once each, with their scales.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.bench_cases_experts import CHECKED_ROWS, DISTINCT, random_gates
from ddtree.bench_data import EPS, bf16, generator, normal, poisoned, require_close, require_norm, values_of
from ddtree.bench_kernels import Case, Work
from ddtree.quantised import (
    BLOCK,
    E4M3_VALUES,
    Fp8Matrix,
    Int4Matrix,
    QuantisedMatrix,
    arrays_of,
    dequantised,
)

CHECKED_COLUMNS = 512  # of a large weight, chosen at random
# f32 sums of some thousand products err by about 1e-6; an activation that such an error carries across a rounding
# boundary of bf16 moves by 2^-8, one in some thousand.
NORM_BOUND = 5e-4


def cases(quick: bool) -> list[Case]:
    """One to 65 rows; quick: small matrices of every format, whose K is whole chunks of 128, and is not."""
    if quick:
        sizes = [
            (m, h, i, kind)
            for kind in ("int4", "fp8")
            for h, i in ((160, 96), (256, 128))
            for m in (1, 12, 40)
        ]
        found = [experts(m, 6, 2, h, i, kind) for m, h, i, kind in sizes]
        return found + [linear(m, n, k) for n, k in ((33, 272), (300, 1152)) for m in (1, 12, 40)]
    found = [experts(m, 384, 8, 7168, 2048, "int4") for m in (1, 8, 16, 65)]
    found += [experts(m, 256, 8, 7168, 2048, "fp8") for m in (1, 65)]
    return found + [linear(m, 18432, 7168) for m in (1, 16, 65)]


def random_matrix(rng: np.random.Generator, kind: str, *shape: int) -> QuantisedMatrix:
    """A matrix of random nibbles or finite bytes whose values have about the norm of 1 / sqrt(K)."""
    (values_shape, _), (scales_shape, _) = arrays_of(shape, kind)
    scales = rng.uniform(0.5, 1.5, scales_shape).astype(np.float32) * np.float32(shape[-1] ** -0.5)
    if kind == "int4":
        words = rng.integers(-(2**31), 2**31, values_shape, np.int32)
        return Int4Matrix(words, bf16(scales / np.float32(5)))
    values = rng.integers(0, 255, values_shape, np.uint8)
    values[values & 0x7F == 0x7F] = 0  # NaN
    return Fp8Matrix(values, scales / np.float32(128))


def bytes_of(shape: Sequence[int], kind: str) -> int:
    """Bytes of a matrix [N, K] with its scales."""
    return sum(int(np.prod(size)) * np.dtype(dtype).itemsize for size, dtype in arrays_of(tuple(shape), kind))


@functools.lru_cache(maxsize=1)
def _on_device(num_experts: int, size: int, width: int, kind: str) -> tuple[list[QuantisedMatrix], list[Any]]:
    """Three stacks of DISTINCT experts on the host, and of all experts, repeated, as pairs of arrays on the device."""
    from numba import cuda

    rng, count = generator(f"{kind} experts {size}x{width}"), min(num_experts, DISTINCT)
    shapes = ((count, width, size), (count, width, size), (count, size, width))
    blocks, placed = [random_matrix(rng, kind, *shape) for shape in shapes], []
    for block in blocks:
        pair = []
        for part in block.arrays:
            source, target = (
                cuda.to_device(part),
                cuda.device_array((num_experts, *part.shape[1:]), part.dtype),
            )
            for start in range(0, num_experts, count):
                stop = min(start + count, num_experts)
                target[start:stop].copy_to_device(source[: stop - start])
            pair.append(target)
        placed.append(tuple(pair))
    cuda.synchronize()
    return blocks, placed


def experts(rows: int, num_experts: int, chosen: int, size: int, width: int, kind: str) -> Case:
    name = f"experts {kind} {rows}x{size} {chosen} of {num_experts}x{width}"
    gates = random_gates(rows, num_experts, chosen)
    touched = int(gates.any(axis=1).sum())

    def prepare() -> Work:
        from kernels_numba import experts_fp8, experts_int4
        from kernels_numba.experts_plan import plan_size

        launch = experts_int4.experts_int4 if kind == "int4" else experts_fp8.experts_fp8
        x = normal(generator(name), rows, size)
        blocks, placed = _on_device(num_experts, size, width, kind)
        pairs = rows * chosen
        arrays = {"x": x, "gates": gates, "out": poisoned(rows, size)}
        arrays |= {"hidden": poisoned(pairs, width), "pair_out": poisoned(pairs, size)}
        arrays["plan"] = poisoned(plan_size(rows, num_experts, chosen), dtype=np.int32)
        checked = np.unique(np.linspace(0, rows - 1, CHECKED_ROWS).astype(int))

        def check(found: Any) -> None:
            want = _reference(x[checked], gates[:, checked], blocks)
            require_norm("out", found["out"][checked], want, NORM_BOUND)

        return Work(
            arrays,
            ("out",),
            lambda d, s: launch(d.x, d.gates, *placed, d.hidden, d.out, d.pair_out, d.plan, chosen, s),
            check,
            {"weights": placed},
            "all" if len(checked) == rows else f"{len(checked)} of {rows} rows",
        )

    one = 2 * bytes_of((width, size), kind) + bytes_of((size, width), kind)
    moved = touched * one + 8 * rows * size + 4 * gates.size
    flops = 6 * rows * chosen * size * width
    launcher = f"experts_{kind}.experts_{kind}"
    return Case(name, launcher, moved, flops, prepare, "mma", f"{touched} experts touched")


def _reference(x: np.ndarray, gates: np.ndarray, blocks: list[QuantisedMatrix]) -> np.ndarray:
    """f64 experts, rounding to bf16 where the kernels do; expert e has the weights of block e modulo their number."""
    wide, out = values_of(bf16(x)), np.zeros(x.shape)
    count = blocks[0].shape[0]
    for index in range(count):
        w_gate, w_up, w_down = (dequantised(block[index]) for block in blocks)
        gate, up = wide @ w_gate.T, wide @ w_up.T
        hidden = values_of(bf16((gate / (1 + np.exp(-gate)) * up).astype(np.float32)))
        out += gates[index::count].astype(np.float64).sum(axis=0)[:, None] * (hidden @ w_down.T)
    return out


def linear(rows: int, width: int, length: int) -> Case:
    name = f"linear fp8 {rows}x{length}x{width}"

    def prepare() -> Work:
        from kernels_numba import linear_fp8 as kernels

        rng = generator(name)
        x, weight = normal(rng, rows, length), random_matrix(rng, "fp8", width, length)
        columns = np.sort(rng.choice(width, min(width, CHECKED_COLUMNS), replace=False))

        def check(found: Any) -> None:
            blocks = np.repeat(weight.scales[columns // BLOCK], BLOCK, axis=-1)[:, :length]
            wide, part = values_of(bf16(x)), E4M3_VALUES[weight.values[columns]] * blocks.astype(np.float64)
            # any order of `length` products and sums in f32; on tensor cores 9 EPS a step of 16
            require_close(
                "out",
                found["out"][:, columns],
                wide @ part.T,
                (length + 8) * EPS,
                np.abs(wide) @ np.abs(part).T,
            )

        return Work(
            {
                "x": x,
                "values": weight.values,
                "scales": weight.scales,
                "out": poisoned(rows, width),
                "scratch": poisoned(max(kernels.linear_fp8_scratch(rows, width, length), 1)),
            },
            ("out",),
            lambda d, s: kernels.linear_fp8(d.x, d.values, d.scales, d.out, d.scratch, s),
            check,
            checked=f"{len(columns)} of {width} columns" if len(columns) < width else "all",
        )

    moved = bytes_of((width, length), "fp8") + 4 * rows * (length + width)
    return Case(name, "linear_fp8.linear_fp8", moved, 2 * rows * width * length, prepare, "mma")
