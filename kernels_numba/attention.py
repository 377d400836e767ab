"""Absorbed MLA attention of tree rows over the latent and rope caches: every head of a row shares the row's keys.

    out[i, h] = softmax over q of (scale * (q_latent[i, h] . latent[q] + q_rope[i, h] . rope[q])) @ latent

Row i stands at p = context_len + depths[i] and sees positions q = 0..p, in that order: q < context_len is cache
row q, a later one cache row context_len + lineage[i, q - context_len]. Keys are cut into tiles by position, and tiles
into splits by p alone; a block takes one split of one row for up to 16 heads, then `attention_combine` adds the
splits in order. So a row's bits depend on its keys, its queries and p: not on other rows, the capacity, or which
ancestors are committed.

In bf16 mode (caches of bf16 bits) the queries are rounded to bf16 here, as any input of a product is; the softmax's
weights stay f32, since they meet the values on CUDA cores, and so do all sums and the result.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, int32, types, uint32

from kernels_numba import attention_combine as combining
from kernels_numba.attention_combine import (
    attention_combine_kernel,
    keys_of_row,
    scratch_size,
    splits_for,
    tiles_of,
)
from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_attend import MAX_COLUMNS, OPTIONS, make_attend, rows_for
from kernels_numba.primitives_attend_steps import KEYS, THREADS, WARPS, format_of
from kernels_numba.primitives_words import copy16
from kernels_numba.registry import KernelSpec

MULTIPLE = 8  # of the caches' widths: rows are then read 16 bytes at a time
AHEAD = 8  # words of values a thread loads ahead


def _source_ops(rank, rope, half):
    """Device functions over (q_latent, q_rope, latents, ropes, lineage, row, context_len, first pair, last pair)."""
    form = format_of(half)
    dims, load, slab_dims = form.dims, form.load, form.dims * WARPS
    latent_slabs, even = -(-rank // slab_dims), rank % slab_dims == 0 and rope % slab_dims == 0

    @cuda.jit(device=True, inline="always")
    def find_row(source, position):
        """The cache row of a position; 0, which is memory, where a lineage points out of the cache."""
        latents, lineage, row, context = source[2], source[4], source[5], source[6][0]
        found = position
        if position >= context:
            found = int32(context + lineage[uint32(row), uint32(position - context)])
        return found if uint32(found) < uint32(latents.shape[0] // rank) else int32(0)

    @cuda.jit(device=True, inline="always")
    def has_piece(slab, piece):
        if slab < latent_slabs:
            return even or (slab * WARPS + piece) * dims < rank
        return even or ((slab - latent_slabs) * WARPS + piece) * dims < rope

    @cuda.jit(device=True, inline="always")
    def copy_keys(cache, width, rows, column, stage, at):
        for j in range(KEYS):
            copy16(stage, at + 4 * j, cache, rows[j], width, column)

    @cuda.jit(device=True, inline="always")
    def fetch(source, rows, slab, piece, stage, at):
        if slab < latent_slabs:
            copy_keys(source[2], rank, rows, slab * slab_dims + piece * dims, stage, at)
        else:
            column = (slab - latent_slabs) * slab_dims + piece * dims
            copy_keys(source[3], rope, rows, column, stage, at)

    @cuda.jit(device=True, inline="always")
    def fetch_query(source, h, slab, column, queries, at):
        pair = min(source[7] + h, source[8])
        if slab < latent_slabs:
            column += slab * slab_dims
            if even or column < rank:
                copy16(queries, at, source[0], pair, rank, column)
        else:
            column += (slab - latent_slabs) * slab_dims
            if even or column < rope:
                copy16(queries, at, source[1], pair, rope, column)

    @cuda.jit(device=True, inline="always")
    def load_value(source, row, column, raw, at):
        load(source[2], row, rank, column, raw, at)

    return SimpleNamespace(
        find_row=find_row,
        has_piece=has_piece,
        fetch=fetch,
        fetch_query=fetch_query,
        load_value=load_value,
    )


@functools.cache
def make_attention(rank, rope, half, rows):
    """The kernel for latents of `rank` and ropes of `rope`, f32 or bf16 (`half`) caches, `rows` heads a block."""
    dims = format_of(half).dims
    slabs = -(-rank // (dims * WARPS)) - (-rope // (dims * WARPS))
    parts = min(WARPS, max(rank, rope) // dims)
    attend = make_attend(rows, half, rank, slabs, parts, AHEAD, _source_ops(rank, rope, half))

    @cuda.jit(**OPTIONS)
    def attention_kernel(
        q_latent, q_rope, latents, ropes, lineage, depths, context_len, scale, heads, scratch
    ):
        """Block (split, group of heads, row); arrays are flat but lineage [M, D]."""
        row = cuda.blockIdx.z
        num_keys = keys_of_row(row, lineage, depths, context_len)
        tiles, each = tiles_of(num_keys)
        first, last = int32(cuda.blockIdx.x * each), int32(min((cuda.blockIdx.x + 1) * each, tiles))
        if first < last:
            pair, head = row * heads, cuda.blockIdx.y * rows
            source = (
                q_latent, q_rope, latents, ropes, lineage, row, context_len, pair + head, pair + heads - 1
            )  # fmt: skip
            padded = cuda.gridDim.y * rows
            attend(
                source, first, last, num_keys, scale, scratch, row * padded + head, cuda.gridDim.z * padded
            )

    return attention_kernel


def attention_scratch(rows, heads, rank, capacity):
    """f32 elements of scratch that `attention` wants for up to that many rows over caches of that capacity."""
    group = rows_for(heads)
    return scratch_size(rows * -(-heads // group) * group, rank, capacity)


def attention(
    q_latent,
    q_rope,
    latent_cache,
    rope_cache,
    lineage,
    depths,
    context_len,
    scale,
    out,
    scratch,
    stream=0,
):
    """out[i, h] = softmax(scale * (q_latent . latents + q_rope . ropes)) @ latents over positions 0..p of row i.

    q_latent and out f32 [M, H, R], q_rope f32 [M, H, P], latent_cache [capacity, R] and rope_cache [capacity, P] both
    f32 or both bf16 bits, lineage i32 [M, D], depths i32 [M], context_len i32 [1] on the device, scale a host number,
    scratch flat f32 of at least attention_scratch(M, H, R, capacity). R and P are multiples of 8; arrays start at 16
    bytes. What a row does not see may hold anything. A padding row (lineage -1) sees the context, and gives 0 where
    there is none. Raises LaunchError.
    """
    check("attention: q_latent", q_latent, "float32", (None, None, None))
    rows, heads, rank = q_latent.shape
    check("attention: q_rope", q_rope, "float32", (rows, heads, None))
    rope = q_rope.shape[2]
    for name, width in (("R", rank), ("P", rope)):
        require(
            width > 0 and width % MULTIPLE == 0, f"attention: {name}: expected a multiple of 8, found {width}"
        )
    require(rank <= MAX_COLUMNS, f"attention: R: expected at most {MAX_COLUMNS}, found {rank}")
    check("attention: latent_cache", latent_cache, ("float32", "uint16"), (None, rank))
    capacity = latent_cache.shape[0]
    check("attention: rope_cache", rope_cache, str(latent_cache.dtype), (capacity, rope))
    check("attention: lineage", lineage, "int32", (rows, None))
    check("attention: depths", depths, "int32", (rows,))
    check("attention: context_len", context_len, "int32", (1,))
    check("attention: out", out, "float32", q_latent.shape)
    check("attention: scratch", scratch, "float32", (None,))
    wanted = attention_scratch(rows, heads, rank, capacity)
    require(scratch.size >= wanted, f"attention: scratch: expected {wanted} elements, found {scratch.size}")
    require(capacity > 0 or not rows, "attention: latent_cache: expected at least one row, found none")
    if not q_latent.size:
        return
    group, splits = rows_for(heads), splits_for(capacity)
    kernel = make_attention(rank, rope, str(latent_cache.dtype) == "uint16", group)
    kernel[(splits, -(-heads // group), rows), THREADS, stream](
        q_latent.reshape(-1),
        q_rope.reshape(-1),
        latent_cache.reshape(-1),
        rope_cache.reshape(-1),
        lineage,
        depths,
        context_len,
        np.float32(scale),
        np.int32(heads),
        scratch,
    )
    columns, padded = -(-rank // combining.THREADS), -(-heads // group) * group
    attention_combine_kernel[(columns, heads, rows), combining.THREADS, stream](
        scratch, lineage, depths, context_len, *(np.int32(n) for n in (padded, rank, splits)), out.reshape(-1)
    )


def _spec(rank, rope, half, rows):
    flat, bits, counts = (types.Array(dtype, 1, "C") for dtype in (types.float32, types.uint16, types.int32))
    cache = bits if half else flat
    arguments = (flat, flat, cache, cache, types.Array(types.int32, 2, "C"), counts, counts)
    name = f"attention_{rank}_{rope}_{'bf16' if half else 'f32'}_{rows}"
    kernel = make_attention(rank, rope, half, rows)
    return KernelSpec(name, kernel, (*arguments, types.float32, types.int32, flat), THREADS)


# (R, P, heads a block): this project's model, the same for few heads, Kimi K2
SHAPES = ((16, 8, 4),) if SIMULATED else ((64, 16, 8), (64, 16, 4), (512, 64, 16))
SPECS = [_spec(rank, rope, half, rows) for rank, rope, rows in SHAPES for half in (False, True)]
