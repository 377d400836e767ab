"""Log-probabilities of a depth's candidates below each candidate of the depth before, sorted: one block a depth.

    s(p, c) = sum over r of silu(parent_table[p] + gated[d])[r] * child_table[c, r],   silu(x) = x / (1 + exp(-x))
    log_prob(p, c) = l(c) + s(p, c) + (logsumexp_c l(c) - logsumexp_c(l(c) + s(p, c))),   l the depth's marginal

The rows of both tables go to shared memory, the parents' combined with the gate; then a thread has one pair (p, c), a
loop where there are more pairs than threads. A sum over r is four chains of fma, r modulo 4, added at the end; those
over c run in order. So the result depends on nothing but the inputs. A pair's place is the number of pairs before it.

In f32: |error of s| <= (R / 4 + 10) eps sum_r (|parent| + |gate|) |child|, the 10 for silu's four roundings and exp and
the last additions; a log-probability adds a few roundings of its own size and of l, two sums of exponentials and two
logarithms. Knows tables of numbers, not who made them.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int32, int64, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, after_previous, device_function, exp, fma, load4, store4
from kernels_numba.primitives_mma import ALIGN
from kernels_numba.primitives_select import is_finite
from kernels_numba.registry import KernelSpec

LANES = 4 if SIMULATED else 16  # threads that bring one row of a table
THREADS = 16 if SIMULATED else 256
MAX_CANDIDATES, MAX_RANK = 16, 256
TURNS = MAX_RANK // (4 * LANES)  # loads of four that a lane has in flight, of each table
HELD = 12 * TURNS
ROW = MAX_RANK + 4  # from one row in shared memory to the next: eight rows at once meet no bank twice
ROOM = 2 * MAX_CANDIDATES * ROW
ROWS = MAX_CANDIDATES + 1  # of pairs, and one of the marginal
PITCH = MAX_CANDIDATES + 1  # from one such row to the next
VALUES = ROWS * PITCH
NEG_INF = np.float32(-np.inf)


@device_function
def combine(parent, gate):
    """silu(parent + gate), which from -88 on is 0 to f32; the one place of this formula on the device."""
    total = parent + gate
    return total / (float32(1) + exp(min(-total, float32(88))))


@device_function
def _log_sum_exp(values, first, width):
    """Of the finite among values[first : first + width], in order; 0 where there is none."""
    most = NEG_INF
    for i in range(width):
        most = max(most, values[first + i])
    total = float32(1) if most == NEG_INF else float32(0)
    shift = float32(0) if most == NEG_INF else most
    for i in range(width):
        total += exp(values[first + i] - shift)
    return shift + float32(math.log(total))


@device_function
def parent_and_candidate(pair, width):
    """Of a pair's number, i32."""
    return int32(uint32(pair) // uint32(width)), int32(uint32(pair) % uint32(width))


@functools.cache
def make_branch_scores(wide):
    """The kernel; `wide`: R is a multiple of 4, so that rows of the flat tables are read 16 bytes at a time."""

    @device_function
    def four(table, start, column, rank):
        """table[start + column] and three more, 0 past the rank."""
        if wide:
            return load4(table, start + column)
        at = start + column
        zero = float32(0)
        return (
            table[at],
            table[at + 1] if column + 1 < rank else zero,
            table[at + 2] if column + 2 < rank else zero,
            table[at + 3] if column + 3 < rank else zero,
        )

    @device_function
    def bring(tables, sources, rank, lane, rows, to_parent, to_child):
        """Put a parent's combined row and a candidate's row into shared memory, all loads of a lane at once."""
        gated, parent_table, child_table = tables
        from_gate, from_parent, from_child = sources
        held = cuda.local.array(HELD, float32)
        for i in range(TURNS):
            column = int32(4 * (i * LANES + lane))
            if column < rank:
                a, b, c, d = four(gated, from_gate, column, rank)
                held[12 * i], held[12 * i + 1], held[12 * i + 2], held[12 * i + 3] = a, b, c, d
                a, b, c, d = four(parent_table, from_parent, column, rank)
                held[12 * i + 4], held[12 * i + 5], held[12 * i + 6], held[12 * i + 7] = a, b, c, d
                a, b, c, d = four(child_table, from_child, column, rank)
                held[12 * i + 8], held[12 * i + 9], held[12 * i + 10], held[12 * i + 11] = a, b, c, d
        for i in range(TURNS):
            column = int32(4 * (i * LANES + lane))
            if column < rank:
                a, b = combine(held[12 * i + 4], held[12 * i]), combine(held[12 * i + 5], held[12 * i + 1])
                c = combine(held[12 * i + 6], held[12 * i + 2])
                d = combine(held[12 * i + 7], held[12 * i + 3])
                store4(rows, to_parent + column, a, b, c, d)
                e, f, g, h = held[12 * i + 8], held[12 * i + 9], held[12 * i + 10], held[12 * i + 11]
                store4(rows, to_child + column, e, f, g, h)

    @cuda.jit
    def branch_scores_kernel(
        token_ids, log_probs, block, gated, parent_table, child_table, rank, out_places, out_log_probs
    ):
        """Flat gated [L, R] and tables [V, R]; block d writes depth d."""
        after_previous()
        rows = cuda.shared.array(ROOM, float32, ALIGN)  # of parents, then of candidates
        values = cuda.shared.array(VALUES, float32)  # of the pairs, then the marginal
        totals = cuda.shared.array(ROWS, float32)
        thread, depth = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        width = int32(log_probs.shape[1])
        lane, marginal = int32(thread % LANES), int32(width * PITCH)
        for row in range(int32(thread // LANES), width, int32(THREADS // LANES)):
            log_prob = log_probs[depth, row]
            parent = block[0] if depth == 0 else token_ids[depth - 1, row]
            sources = int64(depth) * rank, int64(parent) * rank, int64(token_ids[depth, row]) * rank
            to_parent, to_child = int64(row) * ROW, int64(width + row) * ROW
            bring((gated, parent_table, child_table), sources, rank, lane, rows, to_parent, to_child)
            if lane == 0:
                values[marginal + row] = log_prob if is_finite(log_prob) else NEG_INF
        cuda.syncthreads()  # the rows and the marginal are there

        for pair in range(thread, int32(width * width), int32(THREADS)):
            parent, candidate = parent_and_candidate(pair, width)
            left, right = int64(parent) * ROW, int64(width + candidate) * ROW
            p, q, r, s = float32(0), float32(0), float32(0), float32(0)
            for column in range(int32(0), rank, int32(4)):
                a, b, c, d = load4(rows, left + column)
                e, f, g, h = load4(rows, right + column)
                p, q, r, s = fma(a, e, p), fma(b, f, q), fma(c, g, r), fma(d, h, s)
            value = values[marginal + candidate] + ((p + q) + (r + s))
            follows = depth > 0 or parent == 0  # the root is one parent
            values[parent * PITCH + candidate] = value if follows and is_finite(value) else NEG_INF
        cuda.syncthreads()  # the scored pairs are there

        for row in range(thread, int32(width + 1), int32(THREADS)):
            totals[row] = _log_sum_exp(values, int32(row * PITCH), width)
        cuda.syncthreads()  # so are the sums over each row

        for pair in range(thread, int32(width * width), int32(THREADS)):
            parent, candidate = parent_and_candidate(pair, width)
            shift, place = totals[width] - totals[parent], int32(0)
            value = values[parent * PITCH + candidate] + shift
            for other in range(width):
                rival = values[parent * PITCH + other] + shift
                place += int32(rival > value or (rival == value and other < candidate))
            out_places[depth, parent, place] = candidate
            out_log_probs[depth, parent, place] = value

    return branch_scores_kernel


def branch_scores(
    token_ids, log_probs, block, gated, parent_table, child_table, out_places, out_log_probs, stream=0
):
    """Write what follows each candidate of the depth before, best first: places and log-probabilities.

    token_ids i32 and log_probs f32 [L, P], P at most MAX_CANDIDATES; block i32 [B >= 1], block[0] the root's token;
    gated f32 [L, R], R in 1..MAX_RANK; parent_table and child_table f32 [V, R], ids in 0..V - 1. Outputs out_places i32
    and out_log_probs f32 [L, P, P]: row i of depth d follows candidate i of depth d - 1, descending, equal values by
    the lower place. Depth 0 follows the root: row 0; its other rows are -inf with places 0..P - 1. A candidate whose
    marginal or whose score is not finite in f32 is -inf, and the others hold its share. Raises LaunchError.
    """
    check("branch_scores: token_ids", token_ids, "int32", (None, None))
    depths, width = token_ids.shape
    check("branch_scores: log_probs", log_probs, "float32", (depths, width))
    check("branch_scores: block", block, "int32", (None,))
    require(block.shape[0] > 0, "branch_scores: block: the root's token is missing")
    check("branch_scores: gated", gated, "float32", (depths, None))
    rank = gated.shape[1]
    check("branch_scores: parent_table", parent_table, "float32", (None, rank))
    check("branch_scores: child_table", child_table, "float32", parent_table.shape)
    check("branch_scores: out_places", out_places, "int32", (depths, width, width))
    check("branch_scores: out_log_probs", out_log_probs, "float32", (depths, width, width))
    require(
        width <= MAX_CANDIDATES, f"branch_scores: {width} candidates a depth, at most {MAX_CANDIDATES} fit"
    )
    require(1 <= rank <= MAX_RANK, f"branch_scores: rank {rank}, wanted 1..{MAX_RANK}")
    if not depths or not width:
        return
    kernel = make_branch_scores(rank % 4 == 0)
    kernel[depths, THREADS, stream](
        token_ids,
        log_probs,
        block,
        gated.reshape(-1),
        parent_table.reshape(-1),
        child_table.reshape(-1),
        np.int32(rank),
        out_places,
        out_log_probs,
    )


_I32, _FLAT = types.Array(types.int32, 1, "C"), types.Array(types.float32, 1, "C")
_TABLE = types.Array(types.int32, 2, "C"), types.Array(types.float32, 2, "C")
_OUT = types.Array(types.int32, 3, "C"), types.Array(types.float32, 3, "C")
SPECS = [
    KernelSpec(name, make_branch_scores(wide), (*_TABLE, _I32, *(_FLAT,) * 3, types.int32, *_OUT), THREADS)
    for name, wide in (("branch_scores", True), ("branch_scores_ragged", False))
]
