"""Weights reach the device piece by piece: the file's values in every bit, and next to no host memory on the way."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from compare_arrays import assert_same_bits
from conftest import SIMULATED
from engine.load_large import LARGE, Peak, check_arrays, config_of, make_target
from engine.micro import write_micro_bundle
from support import trained

from ddtree.bundle import open_bundle
from ddtree.cli_options import LateBar
from ddtree.engine import Engine
from ddtree.kdtr import ChecksumError
from ddtree.ops import get_ops
from ddtree.ops.numpy_ops import NumpyOps
from ddtree.weights_pieces import convert, pieces

# Some hundred megabytes, most of it in one layer's experts, and an embedding of several pieces.
MEDIUM = LARGE | {
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
}
CHUNK_BYTES = 4 << 20
MOST_BYTES = (
    48 << 20
)  # of host memory beyond two pinned buffers of that size: Python's own, the rotary tables


@pytest.mark.parametrize("most", [1, 2, 7, 24, 59, 60, 1000])
def test_pieces_follow_one_another(most):
    whole = np.arange(120).reshape(2, 3, 4, 5)
    for values in (
        whole,
        whole.transpose(0, 2, 1, 3),
        whole[:, 1:].transpose(0, 2, 1, 3),
        whole[0, 0, 0],
        whole[:, :0],
    ):
        out, end = np.full(values.size, -1), 0
        for place, piece in pieces(values, most):
            assert place == end and 0 < piece.size <= most and np.shares_memory(piece, whole)
            out[place : place + piece.size] = piece.ravel()
            end += piece.size
        assert end == values.size and out.tolist() == values.ravel().tolist()


@pytest.mark.parametrize("source", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("target", ["f32", "bf16"])
def test_conversion_is_numpys_cast(source, target):
    rng = np.random.default_rng(1)
    values = (rng.standard_normal((33, 5)) * 10.0 ** rng.integers(-6, 4, (33, 5))).astype(source)
    values[:4, 0] = np.inf, -np.inf, 0.0, -0.0
    for view in (values, values.T, values[::2, 1:]):
        out = np.empty(view.shape, np.float32 if target == "f32" else np.uint16)
        convert(view, out)
        cast = view.astype(np.float32) if target == "f32" else view.astype(ml_dtypes.bfloat16).view(np.uint16)
        assert_same_bits(out, cast, f"{np.dtype(source)} to {target}")


def test_bf16_is_copied_in_every_bit():
    bits = np.arange(1 << 16, dtype=np.uint16)  # every NaN among them
    same, wide = np.empty_like(bits), np.empty(len(bits), np.float32)
    convert(bits.view(ml_dtypes.bfloat16), same)
    convert(bits.view(ml_dtypes.bfloat16), wide)
    assert np.array_equal(same, bits) and np.array_equal(wide.view(np.uint32), bits.astype(np.uint32) << 16)


def flat(weights):
    """All arrays of a tree of weights, in order."""
    for value in vars(weights).values():
        if isinstance(value, list):
            for layer in value:
                yield from flat(layer)
        elif hasattr(value, "shape"):
            yield value
        elif value is not None:
            yield from flat(value)


def test_the_size_of_pieces_changes_nothing(monkeypatch):
    want = Engine(trained(), max_budget=1, max_context=8)
    monkeypatch.setattr(NumpyOps, "chunk_bytes", 1000)
    got = Engine(trained(), max_budget=1, max_context=8)
    for parts in ("model", "drafter"):
        pairs = zip(*(flat(getattr(engine, parts).weights) for engine in (got, want)), strict=True)
        for mine, theirs in pairs:
            assert_same_bits(mine, theirs, parts)


@pytest.mark.parametrize(
    "chunk_bytes",
    [
        pytest.param(12, marks=pytest.mark.simulator),
        pytest.param(1000, marks=pytest.mark.simulator),
        pytest.param(1000, marks=pytest.mark.gpu, id="gpu"),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_device_weights_are_the_files(dtype, chunk_bytes, tmp_path, monkeypatch):
    from ddtree.ops.cuda_ops import CudaOps

    bundle = open_bundle(write_micro_bundle(tmp_path))
    monkeypatch.setattr(CudaOps, "chunk_bytes", chunk_bytes)
    on_host, ops = get_ops("numpy"), get_ops("cuda", dtype)
    for load in (bundle.target_weights, bundle.drafter_weights):
        for mine, theirs in zip(flat(load(20, ops)), flat(load(20, on_host)), strict=True):
            want = (
                theirs if str(mine.dtype) == "float32" else theirs.astype(ml_dtypes.bfloat16).view(np.uint16)
            )
            assert_same_bits(ops.read(mine), want, f"{dtype} {mine.shape}")


def test_progress_counts_the_files_bytes():
    told = []
    Engine(trained(), max_budget=1, max_context=8, progress=lambda count, total: told.append((count, total)))
    assert {total for _, total in told} == {trained().weight_bytes}
    assert sum(count for count, _ in told) == trained().weight_bytes


def test_a_quick_load_shows_no_bar(capsys):
    bar = LateBar("load", "B", delay=60, scaled=True)
    bar.step(10, 4)
    bar.step(10, 6)
    bar.close()
    LateBar("load", "B").close()
    assert capsys.readouterr().err == ""
    bar = LateBar("load", "B", scaled=True)
    bar.step(10_000_000, 10_000_000)
    assert "10.0M" in capsys.readouterr().err


def test_a_broken_array_is_found_on_the_way(tmp_path):
    path = write_micro_bundle(tmp_path) / "target.kdtr"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(ChecksumError):
        Engine(open_bundle(tmp_path), max_budget=1, max_context=8)


# --- host memory ----------------------------------------------------------------------------------------------------


def test_the_large_model_has_the_size_it_is_named_by():
    assert config_of(9.6e9)["num_hidden_layers"] == 12 and config_of(1)["num_hidden_layers"] == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="RssAnon is Linux's")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_loading_takes_next_to_no_host_memory(dtype, root, tmp_path):
    """In a process of its own, whose device memory is a file: what is left are the host's own anonymous pages."""
    paths = os.pathsep.join([str(root), str(root / "tests")])
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": paths}
    command = [sys.executable, __file__, str(tmp_path), dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["loaded"] > (150e6 if dtype == "bf16" else 60e6) and found["checked"] == 14
    assert found["grown"] < MOST_BYTES + 2 * CHUNK_BYTES, found


def measure(folder: Path, dtype: str) -> None:
    """Load MEDIUM into device memory that is a file, and print what the host's anonymous memory grew by."""
    from numba import cuda
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    from ddtree.ops.cuda_ops import CudaOps

    def device_array(shape, dtype):
        size, name = int(np.prod(shape)) * np.dtype(dtype).itemsize, folder / "device"
        with open(name, "wb") as file:
            file.truncate(max(size, 1))
        array = np.memmap(name, np.uint8, "r+")[:size].view(np.ndarray).view(dtype).reshape(shape)
        name.unlink()
        return FakeCUDAArray(array)

    assert SIMULATED
    experts = 32 if dtype == "bf16" else 8
    make_target(folder / "target.kdtr", MEDIUM | {"n_routed_experts": experts})
    cuda.device_array, CudaOps.chunk_bytes = device_array, CHUNK_BYTES
    CudaOps.check_sizes = staticmethod(
        lambda *sizes: None
    )  # no kernel runs, and the simulator's are for small sizes
    get_ops("cuda", dtype)  # what importing takes is no part of loading
    bundle = open_bundle(folder)
    with Peak() as memory:
        engine = Engine(bundle, backend="cuda", dtype=dtype, max_budget=4)
    names = check_arrays(engine)
    grown = memory.peak - memory.before
    print(json.dumps({"grown": grown, "loaded": bundle.weight_bytes, "checked": len(names)}))


if __name__ == "__main__":
    measure(Path(sys.argv[1]), sys.argv[2])
