"""Absorbed MLA attention of tree rows over the latent and rope caches: every head of a row shares the row's keys.

    out[i, h] = softmax over q of (scale * (q_latent[i, h] . latent[q] + q_rope[i, h] . rope[q])) @ latent

Row i stands at p = context_len + depths[i] and sees positions q = 0..p, in that order: q < context_len is cache
row q, a later one cache row context_len + lineage[i, q - context_len]. Positions are cut into splits by p and the
shape alone; a block takes one split of one row for up to 16 heads, then `attention_combine` adds the splits in order.
So a row's bits depend on its keys, its queries and p: not on other rows, the capacity, or what is committed.

In bf16 mode (caches of bf16 bits) the queries are rounded to bf16 here, as any input of a product is; the softmax's
weights are not, and so are all sums and the result f32. `attention_wgmma`, which Kimi K2 and DeepSeek-V3 take on an
H100 or H200, rounds its weights too.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba import attention_wgmma
from kernels_numba.attention_combine import (
    combine_rows,
    keys_of_split,
    scratch_size,
    settled_keys_of_row,
    splits_for,
)
from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, after_previous, device_function, load_settled
from kernels_numba.primitives_attend import make_attend, stats_place, sums_place
from kernels_numba.primitives_attend_copy import NO_ROW, make_copies
from kernels_numba.primitives_attend_steps import ROWS, key_warps_for, options_for, plan_of
from kernels_numba.primitives_mma import THREADS, get_floats, thread_here
from kernels_numba.registry import KernelSpec

MULTIPLE = 8  # of the caches' widths: rows are then read 16 bytes at a time


def _source_ops(rank, rope, half, keys):
    """Device functions over (latents, ropes, lineage, row, context_len, q_latent, q_rope, first pair)."""
    latent = make_copies(keys, rank + rope, half, rank, 0)
    tail = make_copies(keys, rank + rope, half, rope, rank)
    copy_latents, copy_ropes, copy_listed_latents, copy_listed_ropes = (
        latent.plain,
        tail.plain,
        latent.listed,
        tail.listed,
    )

    @device_function
    def find_row(source, position, last):
        """The cache row of a position; 0, which is memory, where a lineage points out of the cache."""
        if position >= last:
            return int32(NO_ROW)
        found, context, lineage = position, source[4], source[2]
        if position >= context:
            at = int64(source[3]) * lineage.shape[1] + int64(int32(position - context))
            found = int32(context + load_settled(lineage, at))
        return found if uint32(found) < uint32(source[0].shape[0] // rank) else int32(0)

    @device_function
    def bring(source, first, last, found, tile):
        latents, ropes, stop = source[0], source[1], int32(first + keys)
        if stop <= last and stop <= source[4] and stop <= latents.shape[0] // rank:  # committed rows in order
            copy_latents(latents, int64(first) * rank, rank, tile)
            copy_ropes(ropes, int64(first) * rope, rope, tile)
        else:
            for key in range(thread_here(), int32(keys), int32(THREADS)):
                found[key] = find_row(source, int32(first + key), last)
            cuda.syncthreads()  # the rows are there
            copy_listed_latents(latents, found, tile)
            copy_listed_ropes(ropes, found, tile)

    @device_function
    def query_pair(source, h, dim, low, stop):
        pair = int64(source[7] + h)
        if stop <= rank:
            return get_floats(source[5], pair * rank + dim)
        if low >= rank and stop <= rank + rope:
            return get_floats(source[6], pair * rope + (dim - rank))
        if dim < rank:
            return get_floats(source[5], pair * rank + dim)
        if dim < rank + rope:
            return get_floats(source[6], pair * rope + (dim - rank))
        return float32(0), float32(0)

    return SimpleNamespace(bring=bring, query_pair=query_pair)


@functools.cache
def make_attention(rank, rope, half):
    """The kernel for latents of `rank` and ropes of `rope`, f32 or bf16 (`half`) caches."""
    width = rank + rope
    key_warps = key_warps_of(width, half)
    step = plan_of(width, width, half, key_warps).keys
    ops = _source_ops(rank, rope, half, step)
    begin, finish = make_attend(width, 0, rank, width, half, key_warps, ops)

    @cuda.jit(**options_for(width, rank, width, half))
    def attention_kernel(
        q_latent, q_rope, settled_latents, settled_ropes, settled_lineage, settled_depths, settled_context,
        scale, heads, scratch,
    ):  # fmt: skip
        """Block (split, group of heads, row); arrays are flat but lineage [M, D].

        The first keys are on their way before the launch ahead, which makes queries, has ended.
        """
        row, split, splits = int32(cuda.blockIdx.z), cuda.blockIdx.x, cuda.gridDim.x
        keys = settled_keys_of_row(row, settled_lineage, settled_depths, settled_context)
        first, last = keys_of_split(keys, split, uint32(step))
        context = load_settled(settled_context, int64(0))
        room = begin((settled_latents, settled_ropes, settled_lineage, row, context), first, last)
        after_previous()
        if first < last:
            head = int32(cuda.blockIdx.y * ROWS)
            slot, slots = row * heads + head, cuda.gridDim.z * heads
            source = (
                settled_latents, settled_ropes, settled_lineage, row, context, q_latent, q_rope, slot,
            )  # fmt: skip
            finish(
                room, source, first, last, min(int32(heads - head), int32(ROWS)), scale, scratch,
                sums_place(slot, split, splits, rank), stats_place(slot, slots, split, splits, rank), splits,
            )  # fmt: skip

    return attention_kernel


def key_warps_of(width, half):
    """The key_warps for R + P = `width`, f32 or bf16 (`half`) caches; 0 where sixteen keys do not fit."""
    return key_warps_for(width, width, half)


def attention_scratch(rows, heads, rank, capacity):
    """f32 elements of scratch that `attention` wants for up to that many rows over caches of that capacity."""
    wanted = scratch_size(rows * heads, rank, capacity)
    if rank == attention_wgmma.RANK and heads % attention_wgmma.HEADS == 0:
        wanted = max(wanted, attention_wgmma.wgmma_scratch(rows, heads, capacity))
    return wanted


def attention(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out, scratch, stream=0
):
    """out[i, h] = softmax(scale * (q_latent . latents + q_rope . ropes)) @ latents over positions 0..p of row i.

    q_latent and out f32 [M, H, R], q_rope f32 [M, H, P], latent_cache [capacity, R] and rope_cache [capacity, P] both
    f32 or both bf16 bits, lineage i32 [M, D], depths i32 [M], context_len i32 [1] on the device, scale a host number,
    scratch flat f32 of at least attention_scratch(M, H, R, capacity). R and P are multiples of 8; arrays start at 16
    bytes. What a row does not see may hold anything. A padding row (lineage -1) sees the context, and gives 0 where
    there is none. In a captured sequence the launch ahead may write the queries, but not caches, lineage, depths or
    context_len. Raises LaunchError.

    A GPU of compute capability 9.0 takes `attention_wgmma` where that can: bf16, (R, P) = (512, 64), H a multiple of
    64, a positive scale. Its softmax weights are bf16. All else is `portable_attention`.
    """
    queries, caches = (q_latent, q_rope), (latent_cache, rope_cache)
    arguments = (*queries, *caches, lineage, depths, context_len, scale, out, scratch)
    _check_arguments(*arguments)
    if scale > 0 and attention_wgmma.can_take(*queries, latent_cache):
        attention_wgmma.attend_rows(*arguments, stream)
    else:
        _launch_portable(*arguments, stream)


def portable_attention(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out, scratch, stream=0
):
    """As `attention`, by the kernel of every GPU and every shape, whose softmax weights are f32."""
    queries, caches = (q_latent, q_rope), (latent_cache, rope_cache)
    arguments = (*queries, *caches, lineage, depths, context_len, scale, out, scratch)
    _check_arguments(*arguments)
    _launch_portable(*arguments, stream)


def _check_arguments(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out, scratch
):
    check("attention: q_latent", q_latent, "float32", (None, None, None))
    rows, heads, rank = q_latent.shape
    check("attention: q_rope", q_rope, "float32", (rows, heads, None))
    rope = q_rope.shape[2]
    for name, width in (("R", rank), ("P", rope)):
        require(
            width > 0 and width % MULTIPLE == 0, f"attention: {name}: expected a multiple of 8, found {width}"
        )
    check("attention: latent_cache", latent_cache, ("float32", "uint16"), (None, rank))
    capacity, half = latent_cache.shape[0], str(latent_cache.dtype) == "uint16"
    width = rank + rope
    require(
        key_warps_of(width, half) > 0,
        f"attention: R + P: expected sixteen keys to fit in shared memory, found {width}",
    )
    check("attention: rope_cache", rope_cache, str(latent_cache.dtype), (capacity, rope))
    check("attention: lineage", lineage, "int32", (rows, None))
    check("attention: depths", depths, "int32", (rows,))
    check("attention: context_len", context_len, "int32", (1,))
    check("attention: out", out, "float32", q_latent.shape)
    check("attention: scratch", scratch, "float32", (None,))
    wanted = attention_scratch(rows, heads, rank, capacity)
    require(scratch.size >= wanted, f"attention: scratch: expected {wanted} elements, found {scratch.size}")
    require(capacity > 0 or not rows, "attention: latent_cache: expected at least one row, found none")


def _launch_portable(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out, scratch, stream
):
    if not q_latent.size:
        return
    (rows, heads, rank), rope = q_latent.shape, q_rope.shape[2]
    half, width = str(latent_cache.dtype) == "uint16", rank + rope
    splits = splits_for(latent_cache.shape[0])
    kernel = make_attention(rank, rope, half)
    kernel[(splits, -(-heads // ROWS), rows), THREADS, stream](
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
    step = plan_of(width, width, half, key_warps_of(width, half)).keys
    combine_rows(scratch, lineage, depths, context_len, step, splits, out, stream)


def _spec(rank, rope, half):
    flat, bits, counts = (types.Array(dtype, 1, "C") for dtype in (types.float32, types.uint16, types.int32))
    cache = bits if half else flat
    arguments = (flat, flat, cache, cache, types.Array(types.int32, 2, "C"), counts, counts)
    name = f"attention_{rank}_{rope}_{'bf16' if half else 'f32'}"
    kernel = make_attention(rank, rope, half)
    return KernelSpec(name, kernel, (*arguments, types.float32, types.int32, flat), THREADS)


# (R, P): this project's model, Kimi K2
SHAPES = ((16, 8),) if SIMULATED else ((64, 16), (512, 64))
SPECS = [_spec(rank, rope, half) for rank, rope in SHAPES for half in (False, True)]
