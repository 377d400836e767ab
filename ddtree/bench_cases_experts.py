"""Cases of the MoE layer, gates and expert product: Kimi K2's 384 experts, 8 a row, and the shipped model's 16.

Kimi's experts are all there, 34 GB; only DISTINCT of them differ, repeated in turn, so that making them does not
take minutes. Routing is random, and the bytes are those of the experts that it touches, once each.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ddtree.bench_data import (
    EPS,
    bf16,
    generator,
    normal,
    poisoned,
    require_close,
    require_norm,
    stored,
    values_of,
)
from ddtree.bench_kernels import Case, Work
from ddtree.errors import UsageError
from ddtree.reference.gate import GateRule, gate_device

DISTINCT = 4
LARGE = 1 << 30  # elements from which the weights are made on the device, and are there once
CHECKED_ROWS = 2
# f32 sums of some thousand products err by about 1e-6; in bf16 mode an activation that such an error carries across a
# rounding boundary moves by 2^-8, one in some thousand
NORM_BOUND = {"f32": 2e-5, "bf16": 5e-4}


def cases(quick: bool) -> list[Case]:
    """One, 16 and 64 rows; quick: widths that 16-byte accesses fit, and not."""
    if quick:
        sizes = ((64, 40), (35, 17))
        found = [
            experts(m, 6, 2, h, i, dtype) for dtype in ("f32", "bf16") for h, i in sizes for m in (1, 3, 12)
        ]
        return found + [
            gate(3, 33, 5, "noaux_tc"),
            gate(3, 32, 3, "noaux_tc", 4, 2),
            gate(3, 32, 3, "greedy"),
        ]
    found = [gate(m, *sizes, "noaux_tc") for sizes in ((384, 8), (16, 4)) for m in (1, 64)]
    found += [experts(m, 384, 8, 7168, 2048, "bf16") for m in (1, 16, 64)]
    found += [experts(m, 64, 6, 2048, 1024, "bf16") for m in (1, 16, 64)]
    return found + [experts(m, 16, 4, 256, 96, dtype) for dtype in ("f32", "bf16") for m in (1, 16, 64)]


def random_gates(rows: int, num_experts: int, chosen: int) -> np.ndarray:
    """f32 gates [E, M], `chosen` of each column positive and of sum one."""
    rng = generator(f"gates {rows} {num_experts} {chosen}")
    gates = np.zeros((num_experts, rows), np.float32)
    for row in range(rows):
        weights = rng.uniform(0.2, 1, chosen).astype(np.float32)
        gates[rng.choice(num_experts, chosen, replace=False), row] = weights / weights.sum()
    return gates


def _blocks(num_experts: int, size: int, width: int, dtype: str) -> list[np.ndarray]:
    """w_gate, w_up [n, I, H] and w_down [n, H, I] of n distinct experts."""
    count = min(num_experts, DISTINCT)
    rng = generator(f"experts {size}x{width}")
    shapes = ((count, width, size), (count, width, size), (count, size, width))
    return [stored(normal(rng, *shape, scale=shape[2] ** -0.5), dtype) for shape in shapes]


@functools.lru_cache(maxsize=1)
def _large(num_experts: int, size: int, width: int, dtype: str) -> tuple[list[np.ndarray], dict[str, Any]]:
    """The distinct experts on the host, and all experts on the device."""
    from numba import cuda

    need = 3 * num_experts * size * width * (2 if dtype == "bf16" else 4)
    free = cuda.current_context().get_memory_info().free
    if free < need * 1.05:
        raise UsageError(
            f"needs {need / 1e9:.0f} GB of GPU memory for the weights, {free / 1e9:.0f} GB are free"
        )
    blocks, placed = _blocks(num_experts, size, width, dtype), {}
    for name, block in zip(("w_gate", "w_up", "w_down"), blocks, strict=True):
        source = cuda.to_device(block)
        target = cuda.device_array((num_experts, *block.shape[1:]), block.dtype)
        for start in range(0, num_experts, len(block)):
            stop = min(start + len(block), num_experts)
            target[start:stop].copy_to_device(source[: stop - start])
        placed[name] = target
    cuda.synchronize()
    return blocks, placed


def experts(rows: int, num_experts: int, chosen: int, size: int, width: int, dtype: str) -> Case:
    name = f"experts {dtype} {rows}x{size} {chosen} of {num_experts}x{width}"
    gates = random_gates(rows, num_experts, chosen)
    touched = int(gates.any(axis=1).sum())

    def prepare() -> Work:
        from kernels_numba import experts as kernels

        x = normal(generator(name), rows, size)
        pairs = rows * chosen
        arrays = {"x": x, "gates": gates, "out": poisoned(rows, size)}
        arrays |= {"hidden": poisoned(pairs, width), "pair_out": poisoned(pairs, size)}
        arrays["plan"] = poisoned(kernels.plan_size(rows, num_experts, chosen), dtype=np.int32)
        if num_experts * size * width >= LARGE:
            blocks, shared = _large(num_experts, size, width, dtype)
        else:
            blocks, shared = _blocks(num_experts, size, width, dtype), {}
            whole = [block[np.arange(num_experts) % len(block)] for block in blocks]
            arrays |= dict(zip(("w_gate", "w_up", "w_down"), whole, strict=True))
        checked = np.unique(np.linspace(0, rows - 1, CHECKED_ROWS).astype(int))

        def check(found: Any) -> None:
            want = _reference(x[checked], gates[:, checked], blocks, dtype)
            require_norm("out", found["out"][checked], want, NORM_BOUND[dtype])

        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.experts(
                *(d.x, d.gates, d.w_gate, d.w_up, d.w_down),
                *(d.hidden, d.out, d.pair_out, d.plan, chosen, s),
            ),
            check,
            shared,
            "all" if len(checked) == rows else f"{len(checked)} of {rows} rows",
        )

    item = 2 if dtype == "bf16" else 4
    moved = 3 * touched * size * width * item + 8 * rows * size + 4 * gates.size
    flops = 6 * rows * chosen * size * width
    unit = "mma" if dtype == "bf16" and size % 8 == width % 8 == 0 else "fma"
    return Case(name, "experts.experts", moved, flops, prepare, unit, f"{touched} experts touched")


def _reference(x: np.ndarray, gates: np.ndarray, blocks: list[np.ndarray], dtype: str) -> np.ndarray:
    """f64 experts, rounding to bf16 where the kernels do; expert e has the weights of block e modulo their number."""

    def rounded(values: np.ndarray) -> np.ndarray:
        return values_of(bf16(values.astype(np.float32))) if dtype == "bf16" else values.astype(np.float64)

    wide, out = rounded(x), np.zeros(x.shape)
    for index in range(len(blocks[0])):
        w_gate, w_up, w_down = (values_of(block[index]) for block in blocks)
        gate, up = wide @ w_gate.T, wide @ w_up.T
        result = rounded(gate / (1 + np.exp(-gate)) * up) @ w_down.T
        out += gates[index :: len(blocks[0])].astype(np.float64).sum(axis=0)[:, None] * result
    return out


def gate(rows: int, num_experts: int, chosen: int, method: str, groups: int = 1, kept: int = 1) -> Case:
    name = f"gate {method} {rows}x{num_experts} top {chosen}, {kept} of {groups} groups"

    def prepare() -> Work:
        from kernels_numba import gate as kernels

        rng = generator(name)
        logits, bias = normal(rng, rows, num_experts), normal(rng, num_experts, scale=0.1)
        rule = GateRule(chosen, groups, kept, True, 2.5, method)
        biased = method == "noaux_tc"

        def check(found: Any) -> None:
            want = np.empty((num_experts, rows))
            gate_device(values_of(logits), values_of(bias) if biased else None, rule, want)
            # an exponential of 2 ulp, a sum of `chosen` or of all scores, two quotients, a product
            require_close("gates", found["gates"], want, (num_experts + 16) * EPS)

        arrays = {"logits": logits, "bias": bias, "gates": poisoned(num_experts, rows)}
        return Work(
            arrays,
            ("gates",),
            lambda d, s: kernels.gate(d.logits, d.bias if biased else None, rule, d.gates, s),
            check,
        )

    return Case(name, "gate.gate", 8 * rows * num_experts, 8 * rows * num_experts, prepare)
