"""Cases of the state between rounds: report, counters, positions and timer stamps. One block or one thread each."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.bench_cases_commit import CONTEXT, tree_of, walk
from ddtree.bench_data import generator, poisoned, require_equal, scalar
from ddtree.bench_kernels import Case, Work


def cases(quick: bool) -> list[Case]:
    """Trees of 64 and 512 nodes; quick: 30."""
    sizes = (30,) if quick else (64, 512)
    each = [case(n) for n in sizes for case in (next_positions, settle)]
    return each + [advance(), finish_chunk(), stamp()]


def next_positions(num_nodes: int) -> Case:
    name, rows = f"next_positions {num_nodes} nodes", num_nodes + 1

    def prepare() -> Work:
        from kernels_numba import round_state as kernels

        depths = np.arange(rows, dtype=np.int32) % 16

        def check(found: Any) -> None:
            require_equal("out", found["out"], CONTEXT + depths + 1)

        arrays = {"depths": depths, "context_len": scalar(CONTEXT), "out": poisoned(rows, dtype=np.int32)}
        return Work(
            arrays, ("out",), lambda d, s: kernels.next_positions(d.depths, d.context_len, d.out, s), check
        )

    return Case(name, "round_state.next_positions", 8 * rows, 0, prepare)


def settle(num_nodes: int) -> Case:
    """A good walk, and one bad row off it."""
    name, rows = f"settle {num_nodes} nodes", num_nodes + 1

    def prepare() -> Work:
        from kernels_numba import round_state as kernels

        tree = tree_of(name, num_nodes, rows)
        path, result = walk(tree)
        bad = np.zeros(rows, np.uint8)
        bad[np.setdiff1d(np.arange(rows), path[: result[0]])[0]] = 1
        rng = generator(name)
        arrays = {**tree, "path": path, "bad": bad, "result": result}
        arrays |= {"depths": rng.integers(0, 16, rows, np.int32), "log_weights": -rng.random(rows)}
        report = poisoned(kernels.report_size(rows), dtype=np.int32)

        def check(found: Any) -> None:
            head = np.array([*result, num_nodes, 1, -1], np.int32)
            columns = ("targets", "path", "token_ids", "parents", "depths")
            parts = [head, *(arrays[column] for column in columns), arrays["log_weights"].view(np.int32)]
            require_equal("report", found["report"], np.concatenate(parts))
            require_equal("result", found["result"], result)

        def launch(d: Any, stream: Any) -> None:
            walked = (d.path, d.targets, d.bad, d.num_nodes)
            built = (d.token_ids, d.parents, d.depths, d.log_weights)
            kernels.settle(*walked, *built, d.result, d.report, stream)

        return Work({**arrays, "report": report}, ("report", "result"), launch, check)

    return Case(name, "round_state.settle", 57 * rows, 0, prepare)


def advance() -> Case:
    horizon, limit = 15, 1 << 20

    def prepare() -> Work:
        from kernels_numba import round_state as kernels

        state = {"context_len": scalar(CONTEXT), "wanted": scalar(40), "max_depth": scalar(-7)}
        state |= {"tree_ids": np.arange(5, dtype=np.int32), "block_ids": np.arange(5, dtype=np.int32)}

        def check(found: Any) -> None:
            tokens = np.array([77, 1, 2, 3, 4], np.int32)
            wanted = {"context_len": scalar(CONTEXT + 4), "wanted": scalar(36), "max_depth": scalar(horizon)}
            for part, want in {**wanted, "tree_ids": tokens, "block_ids": tokens}.items():
                require_equal(part, found[part], want)

        def launch(d: Any, stream: Any) -> None:
            counters = (d.context_len, d.wanted, d.max_depth)
            kernels.advance(d.result, horizon, limit, *counters, d.tree_ids, d.block_ids, stream)

        return Work({"result": np.array([4, 77], np.int32), **state}, tuple(state), launch, check)

    return Case("advance", "round_state.advance", 44, 0, prepare)


def finish_chunk() -> Case:
    def prepare() -> Work:
        from kernels_numba import round_state as kernels

        targets, bad = np.arange(50, 58, dtype=np.int32), np.zeros(8, np.uint8)
        bad[3] = 1  # no row that chooses a token
        outputs = {"result": poisoned(2, dtype=np.int32), "report": poisoned(9, dtype=np.int32)}

        def check(found: Any) -> None:
            require_equal("result", found["result"], np.array([6, 55], np.int32))
            want = outputs["report"].copy()
            want[:5] = 6, 55, 0, 0, -1
            require_equal("report", found["report"], want)

        return Work(
            {"count": scalar(6), "targets": targets, "bad": bad, **outputs},
            tuple(outputs),
            lambda d, s: kernels.finish_chunk(d.count, d.targets, d.bad, d.result, d.report, s),
            check,
        )

    return Case("finish_chunk", "round_state.finish_chunk", 37, 0, prepare)


def stamp() -> Case:
    def prepare() -> Work:
        from kernels_numba import round_state as kernels

        def check(found: Any) -> None:
            times = found["times"]
            assert times[1] > 0 and times[0] == times[2] == 0, (
                f"times: found {times}, wanted the second alone"
            )

        arrays = {"times": np.zeros(3, np.uint64)}
        return Work(arrays, ("times",), lambda d, s: kernels.stamp(d.times, 1, s), check, varying=("times",))

    return Case("stamp", "round_state.stamp", 8, 0, prepare)
