"""What `inspect --memory` foretells is what engines allocate, byte for byte, and a GPU without it is refused first."""

import functools
import json

import numpy as np
import pytest
from engine.micro import BRANCHED, DRAFTER, TARGET, write_micro_bundle
from support import branched, trained

from ddtree.bundle import open_bundle
from ddtree.engine import Engine
from ddtree.engine_memory import check_free, plan_memory, sum_of
from ddtree.engine_parts import EngineSizes
from ddtree.errors import CapacityError, DeviceMemoryError
from ddtree.ops.plan_ops import Counted, PlanOps

SIZES = EngineSizes(max_budget=5, max_context=16, prefill_chunk=3)
ON_HOST = (
    "target weights",
    "latent cache",
    "model buffers",
    "drafter weights",
    "drafter cache",
    "drafter buffers",
)


@pytest.fixture
def micro(tmp_path):
    return open_bundle(write_micro_bundle(tmp_path))


@pytest.mark.parametrize("drafter", ["plain", "branched", None])
def test_an_engine_on_numpy_holds_what_was_foretold(drafter):
    bundles = {"plain": trained, "branched": branched, None: lambda: open_bundle(trained().target.path)}
    bundle = bundles[drafter]()
    engine = Engine(bundle, max_budget=7, max_context=100, prefill_chunk=5)
    areas = plan_memory(bundle, EngineSizes(7, 100, 5)).areas
    wanted = ON_HOST if drafter else ON_HOST[:3]
    assert engine.memory() == {area: areas[area] for area in wanted}
    assert set(areas) - set(wanted) == {"round state", "kernels' scratch"}


@pytest.mark.simulator
@pytest.mark.parametrize("gemm", ["invariant", "cublas"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("drafter", [DRAFTER, BRANCHED], ids=["plain", "branched"])
def test_an_engine_on_cuda_allocates_what_was_foretold(tmp_path, drafter, dtype, gemm, monkeypatch):
    from numba import cuda

    micro = open_bundle(write_micro_bundle(tmp_path, 0, TARGET, drafter))
    allocated, device_array = [], cuda.device_array

    def counting(shape, dtype):
        allocated.append(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        return device_array(shape, dtype)

    monkeypatch.setattr(cuda, "device_array", counting)
    monkeypatch.setattr(cuda, "to_device", None)  # all arrays come from the one place
    engine = Engine(
        micro, backend="cuda", dtype=dtype, gemm=gemm, max_budget=5, max_context=16, prefill_chunk=3
    )
    report = plan_memory(micro, SIZES, dtype, gemm)
    start = 4 if gemm == "cublas" else 0  # i32[1], a part of the products and not of a model
    assert engine.memory() == report.areas
    assert sum(allocated) == report.total + start


@pytest.mark.simulator
def test_scratch_never_grows_after_construction(micro):
    engine = Engine(micro, backend="cuda", max_budget=5, max_context=16, prefill_chunk=3)
    held = {name: array.shape for name, array in engine.ops.scratches.items()}
    for name, (count,) in held.items():
        assert engine.ops.scratch(name, count) is engine.ops.scratches[name]
        with pytest.raises(
            CapacityError, match=f"scratch {name}: {count + 1} elements are wanted, {count} were"
        ):
            engine.ops.scratch(name, count + 1)
    assert {name: array.shape for name, array in engine.ops.scratches.items()} == held


def test_slices_and_views_that_only_count():
    array = Counted((3, 4, 5), np.uint64)
    assert (array[1].shape, array[:2].shape, array[:, 1:3].shape) == ((4, 5), (2, 4, 5), (3, 2, 5))
    assert (array.view(np.int32).shape, array.nbytes, len(array)) == ((3, 4, 10), 480, 3)
    assert Counted((2**40, 2**30), np.float32).nbytes == 2**72  # no product of a machine's integers


def test_half_the_bytes_in_bf16_and_none_read(micro, monkeypatch):
    monkeypatch.setattr(type(micro.target), "__getitem__", lambda *key: pytest.fail("an array was read"))
    f32, bf16 = (plan_memory(micro, SIZES, dtype).areas for dtype in ("f32", "bf16"))
    for area, group in (("target weights", "attention"), ("latent cache", "rope"), ("drafter cache", "keys")):
        assert f32[area][group] == 2 * bf16[area][group] > 0
    for area, group in (
        ("target weights", "norms"),
        ("target weights", "router"),
        ("model buffers", "logits"),
    ):
        assert f32[area][group] == bf16[area][group] > 0


def test_a_branch_head_is_counted(tmp_path):
    micro = open_bundle(write_micro_bundle(tmp_path, 0, TARGET, BRANCHED))
    f32, bf16 = (plan_memory(micro, SIZES, dtype).areas for dtype in ("f32", "bf16"))
    for areas, size in ((f32, 4), (bf16, 2)):
        weights, state = areas["drafter weights"], areas["round state"]
        assert weights["branch tables"] == 2 * 64 * 4 * 4, "two of vocabulary x rank, f32 in every mode"
        assert weights["branch head"] == 3 * 4 * 32 * size
        assert areas["drafter buffers"]["gated"] == 3 * 4 * 4
        assert state["branch_places"] == state["branch_log_probs"] == 3 * 16 * 16 * 4
        assert state["table_ids"] == 3 * 16 * 4, "the table has the head's columns at a budget of 5"


def test_too_little_memory_is_refused_in_one_line(micro):
    report = plan_memory(micro, SIZES)
    check_free(report, report.total, "a GPU")
    with pytest.raises(DeviceMemoryError) as caught:
        check_free(report, report.total - 1, "a GPU")
    said = str(caught.value)
    assert f"needs {report.total:,} bytes" in said and f"{report.total - 1:,} are free on a GPU" in said
    assert f"target weights {sum_of(report.areas['target weights']):,}" in said and "\n" not in said


@pytest.mark.simulator
def test_too_little_memory_is_refused_before_anything_is_taken(micro, monkeypatch):
    from ddtree.ops.cuda_memory import CudaMemory

    monkeypatch.setattr(CudaMemory, "free_memory", lambda memory: 1000)
    monkeypatch.setattr(CudaMemory, "allocate", lambda *arguments: pytest.fail("memory was taken"))
    with pytest.raises(DeviceMemoryError, match=r"the engine needs .* 1,000 are free"):
        Engine(micro, backend="cuda", max_budget=5, max_context=16)


@pytest.mark.simulator
@pytest.mark.parametrize("place", ["device_array", "pinned_array"])
def test_an_allocation_that_fails_says_what_for(micro, place, monkeypatch):
    from numba import cuda

    class CudaAPIError(RuntimeError):
        code = 2

    def full(shape, dtype):
        raise CudaAPIError("[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(cuda, place, full)
    wanted = "scratch attention" if place == "device_array" else "pinned memory"
    with pytest.raises(DeviceMemoryError, match=rf"{wanted}.* needs [\d,]+ bytes") as caught:
        Engine(micro, backend="cuda", max_budget=5, max_context=16)
    assert "\n" not in str(caught.value)


@pytest.mark.simulator
def test_another_error_of_an_allocation_passes(micro, monkeypatch):
    from numba import cuda

    def broken(shape, dtype):
        raise RuntimeError("no such thing")

    monkeypatch.setattr(cuda, "device_array", broken)
    with pytest.raises(RuntimeError, match="no such thing"):
        Engine(micro, backend="cuda", max_budget=5, max_context=16)


@pytest.mark.gpu
def test_a_gpu_that_is_too_small_is_refused(micro):
    from numba import cuda

    from ddtree.ops import get_ops

    ops = get_ops("cuda")
    free = ops.free_memory()
    assert 0 < free <= cuda.current_context().get_memory_info().total
    with pytest.raises(DeviceMemoryError, match=r"needs [0-9,]+ bytes, [0-9,]+ are free on"):
        ops.empty((2 * free,), np.uint8)
    engine = Engine(micro, backend="cuda", max_budget=5, max_context=16)
    assert engine.memory() == plan_memory(micro, EngineSizes(5, 16)).areas


# --- the command line -----------------------------------------------------------------------------------------------


@pytest.fixture
def run(command):
    """Run `inspect` in this process; returns (exit code, stdout, stderr)."""
    return functools.partial(command, "inspect")


def test_inspect_memory_prints_a_table_and_json(run):
    code, out, err = run("--memory", "--budget", 7, "--context", 100, "--dtype", "bf16")
    document = json.loads(run("--memory", "--budget", 7, "--context", 100, "--dtype", "bf16", "--json")[1])
    assert (code, err) == (0, "") and f"{document['total']:,}" in out and "  experts" in out
    report = plan_memory(trained(), EngineSizes(7, 100), "bf16")
    assert document["areas"] == report.areas
    assert document["total"] == sum(size for groups in report.areas.values() for size in groups.values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory", "--budget", "-1"], "max_budget"),
        (["--memory", "--budget", "1025"], "the backend cuda takes at most"),
        (["--memory", "--context", "2000"], "context"),
        (["--memory", "--dtype", "f64"], "dtype"),
        (["--memory", "--gemm", "magic"], "gemm"),
        (["--memory", "--verify"], "--verify"),
        (["no/such", "--memory"], "no/such"),
        (["no/such", "--budget", "3"], "--memory"),
        ([], "--memory"),
    ],
)
def test_inspect_memory_refuses(run, arguments, said):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and said in err


def test_plan_ops_compute_nothing():
    ops = PlanOps()
    assert ops.put(np.ones((2, 3))).shape == (2, 3) and ops.allocated == 24
