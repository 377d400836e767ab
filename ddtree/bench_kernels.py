"""One kernel launch at a time: checked against its NumPy reference, then timed as a graph node and from Python.

A case says what it must move and compute at least; its time stands beside what the card can do with that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from ddtree.ops.graphs import GpuStream

# Copies of a case's arrays, taken in turn, so that a launch finds nothing of its own in the L2 cache.
WORKING_SET = 4  # L2 sizes that the copies fill together
MOST_COPIES = 64
# Launches in one graph: its own launch, some microseconds, must not show in the mean.
GRAPH_MICROSECONDS = 2000.0
FEWEST_NODES, MOST_NODES = 4, 200
REPLAY_SECONDS = 0.2
FEWEST_REPLAYS, MOST_REPLAYS = 5, 50


@dataclass
class Work:
    """A launch with everything it needs.

    `arrays` are put on the device, once a copy; `launch(d, stream)` finds them as attributes of d, besides what
    `shared` holds: device arrays too large to double. `check` gets the named outputs as host arrays and raises
    AssertionError. `checked` says which part of them the reference was computed for; `varying` names outputs that
    differ from run to run, as a clock's.
    """

    arrays: dict[str, np.ndarray]
    outputs: tuple[str, ...]
    launch: Callable[[Any, Any], None]
    check: Callable[[Mapping[str, np.ndarray]], None]
    shared: dict[str, Any] = field(default_factory=dict)
    checked: str = "all"
    varying: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """A named launch: the least bytes to move through memory, the FLOPs, what computes them, and how to set it up."""

    name: str
    launcher: str  # module.function in kernels_numba
    bytes: int
    flops: int
    prepare: Callable[[], Work]
    unit: str = "fma"  # or "mma": bf16 tensor cores
    note: str = ""


def place(work: Work) -> SimpleNamespace:
    """Fresh device copies of a work's arrays.

    They stand when this returns: a small copy on the default stream may end after a launch on another has begun.
    """
    from numba import cuda

    arrays = {name: cuda.to_device(np.ascontiguousarray(array)) for name, array in work.arrays.items()}
    cuda.synchronize()
    return SimpleNamespace(**arrays, **work.shared)


def outputs_of(work: Work, placed: SimpleNamespace) -> dict[str, np.ndarray]:
    """Host copies of a work's outputs."""
    return {name: getattr(placed, name).copy_to_host() for name in work.outputs}


def run_checked(work: Work, stream: GpuStream) -> dict[str, np.ndarray]:
    """Launch once and hold the outputs to the reference; returns them."""
    placed = place(work)
    work.launch(placed, stream.numba)
    stream.sync()
    found = outputs_of(work, placed)
    work.check(found)
    return found


def run_captured(work: Work, stream: GpuStream, replays: int = 1) -> dict[str, np.ndarray]:
    """The outputs of a graph of one launch; the kernel must have run before."""
    placed = place(work)
    graph = stream.capture(lambda numba_stream: work.launch(placed, numba_stream))
    for _ in range(replays):
        stream.replay(graph)
    stream.sync()
    return outputs_of(work, placed)


def time_case(case: Case, work: Work, stream: GpuStream, l2_bytes: int) -> dict[str, Any]:
    """Microseconds a launch of checked work, as a graph node and from Python, over copies that outgrow the L2."""
    own_bytes = sum(array.nbytes for array in work.arrays.values())
    copies = 1
    if own_bytes and own_bytes < WORKING_SET * l2_bytes and not work.shared:
        copies = min(MOST_COPIES, -(-WORKING_SET * l2_bytes // own_bytes))
    placed = _rotation(work, copies)
    once = min(_graph_of(FEWEST_NODES, work, placed, stream)[1])
    nodes = int(min(MOST_NODES, max(FEWEST_NODES, GRAPH_MICROSECONDS // once)))
    launches, times = _graph_of(nodes, work, placed, stream)
    return {
        "graph_us": statistics.median(times),
        "graph_us_range": [min(times), max(times)],
        "launch_us": _python_microseconds(launches, stream, nodes),
        "graph_nodes": nodes,
        "copies": min(copies, nodes),
        "working_set_bytes": min(copies, nodes) * own_bytes,
    }


def _graph_of(
    nodes: int, work: Work, placed: list[SimpleNamespace], stream: GpuStream
) -> tuple[Callable[[Any], None], list[float]]:
    """What launches a work `nodes` times, over its copies in turn, and microseconds a node of its replays."""

    def launches(numba_stream: Any) -> None:
        for node in range(nodes):
            work.launch(placed[node % len(placed)], numba_stream)

    return launches, replay_times(stream.capture(launches), stream, nodes)


def replay_times(graph: Any, stream: GpuStream, nodes: int) -> list[float]:
    """Microseconds a node of several replays of a graph, after a warm-up."""
    return run_times(lambda: stream.replay(graph), stream, nodes)


def run_times(
    run: Callable[[], None], stream: GpuStream, nodes: int, seconds: float | None = None
) -> list[float]:
    """The same of whatever `run` puts on the stream, as many nodes each time, for about `seconds`."""
    warm = [stream.milliseconds(run) for _ in range(3)][-1]
    wanted = 1e3 * (REPLAY_SECONDS if seconds is None else seconds) // max(warm, 1e-3)
    replays = int(min(MOST_REPLAYS, max(FEWEST_REPLAYS, wanted)))
    return [stream.milliseconds(run) * 1e3 / nodes for _ in range(replays)]


def _rotation(work: Work, copies: int) -> list[SimpleNamespace]:
    """A placed work, and copies of it made on the device."""
    from numba import cuda

    first = place(work)
    placed = [first]
    for _ in range(copies - 1):
        twin = SimpleNamespace(**work.shared)
        for name in work.arrays:
            source = getattr(first, name)
            target = cuda.device_array(source.shape, source.dtype)
            target.copy_to_device(source)
            setattr(twin, name, target)
        placed.append(twin)
    cuda.synchronize()
    return placed


def _python_microseconds(launches: Callable[[Any], None], stream: GpuStream, count: int) -> float:
    """Wall-clock microseconds a launch, issued one after another and waited for at the end; median of five."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        launches(stream.numba)
        stream.sync()
        times.append((time.perf_counter() - start) * 1e6 / count)
    return statistics.median(times)


def against_ceilings(case: Case, microseconds: float, ceilings: Mapping[str, float]) -> dict[str, Any]:
    """Rates, and the fraction of what bounds the case: copy bandwidth or the rate of its arithmetic unit."""
    floors = {"copy": case.bytes / (ceilings["copy_gb_s"] * 1e3)}
    if rate := ceilings.get(f"{case.unit}_tflop_s"):
        floors[case.unit] = case.flops / (rate * 1e6)
    bound = max(floors, key=floors.__getitem__)
    return {
        "gb_s": case.bytes / microseconds / 1e3,
        "tflop_s": case.flops / microseconds / 1e6,
        "bound": bound,
        "floor_us": floors[bound],
        "fraction": floors[bound] / microseconds,
    }
