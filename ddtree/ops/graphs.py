"""CUDA graphs: Numba launches captured on a cuda.core stream, replayed and timed. It knows no kernel.

Importing this needs nothing but Python; opening a stream needs a GPU and the extra `gpu`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ddtree.errors import UsageError

INSTALL = "install the extra `gpu`: pip install -e .[gpu]"


def simulated() -> bool:
    """Whether Numba's CUDA simulator is on in this process."""
    return os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")


def require_gpu(what: str) -> None:
    """Raise UsageError, in one line, unless kernels can run here on an NVIDIA GPU."""
    if simulated():
        raise UsageError(f"{what}: the CUDA simulator is on; unset NUMBA_ENABLE_CUDASIM to use a GPU")
    for module, package in (("numba_cuda", "numba-cuda"), ("cuda.core", "cuda-core")):
        if not _installed(module):
            raise UsageError(f"{what}: {package} is not installed; {INSTALL}")
    core = importlib.import_module("cuda.core")
    if not hasattr(core, "Device"):  # it was in cuda.core.experimental once
        raise UsageError(f"{what}: cuda-core {core.__version__} is too old; {INSTALL}")
    from numba import cuda

    if not cuda.is_available():
        raise UsageError(
            f"{what}: no NVIDIA GPU, or no driver for CUDA 13 or newer, was found; nothing was run"
        )


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around it is missing
        return False


class GraphRunner:
    """Runs bodies of launches on one stream: eagerly at first, then as replays of a captured graph.

    The first, eager run of a body compiles its kernels and takes its scratch; a capture could do neither. In the
    simulator, and with `graphs` off, every run is eager: the same launches, the same bits.
    """

    def __init__(self, ops: Any, graphs: bool):
        self.ops, self.graphs = ops, graphs and not simulated()
        self._graphs: dict[Any, Any] = {}
        if not simulated():
            self.stream = GpuStream()
            ops.wait()  # what `ops` has put on the default stream is there for this one
            ops.stream = self.stream.numba

    def run(self, key: Any, body: Callable[[], None]) -> None:
        """Run `body`, whose launches depend on `key` and on device memory alone.

        Whatever cuts it short, Ctrl-C among others, leaves no graph of `key`, and scratch as it was when made.
        """
        try:
            if key in self._graphs:
                self.stream.replay(self._graphs[key])
                return
            body()
            if self.graphs:
                self.stream.sync()
                self.ops.frozen = True
                self._graphs[key] = self.stream.capture(lambda stream: body())
                self.ops.frozen = False
        except BaseException:
            self.ops.recover()
            raise


@contextmanager
def _overlapping() -> Iterator[None]:
    """Numba's launches let the next one start before they end (programmatic dependent launch), where cuda.core can.

    Every kernel calls `after_previous`, which waits for what it needs, before it touches anything but weights: a
    launch's latency, and that of its first weights, is hidden behind the kernel before it. Numba has no word for it, so
    its launch settings are replaced while a graph is captured.
    """
    from numba.cuda import dispatcher

    plain = getattr(dispatcher, "LaunchConfig", None)
    if hasattr(plain, "programmatic_stream_serialization"):
        dispatcher.LaunchConfig = partial(plain, programmatic_stream_serialization=True)
    try:
        yield
    finally:
        dispatcher.LaunchConfig = plain


class GpuStream:
    """A stream of the current device for cuda.core (`core`) and for Numba's launches (`numba`)."""

    def __init__(self) -> None:
        from cuda.core import Device, EventOptions
        from numba import cuda

        self.device = Device()
        self.device.set_current()
        self.core = self.device.create_stream()
        self.numba = cuda.external_stream(int(self.core.handle))
        self._timed = EventOptions(timing_enabled=True)

    def driver_versions(self) -> dict[str, str | None]:
        """The versions of the driver and of the CUDA it speaks; None where it will not say."""
        from cuda.core import system

        asked = {"driver": system.get_kernel_mode_driver_version, "cuda": system.get_user_mode_driver_version}
        found: dict[str, str | None] = {}
        for name, ask in asked.items():
            try:
                major, minor, *patch = ask()
                found[name] = ".".join([str(major), str(minor), *(f"{part:02d}" for part in patch)])
            except RuntimeError:
                found[name] = None
        return found

    def sync(self) -> None:
        """Wait for all that was put on the stream."""
        self.core.sync()

    def capture(self, launch: Callable[[Any], None]) -> Any:
        """A graph of what `launch(stream)` puts on a Numba stream.

        Everything must have been launched once before: a capture can neither compile nor load a kernel. Arrays that
        the launches name must outlive the graph. When `launch` raises, the stream captures no longer.
        """
        from numba import cuda

        builder = self.core.create_graph_builder()
        try:
            with cuda.defer_cleanup():  # Numba frees memory when it likes, which is not for a graph to replay
                builder.begin_building()
                with _overlapping():
                    launch(self.numba)
                builder.end_building()
            return builder.complete()
        except BaseException:  # Ctrl-C among others: the stream must not stay in capture
            with suppress(Exception):  # a capture that was cut short may be invalid, which ending it says
                if builder.is_building:
                    builder.end_building()
            builder.close()
            raise

    def replay(self, graph: Any) -> None:
        """Launch a graph."""
        graph.launch(self.core)

    def milliseconds(self, work: Callable[[], None]) -> float:
        """The time on the GPU between what came before and the end of what `work` puts on the stream."""
        start = self.core.record(options=self._timed)
        work()
        stop = self.core.record(options=self._timed)
        stop.sync()
        return stop - start
