"""One forward on an engine, outside of any round: its batch in the backend's memory, its time as one graph, by layer
and by operation. It decides nothing about models.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch, chain_batch, tree_batch
from ddtree.bench_calls import Call, Cost, cost_of, label_of, record_forward, weight_names
from ddtree.bench_equality import scattered_tree
from ddtree.bench_kernels import run_times
from ddtree.engine import Engine
from ddtree.tree import DraftTree

DEPTH = 15  # of the trees that are verified: the horizon of a drafter of block 16
NODES = 24  # launches of one operation in a graph
SECONDS = 0.05  # that it is replayed
STAMPED = 9  # replays whose stamps are read
UNIT_AMPLITUDE = 3**0.5  # of even random numbers whose standard deviation is 1


def verify_tree(token_ids: Sequence[int], rows: int, vocab: int) -> DraftTree:
    """A tree of that many rows: the root and a path of the tokens, scattered among random nodes."""
    if rows == 1:
        return DraftTree.root_only(int(token_ids[0]))
    path = list(token_ids[: min(DEPTH, rows - 1) + 2])
    return scattered_tree(path, rows - 1, DEPTH, vocab, np.random.default_rng(rows))


def placed(engine: Engine, batch: ForwardBatch) -> ForwardBatch:
    """The batch in the memory of the engine's backend."""
    if not engine.runner:
        return batch
    put = engine.ops.integers
    arrays = (put(array) for array in (batch.token_ids, batch.depths, batch.lineage))
    return ForwardBatch(*arrays, put(np.array([batch.context_len])))


def commit(engine: Engine, token_ids: Sequence[int]) -> None:
    """Make the tokens the engine's whole context; the drafter learns nothing of them."""
    engine.reset(drafting=False)
    for start in range(0, len(token_ids), engine.prefill_chunk):
        chunk = np.asarray(token_ids[start : start + engine.prefill_chunk], np.int32)
        engine.model.forward(placed(engine, chain_batch(chunk, engine.context_len)), engine.cache)
        engine.cache.context_len += len(chunk)


def random_context(engine: Engine, context_len: int) -> None:
    """Make random rows the engine's whole context: what a long prompt would leave, without the time it takes."""
    from kernels_numba import fill

    engine.reset(drafting=False)
    for index, array in enumerate((engine.cache.latent, engine.cache.rope)):
        fill.fill(array, 0, index, UNIT_AMPLITUDE, engine.ops.stream)
    engine.cache.context_len = context_len


def tree_forward(engine: Engine, tree: DraftTree) -> ForwardBatch:
    """The placed batch that verifies a tree on the engine's context."""
    return placed(engine, tree_batch(tree, engine.context_len))


def against_floor(microseconds: float, moved: int, copy_gb_s: float) -> dict[str, float]:
    """A time beside the floor that copy bandwidth sets for the least bytes that must move."""
    floor = moved / copy_gb_s / 1e3
    return {"us": microseconds, "bytes": moved, "floor_us": floor, "fraction": floor / microseconds}


class ForwardTimes:
    """Times of the forward of one tree on the context committed before; needs a GPU and graphs."""

    def __init__(self, engine: Engine, tree: DraftTree, copy_gb_s: float):
        self.engine, self.stream, self.tree = engine, engine.runner.stream, tree
        self.batch, self.copy_gb_s = tree_forward(engine, tree), copy_gb_s
        self.names = weight_names(engine.model.weights)
        self.calls = record_forward(engine, self.batch)
        self.key = ("forward", len(tree.token_ids), engine.decodes_started)

    def cost(self, call: Call) -> Cost:
        return cost_of(call, self.names, self.engine.context_len, self.tree.depths)

    def run(self) -> None:
        """The whole forward: eagerly at first, then its graph."""
        self.engine.runner.run(self.key, lambda: self.engine.model.forward(self.batch, self.engine.cache))

    def whole(self) -> dict[str, Any]:
        """The forward as one graph against its floor: weights and cache rows really read, at copy bandwidth."""
        self.run()
        times = run_times(self.run, self.stream, 1)
        costs = [self.cost(call) for call in self.calls]
        moved = sum(cost.weights + cost.cache for cost in costs)
        touched = [call.routed[0] for call in self.calls if call.routed]
        return self._against(statistics.median(times), moved, sum(cost.flops for cost in costs)) | {
            "us_range": [min(times), max(times)],
            "launches": len(self.calls),
            "experts_touched": touched,
        }

    def by_layer(self) -> list[dict[str, Any]]:
        """Microseconds of each layer inside the forward's graph, by time stamps between them; median of replays."""
        config, ops = self.engine.config, self.engine.ops
        layers = config.num_hidden_layers
        times, slots = ops.empty((layers + 3,), np.uint64), {"embedding": 1, "layer": 2}

        def stamp(step: str, layer: int, array: Any) -> None:
            if step in slots:
                ops.stamp(times, slots[step] + layer)

        def body() -> None:
            ops.stamp(times, 0)
            self.engine.model.forward(self.batch, self.engine.cache, stamp)
            ops.stamp(times, layers + 2)

        spans = []
        for _ in range(STAMPED + 2):
            self.engine.runner.run(("stamped", *self.key), body)
            spans.append(np.diff(ops.read(times).astype(np.int64)) / 1e3)
        middle = np.median(spans[2:], axis=0).tolist()
        kinds = ["moe" if config.is_moe(layer) else "dense" for layer in range(layers)]
        names = ["embedding", *range(layers), "head"]
        rows = zip(names, ["", *kinds, ""], middle, strict=True)
        return [{"layer": name, "kind": kind, "us": us} for name, kind, us in rows]

    def by_operation(self) -> list[dict[str, Any]]:
        """Each operation of one layer of each kind, alone in a graph, taking the layers of its kind in turn."""
        records = []
        for kind, slots in self._slots().items():
            for calls in slots:
                self.run()  # what operations work in place on is itself again
                self.stream.sync()
                records.append({"kind": kind} | self._alone(calls))
        return records

    def _alone(self, calls: list[Call]) -> dict[str, Any]:
        """One operation of several layers: time, least bytes, and whether its weights fit into the L2 together."""
        ops = self.engine.ops

        def body() -> None:
            for node in range(NODES):
                call = calls[node % len(calls)]
                getattr(ops, call.name)(*call.arguments)

        key = ("alone", *self.key, id(calls[0]))
        self.engine.runner.run(key, body)
        times = run_times(lambda: self.engine.runner.run(key, body), self.stream, NODES, SECONDS)
        last = [call for call in self.calls if call.routed]
        call = (
            calls[0] if calls[0].routed is None else last[-1]
        )  # the gates that are left are the last layer's
        cost, label = self.cost(call), label_of(calls[0], self.names)
        shapes = ", ".join("x".join(map(str, a.shape)) for a in calls[0].arguments if hasattr(a, "shape"))
        resident = cost.weights * len(calls) < self.stream.device.properties.l2_cache_size
        return {"operation": label, "step": calls[0].step, "shapes": shapes} | (
            self._against(statistics.median(times), cost.bytes, cost.flops)
            | {"layers_in_turn": len(calls), "weights_stay_in_l2": bool(cost.weights) and resident}
        )

    def _slots(self) -> dict[str, list[list[Call]]]:
        """By kind of layer (dense, moe, ends), the calls of one operation in all layers of that kind."""
        config, found = self.engine.config, defaultdict(lambda: defaultdict(list))
        seen: dict[tuple, int] = defaultdict(int)
        for call in self.calls:
            inside = call.step not in ("embedding", "norm", "head")
            kind = ("moe" if config.is_moe(call.layer) else "dense") if inside else "ends"
            label = label_of(call, self.names)
            seen[call.layer, label] += 1
            found[kind][label, seen[call.layer, label]].append(call)
        return {kind: list(slots.values()) for kind, slots in found.items()}

    def _against(self, microseconds: float, moved: int, flops: int) -> dict[str, Any]:
        """Rates, and the floor that copy bandwidth sets."""
        return against_floor(microseconds, moved, self.copy_gb_s) | {
            "flops": flops,
            "gb_s": moved / microseconds / 1e3,
            "tflop_s": flops / microseconds / 1e6,
        }
