"""Work on many processes: how cells of it are cut, sent, watched, and done again when a worker dies.

Knows neither what a cell computes nor where the workers come from.
"""

from __future__ import annotations

import pickle
import queue
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from functools import cache
from itertools import accumulate, groupby, islice
from typing import Any

from threadpoolctl import threadpool_limits

from ddtree import study_cluster
from ddtree.errors import DdtreeError, UsageError
from ddtree.study_cluster import LOCAL, client_of, one_line, quiet
from ddtree.versions import package_version

PIECES = 16  # that a worker gets, at least: the last ones to finish leave little idle
MOST_WEIGHT = 32_768  # of a piece
MOST_SENT = 1000  # pieces at the scheduler at a time

Work = Callable[[Sequence[Any]], Iterable[Any]]
Part = tuple[list[int], list]  # places of cells, and what the work made of each


def on_workers(
    work: Work, cells: Sequence[Any], weights: Sequence[float], workers: int, scheduler: str = LOCAL
) -> Iterator[Part]:
    """First nothing of no cell, once workers are there; then places and results of each piece as it is done.

    `work` makes a list of results of a list of cells; both go by pickle, neither is opened by the scheduler. A cell's
    weight says how long it takes, in any unit. `scheduler` is "local" for `workers` processes of one thread on this
    machine, or an address. A piece whose worker dies goes to another. Raises what the work raises, and UsageError
    without Dask, a scheduler that answers, or workers, for other versions there, or for a piece that keeps killing.
    """
    try:
        import distributed  # noqa: F401  it takes a moment, and most commands do without
    except ImportError as error:
        raise UsageError(
            f"workers: {error.name} is not installed; pip install distributed, or use --workers 1"
        ) from None
    workers = min(workers, len(cells))
    with quiet(), client_of(workers, scheduler) as client:
        yield [], []
        threads = workers if scheduler == LOCAL else sum(client.nthreads().values())
        pieces = cut(weights, threads)
        waiting, under_way, done = iter(pieces), {}, queue.SimpleQueue()

        def send(number: int) -> None:
            parts = list(islice(waiting, number))
            blobs = [pickle.dumps((work, [cells[place] for place in part])) for part in parts]
            version = package_version("ddtree")
            sent = client.map(work_on, blobs, version=version, pure=False, key="replay") if parts else []
            for future, part in zip(sent, parts, strict=True):
                under_way[future] = part
                future.add_done_callback(done.put)

        send(MOST_SENT)
        while under_way:
            future = _next_done(client, done)
            places = under_way[future]
            results = _result(future, cells[places[0]])
            if results is None:  # they were lost with their worker, and are on their way again
                future.add_done_callback(done.put)
                continue
            del under_way[future]
            send(1)
            yield places, results


def cut(weights: Sequence[float], workers: int) -> list[list[int]]:
    """Consecutive places of cells in pieces of like weight: at most MOST_WEIGHT, and PIECES for each worker."""
    most = min(MOST_WEIGHT, sum(weights) / (PIECES * max(workers, 1)))
    before = accumulate(weights, initial=0)
    numbered = [
        (int(weight / most) if most else 0, place)
        for weight, place in zip(before, range(len(weights)), strict=False)
    ]
    return [[place for _, place in group] for _, group in groupby(numbered, key=lambda each: each[0])]


def work_on(blob: bytes, version: str) -> list:
    """What a worker makes of a piece, one BLAS thread; an error a user can cause names the machine."""
    try:
        if (mine := package_version("ddtree")) != version:
            raise UsageError(f"it has ddtree {mine}, this sweep {version}; install the same version")
        work, cells = pickle.loads(blob)
        _one_thread()
        return list(work(cells))
    except (DdtreeError, OSError) as error:
        raise UsageError(f"worker on {socket.gethostname()}: {error}") from None


@cache
def _one_thread() -> None:
    """One BLAS thread from here on: a worker is one of many. Asked once, for asking takes milliseconds."""
    threadpool_limits(1)


def _next_done(client: Any, done: queue.SimpleQueue) -> Any:
    """The next future that is done; UsageError once the scheduler is gone, or all workers are and stay so."""
    deadline = time.monotonic() + study_cluster.NO_WORKERS
    while True:
        try:
            return done.get(timeout=1)
        except queue.Empty:
            try:
                threads = client.sync(client.scheduler.ncores, callback_timeout=study_cluster.NO_WORKERS)
            except OSError as error:
                raise UsageError(f"scheduler: the connection was lost: {one_line(error)}") from None
            if threads:
                deadline = time.monotonic() + study_cluster.NO_WORKERS
            elif time.monotonic() > deadline:
                raise UsageError(
                    f"workers: all are gone, and none came back in {study_cluster.NO_WORKERS:g} s"
                ) from None


def _result(future: Any, first: Any) -> list | None:
    """What a worker made of a piece whose first cell is `first`; None where it was lost and is made again."""
    from distributed import KilledWorker

    try:
        return future.result(timeout=study_cluster.NO_WORKERS)
    except TimeoutError:
        return None
    except KilledWorker as error:
        raise UsageError(
            f"workers: {error.allowed_failures + 1} of them ended in the piece from {first} on: out of memory, or a "
            "shape that crashes"
        ) from None
    except CancelledError as error:
        reason = getattr(error, "reason", "it was cancelled")
        raise UsageError(f"scheduler: it dropped the work: {reason}") from None
    except ModuleNotFoundError as error:
        raise UsageError(f"worker: it cannot import {error.name}; install what this process has") from None
