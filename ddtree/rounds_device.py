"""A round on the device: draft, build, verify, accept, compact as one sequence of launches, with no host between them.

The sequence is captured in a CUDA graph and replayed, or launched eagerly: the same kernels, the same bits. The host
launches it, copies one report, and learns from it what was committed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.engine_state import HEAD, STAGES, TIMES, buffer_size
from ddtree.errors import NumericsError, UsageError
from ddtree.rounds import HOST_PARTS, Clock, Round, bad_prompt, cut_at_stop, max_depth_of
from ddtree.tree import DraftTree

BRANCH_AWARE = "branch_aware"
BUILT = ("best_first", BRANCH_AWARE)  # trees; a chain is best_first of one candidate a depth


def check_built(engine: Engine, config: DecodeConfig) -> None:
    """Raise UsageError for a tree that is not built on the device."""
    if config.method == "tree" and config.shape not in BUILT:
        raise UsageError(
            f"shape: the backend {engine.ops.name} builds {' and '.join(BUILT)} alone, found {config.shape!r}"
        )


class DeviceRounds:
    """The rounds of one decode on the device."""

    def __init__(self, engine: Engine, config: DecodeConfig, sequence: int):
        self.engine, self.config, self.state = engine, config, engine.device_state
        self.budget = 0 if config.method == "ar" else config.budget
        if config.method == "chain":
            self.budget = min(config.budget, engine.horizon)
        self.branching = config.method == "tree" and config.shape == BRANCH_AWARE and self.budget > 0
        self.width = min(1 if config.method == "chain" else self.budget, engine.config.vocab_size)
        if self.branching:
            self.width = engine.drafter.config.candidates
        self.rows = self.budget + 1
        greedy = config.sampling.greedy
        self.key: tuple = config.method, self.budget, self.branching, greedy  # what the launches depend on
        self.copied = self._copied(self.rows)
        self.left = 0.0  # when the host was done with the last round
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
            key = ("prefill", start == 0, self.config.sampling.greedy, engine.drafting)
            engine.runner.run(key, self._prefill_first if start == 0 else self._prefill_chunk)
            engine.cache.context_len += len(chunk)
        self._ask_for_report(self._copied(0))
        self._wait()
        head, seconds = self._read_report(HEAD)
        position = len(prompt) - 1
        if head[4] >= 0:
            raise bad_prompt(position)
        first = int(head[1])
        tree, path = DraftTree.root_only(int(prompt[-1])), np.zeros(1, np.int32)
        self.left = time.perf_counter()
        return Round(
            0, position, tree, np.array([first], np.int32), path, first, (first,), seconds, None, 0, None
        )

    def next(self, last: Round, wanted: int) -> Round:
        """The round after `last`; it commits at most `wanted` tokens."""
        engine, host = self.engine, Clock(HOST_PARTS, self.left)
        host.stage("loop")
        if last.index == 0:
            self._first_round(wanted)
        context_len = engine.context_len
        host.stage("bookkeeping")
        engine.runner.run(self.key, self._round)
        host.stage("launch")
        self._ask_for_report(self.copied)
        host.stage("copy")
        self._wait()
        host.stage("wait")
        tree, target, path, bonus, num_bad, seconds = self._decoded(context_len)
        tokens = cut_at_stop(tuple(target[path].tolist()), self.config.stop_token_ids)
        engine.cache.context_len += len(tokens)
        host.stage("bookkeeping")
        self.left, index = host.last, last.index + 1
        return Round(
            *(index, context_len, tree, target, path, bonus, tokens, seconds),
            *(None, num_bad, None, host.seconds),
        )

    def _decoded(self, context_len: int) -> tuple[DraftTree, np.ndarray, np.ndarray, int, int, dict]:
        """Tree, target tokens, path, bonus, bad rows off the walk and stage times out of the report.

        Raises NumericsError when a row of the walk is bad.
        """
        report, seconds = self._read_report(HEAD + 7 * self.rows)
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
        return tree, target[used], path[:length], bonus, num_bad, seconds

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

    def _copied(self, rows: int) -> tuple[Any, np.ndarray]:
        """What is copied for a report of that many rows, on the device and on the host."""
        size = buffer_size(rows)
        return self.state.buffer[:size], self.state.host_buffer[:size]

    def _ask_for_report(self, copied: tuple[Any, np.ndarray]) -> None:
        """Put the one copy of a round on the stream."""
        source, target = copied
        source.copy_to_host(target, stream=self.engine.ops.stream)

    def _wait(self) -> None:
        if self.engine.ops.stream:
            self.engine.ops.stream.synchronize()

    def _read_report(self, count: int) -> tuple[np.ndarray, dict[str, float]]:
        """A copy of the first `count` slots of the report that came, and seconds by stage."""
        buffer = self.state.host_buffer[: TIMES + (count + 1) // 2].copy()
        stamps = np.diff(buffer[:TIMES].astype(np.int64)) / 1e9
        return buffer[TIMES:].view(np.int32)[:count], dict(zip(STAGES, stamps.tolist(), strict=True))

    # --- what the device does ----------------------------------------------------------------------------------------

    def _prefill_first(self) -> None:
        """The first chunk of a prompt: verify begins here, and ends in the last chunk."""
        for slot in range(3):
            self.engine.ops.stamp(self.state.times, slot)
        self._prefill_chunk()

    def _prefill_chunk(self) -> None:
        """One chunk of a prompt: rows past `count` are padding, and what they write is unreachable."""
        engine, ops, state = self.engine, self.engine.ops, self.state
        rows = engine.prefill_chunk
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

    def _draft(self, *tree: Any) -> None:
        """Draft, and build the tree into the arrays that are given: build_tree's outputs but for the last."""
        engine, ops, state = self.engine, self.engine.ops, self.state
        weights, horizon, k = engine.model.weights, engine.horizon, self.width
        logits = engine.drafter.draft(state.block, state.context_len, weights.embedding, weights.head)
        table_ids = state.table_ids[: horizon * k].reshape(horizon, k)
        log_probs = state.table_log_probs[: horizon * k].reshape(horizon, k)
        ops.topk_log_softmax(logits, k, table_ids, log_probs)
        bounds = self.budget, state.max_depth
        if not self.branching:
            ops.stamp(state.times, 1)
            ops.build_tree(table_ids, log_probs, *bounds, *tree, state.num_nodes)
            return
        places, conditional = (
            array.reshape(horizon, k, k) for array in (state.branch_places, state.branch_log_probs)
        )
        engine.drafter.branch_scores(table_ids, log_probs, state.block, places, conditional)
        ops.stamp(state.times, 1)
        ops.build_branch_tree(table_ids, places, conditional, *bounds, *tree, state.num_nodes)

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
