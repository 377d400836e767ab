"""Cases of a round's end: the walk down the tree, and the move of accepted rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_cases_attention import random_tree
from ddtree.bench_data import bf16, generator, normal, poisoned, require_equal, scalar, stored
from ddtree.bench_kernels import Case, Work
from ddtree.reference import accept as golden

CONTEXT = 9  # committed rows before the call; the caches need not be long for a move


def cases(quick: bool) -> list[Case]:
    """Kimi K2's 61 layers of 512 + 64 in bf16; quick: few layers, widths that 16-byte accesses fit, and not."""
    found = [
        append_rows(m, w, d) for d in ("f32", "bf16") for m, w in (((3, 33),) if quick else ((16, 1024),))
    ]
    if quick:
        found += [accept(n) for n in (0, 1, 30)]
        found += [compact(2, 40, w, d) for d in ("f32", "bf16") for w in (32, 9)]
        return found + [accept_compact(2, 30, 16, 8, dtype) for dtype in ("f32", "bf16")]
    found += [accept(n) for n in (16, 64, 512)]
    found += [compact(61, 65, 512, "bf16")]
    return found + [accept_compact(61, n, 512, 64, "bf16") for n in (64, 512)]


def tree_of(name: str, num_nodes: int, rows: int) -> dict[str, np.ndarray]:
    """A random tree with unused rows behind it, and targets that walk some way down it."""
    rng = generator(name)
    depths, lineage = random_tree(rng, num_nodes + 1, 16)
    parents = np.full(rows, -1, np.int32)
    token_ids = np.zeros(rows, np.int32)
    for row in range(1, num_nodes + 1):
        parents[row] = lineage[row, depths[row] - 1]
        token_ids[row] = 1000 + row  # siblings differ
    targets = rng.integers(0, 1000, rows, np.int32)
    deepest = int(depths.argmax())
    path = lineage[deepest, : depths[deepest] + 1]
    targets[path[:-1]] = token_ids[path[1:]]
    return {"parents": parents, "token_ids": token_ids, "targets": targets, "num_nodes": scalar(num_nodes)}


def walk(tree: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The reference's path i32 [rows], and i32 [2] of its length and the bonus token."""
    path = np.empty(len(tree["parents"]), np.int32)
    columns = (tree[name] for name in ("parents", "token_ids", "targets"))
    result = golden.accept(*columns, int(tree["num_nodes"][0]), path)
    return path, np.array(result, np.int32)


def accept(num_nodes: int) -> Case:
    name = f"accept {num_nodes} nodes"

    def prepare() -> Work:
        from kernels_numba import accept as kernels

        tree = tree_of(name, num_nodes, num_nodes + 3)
        path, result = walk(tree)

        def check(found: Any) -> None:
            require_equal("path", found["path"], path)
            require_equal("result", found["result"], result)

        outputs = {"path": poisoned(len(path), dtype=np.int32), "result": poisoned(2, dtype=np.int32)}
        return Work(
            {**tree, **outputs},
            tuple(outputs),
            lambda d, s: kernels.accept(d.parents, d.token_ids, d.targets, d.num_nodes, d.path, d.result, s),
            check,
        )

    return Case(name, "accept.accept", 16 * (num_nodes + 1), 0, prepare)


def _moved(cache: np.ndarray, path: np.ndarray, length: int) -> np.ndarray:
    """A copy of a cache [layers, capacity, width] after the move."""
    after = cache.copy()
    golden.compact(list(after), CONTEXT, path[:length])
    return after


def compact(layers: int, rows: int, width: int, dtype: str) -> Case:
    """A path that leaves the spine at once and takes every third row."""
    path = np.concatenate([[0], np.arange(2, rows, 3)]).astype(np.int32)
    name = f"compact {dtype} {layers} layers {width}, {len(path) - 1} of {rows - 1} rows"

    def prepare() -> Work:
        from kernels_numba import compact as kernels

        cache = stored(normal(generator(name), layers, CONTEXT + rows, width), dtype)
        padded = np.full(rows, -1, np.int32)
        padded[: len(path)] = path

        def check(found: Any) -> None:
            require_equal("cache", found["cache"], _moved(cache, path, len(path)))

        arrays = {"cache": cache, "context_len": scalar(CONTEXT), "path": padded, "length": scalar(len(path))}
        return Work(
            arrays,
            ("cache",),
            lambda d, s: kernels.compact(d.cache, d.context_len, d.path, d.length, s),
            check,
        )

    size = 2 * layers * (len(path) - 1) * width * (2 if dtype == "bf16" else 4)
    return Case(name, "compact.compact", size, 0, prepare)


def accept_compact(layers: int, num_nodes: int, latent: int, rope: int, dtype: str) -> Case:
    """The walk, then the move of both caches in every layer, without the host in between."""
    name = f"accept_compact {dtype} {layers} layers {latent}+{rope} {num_nodes} nodes"
    tree = tree_of(name, num_nodes, num_nodes + 1)
    path, result = walk(tree)
    moves = int((path[: result[0]] != np.arange(result[0])).sum())

    def prepare() -> Work:
        from kernels_numba import accept as accepting
        from kernels_numba import compact as moving

        rng = generator(name)
        capacity = CONTEXT + num_nodes + 1
        caches = {
            f"cache{width}": stored(normal(rng, layers, capacity, width), dtype) for width in (latent, rope)
        }

        def launch(d: Any, stream: Any) -> None:
            accepting.accept(d.parents, d.token_ids, d.targets, d.num_nodes, d.path, d.result, stream)
            for cache in caches:
                moving.compact(getattr(d, cache), d.context_len, d.path, d.result, stream)

        def check(found: Any) -> None:
            require_equal("path", found["path"], path)
            require_equal("result", found["result"], result)
            for cache, before in caches.items():
                require_equal(cache, found[cache], _moved(before, path, result[0]))

        outputs = {
            "path": poisoned(len(path), dtype=np.int32),
            "result": poisoned(2, dtype=np.int32),
            **caches,
        }
        arrays = {**tree, "context_len": scalar(CONTEXT), **outputs}
        return Work(arrays, tuple(outputs), launch, check)

    item = 2 if dtype == "bf16" else 4
    moved = 16 * (num_nodes + 1) + 2 * layers * moves * (latent + rope) * item
    launchers = "accept.accept, compact.compact"
    return Case(name, launchers, moved, 0, prepare, note=f"{moves} rows moved in each layer")


def append_rows(rows: int, width: int, dtype: str) -> Case:
    name = f"append_rows {dtype} {rows}x{width}"

    def prepare() -> Work:
        from kernels_numba import append_rows as kernels

        values = normal(generator(name), rows, width)
        cache = poisoned(CONTEXT + rows + 2, width, dtype=np.uint16 if dtype == "bf16" else np.float32)

        def check(found: Any) -> None:
            want = cache.copy()
            want[CONTEXT : CONTEXT + rows] = bf16(values) if dtype == "bf16" else values
            require_equal("cache", found["cache"], want)

        arrays = {"rows": values, "context_len": scalar(CONTEXT), "cache": cache}
        return Work(
            arrays, ("cache",), lambda d, s: kernels.append_rows(d.rows, d.context_len, d.cache, s), check
        )

    return Case(name, "append_rows.append_rows", rows * width * (6 if dtype == "bf16" else 8), 0, prepare)
