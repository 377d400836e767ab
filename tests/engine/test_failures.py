"""What goes wrong on the way: the error is named, what was committed stays, and the next decode gives right tokens.

The same tests run on NumPy, in the simulator with quick twins of the slow kernels, and on a GPU with captured rounds.
"""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from conftest import SIMULATED
from engine.micro import write_micro_bundle
from support import tokens_of

from ddtree.batch import chain_batch
from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import CapacityError, NumericsError

SEED, PROMPT = 167, [5, 17, 40]
TREE = DecodeConfig("tree", budget=5, max_new_tokens=4)
BACKENDS = [
    pytest.param({}, id="numpy"),
    pytest.param({"backend": "cuda"}, id="simulator", marks=pytest.mark.simulator),
    pytest.param({"backend": "cuda"}, id="gpu", marks=pytest.mark.gpu),
]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return open_bundle(write_micro_bundle(tmp_path_factory.mktemp("micro"), SEED))


def open_engine(bundle, max_context=16, **backend):
    sizes = {"max_budget": 5, "max_context": max_context, "prefill_chunk": 3}
    with pytest.MonkeyPatch.context() as patch:
        if backend and SIMULATED:
            from engine.quick_ops import QuickOps

            patch.setattr("ddtree.engine.get_ops", lambda backend, *settings: QuickOps(*settings))
        return Engine(bundle, **sizes, **backend)


def run(engine, config=TREE):
    return list(decode(engine, PROMPT, config))


def on_host(engine, array):
    return np.array(array) if engine.ops.name == "numpy" else engine.ops.read(array)


def caches(engine):
    """Copies of all the target's cache rows."""
    return [on_host(engine, array) for array in (engine.cache.latent, engine.cache.rope)]


@pytest.fixture(scope="module")
def wanted(bundle):
    return tokens_of(run(open_engine(bundle)))


# --- Ctrl-C -------------------------------------------------------------------------------------------------------

STRUCK = {"prefill": ("append_latent", 2), "verify": ("accept", 1), "commit": ("compact", 3)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", STRUCK)
def test_after_an_interrupt_the_next_decode_is_right(bundle, wanted, backend, place, monkeypatch):
    """Ctrl-C strikes at the n-th call of an operation: in a prefill, in a round, or on the way to the cache."""
    engine = open_engine(bundle, **backend)
    strike(engine, monkeypatch, *STRUCK[place])
    with pytest.raises(KeyboardInterrupt):
        run(engine)
    monkeypatch.undo()
    assert engine.runner is None or not engine.ops.frozen
    assert tokens_of(run(engine)) == wanted


def strike(engine, monkeypatch, name, at_call, when=lambda: True):
    """From now on the `at_call`-th call of an operation, of those that come when `when()`, is a KeyboardInterrupt."""
    operation, calls = getattr(engine.ops, name), []

    def struck(*arguments):
        calls.append(when())
        if sum(calls) == at_call and calls[-1]:
            raise KeyboardInterrupt
        return operation(*arguments)

    monkeypatch.setattr(engine.ops, name, struck)


@pytest.mark.gpu
@pytest.mark.parametrize("gemm", ["invariant", "cublas"])
@pytest.mark.parametrize("place", ["append_latent", "settle", "compact", "advance"])
def test_an_interrupted_capture_leaves_no_half_graph(bundle, wanted, place, gemm, monkeypatch):
    engine = open_engine(bundle, backend="cuda", gemm=gemm)
    strike(engine, monkeypatch, place, 1, lambda: engine.ops.frozen)
    for _ in range(3):  # the prefill's capture, and what is not struck any more
        try:
            run(engine)
        except KeyboardInterrupt:
            assert not engine.ops.frozen
            break
    else:
        pytest.fail("no capture was struck")
    monkeypatch.undo()
    for _ in range(2):  # eagerly and captured, then replayed
        assert tokens_of(run(engine)) == wanted


class FakeStream:
    """Stands in for a GpuStream: `capture` runs the launches, and keeps what it captured."""

    def __init__(self):
        self.replayed = []

    def sync(self):
        pass

    def capture(self, launch):
        launch(None)
        return object()

    def replay(self, graph):
        self.replayed.append(graph)


class FakeOps:
    frozen, recovered = False, 0

    def recover(self):
        self.frozen, self.recovered = False, self.recovered + 1


def fake_runner():
    from ddtree.ops.graphs import GraphRunner

    runner = GraphRunner.__new__(GraphRunner)
    runner.ops, runner.graphs, runner.stream, runner._graphs = FakeOps(), True, FakeStream(), {}
    return runner


@pytest.mark.parametrize("at", [0, 1])
def test_a_runner_that_was_struck_starts_over(at):
    """Struck in the eager run (0) or in the capture (1): nothing stays frozen, and no graph is kept."""
    runner, calls = fake_runner(), []

    def body():
        calls.append(runner.ops.frozen)
        if len(calls) == at + 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        runner.run("key", body)
    assert (runner.ops.frozen, runner.ops.recovered, runner._graphs) == (False, 1, {})
    del calls[at:]
    calls.extend([None, None])
    runner.run("key", body)
    runner.run("key", body)
    assert calls[-2:] == [False, True] and len(runner.stream.replayed) == 1


class FakeBuilder:
    """cuda.core's graph builder: which of its methods were called."""

    def __init__(self):
        self.is_building, self.closed = False, False

    def begin_building(self):
        self.is_building = True

    def end_building(self):
        self.is_building = False
        raise RuntimeError("the capture was invalidated")

    def close(self):
        self.closed = True


@pytest.mark.simulator
def test_a_capture_that_was_struck_is_ended_and_dropped(monkeypatch):
    from contextlib import nullcontext
    from types import SimpleNamespace

    from ddtree.ops import graphs
    from ddtree.ops.graphs import GpuStream

    monkeypatch.setattr(graphs, "_overlapping", nullcontext)  # of numba-cuda, which may not be there

    def launch(stream):
        assert builder.is_building
        raise KeyboardInterrupt

    builder, stream = FakeBuilder(), GpuStream.__new__(GpuStream)
    stream.core, stream.numba = SimpleNamespace(create_graph_builder=lambda: builder), None
    with pytest.raises(KeyboardInterrupt):
        stream.capture(launch)
    assert (builder.is_building, builder.closed) == (False, True)


@pytest.mark.skipif(os.name != "posix", reason="sends SIGINT")
def test_ctrl_c_on_the_command_line_is_one_line_and_130():
    command = [
        sys.executable,
        "-m",
        "ddtree",
        "generate",
        "def f():\n",
        "--max-new-tokens",
        "900",
        "--method",
        "ar",
    ]
    # A background job ignores the signal, and so would its child.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout.readline()  # it streams: decoding has begun
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip().splitlines()) == (130, ["interrupted"])


# --- NaN ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("where", ["prompt", "round"])
def test_after_nan_logits_the_next_decode_is_right(bundle, wanted, backend, where):
    """The target's last norm is spoilt before the prompt, or after it; every logit is NaN then."""
    engine = open_engine(bundle, **backend)
    norm = engine.model.weights.norm
    honest = on_host(engine, norm)
    rounds = decode(engine, PROMPT, TREE)
    got = list(next(rounds).tokens) if where == "round" else []
    set_row(engine, norm, np.full_like(honest, np.nan))
    says = "the prompt's last row, position 2" if where == "prompt" else "row 0 at position 3 has a NaN"
    with pytest.raises(NumericsError, match=says):
        list(rounds)
    assert engine.context_len == 3 and got == wanted[: len(got)]
    set_row(engine, norm, honest)
    assert tokens_of(run(engine)) == wanted


def set_row(engine, row, values):
    if engine.ops.name == "numpy":
        row[...] = values
    else:
        engine.ops.write(row, values)


# --- a full cache -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_full_cache_ends_the_decode_and_keeps_what_was_committed(bundle, wanted, backend):
    engine = open_engine(bundle, max_context=5, **backend)
    rounds = run(engine, DecodeConfig("tree", budget=5, max_new_tokens=40))
    assert rounds[-1].finish == "context" and tokens_of(rounds) == wanted[:3]
    assert engine.context_len == 5  # the prompt and what was generated, but for the last token
    reference = open_engine(bundle)
    run(reference)
    for found, want in zip(caches(engine), caches(reference), strict=True):
        np.testing.assert_allclose(found[:, :5], want[:, :5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("context_len", "rows"), [(0, 7), (16, 7), (17, 6), (22, 1)])
def test_a_forward_without_room_writes_nothing(bundle, backend, context_len, rows):
    """More rows than the scratch holds, or than the cache has left."""
    engine = open_engine(bundle, **backend)
    before = caches(engine)
    engine.cache.context_len = context_len
    with pytest.raises(CapacityError):
        engine.forward(chain_batch(np.arange(rows), context_len))
    assert engine.context_len == context_len
    for found, want in zip(caches(engine), before, strict=True):
        assert found.tobytes() == want.tobytes()
