"""`bench draft`: what a drafter costs at any shape, from random weights: a pass over its block, and learning new rows.

Only the drafter is made, with the target's embedding and head: the target itself may be too large for the machine. Its
layers are those of `ddtree.drafter`, launched as a round does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ddtree.bench import SCHEMA_VERSION, environment
from ddtree.bench_forward import against_floor
from ddtree.bench_random import RandomBundle
from ddtree.drafter import Drafter
from ddtree.errors import NumericsError, UsageError
from ddtree.ops import get_ops
from ddtree.ops.graphs import GraphRunner, require_gpu

KIND = "ddtree draft bench"
CHUNK = 64  # rows by which the context is filled


class RandomDrafter:
    """A drafter of random weights on `ops`, with room for a context of `capacity` rows and its block on top."""

    def __init__(self, bundle: RandomBundle, capacity: int, ops: Any):
        if bundle.drafter_config is None:
            raise UsageError(f"{bundle.path}: there is no {bundle.path.stem}-drafter.json beside it")
        self.config, self.ops = bundle.drafter_config, ops
        one_layer = replace(bundle.config, num_hidden_layers=1, first_k_dense_replace=1)
        positions = capacity + self.config.block_size
        target = replace(bundle, config=one_layer).target_weights(positions, ops)
        self.embedding, self.head = target.embedding, target.head
        del target  # its layer
        weights = bundle.drafter_weights(positions, ops)
        self.drafter = Drafter(self.config, weights, positions, CHUNK, ops)
        block = np.full(self.config.block_size, self.config.mask_token_id, np.int32)
        block[0] = 1
        self.block = ops.integers(block)
        width = len(self.config.target_layer_ids) * self.config.hidden_size
        features = np.random.default_rng(0).standard_normal((CHUNK, width), np.float32)
        self.features = ops.put_exact(features)

    def fill(self, context_len: int) -> None:
        """Give it a context of that many rows, at least; features repeat."""
        for start in range(0, context_len, CHUNK):
            self.drafter.extend(self.features, self.at(start))

    def at(self, context_len: int) -> Any:
        """A context's length as the backend's operations take it."""
        return self.ops.integers(np.array([context_len])) if self.ops.name == "cuda" else context_len

    def draft(self, at: Any) -> Any:
        """Logits of a block behind the context whose length `at` gives."""
        return self.drafter.draft(self.block, at, self.embedding, self.head)

    def extend(self, rows: int, at: Any) -> None:
        """Learn that many new rows."""
        self.drafter.extend(self.features[:rows], at)

    def draft_bytes(self, context_len: int) -> int:
        """The least bytes of a draft: its layers' weights, the target's head, cached keys and values in the window."""
        c, weights = self.config, self.drafter.weights
        layers = sum(_layer_bytes(layer) for layer in weights.layers)
        seen = context_len if c.context_window is None else min(context_len, c.context_window)
        cached = 2 * seen * c.num_key_value_heads * c.head_dim * self.drafter.keys[0].dtype.itemsize
        return layers + self.head.nbytes + c.num_hidden_layers * cached

    def extend_bytes(self) -> int:
        """The least bytes of learning rows: the projection of features, and every layer's of keys and values."""
        weights = self.drafter.weights
        return weights.fc.nbytes + sum(layer.k.nbytes + layer.v.nbytes for layer in weights.layers)


def _layer_bytes(layer: Any) -> int:
    matrices = (layer.q, layer.k, layer.v, layer.o, layer.mlp.gate, layer.mlp.up, layer.mlp.down)
    return sum(matrix.nbytes for matrix in matrices)


def run_draft_bench(
    bundle: RandomBundle,
    contexts: Sequence[int],
    dtype: str = "bf16",
    gemm: str = "invariant",
    progress: Callable[[int], None] = lambda total: None,
) -> dict[str, Any]:
    """The document that --json prints: for each context the time of a draft, of learning one row and horizon + 1 rows.

    Every graph's logits are held to those of eager launches first, bit for bit. `progress(total)` is called after each
    context. Raises UsageError without a GPU or a drafter, NumericsError where logits differ or are not finite.
    """
    require_gpu("bench draft")
    from ddtree.bench_ceilings import measure_ceilings

    ops = get_ops("cuda", dtype, "device", gemm)
    runner = GraphRunner(ops, True)
    longest = -(-max(contexts) // CHUNK) * CHUNK
    if bundle.drafter_config is not None:
        ops.reserve(bundle.config, bundle.drafter_config, CHUNK, longest + CHUNK, bundle.fp8)
    made = RandomDrafter(bundle, longest, ops)
    ceilings, times = measure_ceilings(runner.stream), []
    for context in sorted(contexts):
        made.fill(context)
        at = made.at(context)
        _check(made, runner, at, context)
        works = [("draft", made.config.block_size, made.draft_bytes(context), lambda at=at: made.draft(at))]
        for rows in (1, made.config.horizon + 1):
            work = lambda rows=rows, at=at: made.extend(rows, at)  # noqa: E731
            works.append(("extend", rows, made.extend_bytes(), work))
        for what, rows, moved, work in works:
            key = (what, rows, context)
            runner.run(key, work)
            times.append(
                {"context_len": context, "what": what, "rows": rows}
                | against_floor(_median(runner, key, work), moved, ceilings["copy_gb_s"])
            )
        progress(len(contexts))
    head = {"schema": SCHEMA_VERSION, "kind": KIND, **environment(runner.stream), "model": bundle.path.stem}
    shape = {"layers": made.config.num_hidden_layers, "block_size": made.config.block_size}
    mode = {"backend": ops.name, "dtype": dtype, "gemm": gemm, "mode": "graphs"}
    return head | mode | shape | {"ceilings": ceilings, "times": times}


def _check(made: RandomDrafter, runner: GraphRunner, at: Any, context: int) -> None:
    """Raise NumericsError unless a replayed draft gives the eager one's logits, all of them finite."""
    key, found = ("draft", made.config.block_size, context), []
    for _ in range(2):  # eager, then the graph
        runner.run(key, lambda: made.draft(at))
        runner.stream.sync()
        found.append(made.ops.read(made.drafter.logits).copy())
    if not np.isfinite(found[0]).all() or not np.array_equal(*found):
        raise NumericsError(f"draft: logits after {context} positions are not finite, or differ in a graph")


def _median(runner: GraphRunner, key: Any, work: Callable[[], Any]) -> float:
    from ddtree.bench_kernels import run_times

    return statistics.median(run_times(lambda: runner.run(key, work), runner.stream, 1))


def format_draft_table(document: dict[str, Any]) -> str:
    """The document as text."""
    lines = [f"{'what':7} {'rows':>5} {'context':>8} {'us':>9} {'MB':>9} {'of its floor':>13}"]
    for one in document["times"]:
        lines.append(
            f"{one['what']:7} {one['rows']:5} {one['context_len']:8} {one['us']:9.1f} {one['bytes'] / 1e6:9.1f} "
            f"{1 / one['fraction']:12.2f}x"
        )
    mode = ", ".join(document[name] for name in ("backend", "dtype", "gemm", "mode"))
    lines.append(
        f"{document['model']}: {document['layers']} layers, block {document['block_size']} ({mode}) on "
        f"{document['gpu']}; floor: bytes at {document['ceilings']['copy_gb_s']:.0f} GB/s"
    )
    return "\n".join(lines)
