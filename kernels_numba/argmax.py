"""Argmax of each row, and rows that decide nothing: out[m] = the lowest v with logits[m, v] = max over v.

A NaN never wins (it counts as -inf, so that every id is in range) and -0.0 = 0.0. A row is bad when it has a NaN or no
finite value. Maxima do not depend on their order: a row may be cut among blocks in any way.
"""

from numba import cuda, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    after_previous,
    bits_from_float,
    device_function,
    index_of_key,
    order_key,
)
from kernels_numba.primitives_block import MAX_THREADS, block_max_u64
from kernels_numba.registry import KernelSpec

THREADS = 8 if SIMULATED else 256  # of a block that has a part of a row
ROW_THREADS = 8 if SIMULATED else 1024  # of a block that has a whole row
UNROLL = 4  # loads in flight a thread; `scan` writes them out
TARGET_BLOCKS = 6 if SIMULATED else 132 * 8  # rows x parts that fill the card

# What a part of a row saw, in 21 bits each of a u64 that all parts add to: parts done, with a NaN, with a finite value.
NAN_SHIFT, FINITE_SHIFT, FIELD = 21, 42, (1 << 21) - 1


@device_function
def kind(value):
    """1 for a NaN, 2 for a finite value, 0 for an infinity."""
    magnitude = uint32(bits_from_float(value)) & uint32(0x7FFFFFFF)
    if magnitude > uint32(0x7F800000):
        return int32(1)
    return int32(2) if magnitude < uint32(0x7F800000) else int32(0)


@device_function
def scan(logits, row, first, step, scratch, partials):
    """Greatest order_key and kinds (bits) of logits[row, first::step], over the block: (key, any NaN, any finite)."""
    vocab = int32(logits.shape[1])
    key, kinds = uint64(0), int32(0)
    for i in range(first, vocab, int32(UNROLL) * step):
        # Past the end a thread reads its first element again, which changes neither maximum nor kinds.
        j = i + step if i + step < vocab else i
        k = i + int32(2) * step if i + int32(2) * step < vocab else i
        m = i + int32(3) * step if i + int32(3) * step < vocab else i
        a, b, c, d = logits[row, i], logits[row, j], logits[row, k], logits[row, m]
        key = max(max(key, order_key(a, i)), order_key(b, j))
        key = max(max(key, order_key(c, k)), order_key(d, m))
        kinds |= kind(a) | kind(b) | kind(c) | kind(d)
    key = block_max_u64(key, scratch, partials)
    has_nan = cuda.syncthreads_or(kinds & int32(1))
    has_finite = cuda.syncthreads_or(kinds & int32(2))
    return key, has_nan != 0, has_finite != 0


@cuda.jit
def argmax_kernel(logits, out):
    """out[row] = the row's argmax; a block a row."""
    after_previous()
    scratch = cuda.shared.array(MAX_THREADS, uint64)
    partials = cuda.shared.array(WARP, uint64)
    row = cuda.blockIdx.x
    key, _, _ = scan(logits, row, int32(cuda.threadIdx.x), int32(cuda.blockDim.x), scratch, partials)
    if cuda.threadIdx.x == 0:
        out[row] = index_of_key(key)


@cuda.jit
def row_is_bad_kernel(logits, out):
    """out[row] = whether the row is bad; a block a row."""
    after_previous()
    scratch = cuda.shared.array(MAX_THREADS, uint64)
    partials = cuda.shared.array(WARP, uint64)
    row = cuda.blockIdx.x
    first, step = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
    _, has_nan, has_finite = scan(logits, row, first, step, scratch, partials)
    if cuda.threadIdx.x == 0:
        out[row] = has_nan or not has_finite


@cuda.jit
def argmax_and_bad_kernel(logits, out_tokens, out_bad, scratch):
    """Both; gridDim.y blocks a row, of which the last to arrive writes the row's results and zeroes its scratch."""
    after_previous()
    slots = cuda.shared.array(MAX_THREADS, uint64)
    partials = cuda.shared.array(WARP, uint64)
    row, parts = cuda.blockIdx.x, cuda.gridDim.y
    first = int32(cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x)
    step = int32(parts * cuda.blockDim.x)
    key, has_nan, has_finite = scan(logits, row, first, step, slots, partials)
    if cuda.threadIdx.x != 0:
        return
    seen = uint64(1)
    if has_nan:
        seen += uint64(1 << NAN_SHIFT)
    if has_finite:
        seen += uint64(1 << FINITE_SHIFT)
    if parts > 1:
        cuda.atomic.max(scratch, (row, 0), key)
        cuda.threadfence()  # this part's key is there before it counts as done
        seen += cuda.atomic.add(scratch, (row, 1), seen)
        if seen & uint64(FIELD) != uint64(parts):
            return
        cuda.threadfence()  # every part is done; now read their maximum
        key = cuda.atomic.exch(scratch, (row, 0), uint64(0))
        scratch[row, 1] = uint64(0)
    out_tokens[row] = index_of_key(key)
    nan_parts = (seen >> uint64(NAN_SHIFT)) & uint64(FIELD)
    finite_parts = seen >> uint64(FINITE_SHIFT)
    out_bad[row] = nan_parts > uint64(0) or finite_parts == uint64(0)


def check_logits(name, logits):
    """Raise LaunchError unless logits are f32 [M, V] with at least one id a row that has a place; returns (M, V)."""
    check(f"{name}: logits", logits, "float32", (None, None))
    rows, vocab = logits.shape
    require(vocab > 0 or not rows, f"{name}: the vocabulary is empty, wanted at least one logit a row")
    require(vocab <= 2**30, f"{name}: logits: expected at most 2^30 columns, found {vocab}")
    return rows, vocab


def argmax(logits, out, stream=0):
    """out i32 [M] = the lowest id of each row's greatest logit; logits f32 [M, V]. Raises LaunchError."""
    rows, _ = check_logits("argmax", logits)
    check("argmax: out", out, "int32", (rows,))
    if rows:
        argmax_kernel[rows, ROW_THREADS, stream](logits, out)


def row_is_bad(logits, out, stream=0):
    """out bool or u8 [M] = whether a row of f32 logits [M, V] has a NaN or no finite value. Raises LaunchError."""
    rows, _ = check_logits("row_is_bad", logits)
    check("row_is_bad: out", out, ("bool", "uint8"), (rows,))
    if rows:
        row_is_bad_kernel[rows, ROW_THREADS, stream](logits, out)


def parts_of(rows, vocab):
    """Blocks a row: enough to fill the card, and none with less than one load a thread."""
    return max(1, min(TARGET_BLOCKS // rows, -(-vocab // (UNROLL * THREADS))))


def argmax_and_bad(logits, out_tokens, out_bad, scratch, stream=0):
    """Both of the above in one launch: out_tokens i32 [M], out_bad bool or u8 [M].

    scratch u64 [at least M, 2] must be zero before the first call and is left zero by every call; calls that may run
    at the same time need one each. Raises LaunchError.
    """
    rows, vocab = check_logits("argmax_and_bad", logits)
    check("argmax_and_bad: out_tokens", out_tokens, "int32", (rows,))
    check("argmax_and_bad: out_bad", out_bad, ("bool", "uint8"), (rows,))
    check("argmax_and_bad: scratch", scratch, "uint64", (None, 2))
    found = scratch.shape[0]
    require(found >= rows, f"argmax_and_bad: scratch: expected at least {rows} rows, found {found}")
    if rows:
        launch = argmax_and_bad_kernel[(rows, parts_of(rows, vocab)), THREADS, stream]
        launch(logits, out_tokens, out_bad, scratch)


_LOGITS, _SCRATCH = types.Array(types.float32, 2, "C"), types.Array(types.uint64, 2, "C")
_TOKENS, _BAD, _BOOL = (types.Array(dtype, 1, "C") for dtype in (types.int32, types.uint8, types.boolean))
SPECS = [
    KernelSpec("argmax", argmax_kernel, (_LOGITS, _TOKENS), ROW_THREADS),
    KernelSpec("row_is_bad", row_is_bad_kernel, (_LOGITS, _BAD), ROW_THREADS),
    KernelSpec("row_is_bad_bool", row_is_bad_kernel, (_LOGITS, _BOOL), ROW_THREADS),
    KernelSpec("argmax_and_bad", argmax_and_bad_kernel, (_LOGITS, _TOKENS, _BAD, _SCRATCH), THREADS),
    KernelSpec("argmax_and_bad_bool", argmax_and_bad_kernel, (_LOGITS, _TOKENS, _BOOL, _SCRATCH), THREADS),
]
