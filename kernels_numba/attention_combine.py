"""The last step of split attention: sums of parts of the context become one softmax average, in the order of position.

    out[i, h] = (sum over s of exp(peak[s] - peak) * partial[s]) / (sum over s of exp(peak[s] - peak) * total[s])

It also says how the context is split, for `attention` and `block_attention` alike: keys come in tiles, and a row of n
tiles gives every split ceil(n / MAX_SPLITS) of them. That depends on the number of keys the row sees alone.
Scratch is f32 [slots, splits, width] of sums, then [slots, splits, 2] of peaks and totals. A slot is a query row; a
row of attention has one for each head, their number padded to whole blocks.
"""

from numba import cuda, float32, int32, int64, types

from kernels_numba.primitives import SIMULATED, exp, fma
from kernels_numba.primitives_attend import stats_place, sums_place
from kernels_numba.primitives_attend_steps import TILE
from kernels_numba.registry import KernelSpec

MAX_SPLITS = (
    3 if SIMULATED else 66
)  # with 4 groups of heads, two blocks for each of an H200's multiprocessors
SHARES = 2 * MAX_SPLITS
THREADS = 8 if SIMULATED else 128
AHEAD = 2 if SIMULATED else 16  # sums loaded before the first is added


def splits_for(keys):
    """The most splits that a row of up to `keys` keys has."""
    return max(1, min(MAX_SPLITS, -(-keys // TILE)))


def scratch_size(slots, width, keys):
    """f32 elements of scratch for that many slots, of rows that see up to `keys` keys."""
    return slots * splits_for(keys) * (width + 2)


@cuda.jit(device=True, inline="always")
def tiles_of(num_keys):
    """(tiles, tiles of a split) of a row that sees that many keys."""
    tiles = (num_keys + int32(TILE - 1)) // int32(TILE)
    return tiles, (tiles + int32(MAX_SPLITS - 1)) // int32(MAX_SPLITS)


@cuda.jit(device=True, inline="always")
def keys_of_row(row, lineage, depths, context_len):
    """How many positions a row sees: up to its own; a padding row (lineage -1 at its own depth) the context alone."""
    depth = depths[row]
    known = depth >= 0 and depth < lineage.shape[1] and lineage[row, depth] >= 0
    return int32(context_len[0] + depth + 1 if known else context_len[0])


@cuda.jit(device=True, inline="always")
def combine(slot, slots, column, width, num_keys, splits, scratch, shares):
    """Column `column` of the average of a slot that sees num_keys keys; no keys give 0. All threads come here."""
    tiles, each = tiles_of(num_keys)
    used = int32(min((tiles + each - 1) // max(each, int32(1)), splits))
    sums, stats = sums_place(slot, 0, splits, width), stats_place(slot, slots, 0, splits, width)
    for s in range(cuda.threadIdx.x, used, THREADS):
        shares[s] = scratch[stats + 2 * s]
    cuda.syncthreads()  # the peaks are there
    peak = float32(-float("inf"))
    for s in range(used):
        peak = max(peak, shares[s])
    cuda.syncthreads()  # and have been read
    for s in range(cuda.threadIdx.x, used, THREADS):
        mine = scratch[stats + 2 * s]
        share = float32(1) if mine == peak else exp(mine - peak)
        shares[s] = share
        shares[MAX_SPLITS + s] = share * scratch[stats + 2 * s + 1]
    cuda.syncthreads()  # each split's share of the sums and of the total is there
    total, value = float32(0), float32(0)
    if column < width:
        for s in range(used):
            total += shares[MAX_SPLITS + s]
        loaded = cuda.local.array(AHEAD, float32)
        at, s = sums + column, int32(0)
        while s + AHEAD <= used:
            for j in range(AHEAD):
                loaded[j] = scratch[at + j * width]
            for j in range(AHEAD):
                value = fma(shares[s + j], loaded[j], value)
            at += AHEAD * width
            s = int32(s + AHEAD)
        while s < used:
            value = fma(shares[s], scratch[at], value)
            at += width
            s = int32(s + 1)
    return value / total if used > 0 else float32(0)


@cuda.jit
def attention_combine_kernel(scratch, lineage, depths, context_len, padded, width, splits, out):
    """Block (columns, head, row): a thread makes one element of flat out [M, heads, width], from padded slots a row."""
    shares = cuda.shared.array(SHARES, float32)
    row, head = cuda.blockIdx.z, cuda.blockIdx.y
    column = cuda.blockIdx.x * int32(THREADS) + cuda.threadIdx.x
    num_keys = keys_of_row(row, lineage, depths, context_len)
    slot, slots = row * padded + head, cuda.gridDim.z * padded
    value = combine(slot, slots, column, width, num_keys, splits, scratch, shares)
    if column < width:
        out[(int64(row) * cuda.gridDim.y + head) * width + column] = value


_FLAT, _ONE = types.Array(types.float32, 1, "C"), types.Array(types.int32, 1, "C")
SPECS = [
    KernelSpec(
        "attention_combine",
        attention_combine_kernel,
        (_FLAT, types.Array(types.int32, 2, "C"), _ONE, _ONE, *(types.int32,) * 3, _FLAT),
        THREADS,
    )
]
