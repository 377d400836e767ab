"""Rotary embedding by position in NeoX (half-split) order, the query split, the latent append with both norms.

A row at depth d stands at position p = context_len + d. Pair i of D / 2 turns by the angle whose cosine and sine stand
in row p of the tables: out[i] = x[i] * cos - x[i + D/2] * sin, out[i + D/2] = x[i + D/2] * cos + x[i] * sin.
`cos` and `sin` are f32 [P, D / 2]; a position past them is read as the last: the engine checks, the kernels stay
inside. `context_len` is i32[1] on the device. Caches are f32, or bf16 as u16 bits.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, int64, types

from kernels_numba.checks import check, require
from kernels_numba.norm import inverse_rms, is_wide, norm_threads, sum_of_squares, sum_of_squares4
from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    after_previous,
    device_function,
    float_to_bf16,
    fma,
    load_settled,
)
from kernels_numba.primitives_block import MAX_THREADS
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256
CACHE_DTYPES = ("float32", "uint16")


@device_function
def as_is(value):
    """What an f32 cache stores."""
    return value


@device_function
def position_of(row, depths, context_len, cos):
    """The row's position, kept inside the tables."""
    return min(max(int64(context_len[0]) + depths[row], int64(0)), int64(cos.shape[0] - 1))


@device_function
def turn(first, second, c, s):
    """The pair (first, second) turned by the angle of cosine c and sine s."""
    return fma(first, c, -(second * s)), fma(second, c, first * s)


@functools.cache
def make_rope(bf16):
    """The rotary kernel into f32 or bf16."""
    convert = float_to_bf16 if bf16 else as_is

    @cuda.jit
    def rope_kernel(x, cos, sin, depths, context_len, out):
        """Block (row, part): a thread turns one pair of one head; x and out [M, heads, D]."""
        after_previous()
        row = cuda.blockIdx.x
        half = int32(cos.shape[1])
        unit = int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
        head, i = unit // half, unit % half
        if head < x.shape[1]:
            p = position_of(row, depths, context_len, cos)
            a, b = turn(x[row, head, i], x[row, head, i + half], cos[p, i], sin[p, i])
            out[row, head, i], out[row, head, i + half] = convert(a), convert(b)

    return rope_kernel


@device_function
def settled_position_of(row, depths, context_len, cos):
    """position_of, of arrays that the launch ahead does not write."""
    place = int64(load_settled(context_len, int64(0))) + load_settled(depths, int64(row))
    return min(max(place, int64(0)), int64(cos.shape[0] - 1))


@cuda.jit
def split_query_kernel(
    query, nope, settled_cos, settled_sin, settled_depths, settled_context, q_nope, q_rope
):
    """Block (row, part): a thread copies one element or turns one pair of one head of query [M, H, nope + rope].

    Its angle is looked up before the launch ahead has ended, which does not write tables, depths or context_len.
    """
    row = cuda.blockIdx.x
    half = int32(settled_cos.shape[1])
    unit = int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
    head, i = unit // (nope + half), unit % (nope + half)
    j, c, s = i - nope, float32(0), float32(0)
    if j >= 0:
        p = settled_position_of(row, settled_depths, settled_context, settled_cos)
        c, s = load_settled(settled_cos, p * half + j), load_settled(settled_sin, p * half + j)
    after_previous()
    if head < query.shape[1]:
        if i < nope:
            q_nope[row, head, i] = query[row, head, i]
        else:
            a, b = turn(query[row, head, i], query[row, head, i + half], c, s)
            q_rope[row, head, j], q_rope[row, head, j + half] = a, b


@functools.cache
def make_append_latent(bf16, wide):
    """The append kernel into f32 or bf16 caches; `wide` as in the norm, whose sums it takes."""
    convert = float_to_bf16 if bf16 else as_is
    reduce = sum_of_squares4 if wide else sum_of_squares

    @cuda.jit
    def append_latent_kernel(
        qkv,
        weight,
        eps,
        settled_cos,
        settled_sin,
        settled_depths,
        settled_context,
        q_lora,
        latent_cache,
        rope_cache,
        query,
    ):
        """Block (i, 0) writes row context_len + i of both caches, or nothing when that is past their last.

        Block (i, 1) norms the `query` elements before the latent of flat qkv into flat q_lora. `weight` is both norms';
        a thread's first is on its way before the launch ahead has ended, and its angle, of tables, depths and
        context_len that the launch ahead does not write; what it turns before the sum is known.
        """
        scratch = cuda.shared.array(MAX_THREADS, float32)
        partials = cuda.shared.array(WARP, float32)
        row, thread, step = cuda.blockIdx.x, int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        is_query, rank = cuda.blockIdx.y == 1, int32(weight.shape[0] - query)
        width, before = (query, int32(0)) if is_query else (rank, query)
        first = weight[before + min(thread, int32(width - 1))]
        half = int32(settled_cos.shape[1])
        p = settled_position_of(row, settled_depths, settled_context, settled_cos) * half
        target = int64(load_settled(settled_context, int64(0))) + row
        c = s = x = y = float32(0)
        if thread < half and not is_query:
            c, s = load_settled(settled_cos, p + thread), load_settled(settled_sin, p + thread)
        after_previous()
        start = int64(row) * (query + rank + 2 * half) + before
        key = start + rank
        if thread < half and not is_query:
            x, y = qkv[key + thread], qkv[key + thread + half]
        scale = inverse_rms(reduce(qkv, start, width, scratch, partials), width, eps)
        if is_query:
            to = int64(row) * query
            if thread < query:
                q_lora[to + thread] = first * (qkv[start + thread] * scale)
            for i in range(thread + step, query, step):
                q_lora[to + i] = weight[i] * (qkv[start + i] * scale)
        elif target >= 0 and target < latent_cache.shape[0]:
            if thread < rank:
                latent_cache[target, thread] = convert(first * (qkv[start + thread] * scale))
            for i in range(thread + step, rank, step):
                latent_cache[target, i] = convert(weight[before + i] * (qkv[start + i] * scale))
            if thread < half:
                a, b = turn(x, y, c, s)
                rope_cache[target, thread], rope_cache[target, thread + half] = convert(a), convert(b)
            for i in range(thread + step, half, step):
                c, s = load_settled(settled_cos, p + i), load_settled(settled_sin, p + i)
                a, b = turn(qkv[key + i], qkv[key + i + half], c, s)
                rope_cache[target, i], rope_cache[target, i + half] = convert(a), convert(b)

    return append_latent_kernel


def check_tables(name, cos, sin, depths, context_len, rows, dim):
    """Raise LaunchError unless the tables turn heads of `dim`, and depths and context_len are of `rows` rows."""
    require(dim > 0 and dim % 2 == 0, f"{name}: expected an even number of rotary dimensions, found {dim}")
    check(f"{name}: cos", cos, "float32", (None, dim // 2))
    check(f"{name}: sin", sin, "float32", cos.shape)
    require(cos.shape[0] > 0, f"{name}: cos: expected at least one position, found none")
    check(f"{name}: depths", depths, "int32", (rows,))
    check(f"{name}: context_len", context_len, "int32", (1,))


def grid(rows, units):
    """Blocks of THREADS: a row by the parts of its `units`."""
    return rows, -(-units // THREADS)


def rope(x, cos, sin, depths, context_len, out, stream=0):
    """Turn every head of f32 x [M, heads, D] into out, f32 or bf16, of the same shape; out may be x. LaunchError."""
    check("rope: x", x, "float32", (None, None, None))
    check("rope: out", out, CACHE_DTYPES, x.shape)
    rows, heads, dim = x.shape
    check_tables("rope", cos, sin, depths, context_len, rows, dim)
    if x.size:
        kernel = make_rope(str(out.dtype) == "uint16")
        kernel[grid(rows, heads * dim // 2), THREADS, stream](x, cos, sin, depths, context_len, out)


def split_query(query, cos, sin, depths, context_len, q_nope, q_rope, stream=0):
    """Split f32 query [M, H, nope + rope] into q_nope [M, H, nope] and turned q_rope [M, H, rope]. LaunchError.

    In a captured sequence the launch ahead may write the query, but not tables, depths or context_len.
    """
    check("split_query: query", query, "float32", (None, None, None))
    rows, heads, width = query.shape
    check("split_query: q_nope", q_nope, "float32", (rows, heads, None))
    nope = q_nope.shape[2]
    check("split_query: q_rope", q_rope, "float32", (rows, heads, width - nope))
    check_tables("split_query", cos, sin, depths, context_len, rows, width - nope)
    if query.size:
        units = heads * (nope + (width - nope) // 2)
        split_query_kernel[grid(rows, units), THREADS, stream](
            query, np.int32(nope), cos, sin, depths, context_len, q_nope, q_rope
        )


def append_latent(
    qkv, norm_weight, eps, cos, sin, depths, context_len, q_lora, latent_cache, rope_cache, stream=0
):
    """q_lora[i] = the RMSNorm of qkv[i, :Q]; cache rows context_len + i: that of qkv[i, Q : Q + R] and the turned rest.

    qkv f32 [M, Q + R + P], norm_weight f32 [Q + R], q_lora f32 [M, Q], left alone where Q is 0, latent_cache
    [capacity, R] and rope_cache [capacity, P] both f32 or both bf16. A cache row past the capacity is not written.
    In a captured sequence the launch ahead may write qkv, but not tables, depths or context_len. LaunchError.
    """
    check("append_latent: latent_cache", latent_cache, CACHE_DTYPES, (None, None))
    capacity, rank = latent_cache.shape
    require(rank > 0, "append_latent: latent_cache: expected at least one column, found none")
    require(eps > 0, f"append_latent: eps: expected a number above 0, found {eps}")
    check("append_latent: rope_cache", rope_cache, str(latent_cache.dtype), (capacity, None))
    dim = rope_cache.shape[1]
    check("append_latent: norm_weight", norm_weight, "float32", (None,))
    query = norm_weight.shape[0] - rank
    require(
        query >= 0, f"append_latent: norm_weight: expected {rank} elements at least, found {query + rank}"
    )
    check("append_latent: qkv", qkv, "float32", (None, query + rank + dim))
    rows = qkv.shape[0]
    if query:
        check("append_latent: q_lora", q_lora, "float32", (rows, query))
    check_tables("append_latent", cos, sin, depths, context_len, rows, dim)
    if rows:
        wide = is_wide(query, rank, dim)
        kernel = make_append_latent(str(latent_cache.dtype) == "uint16", wide)
        threads = max(norm_threads(query, wide), norm_threads(rank, wide))
        kernel[(rows, 2 if query else 1), threads, stream](
            qkv.reshape(-1),
            norm_weight,
            float32(eps),
            cos,
            sin,
            depths,
            context_len,
            (q_lora if query else qkv).reshape(-1),
            latent_cache,
            rope_cache,
            np.int32(query),
        )


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_AT = (_array(types.float32, 2), _array(types.float32, 2), _array(types.int32, 1), _array(types.int32, 1))
_HEADS, _FLAT = _array(types.float32, 3), _array(types.float32, 1)
SPECS = [
    KernelSpec("rope", make_rope(False), (_HEADS, *_AT, _HEADS), THREADS),
    KernelSpec("rope_bf16", make_rope(True), (_HEADS, *_AT, _array(types.uint16, 3)), THREADS),
    KernelSpec("split_query", split_query_kernel, (_HEADS, types.int32, *_AT, _HEADS, _HEADS), THREADS),
] + [
    KernelSpec(
        f"append_latent{suffix}{'' if wide else '_odd'}",
        make_append_latent(dtype == types.uint16, wide),
        (_FLAT, _FLAT, types.float32, *_AT, _FLAT, _array(dtype, 2), _array(dtype, 2), types.int32),
        MAX_THREADS,
    )
    for suffix, dtype in (("", types.float32), ("_bf16", types.uint16))
    for wide in (True, False)
]
