"""Cases of attention: the target's absorbed MLA over a tree at Kimi K2's sizes, and the drafter's block attention.

Checked by the norm of the error against f64: the bound that any order of the sums keeps would pass too much.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_data import bf16, generator, normal, poisoned, require_norm, scalar, stored, values_of
from ddtree.bench_kernels import Case, Work
from ddtree.reference.attention import attention as reference_attention
from ddtree.reference.block_attention import block_attention as reference_block_attention

NORM_BOUND = (
    1e-5  # f32 scores of magnitude 10 err by some 1e-6, and so do their exponentials and their average
)
# The same where the kernel rounds weights to bf16: each is then off by 2**-8 of itself at most, by 2**-7 / 24**0.5,
# 1.6e-3, in the mean of squares; and so is the norm of an average of values that know nothing of it.
ROUNDED_NORM_BOUND = 2.0**-9
CHECKED_ROWS = 4


def cases(quick: bool) -> list[Case]:
    """MLA at one and at 64 rows, and one row over a long context; the drafter's at its one block size."""
    if quick:
        shapes = [(1, 4, 32, 8, 0), (3, 5, 32, 8, 70), (3, 17, 512, 64, 200), (3, 64, 512, 64, 600)]
        found = [attention(*shape, dtype) for dtype in ("f32", "bf16") for shape in shapes]
        found += [attention(*shapes[-1], "bf16", portable=True)]
        blocks = [(7, 4, 2, 32, 0, 0), (7, 4, 2, 32, 70, 0), (7, 4, 2, 32, 70, 20)]
        return found + [block_attention(*shape, dtype) for dtype in ("f32", "bf16") for shape in blocks]
    sizes = [(1, 8192), (64, 8192), (1, 65536)]
    found = [attention(m, 64, 512, 64, context, "bf16") for m, context in sizes]
    found += [attention(m, 64, 512, 64, 8192, "bf16", portable=True) for m in (1, 64)]
    found += [attention(m, 8, 64, 16, 512, dtype) for dtype in ("f32", "bf16") for m in (1, 64)]
    blocks = [(16, 32, 8, 128, 4096, 0), (16, 32, 8, 128, 4096, 1024), (16, 8, 4, 32, 512, 256)]
    return found + [block_attention(*shape, "bf16") for shape in blocks]


def random_tree(rng: np.random.Generator, rows: int, levels: int) -> tuple[np.ndarray, np.ndarray]:
    """Depths i32 [rows] and lineage i32 [rows, levels] of a random tree, parents before children."""
    depths, lineage = np.zeros(rows, np.int32), np.full((rows, levels), -1, np.int32)
    lineage[0, 0] = 0
    for row in range(1, rows):
        parent = int(rng.integers(max(0, row - 6), row))
        if depths[parent] + 1 == levels:
            parent = 0
        depths[row] = depths[parent] + 1
        lineage[row, : depths[row]] = lineage[parent, : depths[row]]
        lineage[row, depths[row]] = row
    return depths, lineage


def attention(
    rows: int, heads: int, rank: int, rope: int, context: int, dtype: str, portable: bool = False
) -> Case:
    """`portable` asks for the kernel of every GPU."""
    launcher = "portable_attention" if portable else "attention"
    name = f"{launcher} {dtype} {rows}x{heads}x{rank}+{rope} after {context}"
    capacity = context + rows
    scale = 192**-0.5

    def prepare() -> Work:
        from kernels_numba import attention as kernels

        rng = generator(name)
        q_latent, q_rope = normal(rng, rows, heads, rank), normal(rng, rows, heads, rope)
        latents, ropes = (stored(normal(rng, capacity, width), dtype) for width in (rank, rope))
        depths, lineage = random_tree(rng, rows, 16)
        chosen = np.unique(np.linspace(0, rows - 1, CHECKED_ROWS).astype(int))

        def check(found: Any) -> None:
            queries = [values_of(bf16(q) if dtype == "bf16" else q)[chosen] for q in (q_latent, q_rope)]
            want = np.empty((len(chosen), heads, rank))
            caches = values_of(latents), values_of(ropes)
            reference_attention(*queries, *caches, lineage[chosen], depths[chosen], context, scale, want)
            rounded = not portable and kernels.attention_wgmma.can_take(q_latent, q_rope, latents)
            bound = ROUNDED_NORM_BOUND if rounded else NORM_BOUND
            require_norm("out", found["out"][chosen], want, bound)

        arrays = {"q_latent": q_latent, "q_rope": q_rope, "latents": latents, "ropes": ropes}
        arrays |= {"lineage": lineage, "depths": depths, "context_len": scalar(context)}
        arrays["out"] = poisoned(rows, heads, rank)
        arrays["scratch"] = poisoned(kernels.attention_scratch(rows, heads, rank, capacity))
        return Work(
            arrays,
            ("out",),
            lambda d, s: getattr(kernels, launcher)(
                *(d.q_latent, d.q_rope, d.latents, d.ropes, d.lineage, d.depths, d.context_len),
                *(scale, d.out, d.scratch, s),
            ),
            check,
            checked="all" if len(chosen) == rows else f"{len(chosen)} of {rows} rows",
        )

    item = 2 if dtype == "bf16" else 4
    moved = capacity * (rank + rope) * item + 4 * rows * heads * (2 * rank + rope)
    flops = (
        2 * rows * heads * capacity * (2 * rank + rope)
    )  # of the formula; weights in f32 take three products each
    return Case(name, f"attention.{launcher}", moved, flops, prepare, "mma")


def block_attention(
    block: int, heads: int, groups: int, dim: int, context: int, window: int, dtype: str
) -> Case:
    """A window of 0 is the whole context."""
    name = f"block_attention {dtype} {block}x{heads}/{groups}x{dim} after {context} window {window}"
    start = max(0, context - window) if window else 0
    keys = context - start + block
    scale = dim**-0.5

    def prepare() -> Work:
        from kernels_numba import block_attention as kernels

        rng = generator(name)
        query, own_keys, own_values = (normal(rng, block, n, dim) for n in (heads, groups, groups))
        capacity = context + 3
        caches = [stored(normal(rng, capacity, groups, dim), dtype) for _ in range(2)]

        def check(found: Any) -> None:
            fresh = [values_of(bf16(a) if dtype == "bf16" else a) for a in (query, own_keys, own_values)]
            want = np.empty(query.shape)
            wide = [values_of(cache) for cache in caches]
            reference_block_attention(fresh[0], *wide, *fresh[1:], context, window, scale, want)
            require_norm("out", found["out"], want, NORM_BOUND)

        arrays = {"query": query, "keys": caches[0], "values": caches[1], "context_len": scalar(context)}
        arrays |= {"own_keys": own_keys, "own_values": own_values, "out": poisoned(*query.shape)}
        size = kernels.block_attention_scratch(block, heads, groups, dim, capacity, window)
        arrays["scratch"] = poisoned(size)
        return Work(
            arrays,
            ("out",),
            lambda d, s: kernels.block_attention(
                *(d.query, d.keys, d.values, d.own_keys, d.own_values, d.context_len),
                *(window, scale, d.out, d.scratch, s),
            ),
            check,
        )

    item = 2 if dtype == "bf16" else 4
    moved = 2 * groups * dim * ((keys - block) * item + 4 * block) + 8 * block * heads * dim
    return Case(
        name, "block_attention.block_attention", moved, 4 * block * heads * keys * dim, prepare, "mma"
    )
