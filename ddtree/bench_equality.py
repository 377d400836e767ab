"""The equality that all rests on, at any size: a tree that holds the autoregressive tokens gives their very bits.

Greedy autoregressive decoding records its tokens, logits and cache rows. A tree then holds those tokens as one path,
scattered among random siblings in an order in which parents precede children. One round verifies it in one forward,
and must accept the whole path, with the recorded logits in the path's rows and the recorded rows in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.rounds import Clock, HostRounds, Round
from ddtree.rounds_device import DeviceRounds
from ddtree.tree import DraftTree

MOST_TRIES = 64  # random siblings that a full parent costs before another is taken


def scattered_tree(
    tokens: Sequence[int], budget: int, max_depth: int, vocab: int, rng: np.random.Generator
) -> DraftTree:
    """A tree of `budget` nodes, its root tokens[0], with tokens[1:-1] as a path at random places among random nodes.

    No node but the path's carries the next token after a row of the path, tokens[-1] after its last. Nodes are at
    most `max_depth` deep; where no more fit, the tree is smaller.
    """
    path, columns = list(tokens[1:-1]), ([int(tokens[0])], [-1], [0])
    token_ids, parents, depths = columns
    places = set(rng.choice(budget, min(len(path), budget), replace=False).tolist())
    taken: list[set[int]] = [{int(tokens[1])}]  # of each row, the tokens that no random child may carry
    end = done = 0  # the path's last row so far, and its length

    def put(token: int, parent: int, reserved: set[int]) -> None:
        token_ids.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
        taken.append(reserved)

    for place in range(budget):
        if place in places:
            put(int(path[done]), end, {int(tokens[done + 2])})
            end, done = len(token_ids) - 1, done + 1
            continue
        for _ in range(MOST_TRIES):
            parent, token = int(rng.integers(len(token_ids))), int(rng.integers(vocab))
            if depths[parent] < max_depth and token not in taken[parent]:
                taken[parent].add(token)
                put(token, parent, set())
                break
    arrays = [np.array(column, np.int32) for column in columns]
    return DraftTree(*arrays, -np.arange(len(token_ids), dtype=np.float64)).validate()


def host_copy(engine: Engine, array: Any) -> np.ndarray:
    """A copy on the host of an array of the engine's backend, in the order of its stream."""
    return engine.ops.read(array) if engine.runner else np.array(array)


def round_logits(engine: Engine, this: Round) -> np.ndarray:
    """A copy of the logits [M, V] that the forward of the round just run left; row 0 of the prefill is its last."""
    row = this.context_len % engine.prefill_chunk if this.index == 0 else 0
    return host_copy(engine, engine.model.buffers.logits[row : row + 1 + this.tree.num_nodes])


def committed_cache(engine: Engine, first: int, last: int) -> list[np.ndarray]:
    """Host copies of the cache rows first .. last - 1 of every layer: latents, then rotary keys."""
    cache = engine.cache
    return [host_copy(engine, whole)[:, first:last].copy() for whole in (cache.latent, cache.rope)]


def poison_cache(engine: Engine) -> None:
    """Make every cache row NaN: what a later read finds there must have been written since."""
    for whole in (engine.cache.latent, engine.cache.rope):
        if engine.runner:
            *outer, width = whole.shape
            shape = (*outer, width * whole.dtype.itemsize)
            engine.ops.write(whole, np.full(shape, 0xFF, np.uint8).view(whole.dtype))
        else:
            whole[...] = np.nan


class GivenHostRounds(HostRounds):
    """Rounds on the host whose tree is given, not drafted."""

    given: DraftTree

    def _draft_tree(self, root: int, max_depth: int, clock: Clock) -> tuple[DraftTree, None, None]:
        return self.given, None, None


class GivenDeviceRounds(DeviceRounds):
    """Rounds on the device whose tree is given, not drafted: the very launches of a round but those two stages."""

    given: DraftTree

    def give(self, tree: DraftTree) -> None:
        """Write the tree where the builder would."""
        ops, state, rows = self.engine.ops, self.state, len(tree.token_ids)
        assert rows == self.rows, "a round's tree fills its rows"
        self.key = ("given", *self.key)
        for array, values in (
            (state.token_ids, tree.token_ids),
            (state.parents, tree.parents),
            (state.depths, tree.depths),
            (state.log_weights, tree.log_weights),
            (state.num_nodes, np.array([tree.num_nodes], np.int32)),
        ):
            ops.write(array[: len(values)], values)
        lineage = tree.lineage(self.engine.horizon + 1).reshape(-1)
        ops.write(state.lineage[: lineage.size], lineage)

    def _draft(self, *arrays: Any) -> None:
        self.engine.ops.stamp(self.state.times, 1)


def autoregressive(engine: Engine, prompt_ids: Sequence[int], count: int) -> dict[str, Any]:
    """Greedy decoding: `count` + 1 `tokens`, the `logits` [count, V] behind all but the first, and the `cache` rows."""
    config = DecodeConfig("ar", 0, count + 1)
    tokens, logits = [], []
    for this in decode(engine, prompt_ids, config):
        tokens += this.tokens
        if this.index:
            logits.append(round_logits(engine, this))
    cache = committed_cache(engine, 0, engine.context_len)
    return {"tokens": tokens, "logits": np.concatenate(logits), "cache": cache}


def tree_equals_autoregressive(
    engine: Engine, prompt_ids: Sequence[int], budgets: Sequence[int], seed: int = 0
) -> list[dict[str, Any]]:
    """For each budget, whether one tree round gave the bits of autoregressive decoding; a record each.

    The path is as long as the horizon and the budget allow. `equal` is true when `accepted` (the path and the bonus
    token), `tokens_equal`, `logits_equal` and `cache_equal` (every committed row of every layer) are as they must.
    Raises UsageError without a drafter, whose horizon bounds a tree.
    """
    if not engine.horizon:
        raise UsageError("equality: trees need a drafter, whose horizon bounds them; this model has none")
    want = autoregressive(engine, prompt_ids, engine.horizon + 1)
    runs = 2 if engine.runner and engine.runner.graphs else 1  # of a captured round the first is eager
    records = []
    for budget in budgets:
        each = [_one_tree(engine, prompt_ids, budget, want, seed) for _ in range(runs)]
        records.append(next((record for record in each if not record["equal"]), each[-1]))
    return records


def _one_tree(
    engine: Engine, prompt_ids: Sequence[int], budget: int, want: dict[str, Any], seed: int
) -> dict[str, Any]:
    """One budget: prefill into poisoned caches, one round on a given tree, and its record."""
    rng, length = np.random.default_rng((seed, budget)), min(engine.horizon, budget)
    tokens = want["tokens"][: length + 2]
    tree = scattered_tree(tokens, budget, engine.horizon, engine.config.vocab_size, rng)
    poison_cache(engine)
    engine.reset(drafting=True)
    kind = GivenDeviceRounds if engine.runner else GivenHostRounds
    rounds = kind(engine, DecodeConfig("tree", tree.num_nodes, length + 2), 0)
    first = rounds.prefill(np.asarray(prompt_ids, np.int32))
    rounds.given = tree
    if engine.runner:
        rounds.give(tree)
    this = rounds.next(first, length + 1)
    logits = round_logits(engine, this)[this.path]
    same = len(this.path) == length + 1
    record = {
        "budget": budget,
        "nodes": tree.num_nodes,
        "path_rows": this.path.tolist(),
        "accepted": len(this.tokens),
        "tokens_equal": [*first.tokens, *this.tokens] == tokens,
        "logits_equal": same and logits.tobytes() == want["logits"][: length + 1].tobytes(),
        "cache_equal": same
        and all(
            mine.tobytes() == theirs[:, : engine.context_len].tobytes()
            for mine, theirs in zip(
                committed_cache(engine, 0, engine.context_len), want["cache"], strict=True
            )
        ),
    }
    checks = ("tokens_equal", "logits_equal", "cache_equal")
    return record | {"equal": all(record[name] for name in checks) and same}
