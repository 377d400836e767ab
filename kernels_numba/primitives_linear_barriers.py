"""Barriers between warps, copies that they count, and products of a group of warps, for `linear_wgmma`.

Shared memory is a flat f32 array; a place in it is an index of 32-bit words. On the GPU a group is a warpgroup and a
product is wgmma's (sm_90a). The simulator's group is one warp, whose product has 16 columns of weight, not 64.
"""

import threading

import numpy as np
from numba import cuda

from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_mma import LANES

GROUP = LANES if SIMULATED else 4 * LANES  # threads of a group
TILE = GROUP // 2  # columns of weight of a product: 16 for each warp

if SIMULATED:
    _turn = threading.Condition()

    def align_words(buffers):
        """The index of the first word of shared memory that lies at a multiple of 1024 bytes."""
        return np.int32(0)

    def _change(buffers, at, arrivals=0, count=0):
        """A barrier is what is missing of its phase, arrivals and bytes, and the arrivals of each + the phase << 16."""
        with _turn:
            state = buffers[at : at + 2].view(np.uint32)
            assert int(state[0]) & 0xFFFF >= arrivals, "more arrivals than the barrier waits for"
            missing = (
                int(state[0]) - arrivals + (int(count) << 16) & 0xFFFFFFFF
            )  # bytes may come before their call
            if missing == 0:
                state[1] = int(state[1]) ^ 1 << 16
                missing = int(state[1]) & 0xFFFF
                _turn.notify_all()
            state[0] = missing

    def make_barrier(buffers, at, arrivals):
        """A barrier in two words, whose phase ends after that many arrivals."""
        buffers[at : at + 2].view(np.uint32)[:] = arrivals

    def arrive(buffers, at):
        """Arrive at a barrier."""
        _change(buffers, at, 1)

    def arrive_for_bytes(buffers, at, count):
        """Arrive at a barrier whose phase shall not end before `count` bytes more have been copied for it."""
        _change(buffers, at, 1, count // 16)

    def arrive_with_copies(buffers, at):
        """Arrive at a barrier once all 16-byte copies that this thread has started are there."""
        _change(buffers, at, 1)

    def wait_phase(buffers, at, parity):
        """Wait until a barrier's phase of that parity has ended; before the first phase the one of parity 1 has."""
        with _turn:
            while int(buffers[at + 1 : at + 2].view(np.uint32)[0]) >> 16 == parity:
                assert not threading.current_thread().abort, "another thread failed"
                _turn.wait(1.0)

    def _meet():
        """Wait until all threads of the group have come here."""
        with _turn:
            meetings = vars(threading.current_thread()._manager).setdefault("meetings", {})
            number = int(cuda.threadIdx.x) // GROUP
            found = meetings.setdefault(number, threading.Barrier(GROUP, timeout=60))
        found.wait()

    PLACE_UNIT = 1

    def place_in(source, index):
        """Where a flat global array's [index] is, for `copy_from`; an element further is PLACE_UNIT further."""
        return index

    def copy_from(buffers, to, source, place, count):
        """Start a copy of `count` bytes, 16 or 0, then zeros, from a place in `source` to shared memory."""
        found = source[place : place + 8] if count else np.zeros(8, np.uint16)
        buffers[to : to + 4] = found.view(np.float32)

    def copy_run(buffers, to, source, index, count, at):
        """Start a copy of `count` bytes, a multiple of 16, of a flat f32 array's [index] to shared memory.

        The barrier at `at` is told of the bytes.
        """
        assert count > 0 and count % 16 == 0 and to % 4 == 0 and index % 4 == 0
        buffers[to : to + count // 4] = source[index : index + count // 4]
        _change(buffers, at, 0, -(count // 16))

    def show_to_products():
        """What this thread wrote to shared memory, or was shown, is seen by later products."""

    def _rows_at(buffers, at, count):
        """`count` rows of 64 elements, read where wgmma reads its operand swizzled in 128 bytes."""
        assert at % 256 == 0
        pieces = buffers[at : at + 32 * count].view(np.uint16).reshape(count, 8, 8)
        row, piece = np.ogrid[:count, :8]
        words = pieces[row, piece ^ row % 8].astype(np.uint32) << 16
        return words.view(np.float32).reshape(count, 64).astype(np.float64)

    def product_of(rows):
        """multiply(buffers, columns_at, rows_at, sums): TILE x `rows` sums += TILE weight rows times `rows` inputs.

        Both are 64 elements of K wide, swizzled, at places that are multiples of 1024 bytes.
        """

        @cuda.jit(device=True)
        def multiply(buffers, columns_at, rows_at, sums):
            thread = int(cuda.threadIdx.x) % GROUP
            columns = thread // 32 * 16 + thread % 32 // 4
            left = _rows_at(buffers, int(columns_at), TILE)[[columns, columns + 8]]
            right = _rows_at(buffers, int(rows_at), rows).reshape(rows // 8, 4, 2, 64)[:, thread % 4]
            with np.errstate(invalid="ignore", over="ignore"):
                for k in range(0, 64, 16):
                    step = np.einsum("ck,jsk->jcs", left[:, k : k + 16], right[..., k : k + 16])
                    sums[:] += step.ravel()
            _meet()  # a group goes on as one

        return multiply

else:
    from kernels_numba.intrinsics_linear_wgmma import (
        align_words,
        arrive,
        arrive_for_bytes,
        arrive_with_copies,
        copy_from,
        copy_run,
        make_barrier,
        place_in,
        product_of,
        wait_phase,
    )
    from kernels_numba.intrinsics_wgmma import show_to_products

    PLACE_UNIT = 2  # bytes of a weight

__all__ = [
    "align_words",
    "arrive",
    "arrive_for_bytes",
    "arrive_with_copies",
    "copy_from",
    "copy_run",
    "make_barrier",
    "place_in",
    "product_of",
    "show_to_products",
    "wait_phase",
]
