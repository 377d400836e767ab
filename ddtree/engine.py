"""The engine: owns weights, cache and buffers of one model, and offers the stages of a round. It loops over nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch, chain_batch, tree_batch
from ddtree.bundle import Bundle
from ddtree.config import SamplingConfig
from ddtree.engine_memory import check_free, measure, plan_memory
from ddtree.engine_parts import PREFILL_CHUNK, EngineSizes, allocate
from ddtree.errors import NumericsError, UsageError
from ddtree.model import Observer
from ddtree.ops import get_ops
from ddtree.ops.graphs import GraphRunner
from ddtree.sampling import choose_tokens
from ddtree.tree import DraftTree


class Engine:
    """One model on one backend, for trees of at most `max_budget` nodes and contexts of `max_context` positions.

    The cache holds max_context rows and the largest verify on top, so no round can run over it. `drafting` says
    whether committed rows feed the drafter; autoregressive decoding turns it off. On the backend cuda a `runner` runs
    whole rounds on the device, captured in CUDA graphs unless `graphs` is false; the stages below are the host's.

    All memory is taken here, and what is loaded or made, weights and tables, stands when this returns: any stream may
    read it. What later calls launch goes to the engine's own stream, and `ops.read` reads in its order, no other
    engine's. `progress(bytes, total)` hears of each piece of the weights on its way to the device.
    Raises UsageError for a setting that is not offered, DeviceMemoryError before anything is loaded where there is
    too little memory, and KdtrError for a broken file.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        backend: str = "numpy",
        dtype: str = "f32",
        route: str = "device",
        max_budget: int = 32,
        max_context: int | None = None,
        gemm: str = "invariant",
        graphs: bool = True,
        prefill_chunk: int = PREFILL_CHUNK,
        progress: Callable[[int, int], None] | None = None,
    ):
        self.bundle, self.config = bundle, bundle.config
        self.ops = ops = get_ops(backend, dtype, route, gemm)
        longest = self.config.max_position_embeddings
        sizes = EngineSizes.checked(longest, max_budget, max_context, prefill_chunk)
        ops.check_sizes(self.config, bundle.drafter_config, max_budget, prefill_chunk, dtype, gemm)
        self.max_context, self.max_budget = sizes.max_context, max_budget
        self.prefill_chunk = prefill_chunk
        self.runner = GraphRunner(ops, graphs and route == "device") if backend == "cuda" else None
        self._check_memory(sizes)
        if progress is not None:
            ops.on_upload = lambda count: progress(count, bundle.weight_bytes)
        try:
            self.parts = allocate(bundle, sizes, ops)
        finally:
            ops.on_upload = None
        self.model, self.cache, self.drafter = self.parts.model, self.parts.cache, self.parts.drafter
        if self.drafter is not None:
            self.drafter.fill_branch_tables(self.model.weights.embedding, self.model.weights.head)
        if self.runner is not None:
            ops.wait()
        self.device_state = self.parts.state  # what rounds on the device keep between launches
        self.drafting = self.drafter is not None
        self.decodes_started = 0  # a decode that finds another number than its own has lost the cache
        self._pending: Any = None  # features of committed rows that the drafter has not seen yet

    @property
    def context_len(self) -> int:
        return self.cache.context_len

    @property
    def horizon(self) -> int:
        """The deepest node a draft can hold; 0 without a drafter."""
        return self.drafter.config.horizon if self.drafter else 0

    def _check_memory(self, sizes: EngineSizes) -> None:
        """Raise DeviceMemoryError unless all that the engine will take is free now."""
        free = self.ops.free_memory() if self.runner else None
        if free is not None:
            report = plan_memory(self.bundle, sizes, self.ops.dtype_name, self.ops.gemm)
            check_free(report, free, self.ops.device)

    def memory(self) -> dict[str, dict[str, int]]:
        """Bytes that the engine's arrays take, by area and group."""
        return measure(self.parts, self.ops)

    def reset(self, drafting: bool) -> None:
        """Forget the context. Raises UsageError when a drafter is asked for and the bundle has none."""
        if drafting and self.drafter is None:
            raise UsageError(
                f"{self.bundle.path}: the bundle has no drafter; use the method ar, or name one with --drafter"
            )
        self.cache.context_len, self.drafting, self._pending = 0, drafting, None
        self.decodes_started += 1

    def forward(self, batch: ForwardBatch, observe: Observer | None = None) -> Any:
        """Logits [M, V] of a batch's rows on top of the committed ones; commits nothing."""
        self._feed_drafter()
        self._logits, self._features = self.model.forward(batch, self.cache, observe)
        return self._logits

    def prefill(self, token_ids: np.ndarray) -> Any:
        """Commit a prompt in chunks; returns the logits [1, V] of its last row."""
        for start in range(0, len(token_ids), self.prefill_chunk):
            chunk = token_ids[start : start + self.prefill_chunk]
            logits = self.forward(chain_batch(chunk, self.context_len))
            self.commit(np.arange(len(chunk)))
        return logits[-1:]

    def draft(self, root_token: int, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The drafter's table after the root: token_ids i32[horizon, k] and log_probs f32[horizon, k]."""
        self._feed_drafter()
        config, weights = self.drafter.config, self.model.weights
        block = np.full(config.block_size, config.mask_token_id, np.int32)
        block[0] = root_token
        logits = self.drafter.draft(block, self.context_len, weights.embedding, weights.head)
        token_ids = np.empty((config.horizon, k), np.int32)
        log_probs = np.empty((config.horizon, k), np.float32)
        self.ops.topk_log_softmax(logits, k, token_ids, log_probs)
        return token_ids, log_probs

    def draft_branches(self, root_token: int, k: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The table after the root, of at least P columns, and what its first P are worth below each parent.

        Besides `draft`'s two, of max(k, P) columns, f32[horizon, P, P]: [d, i, j] is the log-probability of candidate j
        of depth d + 1 below candidate i of depth d; the root alone stands above the first depth, at i = 0, where the
        other rows are -inf. Ask only where the drafter has a branch head.
        """
        count, horizon = self.drafter.config.candidates, self.horizon
        token_ids, log_probs = self.draft(root_token, max(k, count))
        best = (np.ascontiguousarray(table[:, :count]) for table in (token_ids, log_probs))
        places = np.empty((horizon, count, count), np.int32)
        ordered = np.empty((horizon, count, count), np.float32)
        block = np.full(horizon + 1, root_token, np.int32)  # its first token is read, no other
        self.drafter.branch_scores(*best, block, places, ordered)
        conditional = np.empty_like(ordered)
        np.put_along_axis(conditional, places, ordered, axis=-1)
        return token_ids, log_probs, conditional

    def verify(self, tree: DraftTree) -> Any:
        """The target's logits [M, V] at every row of a tree."""
        return self.forward(tree_batch(tree, self.context_len))

    def choose(
        self, logits: Any, positions: np.ndarray, sampling: SamplingConfig, sequence: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The target's token after each row, i32[M], and whether the row is bad, bool[M].

        positions i32[M] are the rows' own; the tokens stand one further. Bad rows have a NaN or nothing finite.
        """
        tokens, bad = np.empty(len(positions), np.int32), np.empty(len(positions), bool)
        self.ops.row_is_bad(logits, bad)
        choose_tokens(self.ops, logits, positions + 1, sampling, sequence, tokens)
        return tokens, bad

    def accept(self, tree: DraftTree, tokens: np.ndarray, bad: np.ndarray) -> tuple[np.ndarray, int]:
        """Rows of the walk (root first) and the bonus token; NumericsError when a row of the walk is bad."""
        path = np.empty(len(tokens), np.int32)
        length, bonus = self.ops.accept(tree.parents, tree.token_ids, tokens, tree.num_nodes, path)
        path = path[:length]
        if bad[path].any():
            row = int(path[bad[path].argmax()])
            raise NumericsError(
                f"logits: row {row} at position {self.context_len + int(tree.depths[row])} has a NaN or no finite "
                "value; nothing of this round was committed"
            )
        return path, bonus

    def commit(self, path: np.ndarray) -> None:
        """Make `path`, rows of the last forward, the next committed rows in every cache."""
        self.ops.compact(self.cache.arrays, self.context_len, path)
        if self.drafting:
            self.ops.compact([self._features], 0, path)
            self._pending = (self._features[: len(path)], self.context_len)
        self.cache.context_len += len(path)

    def _feed_drafter(self) -> None:
        """Hand the features of newly committed rows to the drafter, before a forward overwrites them."""
        if self._pending is not None:
            self.drafter.extend(*self._pending)
            self._pending = None
