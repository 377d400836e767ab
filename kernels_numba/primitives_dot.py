"""The dot products of `linear` and `experts`: a warp makes a tile of rows x columns, its lanes striding over K.

    sums[r, c] = sum over k of x[row_at[r] + k] * weight[column_at[c] + k]

These are the products of f32 weights, and of bf16 ones whose K is no multiple of 8; `primitives_tensor` has the others.
K is cut into chunks of 16 bytes of weight (4 f32 or 8 bf16). Lane l takes every WARP-th chunk from its own on and adds
the products one fma after another into one accumulator; then lanes meet in pairs, at distance WARP / 2 first. So the
order of a sum depends on its range of K alone: a tile of more rows or columns shares loads, and a row keeps its bits in
a tile of any shape.

In bf16 mode (`half`) the input is rounded to bf16 as it is loaded; products of two bf16 are exact in f32. A `ragged`
tile is for widths that are no multiple of a chunk: it loads element by element and reads zeros past K.
"""

import functools
from types import SimpleNamespace

import numpy as np
from numba import cuda, float32, int32, uint32

from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    bf16_to_float,
    device_function,
    float_from_bits,
    float_to_bf16,
    fma,
    load4,
)
from kernels_numba.primitives_lanes import THREADS, exchange

# Slots of the shared array that the simulator's `exchange` needs; the GPU leaves it out.
SCRATCH = THREADS * 16
# Rows of a tile: its columns, and how many chunks of each column are loaded before the first is used.
TILES = {1: (1, 4), 2: (2, 2), 4: (2, 2), 8: (4, 1)}
RAGGED_ROWS = (4,)

if SIMULATED:
    load_floats = load4

    def unpack_pair(word):
        """The two bf16 in a u32 as f32, the low half first."""
        return float_from_bits(word << np.uint32(16)), float_from_bits(word & np.uint32(0xFFFF0000))

    def round_pair(a, b):
        """(a, b), f32, each rounded to a value that bf16 holds, nearest even."""
        return bf16_to_float(float_to_bf16(a)), bf16_to_float(float_to_bf16(b))

else:
    from kernels_numba.intrinsics_dot import load_floats, round_pair, unpack_pair


def chunk_of(half):
    """Elements of weight in 16 bytes."""
    return 8 if half else 4


def rows_of_tile(wanted, ragged):
    """The rows of the smallest tile that holds `wanted` rows, or of the largest there is."""
    sizes = RAGGED_ROWS if ragged else tuple(TILES)
    return next((rows for rows in sizes if rows >= wanted), sizes[-1])


@functools.cache
def make_tile(rows, half, ragged):
    """A tile of `rows`: its columns, values = rows x columns, and the device functions `accumulate` and `reduce`.

    load_first(weight, column_at, k, last, length, words) loads the weights of the first chunks of a lane, if there are
    as many, to `words`, an array of tile.words elements of type tile.word, and touches nothing else:
    a kernel may do so before `after_previous`. use_first(x, row_at, k, last, length, words, sums) adds their products
    and returns the k that `accumulate` goes on from.
    accumulate(x, row_at, weight, column_at, k, last, length, sums) adds the products of one lane, whose first chunk
    starts at `k`, up to `last`, in rows of `length`. reduce(sums, lane, scratch, partial, at) adds over the lanes (all
    threads of the block must come) and leaves value r * columns + c in the shared partial[at + r * columns + c].
    """
    columns, depth = TILES[rows]
    accumulate, first, num_words = None, None, 0
    for ahead in (1, 2, 4):
        if ahead <= (1 if ragged else depth):
            load, use = (
                _make_loads(columns, ahead, half, ragged),
                _make_use(rows, columns, ahead, half, ragged),
            )
            accumulate = _make_walk(load, use, columns, ahead, half, accumulate)
            if rows < 4 or ahead == 1:  # more would take registers that make room for another block
                first, num_words = _make_first(load, use, ahead, half), ahead * columns * 4
    reduce = _make_reduce(rows * columns)
    bounds = {} if SIMULATED or rows < 8 else {"launch_bounds": (THREADS, 2)}
    return SimpleNamespace(
        columns=columns, values=rows * columns, accumulate=accumulate, reduce=reduce, bounds=bounds,
        word=_word_of(half), words=num_words, load_first=first[0], use_first=first[1],
    )  # fmt: skip


# --- loads: a chunk of weight as four words, four elements of input -----------------------------------------------


@device_function
def _load_floats(weight, index, left, words, base):
    words[base], words[base + 1], words[base + 2], words[base + 3] = load_floats(weight, index)


@device_function
def _load_ragged_floats(array, index, left, values, base):
    for j in range(4):
        values[base + j] = array[index + j] if j < left else float32(0)


@device_function
def _load_ragged_pairs(weight, index, left, words, base):
    for j in range(4):
        low = uint32(weight[index + 2 * j]) if 2 * j < left else uint32(0)
        high = uint32(weight[index + 2 * j + 1]) if 2 * j + 1 < left else uint32(0)
        words[base + j] = uint32(low | uint32(high << uint32(16)))


@device_function
def _keep_floats(words, base, part, weights, to):
    for j in range(4):
        weights[to + j] = words[base + j]


@device_function
def _widen_pairs(words, base, part, weights, to):
    weights[to], weights[to + 1] = unpack_pair(words[base + 2 * part])
    weights[to + 2], weights[to + 3] = unpack_pair(words[base + 2 * part + 1])


@device_function
def _keep_inputs(inputs):
    pass


@device_function
def _round_inputs(inputs):
    inputs[0], inputs[1] = round_pair(inputs[0], inputs[1])
    inputs[2], inputs[3] = round_pair(inputs[2], inputs[3])


# --- a lane's products --------------------------------------------------------------------------------------------


def _word_of(half):
    """The type of a word of weight: an f32, or two bf16."""
    return uint32 if half else float32


def _make_loads(columns, ahead, half, ragged):
    """A device function that loads the weights of `ahead` chunks of a lane, the first at `k`, to `words`."""
    load_weight = _load_floats
    if ragged or half:
        load_weight = _load_ragged_pairs if half else _load_ragged_floats
    stride = WARP * chunk_of(half)

    @device_function
    def load(weight, column_at, k, length, words):
        for d in range(ahead):
            for c in range(columns):
                at = int32(column_at[c] + k)
                load_weight(weight, at + d * stride, length - k - d * stride, words, (d * columns + c) * 4)

    return load


def _make_use(rows, columns, ahead, half, ragged):
    """A device function that adds the products of those weights. A chunk of bf16 is used in two parts of four
    elements, so that few of its f32s are alive at once."""
    if half:
        parts, widen, finish = 2, _widen_pairs, _round_inputs
    else:
        parts, widen, finish = 1, _keep_floats, _keep_inputs
    load_input = _load_ragged_floats if ragged else _load_floats
    stride, width = WARP * chunk_of(half), columns * 4

    @device_function
    def use(x, row_at, k, length, words, sums):
        weights, inputs = cuda.local.array(width, float32), cuda.local.array(4, float32)
        for d in range(ahead):
            for part in range(parts):
                for c in range(columns):
                    widen(words, (d * columns + c) * 4, part, weights, c * 4)
                for r in range(rows):
                    at, ahead_of_k = int32(row_at[r] + k), d * stride + part * 4
                    load_input(x, at + ahead_of_k, length - k - ahead_of_k, inputs, 0)
                    finish(inputs)
                    for c in range(columns):
                        total = sums[r * columns + c]
                        for j in range(4):
                            total = fma(weights[c * 4 + j], inputs[j], total)
                        sums[r * columns + c] = total

    return use


def _make_first(load, use, ahead, half):
    """(load_first, use_first): a step of `ahead` chunks in two halves, nothing where K is too short for it."""
    stride = WARP * chunk_of(half)
    reach, advance = (ahead - 1) * stride, ahead * stride

    @device_function
    def load_first(weight, column_at, k, last, length, words):
        if k + reach < last:
            load(weight, column_at, k, length, words)

    @device_function
    def use_first(x, row_at, k, last, length, words, sums):
        if k + reach < last:
            use(x, row_at, k, length, words, sums)
            k = int32(k + advance)
        return k

    return load_first, use_first


def _make_walk(load, use, columns, ahead, half, rest):
    """A device function that takes steps of `ahead` chunks while they fit below `last`, then hands on to `rest`.

    All loads of weight of a step come first.
    """
    stride, held, word = WARP * chunk_of(half), ahead * columns * 4, _word_of(half)
    reach, advance = (ahead - 1) * stride, ahead * stride

    @device_function
    def step(x, row_at, weight, column_at, k, length, sums):
        words = cuda.local.array(held, word)
        load(weight, column_at, k, length, words)
        use(x, row_at, k, length, words, sums)

    @device_function
    def last_walk(x, row_at, weight, column_at, k, last, length, sums):
        while k + reach < last:
            step(x, row_at, weight, column_at, k, length, sums)
            k = int32(k + advance)

    @device_function
    def walk(x, row_at, weight, column_at, k, last, length, sums):
        while k + reach < last:
            step(x, row_at, weight, column_at, k, length, sums)
            k = int32(k + advance)
        rest(x, row_at, weight, column_at, k, last, length, sums)

    return last_walk if rest is None else walk


def _make_fold(count, offset):
    """A device function that adds `count` sums over the lanes: each lane keeps half of them and gives half away.

    The pairs are those of a butterfly, so the sums have its bits; at the end a lane holds its share of the values.
    """
    if offset == 0:

        @device_function
        def done(sums, lane, scratch):
            pass

        return done
    half, rest = count // 2, _make_fold(max(count // 2, 1), offset // 2)

    @device_function
    def fold_one(sums, lane, scratch):
        given = cuda.local.array(1, float32)
        given[0] = sums[0]
        exchange(given, 1, offset, scratch)
        sums[0] = sums[0] + given[0]
        rest(sums, lane, scratch)

    if not half:
        return fold_one

    @device_function
    def fold(sums, lane, scratch):
        given = cuda.local.array(half, float32)
        upper = (lane & offset) != 0
        for j in range(half):
            low, high = sums[j], sums[j + half]
            given[j] = low if upper else high
            sums[j] = high if upper else low
        exchange(given, half, offset, scratch)
        for j in range(half):
            sums[j] = sums[j] + given[j]
        rest(sums, lane, scratch)

    return fold


def _make_reduce(values):
    fold = _make_fold(values, WARP // 2)
    share, sharers = max(values // WARP, 1), max(WARP // values, 1)

    @device_function
    def reduce(sums, lane, scratch, partial, at):
        fold(sums, lane, scratch)
        if lane % sharers == 0:
            for j in range(share):
                partial[at + lane // sharers * share + j] = sums[j]

    return reduce
