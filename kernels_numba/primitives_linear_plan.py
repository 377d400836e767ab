"""How `linear_wgmma` cuts a product: columns of a block, stages, and whether shares of K are blocks."""

import functools
from typing import NamedTuple

from kernels_numba.linear_mma import MULTIPROCESSORS
from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_linear_barriers import TILE
from kernels_numba.primitives_linear_wgmma import CHUNK, ROW_WORDS, ROWS

SHARED_LIMIT = 226 << 10  # bytes of dynamic shared memory of a block
MOST_STAGES = 3 if SIMULATED else 24
# Groups of a block that multiply, at most, by the rows of a product: registers.
MOST_GROUPS = {8: 2, 16: 2} if SIMULATED else {32: 5, 72: 5, 128: 3}
# What the choice of tiles reckons with, bytes a ns and ns: fitted to 198 launches on an H200, 87% of them within 10%.
MEMORY_RATE, ANSWER_NS = 4180.0, 1800.0  # of memory; from asking it to its answer, when all ask
OWN_RATE, CHUNK_NS = 58.0, 310.0  # of a multiprocessor, and the least that a chunk takes
PUT_NS, MORE_NS = 0.15, 1.2  # of a block, for a sum that it writes, and for one that it adds to what is there
LAUNCH_NS = 4200.0  # what rounding takes, and a launch besides
ADD_NS, ADD_RATE = 600.0, 2700.0  # what `linear_add` takes, and what it reads and writes


class GroupTiling(NamedTuple):
    """How a launch is cut.

    Rows of a product, columns of a block, stages, whether shares are blocks, and how many blocks there are.
    """

    rows: int
    columns: int
    stages: int
    apart: bool
    blocks: int

    @property
    def groups(self):
        """Groups of a block that multiply."""
        return -(-self.columns // TILE)


def _stage_bytes(rows, columns, num_rows):
    return 4 * ROW_WORDS * (columns + min(rows, -(-num_rows // 8) * 8))


def _other_bytes(rows, columns, num_rows):
    """Bytes beside the stages: before the first multiple of 1024, barriers, and what products read past the last."""
    past = max(-columns % TILE, rows) - min(rows, -(-num_rows // 8) * 8)
    return 1024 + 4 * max(4 * MOST_STAGES, past * ROW_WORDS)


def shared_bytes_of(tiling, num_rows):
    """Bytes of dynamic shared memory that a block wants."""
    sizes = tiling.rows, tiling.columns, num_rows
    return tiling.stages * _stage_bytes(*sizes) + _other_bytes(*sizes)


def tiling_for(num_rows, heads, width, share, split_bits, columns, apart):
    """The GroupTiling with blocks of so many columns, or None if they are too many."""
    rows = next((size for size in ROWS if size >= num_rows), ROWS[-1])
    chunks = share // CHUNK << (0 if apart else split_bits)
    left = (64 << 10 if SIMULATED else SHARED_LIMIT) - _other_bytes(rows, columns, num_rows)
    stages = min(left // _stage_bytes(rows, columns, num_rows), MOST_STAGES, max(chunks, 2))
    items = -(-num_rows // rows) * -(-width // columns) * (heads << (split_bits if apart else 0))
    found = GroupTiling(rows, columns, stages, apart, min(items, MULTIPROCESSORS))
    return found if stages >= 2 and found.groups <= MOST_GROUPS[rows] else None


@functools.lru_cache(maxsize=1024)
def group_tiling_of(num_rows, heads, width, length, share, split_bits, may_part=True):
    """(ns, GroupTiling) of the least time, reckoned from memory, the L2 cache and the busiest multiprocessor."""
    best = None
    for columns in range(8, min(TILE * max(MOST_GROUPS.values()), width + 7) + 1, 8):
        for apart in (False, True) if split_bits and may_part else (False,):
            tiling = tiling_for(num_rows, heads, width, share, split_bits, columns, apart)
            if tiling is not None:
                time = _time_of(tiling, num_rows, heads, width, share, split_bits)
                best = min(best or (time, tiling), (time, tiling), key=lambda one: one[0])
    return best


def _time_of(tiling, num_rows, heads, width, share, split_bits):
    splits = 1 << split_bits if tiling.apart else 1
    used = min(num_rows, tiling.rows)
    items = -(-num_rows // tiling.rows) * -(-width // tiling.columns) * heads * splits
    turns, in_turn = -(-items // MULTIPROCESSORS), (1 << split_bits) // splits
    chunks, weights = share // CHUNK * in_turn, 2 * heads * width * (share << split_bits)
    ahead = tiling.stages if turns * chunks <= tiling.stages else tiling.stages - 1
    asked = min(weights, tiling.blocks * ahead * 2 * CHUNK * tiling.columns)  # of weights, under way at once
    read = _stage_bytes(tiling.rows, tiling.columns, used)
    own = turns * chunks * max(CHUNK_NS, read / OWN_RATE)
    time = max(weights / min(MEMORY_RATE, asked / ANSWER_NS), own) + own / 9 + LAUNCH_NS
    time += turns * used * tiling.columns * (PUT_NS + (in_turn - 1) * MORE_NS)
    if tiling.apart:
        time += ADD_NS + (splits + 1) * num_rows * heads * width * 4 / ADD_RATE
    return time
