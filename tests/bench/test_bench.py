"""The bench without a GPU: which cases there are, what they refuse, what the document and the table say."""

import ast
import json

import numpy as np
import pytest
from conftest import SIMULATED, why_no_gpu
from kernels.registry_rules import launchers_in

from ddtree import bench, bench_data
from ddtree.bench_cases import all_cases
from ddtree.bench_kernels import Case, Work, against_ceilings
from ddtree.errors import UsageError

CEILINGS = {"copy_gb_s": 4000.0, "fma_tflop_s": 50.0}


def launchers(root):
    """module.function of every launcher of kernels_numba."""
    return {
        f"{path.stem}.{name}"
        for path in (root / "kernels_numba").glob("*.py")
        for name in launchers_in(ast.parse(path.read_text("utf-8")))
    }


@pytest.mark.parametrize("quick", [False, True])
def test_every_launcher_has_a_case(root, quick):
    named = {name for case in all_cases(quick) for name in case.launcher.split(", ")}
    ceilings = {"ceilings.copy", "ceilings.chain", "ceilings.tensor_chain"}  # measured before the cases
    assert named == launchers(root) - ceilings


@pytest.mark.parametrize("quick", [False, True])
def test_cases_say_what_they_move(quick):
    for case in all_cases(quick):
        assert case.bytes > 0 and case.flops >= 0, case.name
        assert case.name.isascii() and len(case.name) < 70, case.name


def test_the_figures_that_are_asked_for_are_there():
    names = [case.name for case in all_cases()]
    for wanted in (
        "logits_to_tree f32 15x163840 budget 64",
        "logits_to_tree f32 15x163840 budget 512",
        "accept_compact bf16 61 layers 512+64",
        "attention bf16 1x64x512+64 after 8192",
        "attention bf16 64x64x512+64 after 8192",
        *(f"linear bf16 {m}x7168x18432" for m in (1, 16, 64)),
        "argmax f32 1x163840",
    ):
        assert any(name.startswith(wanted) for name in names), wanted


def test_only_chooses_by_name():
    chosen = bench.choose_cases("linear bf16 1x7168x184", False)
    assert [case.name for case in chosen] == ["linear bf16 1x7168x18432"]
    with pytest.raises(
        UsageError, match=r"^bench kernels: no case's name contains 'no such'; they begin with l"
    ):
        bench.choose_cases("no such", True)


@pytest.mark.skipif(not why_no_gpu(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line():
    with pytest.raises(UsageError) as caught:
        bench.run_kernel_bench(quick=True)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("bench kernels: ")


@pytest.mark.parametrize("missing", ["numba_cuda", "cuda.core"])
def test_without_the_extra_it_says_what_to_install(missing, monkeypatch):
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)
    monkeypatch.setattr("ddtree.ops.graphs._installed", lambda name: name != missing)
    with pytest.raises(UsageError, match=r"^bench kernels: \S+ is not installed; install the extra `gpu`"):
        bench.run_kernel_bench()


def test_a_case_is_set_against_what_bounds_it():
    moves = against_ceilings(Case("a", "m.f", 4_000_000, 1000, Work), 2.0, CEILINGS)
    assert (moves["bound"], moves["floor_us"], moves["fraction"]) == ("copy", 1.0, 0.5)
    assert moves["gb_s"] == 2000
    computes = against_ceilings(Case("b", "m.f", 4000, 100_000_000, Work), 4.0, CEILINGS)
    assert (computes["bound"], computes["floor_us"], computes["fraction"]) == ("fma", 2.0, 0.5)
    assert computes["tflop_s"] == 25
    tiles = Case("c", "m.f", 4000, 100_000_000, Work, unit="mma")
    assert against_ceilings(tiles, 4.0, {**CEILINGS, "mma_tflop_s": 100.0})["bound"] == "mma"


def document():
    """A document as `run_kernel_bench` makes it, of one case that ran and one that failed."""
    ran = {"name": "add f32 1x4", "launcher": "pointwise.add", "graph_us": 1.25, "launch_us": 20.0}
    ran |= against_ceilings(Case("add f32 1x4", "pointwise.add", 50_000, 4, Work), 1.25, CEILINGS)
    failed = {"name": "linear", "launcher": "linear.linear", "error": "AssertionError: out: off"}
    return {"gpu": "a GPU", "driver": "1.2.3", "ceilings": CEILINGS, "cases": [ran, failed]}


def test_the_table_names_failures():
    lines = bench.format_kernel_table(document()).splitlines()
    assert lines[0].split() == ["case", "graph", "us", "launch", "us", "GB/s", "TFLOP/s", "bound", "reached"]
    assert lines[1].startswith("add f32 1x4 ") and lines[1].endswith("copy       1%")
    assert lines[2].endswith("FAILED")
    assert lines[3] == "a GPU, driver 1.2.3; measured ceilings: copy_gb_s 4000.0, fma_tflop_s 50.0"
    assert lines[4:] == bench.failures(document()) == ["linear: AssertionError: out: off"]
    json.dumps(document())


def test_comparisons_fail_where_they_should():
    good = np.array([1.0, np.nan, -np.inf, 0.0], np.float32)
    bench_data.require_close("x", good, good.astype(np.float64), 0)
    bench_data.require_equal("x", good, good.copy())
    for index, value in ((0, 1.001), (1, 1.0), (0, np.nan), (2, np.inf), (3, 1e-30)):
        bad = good.copy()
        bad[index] = value
        with pytest.raises(AssertionError, match="x: 1 of 4"):
            bench_data.require_close("x", bad, good.astype(np.float64), 1e-6)
        with pytest.raises(AssertionError, match="x: "):
            bench_data.require_equal("x", bad, good)
    bench_data.require_norm("x", np.float32([1, 2]), np.array([1.0, 2.0]), 1e-7)
    for bad in ([1, 2.001], [np.nan, 2]):
        with pytest.raises(AssertionError, match="x: off by"):
            bench_data.require_norm("x", np.float32(bad), np.array([1.0, 2.0]), 1e-7)


@pytest.mark.simulator
@pytest.mark.parametrize(
    "name", ["swiglu f32 3x33", "rms_norm f32 3x64", "embed bf16 3 of 100x64", "linear bf16 2x35x17"]
)
def test_cases_run_in_the_simulator(name):
    """Checked against the reference, and caught when the output is touched."""
    from ddtree.bench_kernels import outputs_of, place

    assert SIMULATED
    (case,) = [case for case in all_cases(quick=True) if case.name.startswith(name)]
    work = case.prepare()
    placed = place(work)
    work.launch(placed, 0)
    found = outputs_of(work, placed)
    work.check(found)
    found["out"].flat[-1] += 1
    with pytest.raises(AssertionError):
        work.check(found)
