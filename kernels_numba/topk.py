"""Exact top-k of each row with log-probabilities: k greatest logits, the lower id among equals, logit - logsumexp.

Two kernels. `scan` reads the row once: each thread takes GROUP consecutive logits to their greatest order_key (a u64
that no two elements share) and to sum(exp(logit - greatest)). `select`, a block a row, bisects for a threshold that
k to k + k / 8 of the greatest keys reach. Every one of the k best elements reaches it and lies in such a group, so
only these groups are read again; what reaches the threshold is sorted in shared memory. If ties, or groups fewer than
k, leave more than LIST_SIZE elements, the bisection goes on over these elements until they fit.

    log_prob = (logit - m) - log(sum_g s_g exp(m_g - m)),  m the greatest logit; NaN if m is infinite or anything is NaN

in f32: within (40 + 2 log(V) + 2 |log_prob|) eps of the exact value, from 20 additions and 2 exponentials of 2 ulp on
the way of a term, arguments rounded to 2^-24 of their size (log V at most on average), a logarithm, two subtractions.
The sum's order depends on V alone. Knows rows of numbers, not who made them.
"""

import functools
import math

import numpy as np
from numba import cuda, float32, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    after_previous,
    device_function,
    exp,
    index_of_key,
    order_key,
    warp_sum,
)
from kernels_numba.primitives_select import value_of_key, warp_barrier, warp_count, warp_greatest
from kernels_numba.registry import KernelSpec
from kernels_numba.topk_scan import GROUP, SCAN_THREADS, scan_kernel

SELECT_THREADS = 16 if SIMULATED else 1024
WARPS = SELECT_THREADS // WARP  # at most WARP: one warp reduces what the warps left
TWO_HALVES = 2 * WARPS  # counts of one step and of the next
MAX_KEYS = 8  # group keys a thread of select holds in registers
MAX_VOCAB = MAX_KEYS * SELECT_THREADS * GROUP
LIST_SIZE = 64 if SIMULATED else 2048  # candidates that are sorted
PAIRS = LIST_SIZE // 2 // SELECT_THREADS  # that a thread compares in a step of the sort
MAX_K = LIST_SIZE // 2
MAX_CHOSEN = MAX_K + MAX_K // 8  # groups that may hold one of the k best
BATCH = 4  # loads in flight a thread
NEG_INF = np.float32(-np.inf)
OPTIONS = {} if SIMULATED else {"launch_bounds": SELECT_THREADS}  # so many threads share the register file


def num_groups(vocab):
    """The groups of a row: the width of both scratch arrays."""
    return -(-vocab // GROUP)


@device_function
def _candidate(logits, row, chosen, item, num_items, threshold):
    """The key of element `item` of the chosen groups; 0 past the last, past the row, or under the threshold."""
    within = min(item, uint32(num_items - uint32(1)))
    index = uint32(uint32(chosen[uint32(within // uint32(GROUP))]) * uint32(GROUP) + within % uint32(GROUP))
    last = uint32(logits.shape[1] - 1)
    key = order_key(
        logits[row, min(index, last)], index
    )  # loaded in any case, so that a batch has no branches
    return key if key >= threshold and item == within and index <= last else uint64(0)


@device_function
def _block_count(value, counts, half, scratch):
    """The sum of an i32 over the block, from one barrier; `half` (0, 1, 0, ..) alternates from call to call."""
    thread = int32(cuda.threadIdx.x)
    value = warp_count(value, scratch)
    counts[half * int32(WARPS) + thread // int32(WARP)] = value
    cuda.syncthreads()  # every warp's count is written; the next call writes the other half
    lane = thread % int32(WARP)
    return warp_count(counts[half * int32(WARPS) + lane] if lane < int32(WARPS) else int32(0), scratch)


@device_function
def _sort_descending(keys, size):
    """Bitonic sort of `size` u64, a power of two, in shared memory; a barrier before, none after."""
    thread = int32(cuda.threadIdx.x)
    width = int32(2)
    while width <= size:
        stride = width >> int32(1)
        while stride > int32(0):
            if stride > int32(WARP) or (stride == int32(WARP) and width > int32(2 * WARP)):
                cuda.syncthreads()  # other warps wrote what this step reads
            else:
                warp_barrier()  # a warp's pairs lie in its own window of 2 WARP keys
            for i in range(PAIRS):
                pair = uint32(thread + int32(i * SELECT_THREADS))
                low = uint32((pair << uint32(1)) - (pair & uint32(stride - int32(1))))
                high = uint32(low + uint32(stride))
                if high < uint32(size):
                    a = keys[low]
                    b = keys[high]
                    descending = (low & uint32(width)) == uint32(0)
                    if (a < b) == descending:
                        keys[low] = b
                        keys[high] = a
            stride >>= int32(1)
        width <<= int32(1)


@functools.cache
def select_kernel(keys_per_thread):
    """The kernel for rows of up to keys_per_thread * SELECT_THREADS groups; a block a row."""

    @cuda.jit(**OPTIONS)
    def kernel(logits, group_keys, group_sums, out_token_ids, out_log_probs):
        after_previous()
        found = cuda.shared.array(LIST_SIZE, uint64)
        chosen = cuda.shared.array(MAX_CHOSEN, int32)
        counts = cuda.shared.array(TWO_HALVES, int32)
        tops = cuda.shared.array(WARPS, uint64)
        bottoms = cuda.shared.array(WARPS, uint64)
        sums = cuda.shared.array(WARPS, float32)
        num_chosen = cuda.shared.array(1, int32)
        num_found = cuda.shared.array(1, int32)
        scratch = cuda.shared.array(SELECT_THREADS, uint64)
        float_scratch = cuda.shared.array(SELECT_THREADS, float32)
        keys = cuda.local.array(keys_per_thread, uint64)
        group_values = cuda.local.array(keys_per_thread, float32)
        thread = int32(cuda.threadIdx.x)
        warp = thread // int32(WARP)
        lane = thread % int32(WARP)
        row = uint32(cuda.blockIdx.x)
        groups = int32(group_keys.shape[1])
        k = int32(out_token_ids.shape[1])

        top, below = uint64(0), uint64(0)  # greatest key; greatest complement of one
        for i in range(keys_per_thread):  # without branches, so that all loads are in flight
            group = int32(i * SELECT_THREADS) + thread
            index = uint32(min(group, groups - int32(1)))
            key, value = group_keys[row, index], group_sums[row, index]
            keys[i] = key if group < groups else uint64(0)
            group_values[i] = value if group < groups else float32(0)
        for i in range(keys_per_thread):
            top = max(top, keys[i])
            below = max(below, uint64(~keys[i]) if keys[i] > uint64(0) else uint64(0))
        top = warp_greatest(top, scratch)
        below = warp_greatest(below, scratch)
        tops[warp] = top
        bottoms[warp] = below
        if thread == int32(0):
            num_chosen[0] = int32(0)
            num_found[0] = int32(0)
        cuda.syncthreads()  # every warp's bounds are written, both lists are empty
        top = warp_greatest(tops[lane] if lane < int32(WARPS) else uint64(0), scratch)
        below = warp_greatest(bottoms[lane] if lane < int32(WARPS) else uint64(0), scratch)
        greatest = value_of_key(top)
        total = float32(0)
        for i in range(keys_per_thread):
            scale = value_of_key(keys[i]) - greatest if keys[i] > uint64(0) else float32(0)
            total += group_values[i] * (exp(scale) if group_values[i] > float32(0) else float32(1))
        sums[warp] = warp_sum(total, float_scratch)

        # A threshold that k to k + k / 8 groups reach; keys differ, so it exists.
        threshold = uint64(1) if k > groups else uint64(~below)
        beyond = top + uint64(1)
        reaching = groups
        half = int32(0)
        while reaching > k + (k >> int32(3)) and k < groups and beyond - threshold > uint64(1):
            middle = threshold + ((beyond - threshold) >> uint64(1))
            count = int32(0)
            for i in range(keys_per_thread):
                if keys[i] >= middle:
                    count += int32(1)
            count = _block_count(count, counts, half, scratch)
            half ^= int32(1)
            if count >= k:
                threshold, reaching = middle, count
            else:
                beyond = middle
        for i in range(keys_per_thread):
            if keys[i] >= threshold:
                chosen[cuda.atomic.add(num_chosen, 0, int32(1))] = int32(i * SELECT_THREADS) + thread
        cuda.syncthreads()  # the groups are chosen, in any order

        num_items = uint32(num_chosen[0] * int32(GROUP))
        batch = cuda.local.array(BATCH, uint64)
        fits = False
        while not fits:
            for first in range(thread, int32(num_items), int32(BATCH * SELECT_THREADS)):
                for i in range(BATCH):
                    item = uint32(first + int32(i * SELECT_THREADS))
                    batch[i] = _candidate(logits, row, chosen, item, num_items, threshold)
                for i in range(BATCH):
                    if batch[i] > uint64(0):
                        place = cuda.atomic.add(num_found, 0, int32(1))
                        if place < int32(LIST_SIZE):
                            found[place] = batch[i]
            cuda.syncthreads()  # every candidate is counted and, if they fit, listed
            reaching = num_found[0]
            fits = reaching <= int32(LIST_SIZE)
            if not fits:
                beyond = top + uint64(1)
                while reaching > int32(LIST_SIZE):
                    middle = threshold + ((beyond - threshold) >> uint64(1))
                    count = int32(0)
                    for first in range(thread, int32(num_items), int32(BATCH * SELECT_THREADS)):
                        for i in range(BATCH):
                            item = uint32(first + int32(i * SELECT_THREADS))
                            batch[i] = _candidate(logits, row, chosen, item, num_items, middle)
                        for i in range(BATCH):
                            if batch[i] > uint64(0):
                                count += int32(1)
                    count = _block_count(count, counts, half, scratch)
                    half ^= int32(1)
                    if count >= k:
                        threshold, reaching = middle, count
                    else:
                        beyond = middle
                if thread == int32(0):
                    num_found[0] = int32(0)
                cuda.syncthreads()  # the list is empty again

        size = int32(2)
        while size < reaching:
            size <<= int32(1)
        for i in range(reaching + thread, size, int32(SELECT_THREADS)):
            found[i] = uint64(0)
        cuda.syncthreads()  # the list is filled up
        _sort_descending(found, size)
        total = warp_sum(sums[lane] if lane < int32(WARPS) else float32(0), float_scratch)
        norm = float32(math.log(total)) if total >= float32(1) else float32(math.nan)
        if math.isinf(greatest):
            norm = float32(math.nan)
        cuda.syncthreads()  # the last step of the sort is done
        for i in range(thread, k, int32(SELECT_THREADS)):
            out_token_ids[row, i] = index_of_key(found[i])
            out_log_probs[row, i] = (value_of_key(found[i]) - greatest) - norm

    return kernel


def topk_log_softmax(logits, k, out_token_ids, out_log_probs, group_keys, group_sums, stream=0):
    """Write each row's k greatest logits as ids and log-probabilities, in order.

    logits f32 [L, V], k in 0..V and at most MAX_K, out_token_ids i32 [L, k], out_log_probs f32 [L, k]; scratch
    group_keys u64 and group_sums f32 [L, num_groups(V)], V at most MAX_VOCAB. Raises LaunchError.
    """
    check("topk_log_softmax: logits", logits, "float32", (None, None))
    rows, vocab = logits.shape
    require(vocab <= MAX_VOCAB, f"topk_log_softmax: vocabulary {vocab}, at most {MAX_VOCAB} fit")
    require(0 <= k <= min(vocab, MAX_K), f"topk_log_softmax: k is {k}, wanted 0..{min(vocab, MAX_K)}")
    check("topk_log_softmax: out_token_ids", out_token_ids, "int32", (rows, k))
    check("topk_log_softmax: out_log_probs", out_log_probs, "float32", (rows, k))
    groups = num_groups(vocab)
    check("topk_log_softmax: group_keys", group_keys, "uint64", (rows, groups))
    check("topk_log_softmax: group_sums", group_sums, "float32", (rows, groups))
    if rows == 0 or k == 0:
        return
    chunks = -(-groups // SCAN_THREADS)
    scan_kernel[(chunks, rows), SCAN_THREADS, stream](logits, group_keys, group_sums)
    select = select_kernel(-(-groups // SELECT_THREADS))
    select[rows, SELECT_THREADS, stream](logits, group_keys, group_sums, out_token_ids, out_log_probs)


_F32 = types.Array(types.float32, 2, "C")
_I32 = types.Array(types.int32, 2, "C")
_U64 = types.Array(types.uint64, 2, "C")
SPECS = [
    KernelSpec(f"topk_select_{n}", select_kernel(n), (_F32, _U64, _F32, _I32, _F32), SELECT_THREADS)
    for n in (1, 4, 5, MAX_KEYS)  # 32k, 129,280, 163,840 and the longest vocabulary
]
