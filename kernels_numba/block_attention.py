"""The drafter's attention: a block of queries over a window of context and over the whole block, no causality.

    out[b, h] = softmax over k of (scale * query[b, h] . key[k, g]) @ value[k, g],  g = h // (H / G)

The keys are cache rows start .. context_len - 1, start = max(0, context_len - window), then the block's own rows.
All B x H / G rows of a key head see the same keys: a block of threads takes up to 16 rows and one split of the keys, as
in `attention`, and the splits are added by a second kernel.

In bf16 mode (caches of bf16 bits) the query and the block's own keys and values are rounded to bf16 here.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.attention_combine import (
    COLUMNS,
    MAX_SPLITS,
    keys_of_split,
    make_combine,
    scratch_size,
    splits_for,
    turns_for,
)
from kernels_numba.attention_combine import THREADS as COMBINE_THREADS
from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, after_previous, device_function
from kernels_numba.primitives_attend import make_attend, stats_place, sums_place
from kernels_numba.primitives_attend_copy import NO_ROW, make_copies
from kernels_numba.primitives_attend_steps import ROWS, key_warps_for, options_for, plan_of
from kernels_numba.primitives_mma import THREADS, get_floats, thread_here
from kernels_numba.registry import KernelSpec

MULTIPLE = 8  # of a head's width: rows are read 16 bytes at a time


@device_function
def window_of(context_len, capacity, window):
    """(start, length) of the context that a block sees; window 0 is all of it."""
    context = min(max(context_len[0], int32(0)), capacity)
    start = max(int32(0), int32(context - window)) if window > 0 else int32(0)
    return start, int32(context - start)


def _widths(dim):
    """(dims of a key, where its value's columns start, elements of both) in shared memory."""
    value_at = -(-dim // 16) * 16
    return dim, value_at, value_at + dim


def key_warps_of(dim, half):
    """The key_warps for heads of `dim`, f32 or bf16 (`half`) caches; 0 where sixteen keys and values do not fit."""
    key_width, _, row_width = _widths(dim)
    return key_warps_for(key_width, row_width, half)


def _source_ops(dim, sharing, half, keys):
    """Device functions over (query, keys, values, block keys, block values, context_len, capacity, window, heads,
    key head, key heads, first row).

    A query row is one of `sharing` heads of the key head at one of the block's places. What the functions call the row
    of a key is its row * key heads + key head in the cache; ~(that), below 0, in the block.
    """
    _, value_at, width = _widths(dim)
    of_keys, of_values = (make_copies(keys, width, half, dim, offset) for offset in (0, value_at))
    copy_keys, copy_found_keys = of_keys.plain, of_keys.found
    copy_values, copy_found_values = of_values.plain, of_values.found

    @device_function
    def bring(source, first, last, found, tile):
        start, context = window_of(source[5], source[6], source[7])
        head, heads, stop = source[9], source[10], int32(first + keys)
        if stop <= min(last, context):  # all of them rows of the cache, in order
            index, stride = (int64(start + first) * heads + head) * dim, int64(heads) * dim
            copy_keys(source[1], index, stride, tile)
            copy_values(source[2], index, stride, tile)
        else:
            for key in range(thread_here(), int32(keys), int32(THREADS)):
                k = int32(first + key)
                row = (
                    int32((start + k) * heads + head)
                    if k < context
                    else int32(~((k - context) * heads + head))
                )
                found[key] = row if k < last else int32(NO_ROW)
            cuda.syncthreads()  # the rows are there
            copy_found_keys(source[1], source[3], found, tile)
            copy_found_values(source[2], source[4], found, tile)

    @device_function
    def query_pair(source, h, dim_at, low, stop):
        row = uint32(source[11] + h)
        pair = int64(row // uint32(sharing)) * source[8] + int64(source[9] * sharing + row % uint32(sharing))
        if stop <= dim or dim_at < dim:
            return get_floats(source[0], pair * dim + dim_at)
        return float32(0), float32(0)

    return SimpleNamespace(bring=bring, query_pair=query_pair)


@functools.cache
def make_block_attention(dim, sharing, half):
    """The kernel for heads of `dim`, `sharing` of them a key head, f32 or bf16 (`half`) caches."""
    key_width, value_at, width = _widths(dim)
    key_warps = key_warps_of(dim, half)
    step = plan_of(key_width, width, half, key_warps).keys
    ops = _source_ops(dim, sharing, half, step)
    begin, finish = make_attend(key_width, value_at, dim, width, half, key_warps, ops)

    @cuda.jit(**options_for(key_width, dim, width, half))
    def block_attention_kernel(
        query, keys, values, own_keys, own_values, context_len, capacity, window, scale, block, scratch
    ):
        """Block (split, group of rows, key head); arrays are flat."""
        after_previous()
        num_keys, split = int32(window_of(context_len, capacity, window)[1] + block), cuda.blockIdx.x
        first, last = keys_of_split(num_keys, split, uint32(step))
        if first < last:
            head, heads, splits = int32(cuda.blockIdx.z), int32(cuda.gridDim.z), cuda.gridDim.x
            row, rows = int32(cuda.blockIdx.y * ROWS), int32(block * sharing)
            source = (
                query, keys, values, own_keys, own_values, context_len, capacity, window,
                int32(heads * sharing), head, heads, row,
            )  # fmt: skip
            slot, slots = int32(head * rows + row), int32(heads * rows)
            finish(
                begin(source, first, last), source, first, last, min(int32(rows - row), int32(ROWS)), scale, scratch,
                sums_place(slot, split, splits, dim), stats_place(slot, slots, split, splits, dim), splits,
            )  # fmt: skip

    return block_attention_kernel


@functools.cache
def make_block_combine(turns):
    """The kernel that adds up to turns * COMBINE_WARPS splits."""
    combine = make_combine(turns)

    @cuda.jit
    def block_combine_kernel(scratch, context_len, capacity, window, sharing, width, step, splits, out):
        """Block (columns, head, place): out[place, head, columns] of flat out [B, H, width]."""
        after_previous()
        place, head, block, heads = cuda.blockIdx.z, cuda.blockIdx.y, cuda.gridDim.z, cuda.gridDim.y
        keys = int32(window_of(context_len, capacity, window)[1] + block), step
        slot = (head // sharing * block + place) * sharing + head % sharing
        combine(slot, heads * block, width, keys, splits, scratch, out, (int64(place) * heads + head) * width)

    return block_combine_kernel


def _most_keys(block, capacity, window):
    return (min(capacity, window) if window else capacity) + block


def block_attention_scratch(block, heads, key_heads, dim, capacity, window=0):
    """f32 elements of scratch that `block_attention` wants over caches of that capacity."""
    return scratch_size(heads * block, dim, _most_keys(block, capacity, window))


def block_attention(
    query,
    key_cache,
    value_cache,
    block_key,
    block_value,
    context_len,
    window,
    scale,
    out,
    scratch,
    stream=0,
):
    """Attention of a block over cache rows max(0, context_len - window) .. context_len - 1 and over the block itself.

    query and out f32 [B, H, D], key_cache and value_cache [capacity, G, D] both f32 or both bf16 bits, block_key and
    block_value f32 [B, G, D], context_len i32 [1] on the device, window a host number, 0 for all, scratch flat f32 of
    at least block_attention_scratch(B, H, G, D, capacity, window). H is a multiple of G, D of 8; arrays start at 16
    bytes. Raises LaunchError.
    """
    check("block_attention: query", query, "float32", (None, None, None))
    block, heads, dim = query.shape
    require(dim > 0 and dim % MULTIPLE == 0, f"block_attention: D: expected a multiple of 8, found {dim}")
    check("block_attention: key_cache", key_cache, ("float32", "uint16"), (None, None, dim))
    capacity, key_heads = key_cache.shape[:2]
    check("block_attention: value_cache", value_cache, str(key_cache.dtype), key_cache.shape)
    check("block_attention: block_key", block_key, "float32", (block, key_heads, dim))
    check("block_attention: block_value", block_value, "float32", (block, key_heads, dim))
    check("block_attention: context_len", context_len, "int32", (1,))
    check("block_attention: out", out, "float32", query.shape)
    check("block_attention: scratch", scratch, "float32", (None,))
    half, (key_width, _, row_width) = str(key_cache.dtype) == "uint16", _widths(dim)
    key_warps = key_warps_of(dim, half)
    require(
        key_warps > 0,
        f"block_attention: D: expected a key and a value to fit in shared memory sixteen times, found {dim}",
    )
    require(
        key_heads > 0 and heads % key_heads == 0,
        f"block_attention: H: expected a multiple of G = {key_heads}, found {heads}",
    )
    require(capacity > 0, "block_attention: key_cache: expected at least one row, found none")
    require(window >= 0, f"block_attention: window: expected 0 or more, found {window}")
    wanted = block_attention_scratch(block, heads, key_heads, dim, capacity, window)
    require(
        scratch.size >= wanted, f"block_attention: scratch: expected {wanted} elements, found {scratch.size}"
    )
    if not query.size:
        return
    sharing, place = heads // key_heads, (context_len, np.int32(capacity), np.int32(window))
    splits = splits_for(_most_keys(block, capacity, window))
    kernel = make_block_attention(dim, sharing, half)
    arrays = (array.reshape(-1) for array in (query, key_cache, value_cache, block_key, block_value))
    kernel[(splits, -(-block * sharing // ROWS), key_heads), THREADS, stream](
        *arrays, *place, np.float32(scale), np.int32(block), scratch
    )
    step = plan_of(key_width, row_width, half, key_warps).keys
    sizes = (np.int32(size) for size in (sharing, dim, step, splits))
    make_block_combine(turns_for(splits))[(-(-dim // COLUMNS), heads, block), COMBINE_THREADS, stream](
        scratch, *place, *sizes, out.reshape(-1)
    )


_FLAT, _ONE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")


def _spec(dim, sharing, half):
    cache = types.Array(types.uint16, 1, "C") if half else _FLAT
    name = f"block_attention_{dim}_{sharing}_{'bf16' if half else 'f32'}"
    numbers = (_ONE, types.int32, types.int32, types.float32, types.int32)
    arguments = (_FLAT, cache, cache, _FLAT, _FLAT, *numbers, _FLAT)
    return KernelSpec(name, make_block_attention(dim, sharing, half), arguments, THREADS)


# (D, heads a key head): this project's drafter, Kimi-K2.5-DFlash
SHAPES = ((16, 2),) if SIMULATED else ((32, 2), (128, 8))
SPECS = [_spec(*shape, half) for shape in SHAPES for half in (False, True)] + [
    KernelSpec(
        f"block_combine_{turns}",
        make_block_combine(turns),
        (_FLAT, _ONE, *(types.int32,) * 6, _FLAT),
        COMBINE_THREADS,
    )
    for turns in sorted({turns_for(1), turns_for(MAX_SPLITS)})
]
