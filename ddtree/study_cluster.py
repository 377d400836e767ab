"""Dask workers for a sweep: processes of this machine, or those of a scheduler that runs already."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from ddtree.errors import UsageError
from ddtree.versions import package_version

LOCAL = "local"
CONNECT = 10.0  # seconds for a scheduler to answer
NO_WORKERS = 30.0  # seconds that a sweep waits while no worker is there
ALIKE = ("python", "dask", "distributed", "cloudpickle", "numpy", "ddtree")


@contextmanager
def client_of(workers: int, scheduler: str) -> Iterator[Any]:
    """A client of the scheduler, with at least one worker there."""
    import dask
    from distributed import Client, LocalCluster
    from distributed.versions import VersionMismatchWarning

    with ExitStack() as stack:
        where = scheduler
        if scheduler == LOCAL:
            # Its samples are for a dashboard; they take some 4% of a core a worker.
            stack.enter_context(dask.config.set({"distributed.worker.profile.enabled": False}))
            try:
                with _deaf():
                    where = LocalCluster(
                        n_workers=workers,
                        threads_per_worker=1,
                        dashboard_address="127.0.0.1:0",  # any port, for there may be other clusters
                        scheduler_kwargs={"dashboard": False},
                        memory_limit=0,  # mapped recordings would count
                        silence_logs=logging.CRITICAL,
                    )
            except (OSError, RuntimeError) as error:
                raise UsageError(
                    f"workers: {workers} processes could not be started: {one_line(error.__cause__ or error)}; is a "
                    """script's own code under if __name__ == "__main__"?"""
                ) from None
            stack.enter_context(where)
        else:
            _check_versions(scheduler, _ask(scheduler))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VersionMismatchWarning)  # of packages that do not matter here
            client = stack.enter_context(Client(where, timeout=CONNECT, set_as_default=False))
        try:
            client.wait_for_workers(1, timeout=NO_WORKERS)
        except TimeoutError:
            raise UsageError(
                f"scheduler: {scheduler} has no worker, and none came in {NO_WORKERS:g} s"
            ) from None
        yield client


@contextmanager
def quiet() -> Iterator[None]:
    """Dask's log stays out of the terminal: what a user must know is an error of ours."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _deaf() -> Iterator[None]:
    """Ctrl-C while processes start, which takes a moment, is no one's: each of them would end in a traceback."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _ask(address: str) -> dict[str, dict[str, Any]]:
    """The packages of a scheduler and of each of its workers, by their names; UsageError if none answers in time."""
    from distributed.core import connect, send_recv
    from distributed.security import Security

    async def ask() -> dict[str, dict[str, Any]]:
        comm = await connect(address, timeout=CONNECT, **Security().get_connection_args("client"))
        try:
            packages = [name for name in ALIKE if name != "python"]  # which is always told
            scheduler = await send_recv(comm, op="versions", packages=packages)
            wanted = {"op": "versions", "packages": packages}
            workers = await send_recv(comm, op="broadcast", msg=wanted, on_error="ignore")
            found = {"the scheduler": scheduler} | {f"worker {name}": each for name, each in workers.items()}
            return {name: each["packages"] for name, each in found.items() if each}
        finally:
            comm.abort()

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread runs a loop already
        try:
            return thread.submit(asyncio.run, asyncio.wait_for(ask(), CONNECT)).result()
        except Exception as error:  # anything may listen there, and answer anything
            reason = one_line(error) or f"no answer of a Dask scheduler in {CONNECT:g} s"
            raise UsageError(f"scheduler: {address} cannot be reached: {reason}") from None


def _check_versions(address: str, found: dict[str, dict[str, Any]]) -> None:
    """UsageError for the first that has other versions than this process: rows could differ, pickles be unreadable."""
    for where, packages in found.items():
        for name in ALIKE:
            mine, other = package_version(name), packages.get(name)
            if name == "python":
                mine, other = (".".join(version.split(".")[:2]) for version in (mine, other))
            if mine != other:
                raise UsageError(
                    f"scheduler: {address}: {where} has {name} {other}, this process {mine}; use the same versions"
                )


def one_line(error: BaseException) -> str:
    """An error's message in one line."""
    return " ".join(str(error).split()).rstrip(".")
