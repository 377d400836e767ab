"""Cases of a round's bookkeeping: from the drafter's logits to the tree, and from the target's tokens to the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_cases_vocab import check_top_k, logits_of
from ddtree.bench_data import EPS, generator, normal, poisoned, require_close, require_equal, scalar
from ddtree.bench_kernels import Case, Work
from ddtree.reference.branch_scores import branch_scores as reference_branch_scores
from ddtree.reference.tree_build import build_branch_tree as reference_build_branch_tree
from ddtree.reference.tree_build import build_tree as reference_build_tree

TREE = ("tree_token_ids", "parents", "depths", "log_weights", "lineage", "num_nodes")


def cases(quick: bool) -> list[Case]:
    """A horizon of 15 at Kimi K2's vocabulary, budgets 64 and 512; quick: small ones."""
    if quick:
        found = [draft_tree(5, 300, b) for b in (7, 30)] + [build_tree(5, 20, b) for b in (0, 1, 40)]
        found += [branch_scores(3, 16, 8, 40), branch_scores(5, 3, 6, 9)]
        return found + [build_branch_tree(5, 4, b) for b in (0, 1, 40)]
    found = [draft_tree(15, vocab, b) for vocab in (163840, 2048) for b in (64, 512)]
    found += [build_tree(15, b, b) for b in (16, 64, 256, 512)]
    found += [branch_scores(15, 16, 64, vocab) for vocab in (163840, 2048)]
    return found + [build_branch_tree(15, 16, b) for b in (64, 256)]


def tree_arrays(horizon: int, budget: int) -> dict[str, np.ndarray]:
    """The outputs of a tree builder, poisoned."""
    rows = budget + 1
    arrays = {name: poisoned(rows, dtype=np.int32) for name in ("tree_token_ids", "parents", "depths")}
    arrays |= {"log_weights": poisoned(rows, dtype=np.float64)}
    arrays["lineage"] = poisoned(rows, horizon + 1, dtype=np.int32)
    arrays["num_nodes"] = poisoned(1, dtype=np.int32)
    return arrays


def check_tree(reference: Any, table: tuple[np.ndarray, ...], budget: int, found: Any) -> None:
    """Hold a built tree to the reference's of the same table, bit for bit."""
    horizon = len(table[0])
    want = tree_arrays(horizon, budget)
    outputs = [want[name] for name in TREE[:-1]]
    want["num_nodes"][0] = reference(*table, budget, horizon, *outputs)
    for name in TREE:
        require_equal(name, found[name], want[name])


def draft_tree(horizon: int, vocab: int, budget: int) -> Case:
    """Top-k and the builder, one after the other: what a published builder's time is compared with."""
    name = f"logits_to_tree f32 {horizon}x{vocab} budget {budget}"
    k = min(budget, vocab)

    def prepare() -> Work:
        from kernels_numba import topk, tree_build

        logits = logits_of(name, horizon, vocab)
        groups = topk.num_groups(vocab)
        outputs = {"token_ids": poisoned(horizon, k, dtype=np.int32), "log_probs": poisoned(horizon, k)}
        outputs |= tree_arrays(horizon, budget)
        arrays = {"logits": logits, "keys": poisoned(horizon, groups, dtype=np.uint64)}
        arrays |= {"sums": poisoned(horizon, groups), "max_depth": scalar(horizon), **outputs}

        def launch(d: Any, stream: Any) -> None:
            topk.topk_log_softmax(d.logits, k, d.token_ids, d.log_probs, d.keys, d.sums, stream)
            tree = [getattr(d, part) for part in TREE]
            tree_build.build_tree(d.token_ids, d.log_probs, budget, d.max_depth, *tree, stream)

        def check(found: Any) -> None:
            check_top_k(logits, k, found)
            check_tree(reference_build_tree, (found["token_ids"], found["log_probs"]), budget, found)

        return Work(arrays, tuple(outputs), launch, check)

    moved = 4 * horizon * vocab + 4 * (budget + 1) * (horizon + 6)
    return Case(name, "topk.topk_log_softmax, tree_build.build_tree", moved, 4 * horizon * vocab, prepare)


def build_tree(horizon: int, width: int, budget: int) -> Case:
    name = f"build_tree {horizon}x{width} budget {budget}"

    def prepare() -> Work:
        from kernels_numba import tree_build

        rng = generator(name)
        token_ids = rng.integers(0, 1 << 17, (horizon, width), np.int32)
        logits = normal(rng, horizon, width, scale=2)
        log_probs = -np.sort(-logits + np.log(np.exp(logits).sum(axis=1, keepdims=True)), axis=1)[:, ::-1]
        outputs = tree_arrays(horizon, budget)
        arrays = {"token_ids": token_ids, "log_probs": np.ascontiguousarray(log_probs)}
        arrays |= {"max_depth": scalar(horizon), **outputs}

        def launch(d: Any, stream: Any) -> None:
            tree = [getattr(d, part) for part in TREE]
            tree_build.build_tree(d.token_ids, d.log_probs, budget, d.max_depth, *tree, stream)

        def check(found: Any) -> None:
            check_tree(reference_build_tree, (token_ids, arrays["log_probs"]), budget, found)

        return Work(arrays, tuple(outputs), launch, check)

    moved = 8 * horizon * width + 4 * (budget + 1) * (horizon + 6)
    return Case(
        name, "tree_build.build_tree", moved, 0, prepare, note="one block: bound by its chain of steps"
    )


def build_branch_tree(horizon: int, width: int, budget: int) -> Case:
    name = f"build_branch_tree {horizon}x{width} budget {budget}"

    def prepare() -> Work:
        from kernels_numba import tree_build_branch

        rng = generator(name)
        token_ids = rng.integers(0, 1 << 17, (horizon, width), np.int32)
        logits = normal(rng, horizon, width, width, scale=2)
        log_probs = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
        places = np.argsort(-log_probs, axis=2, kind="stable").astype(np.int32)
        log_probs = np.take_along_axis(log_probs, places, axis=2)
        outputs = tree_arrays(horizon, budget)
        arrays = {"token_ids": token_ids, "places": places, "log_probs": log_probs}
        arrays |= {"max_depth": scalar(horizon), **outputs}

        def launch(d: Any, stream: Any) -> None:
            table = d.token_ids, d.places, d.log_probs
            tree = [getattr(d, part) for part in TREE]
            tree_build_branch.build_branch_tree(*table, budget, d.max_depth, *tree, stream)

        def check(found: Any) -> None:
            check_tree(reference_build_branch_tree, (token_ids, places, log_probs), budget, found)

        return Work(arrays, tuple(outputs), launch, check)

    moved = 4 * horizon * width * (1 + 2 * width) + 4 * (budget + 1) * (horizon + 6)
    note = "one block: bound by its chain of steps"
    return Case(name, "tree_build_branch.build_branch_tree", moved, 0, prepare, note=note)


def branch_scores(horizon: int, width: int, rank: int, vocab: int) -> Case:
    name = f"branch_scores {horizon}x{width} rank {rank} vocab {vocab}"

    def prepare() -> Work:
        from kernels_numba import branch_scores as kernels

        rng = generator(name)
        token_ids = np.stack([rng.permutation(vocab)[:width] for _ in range(horizon)]).astype(np.int32)
        log_probs = -np.sort(normal(rng, horizon, width, scale=2) ** 2, axis=1)
        gated, parents, children = (normal(rng, rows, rank) for rows in (horizon, vocab, vocab))
        children *= np.float32(rank**-0.5)
        arrays = {"token_ids": token_ids, "log_probs": log_probs, "block": scalar(int(token_ids[0, 0]))}
        arrays |= {"gated": gated, "parents": parents, "children": children}
        sources = tuple(arrays)
        outputs = {"places": poisoned(horizon, width, width, dtype=np.int32)}
        outputs |= {"scores": poisoned(horizon, width, width)}

        def check(found: Any) -> None:
            want = {key: array.copy() for key, array in outputs.items()}
            reference_branch_scores(*(arrays[key] for key in sources), *want.values())
            assert (found["scores"][..., :-1] >= found["scores"][..., 1:]).all(), (
                "scores: a row is not sorted"
            )
            got, exact = poisoned(horizon, width, width), poisoned(horizon, width, width)
            np.put_along_axis(got, found["places"], found["scores"], axis=2)
            np.put_along_axis(exact, want["places"], want["scores"], axis=2)
            # a score's chain of fma, and of each sum its worst term, 16 exponentials and a logarithm
            above = np.abs(parents).max() + np.abs(gated).max()
            largest = above * np.abs(children[token_ids]).sum(axis=2).max()
            scale = (rank / 4 + 20) * largest + 5 * np.abs(log_probs).max() + 48
            require_close("scores", got, exact, EPS, float(scale))

        def launch(d: Any, stream: Any) -> None:
            kernels.branch_scores(*(getattr(d, key) for key in (*sources, *outputs)), stream)

        return Work(arrays | outputs, tuple(outputs), launch, check)

    pairs = horizon * width * width
    moved = 4 * (horizon * (2 * width + rank) + 2 * horizon * width * rank + 2 * pairs)
    note = "a block a depth: bound by the latency of two dependent reads"
    return Case(name, "branch_scores.branch_scores", moved, 2 * rank * pairs, prepare, note=note)
