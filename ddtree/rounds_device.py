"""A round on the device: draft, build, verify, accept, compact as one sequence of launches, with no host between them.

The sequence is captured in a CUDA graph and replayed, or launched eagerly: the same kernels, the same bits. The host
launches it, copies one report, and learns from it what was committed.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch, chain_batch
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import NumericsError, UsageError
from ddtree.rounds import STAGES, Round, bad_prompt, cut_at_stop, max_depth_of
from ddtree.tree import DraftTree

HEAD = 5  # report slots before the arrays: length, bonus, nodes, bad rows off the walk, first bad row of the walk


class DeviceState:
    """What lives on the device between launches, for trees of up to `max_budget` nodes and horizons up to `horizon`."""

    def __init__(self, engine: Engine):
        ops, rows = engine.ops, max(engine.max_budget + 1, engine.prefill_chunk)
        config, horizon = engine.config, engine.horizon

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
        self.buffer = ops.empty((len(STAGES) + 1 + (HEAD + 7 * rows + 1) // 2,), np.uint64)
        self.times = self.buffer[: len(STAGES) + 1]
        self.report = self.buffer[len(STAGES) + 1 :].view(np.int32)
        self.settings = ops.empty((6,), np.uint32)
        chain = chain_batch(np.zeros(engine.prefill_chunk), 0)
        self.chain_depths, self.chain_lineage = ops.integers(chain.depths), ops.integers(chain.lineage)
        self.prompt = integers(engine.prefill_chunk)
        k = min(engine.max_budget, config.vocab_size)
        self.table_ids = integers(horizon * k)
        self.table_log_probs = ops.empty((horizon * k,))
        if engine.drafter is not None:
            block = np.full(engine.drafter.config.block_size, engine.drafter.config.mask_token_id)
            self.block = ops.integers(block)
        else:
            self.block = integers(1)


class DeviceRounds:
    """The rounds of one decode on the device."""

    def __init__(self, engine: Engine, config: DecodeConfig, sequence: int):
        if config.method == "tree" and config.shape != "best_first":
            raise UsageError(
                f"shape: the backend {engine.ops.name} builds best_first alone, found {config.shape!r}"
            )
        if engine.device_state is None:
            engine.device_state = DeviceState(engine)
        self.engine, self.config, self.state = engine, config, engine.device_state
        self.budget = 0 if config.method == "ar" else config.budget
        if config.method == "chain":
            self.budget = min(config.budget, engine.horizon)
        self.width = min(1 if config.method == "chain" else self.budget, engine.config.vocab_size)
        self.rows = self.budget + 1
        if not config.sampling.greedy:
            sampling = config.sampling
            settings = engine.ops.sample_settings(
                sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed, sequence
            )
            engine.ops.write(self.state.settings, settings)

    # --- what the host does ------------------------------------------------------------------------------------------

    def prefill(self, prompt: np.ndarray) -> Round:
        """Commit the prompt in chunks; its last row gives the first token."""
        engine, state = self.engine, self.state
        self._set(state.context_len, 0)
        for start in range(0, len(prompt), engine.prefill_chunk):
            chunk = prompt[start : start + engine.prefill_chunk]
            tokens = np.zeros(engine.prefill_chunk, np.int32)
            tokens[: len(chunk)] = chunk
            engine.ops.write(state.prompt, tokens)
            self._set(state.count, len(chunk))
            engine.runner.run(("prefill", self.config.sampling.greedy, engine.drafting), self._prefill_chunk)
            engine.cache.context_len += len(chunk)
        head, seconds = self._copy_report(HEAD)
        position = len(prompt) - 1
        if head[4] >= 0:
            raise bad_prompt(position)
        first = int(head[1])
        tree, path = DraftTree.root_only(int(prompt[-1])), np.zeros(1, np.int32)
        return Round(
            0, position, tree, np.array([first], np.int32), path, first, (first,), seconds, None, 0, None
        )

    def next(self, last: Round, wanted: int) -> Round:
        """The round after `last`; it commits at most `wanted` tokens."""
        engine = self.engine
        if last.index == 0:
            self._first_round(wanted)
        context_len = engine.context_len
        engine.runner.run((self.config.method, self.budget, self.config.sampling.greedy), self._round)
        report, seconds = self._copy_report(HEAD + 7 * self.rows)
        length, bonus, num_nodes, num_bad, first_bad = report[:HEAD].tolist()
        arrays = report[HEAD:]
        target, path, token_ids, parents, depths = arrays[: 5 * self.rows].reshape(5, self.rows)
        if first_bad >= 0:
            raise NumericsError(
                f"logits: row {first_bad} at position {context_len + int(depths[first_bad])} has a NaN or no finite "
                "value; nothing of this round was committed"
            )
        used = slice(num_nodes + 1)
        weights = arrays[5 * self.rows :].copy().view(np.float64)
        tree = DraftTree(token_ids[used], parents[used], depths[used], weights[used])
        path = path[:length]
        tokens = cut_at_stop(tuple(target[path].tolist()), self.config.stop_token_ids)
        engine.cache.context_len += len(tokens)
        index = last.index + 1
        return Round(
            index, context_len, tree, target[used], path, bonus, tokens, seconds, None, num_bad, None
        )

    def _set(self, array: Any, value: int) -> None:
        self.engine.ops.write(array, np.array([value], np.int32))

    def _first_round(self, wanted: int) -> None:
        """After the prefill, which left the first root on the device: how deep the first tree may be."""
        ops, state = self.engine.ops, self.state
        self._set(state.wanted, wanted)
        self._set(state.max_depth, max_depth_of(self.engine, self.config, wanted))
        if self.budget == 0:
            for array, value in (
                (state.parents, -1),
                (state.depths, 0),
                (state.lineage, 0),
                (state.num_nodes, 0),
            ):
                self._set(array[:1], value)
            ops.write(state.log_weights[:1], np.zeros(1))

    def _copy_report(self, count: int) -> tuple[np.ndarray, dict[str, float]]:
        """The first `count` slots of the report, and seconds by stage: the one copy and wait of a round."""
        slots = len(STAGES) + 1
        buffer = self.engine.ops.read(self.state.buffer[: slots + (count + 1) // 2])
        stamps = np.diff(buffer[:slots].astype(np.int64)) / 1e9
        return buffer[slots:].view(np.int32)[:count], dict(zip(STAGES, stamps.tolist(), strict=True))

    # --- what the device does ----------------------------------------------------------------------------------------

    def _prefill_chunk(self) -> None:
        """One chunk of a prompt: rows past `count` are padding, and what they write is unreachable."""
        engine, ops, state = self.engine, self.engine.ops, self.state
        rows = engine.prefill_chunk
        for slot in range(3):
            ops.stamp(state.times, slot)
        batch = ForwardBatch(state.prompt, state.chain_depths, state.chain_lineage, state.context_len)
        logits, features = engine.model.forward(batch, engine.cache)
        ops.stamp(state.times, 3)
        tokens, bad = state.target_tokens[:rows], state.bad[:rows]
        self._choose(logits, batch, state.positions[:rows], tokens, bad)
        ops.finish_chunk(state.count, tokens, bad, state.result, state.report)
        if engine.drafting:
            engine.drafter.extend(features, state.context_len)
        ops.stamp(state.times, 4)
        self._advance()
        ops.stamp(state.times, 5)

    def _round(self) -> None:
        """Draft, build, verify, accept, compact; the drafter learns the committed rows at the end."""
        engine, ops, state, rows = self.engine, self.engine.ops, self.state, self.rows
        ops.stamp(state.times, 0)
        token_ids, parents, depths, log_weights = (
            array[:rows] for array in (state.token_ids, state.parents, state.depths, state.log_weights)
        )
        width = engine.horizon + 1 if self.budget else 1
        lineage = state.lineage[: rows * width].reshape(rows, width)
        if self.budget:
            self._draft(token_ids, parents, depths, log_weights, lineage)
        else:
            ops.stamp(state.times, 1)
        ops.stamp(state.times, 2)
        batch = ForwardBatch(token_ids, depths, lineage, state.context_len)
        logits, features = engine.model.forward(batch, engine.cache)
        ops.stamp(state.times, 3)
        tokens, bad, path = state.target_tokens[:rows], state.bad[:rows], state.path[:rows]
        self._choose(logits, batch, state.positions[:rows], tokens, bad)
        ops.accept(parents, token_ids, tokens, state.num_nodes, path, state.result)
        report = state.report[: HEAD + 7 * rows]
        ops.settle(
            path, tokens, bad, state.num_nodes, token_ids, parents, depths, log_weights, state.result, report
        )
        ops.stamp(state.times, 4)
        for cache in (engine.cache.latent, engine.cache.rope):
            ops.compact(cache, state.context_len, path, state.result)
        if engine.drafting:
            ops.compact(features.reshape(1, *features.shape), state.zero, path, state.result)
            engine.drafter.extend(features[: min(self.budget, engine.horizon) + 1], state.context_len)
        self._advance()
        ops.stamp(state.times, 5)

    def _draft(self, token_ids: Any, parents: Any, depths: Any, log_weights: Any, lineage: Any) -> None:
        engine, ops, state = self.engine, self.engine.ops, self.state
        weights, horizon, k = engine.model.weights, engine.horizon, self.width
        logits = engine.drafter.draft(state.block, state.context_len, weights.embedding, weights.head)
        table_ids = state.table_ids[: horizon * k].reshape(horizon, k)
        log_probs = state.table_log_probs[: horizon * k].reshape(horizon, k)
        ops.topk_log_softmax(logits, k, table_ids, log_probs)
        ops.stamp(state.times, 1)
        ops.build_tree(
            table_ids,
            log_probs,
            self.budget,
            state.max_depth,
            token_ids,
            parents,
            depths,
            log_weights,
            lineage,
            state.num_nodes,
        )

    def _choose(self, logits: Any, batch: ForwardBatch, positions: Any, tokens: Any, bad: Any) -> None:
        ops, state = self.engine.ops, self.state
        if self.config.sampling.greedy:
            ops.argmax_and_bad(logits, tokens, bad)
            return
        ops.row_is_bad(logits, bad)
        ops.next_positions(batch.depths, state.context_len, positions)
        ops.sample(logits, positions, state.settings, tokens)

    def _advance(self) -> None:
        engine, state = self.engine, self.state
        engine.ops.advance(
            state.result,
            engine.horizon,
            engine.max_context,
            state.context_len,
            state.wanted,
            state.max_depth,
            state.token_ids,
            state.block,
        )
