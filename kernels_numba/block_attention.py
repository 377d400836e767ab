"""The drafter's attention: a block of queries over a window of context and over the whole block, no causality.

    out[b, h] = softmax over k of (scale * query[b, h] . key[k, g]) @ value[k, g],  g = h // (H / G)

The keys are cache rows start .. context_len - 1, start = max(0, context_len - window), then the block's own rows.
All B x H / G rows of a key head see the same keys: a block of threads takes up to 16 rows and one split of the keys, as
in `attention`, and the splits are added in order by a second kernel.

In bf16 mode (caches of bf16 bits) the query and the block's own keys and values are rounded to bf16 here.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.attention_combine import SHARES, combine, scratch_size, splits_for, tiles_of
from kernels_numba.attention_combine import THREADS as COMBINE_THREADS
from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_attend import MAX_COLUMNS, OPTIONS, ROWS, make_attend, rows_for
from kernels_numba.primitives_attend_steps import KEYS, THREADS, WARPS, format_of
from kernels_numba.primitives_words import copy16, load_row4, store4, word_of
from kernels_numba.registry import KernelSpec

MULTIPLE = 8  # of a head's width: rows are read 16 bytes at a time
AHEAD = {False: 8, True: 4}  # words of values a thread loads ahead; where it also converts, more would spill


@cuda.jit(device=True, inline="always")
def window_of(context_len, capacity, window):
    """(start, length) of the context that a block sees; window 0 is all of it."""
    context = min(max(context_len[0], int32(0)), capacity)
    start = max(int32(0), int32(context - window)) if window > 0 else int32(0)
    return start, int32(context - start)


def _source_ops(dim, sharing, half):
    """Device functions over (query, keys, values, block keys, block values, context_len, capacity, window, heads,
    key head, key heads, first row, last row).

    A query row is one of `sharing` heads of the key head at one of the block's places. What the functions call the row
    of a key is its row * key heads + key head in the cache; ~(that), below 0, in the block.
    """
    form = format_of(half)
    dims, load, slab_dims = form.dims, form.load, form.dims * WARPS
    even = dim % slab_dims == 0

    @cuda.jit(device=True, inline="always")
    def find_row(source, k):
        start, context = window_of(source[5], source[6], source[7])
        head, heads = source[9], source[10]
        if k < context:
            return int32((start + k) * heads + head)
        return int32(-1 - ((k - context) * heads + head))

    @cuda.jit(device=True, inline="always")
    def has_piece(slab, piece):
        return even or (slab * WARPS + piece) * dims < dim

    @cuda.jit(device=True, inline="always")
    def copy_own(source, row, column, stage, at):
        """A piece of one of the block's own keys."""
        if half:
            a, b, c, d = load_row4(source[3], row, dim, column)
            e, f, g, h = load_row4(source[3], row, dim, column + 4)
            store4(stage, at, word_of(a, b), word_of(c, d), word_of(e, f), word_of(g, h))
        else:
            copy16(stage, at, source[3], row, dim, column)

    @cuda.jit(device=True, inline="always")
    def fetch(source, rows, slab, piece, stage, at):
        column = (slab * WARPS + piece) * dims
        for j in range(KEYS):
            if rows[j] >= 0:
                copy16(stage, at + 4 * j, source[1], rows[j], dim, column)
            else:
                copy_own(source, ~rows[j], column, stage, at + 4 * j)

    @cuda.jit(device=True, inline="always")
    def fetch_query(source, h, slab, column, queries, at):
        column += slab * slab_dims
        row = uint32(min(source[11] + h, source[12]))
        pair = row // uint32(sharing) * source[8] + source[9] * sharing + row % uint32(sharing)
        if even or column < dim:
            copy16(queries, at, source[0], pair, dim, column)

    @cuda.jit(device=True, inline="always")
    def load_value(source, row, column, raw, at):
        if row >= 0:
            load(source[2], row, dim, column, raw, at)
        elif half:
            a, b, c, d = load_row4(source[4], ~row, dim, column)
            raw[at], raw[at + 1] = word_of(a, b), word_of(c, d)
        else:
            load(source[4], ~row, dim, column, raw, at)

    return SimpleNamespace(
        find_row=find_row,
        has_piece=has_piece,
        fetch=fetch,
        fetch_query=fetch_query,
        load_value=load_value,
    )


@functools.cache
def make_block_attention(dim, sharing, half, rows):
    """The kernel for heads of `dim`, `sharing` of them a key head, f32 or bf16 (`half`) caches, `rows` rows a block."""
    dims = format_of(half).dims
    slabs, parts = -(-dim // (dims * WARPS)), min(WARPS, dim // dims)
    attend = make_attend(rows, half, dim, slabs, parts, AHEAD[half], _source_ops(dim, sharing, half))

    @cuda.jit(**OPTIONS)
    def block_attention_kernel(
        query, keys, values, own_keys, own_values, context_len, capacity, window, scale, block, scratch
    ):
        """Block (split, group of rows, key head); arrays are flat."""
        num_keys = int32(window_of(context_len, capacity, window)[1] + block)
        tiles, each = tiles_of(num_keys)
        first, last = int32(cuda.blockIdx.x * each), int32(min((cuda.blockIdx.x + 1) * each, tiles))
        if first < last:
            head, heads = cuda.blockIdx.z, cuda.gridDim.z
            source = (
                query, keys, values, own_keys, own_values, context_len, capacity, window,
                heads * sharing, head, heads, cuda.blockIdx.y * rows, block * sharing - 1,
            )  # fmt: skip
            slot, slots = (head * cuda.gridDim.y + cuda.blockIdx.y) * rows, heads * cuda.gridDim.y * rows
            attend(source, first, last, num_keys, scale, scratch, slot, slots)

    return block_attention_kernel


@cuda.jit
def block_combine_kernel(scratch, context_len, capacity, window, sharing, padded, width, splits, out):
    """Block (columns, head, place): a thread makes one element of flat out [B, H, width]; `padded` slots a key head."""
    shares = cuda.shared.array(SHARES, float32)
    place, head = cuda.blockIdx.z, cuda.blockIdx.y
    column = cuda.blockIdx.x * int32(COMBINE_THREADS) + cuda.threadIdx.x
    num_keys = int32(window_of(context_len, capacity, window)[1] + cuda.gridDim.z)
    slot = head // sharing * padded + place * sharing + head % sharing
    value = combine(
        slot, cuda.gridDim.y // sharing * padded, column, width, num_keys, splits, scratch, shares
    )
    if column < width:
        out[(int64(place) * cuda.gridDim.y + head) * width + column] = value


def _plan(block, heads, key_heads, capacity, window):
    """(rows of a thread block, groups of rows of a key head, splits)."""
    wanted = block * heads // key_heads
    rows = rows_for(wanted)
    return rows, -(-wanted // rows), splits_for((min(capacity, window) if window else capacity) + block)


def block_attention_scratch(block, heads, key_heads, dim, capacity, window=0):
    """f32 elements of scratch that `block_attention` wants over caches of that capacity."""
    rows, groups, _ = _plan(block, heads, key_heads, capacity, window)
    return scratch_size(
        key_heads * groups * rows, dim, (min(capacity, window) if window else capacity) + block
    )


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
    require(dim <= MAX_COLUMNS, f"block_attention: D: expected at most {MAX_COLUMNS}, found {dim}")
    check("block_attention: key_cache", key_cache, ("float32", "uint16"), (None, None, dim))
    capacity, key_heads = key_cache.shape[:2]
    check("block_attention: value_cache", value_cache, str(key_cache.dtype), key_cache.shape)
    check("block_attention: block_key", block_key, "float32", (block, key_heads, dim))
    check("block_attention: block_value", block_value, "float32", (block, key_heads, dim))
    check("block_attention: context_len", context_len, "int32", (1,))
    check("block_attention: out", out, "float32", query.shape)
    check("block_attention: scratch", scratch, "float32", (None,))
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
    rows, groups, splits = _plan(block, heads, key_heads, capacity, window)
    sharing, place = heads // key_heads, (context_len, np.int32(capacity), np.int32(window))
    kernel = make_block_attention(dim, sharing, str(key_cache.dtype) == "uint16", rows)
    arrays = (array.reshape(-1) for array in (query, key_cache, value_cache, block_key, block_value))
    kernel[(splits, groups, key_heads), THREADS, stream](
        *arrays, *place, np.float32(scale), np.int32(block), scratch
    )
    sizes = (np.int32(size) for size in (sharing, groups * rows, dim, splits))
    block_combine_kernel[(-(-dim // COMBINE_THREADS), heads, block), COMBINE_THREADS, stream](
        scratch, *place, *sizes, out.reshape(-1)
    )


_FLAT, _ONE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")


def _spec(dim, sharing, half, rows):
    cache = types.Array(types.uint16, 1, "C") if half else _FLAT
    name = f"block_attention_{dim}_{sharing}_{'bf16' if half else 'f32'}_{rows}"
    numbers = (_ONE, types.int32, types.int32, types.float32, types.int32)
    arguments = (_FLAT, cache, cache, _FLAT, _FLAT, *numbers, _FLAT)
    return KernelSpec(name, make_block_attention(dim, sharing, half, rows), arguments, THREADS)


# (D, heads a key head): this project's drafter, Kimi-K2.5-DFlash
SHAPES = ((16, 2),) if SIMULATED else ((32, 2), (128, 8))
SPECS = [_spec(*shape, half, ROWS[-1]) for shape in SHAPES for half in (False, True)] + [
    KernelSpec(
        "block_combine",
        block_combine_kernel,
        (_FLAT, _ONE, *(types.int32,) * 6, _FLAT),
        COMBINE_THREADS,
    )
]
