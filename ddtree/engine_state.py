"""What rounds on the device keep there between launches. It knows no order of stages and no decode."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.batch import chain_batch
from ddtree.config import DrafterConfig

STAGES = ("draft", "build", "verify", "accept", "compact")
HEAD = 5  # report slots before the arrays: length, bonus, nodes, bad rows off the walk, first bad row of the walk
TIMES = len(STAGES) + 1  # time stamps at the head of the buffer that is copied


def buffer_size(rows: int) -> int:
    """u64 slots of the buffer that a round of that many rows copies: time stamps, then its report."""
    return TIMES + (HEAD + 7 * rows + 1) // 2


class DeviceState:
    """Device arrays for trees of up to `max_budget` nodes and prompts that go through in chunks of `prefill_chunk`."""

    def __init__(
        self, vocab_size: int, drafter: DrafterConfig | None, max_budget: int, prefill_chunk: int, ops: Any
    ):
        rows, horizon = max(max_budget + 1, prefill_chunk), drafter.horizon if drafter else 0

        def integers(count: int) -> Any:
            return ops.empty((count,), np.int32)

        self.context_len, self.wanted, self.max_depth, self.count = (integers(1) for _ in range(4))
        self.num_nodes = ops.integers(np.zeros(1))
        self.zero = ops.integers(np.zeros(1))
        self.result = integers(2)
        self.token_ids, self.parents, self.depths, self.positions = (integers(rows) for _ in range(4))
        self.target_tokens, self.path = integers(rows), integers(rows)
        self.bad = ops.empty((rows,), np.uint8)
        self.log_weights = ops.empty((rows,), np.float64)
        self.lineage = integers(rows * (horizon + 1))
        # one buffer that the host copies whole: the stages' time stamps, then the report
        self.buffer = ops.empty((buffer_size(rows),), np.uint64)
        self.host_buffer = ops.pinned((buffer_size(rows),), np.uint64)  # where the host receives it
        self.times, self.report = self.buffer[:TIMES], self.buffer[TIMES:].view(np.int32)
        self.settings = ops.empty((6,), np.uint32)
        chain = chain_batch(np.zeros(prefill_chunk), 0)
        self.chain_depths, self.chain_lineage = ops.integers(chain.depths), ops.integers(chain.lineage)
        self.prompt = integers(prefill_chunk)
        count = drafter.candidates if drafter else 0  # of a depth, that a branch head scores
        k = max(min(max_budget, vocab_size), count)
        self.table_ids = integers(horizon * k)
        self.table_log_probs = ops.empty((horizon * k,))
        self.branch_places = integers(horizon * count**2)
        self.branch_log_probs = ops.empty((horizon * count**2,))
        block = np.full(drafter.block_size, drafter.mask_token_id) if drafter else np.zeros(1)
        self.block = ops.integers(block)
