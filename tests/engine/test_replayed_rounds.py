"""Rounds on the device against the host's: decodes of every kind on one engine, replayed as captured graphs are."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from engine.micro import BRANCHED, TARGET, write_micro_bundle
from engine.quick_ops import QuickOps, Replays, host

from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig, SamplingConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.errors import NumericsError, UsageError
from ddtree.ops.cuda_ops import CudaOps
from ddtree.ops.numpy_ops import NumpyOps
from ddtree.tree import DTYPES

pytestmark = pytest.mark.simulator
SIZES = {"max_budget": 9, "max_context": 24}
CHUNK = 4
BRANCH_AWARE = "branch_aware"
SAMPLINGS = (
    SamplingConfig(),
    SamplingConfig(0.8, 20, 0.95, 3),
    SamplingConfig(1e-6, 0, 1.0, 2**40 + 5),
    SamplingConfig(1.0, 100, 1e-9, 1),
    SamplingConfig(5.0, 2, 1.0, 7),
)
# Copied or made once, not left over from a round.
KEPT = ("chain_depths", "chain_lineage", "block", "zero", "buffer", "times", "report")


class Eager:
    """A runner that captures nothing."""

    @staticmethod
    def run(key, body):
        body()


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """(the NumPy backend's, the device's) on random weights: a drafter with a branch head, right now and then."""
    bundle = open_bundle(write_micro_bundle(tmp_path_factory.mktemp("micro"), 167, TARGET, BRANCHED))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ddtree.engine.get_ops", lambda backend, *settings: QuickOps(*settings))
        device = Engine(bundle, backend="cuda", prefill_chunk=CHUNK, **SIZES)
    device.runner = Replays(device.ops)
    return Engine(bundle, **SIZES), device


def poison(engine, start=0):
    """Spoil every cache row from `start` on and all scratch; with start 0 also the state of earlier decodes."""
    drafter = engine.drafter
    caches = [host(cache)[:, start:] for cache in (engine.cache.latent, engine.cache.rope)]
    caches += [host(cache)[start:] for cache in (*drafter.keys, *drafter.values)]
    buffers = [host(buffer) for buffer in vars(engine.model.buffers).values()]
    for array in caches + [buffer for buffer in buffers if buffer.dtype == np.float32]:
        array[...] = np.nan
    state = {} if start or engine.device_state is None else vars(engine.device_state)
    for name, array in state.items():
        if name not in KEPT and hasattr(array, "_ary"):
            host(array).reshape(-1).view(np.uint8)[:] = 0x81 if array.dtype == np.int32 else 0xFF


def run(engine, prompt, config, sequence):
    """All rounds, with everything that is not committed spoiled before each."""
    poison(engine)
    rounds = []
    for this in decode(engine, prompt, config, sequence):
        poison(engine, int(host(engine.device_state.context_len)[0]))
        rounds.append(this)
    return rounds


def assert_same_rounds(got, want, what):
    def said(this):
        tree = (*(getattr(this.tree, name) for name in DTYPES), this.target_tokens, this.path)
        rest = (this.index, this.context_len, this.tokens, this.bonus, this.finish, this.num_bad_rows)
        return [array.tolist() for array in tree], rest

    assert [said(this) for this in got] == [said(this) for this in want], what


def draw(rng, method):
    """A prompt, its decode and its sequence: prompts about the chunk's size and the context's, every budget."""
    length = int(rng.choice([1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 22, 23, 24]))
    budget, wanted = int(rng.choice([0, 1, 2, 3, 5, 9])), int(rng.choice([1, 2, 3, 6, 12, 40]))
    sampling = SAMPLINGS[rng.integers(len(SAMPLINGS))]
    stop = tuple(rng.integers(64, size=rng.integers(12)).tolist())
    return (
        rng.integers(64, size=length).tolist(),
        config_of(method, budget, wanted, sampling, stop),
        int(rng.choice([0, 2**32 - 1])),
    )


def config_of(method, *settings):
    """A decode's settings; the shape branch_aware counts as a method here."""
    if method == BRANCH_AWARE:
        return DecodeConfig("tree", *settings, shape=BRANCH_AWARE)
    return DecodeConfig(method, *settings)


@pytest.mark.parametrize("method", ["ar", "chain", "tree", BRANCH_AWARE])
def test_decodes_after_one_another_are_the_hosts(engines, method):
    theirs, device = engines
    rng, accepted = np.random.default_rng(23), 0
    for number in range(8):
        request = draw(rng, method)
        want = list(decode(theirs, *request))
        if number % 4 == 0:  # one that is given up half way
            prompt, config, sequence = draw(rng, method)
            given_up = decode(device, prompt, config, sequence)
            next(given_up), next(given_up, None)
        assert_same_rounds(run(device, *request), want, f"{number}: {request}")
        accepted += sum(len(this.path) > 1 for this in want)
    assert accepted or method == "ar"
    for sampling in (SAMPLINGS[0], SAMPLINGS[-1]) * 2:  # one budget, chosen otherwise
        request = [60, 7, 7], config_of(method, 5, 12, sampling), 0
        assert_same_rounds(run(device, *request), list(decode(theirs, *request)), f"{sampling}")
    assert device.runner.stale == []


def test_shapes_in_turn_on_one_engine(engines):
    """Of one budget, so that nothing but the shape tells one round's launches from another's."""
    theirs, device = engines
    trees = {}
    for method in ("tree", BRANCH_AWARE, "chain", BRANCH_AWARE, "tree"):
        request = [52, 41, 58], config_of(method, 3, 12, SAMPLINGS[0]), 0
        want = list(decode(theirs, *request))
        assert_same_rounds(run(device, *request), want, method)
        trees[method] = [this.tree.token_ids.tolist() for this in want]
    assert trees["tree"] != trees[BRANCH_AWARE] and device.runner.stale == []


def test_the_drafter_learns_every_row_of_a_full_path(engines):
    theirs, device = engines
    request = [52, 41, 58], DecodeConfig("tree", 1, 14), 0
    want = list(decode(theirs, *request))
    assert sum(len(this.path) == 2 for this in want) > 1, "all that was drafted is accepted"
    assert_same_rounds(run(device, *request), want, "full paths")


def test_a_bad_row_ends_a_decode_and_leaves_nothing(engines, monkeypatch):
    theirs, device = engines
    request = [5, 17, 40], DecodeConfig("tree", 5, 12), 0
    want = list(decode(theirs, *request))
    number = next(i for i, this in enumerate(want) if len(this.path) > 1)
    row = int(want[number].path[-1])
    position = want[number].context_len + int(want[number].tree.depths[row])
    rounds = decode(device, *request)
    got = [next(rounds) for _ in range(number)]
    choose = NumpyOps.row_is_bad

    def spoiled(logits, bad):
        logits[row, 3] = np.nan
        choose(logits, bad)

    with (
        monkeypatch.context() as patch,
        pytest.raises(NumericsError, match=f"row {row} at position {position} "),
    ):
        patch.setattr(NumpyOps, "row_is_bad", spoiled)
        next(rounds)
    assert_same_rounds(got, want[:number], "before the bad row")
    assert device.context_len == want[number].context_len == int(host(device.device_state.context_len)[0])
    assert_same_rounds(run(device, *request), want, "once more")


def test_a_shape_that_the_device_lacks_leaves_a_running_decode_alone(engines):
    device = engines[1]
    running = decode(device, [5, 17, 40], DecodeConfig("tree", 5, 5))
    first = next(running)
    with pytest.raises(UsageError, match="builds best_first and branch_aware alone, found 'chain'"):
        decode(device, [5], DecodeConfig("tree", 5, 5, shape="chain"))
    assert len([first, *running]) > 1


def test_the_seconds_of_a_prefill_are_of_all_its_chunks(engines, monkeypatch):
    """With a clock that goes one second a stamp: a chunk after the first adds its own two, and no new start."""
    device, ticks = engines[1], itertools.count()
    monkeypatch.setattr(device, "runner", Eager())
    monkeypatch.setattr(
        device.ops, "stamp", lambda times, slot: host(times).__setitem__(slot, next(ticks) * 10**9)
    )
    for chunks in (1, 3):
        prefill = next(decode(device, [5] * (CHUNK * chunks), DecodeConfig("ar", 0, 2)))
        assert sum(prefill.seconds.values()) == 5 + 3 * (chunks - 1)


def test_what_kernels_cannot_hold_is_refused(engines):
    bundle = engines[0].bundle
    for name, value in (("vocab_size", 2**20), ("n_routed_experts", 513), ("num_experts_per_tok", 32)):
        what = "experts a row" if name == "num_experts_per_tok" else name  # the shared one is the 33rd
        with pytest.raises(UsageError, match=f"{what}: the backend cuda takes at most"):
            CudaOps.check_sizes(replace(bundle.config, **{name: value}), bundle.drafter_config, 5)
    with pytest.raises(UsageError, match="horizon: the backend cuda takes at most 32, found 33"):
        CudaOps.check_sizes(bundle.config, replace(bundle.drafter_config, block_size=34), 5)
    with pytest.raises(UsageError, match="qk_rope_head_dim: the backend cuda takes multiples of 8, found 12"):
        CudaOps.check_sizes(replace(bundle.config, qk_rope_head_dim=12), bundle.drafter_config, 5)
    with pytest.raises(UsageError, match="head_dim: the backend cuda takes multiples of 8, found 20"):
        CudaOps.check_sizes(bundle.config, replace(bundle.drafter_config, head_dim=20), 5)
    with pytest.raises(UsageError, match="max_budget: the backend cuda takes at most"):
        Engine(bundle, backend="cuda", max_budget=2000)
