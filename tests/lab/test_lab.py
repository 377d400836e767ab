"""What the notebooks call: errors in units of a bound, tables, sources, and where kernels run."""

import os
import subprocess
import sys

import numpy as np
import pytest

from ddtree import lab
from ddtree.lab import Count, Factor, Matrix, Out, Twins, error_of, norm_error_of

WHERE = "from ddtree.lab import choose_kernels, Twins; print(choose_kernels()); print(Twins().kernels.device)"


def test_an_error_is_in_units_of_its_bound() -> None:
    got, want = np.array([1.0, 2.5, -4.0, 0.0]), np.array([1.0, 2.0, -4.0, 0.0])
    assert error_of(got, want, 0.25).tolist() == [0, 1, 0, 0]
    assert error_of(got, want, 0.25, 4.0).tolist() == [0, 0.5, 0, 0]
    assert error_of(got, want, 0).tolist() == [0, np.inf, 0, 0]


def test_a_nan_where_none_belongs_is_an_infinite_error() -> None:
    nan = np.nan
    assert error_of([nan, nan, 1.0], [nan, 1.0, nan], 1.0).tolist() == [0, np.inf, np.inf]
    assert norm_error_of(np.array([[nan, 1.0]]), np.ones((1, 2)), 1.0).tolist() == [np.inf]


def test_the_error_of_a_vector() -> None:
    want = np.array([[3.0, 4.0], [0.0, 2.0]])
    assert norm_error_of(want + [[0, 1], [0, 0]], want, 0.1).tolist() == [2, 0]


def test_numbers_stand_to_the_right() -> None:
    table = lab.text_table(("name", "us", "words"), [("a", "10.5", "x y"), ("bc", "9%", "z")])
    assert table == "name    us  words\na     10.5  x y\nbc      9%  z"
    assert lab.text_table(("share",), [("12%",), ("-",)]) == "share\n  12%\n    -"


def test_a_number_with_its_noun() -> None:
    assert [lab.counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert [lab.counted(number, "miss", "misses") for number in (1, 3)] == ["1 miss", "3 misses"]


DOCUMENTS = ("kernels", "decode", "decode_random-4.8b", "layers", "layers_bf16", "layers_random-4.8b")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_what_an_h200_did_is_recorded(name: str) -> None:
    document = lab.recorded(name)
    assert document["gpu"] == "NVIDIA H200" and document["kind"].split()[1] in name


def test_a_kernel_source_starts_with_its_decorator() -> None:
    source = lab.kernel_source("pointwise", "swiglu_kernel")
    assert source.startswith("@cuda.jit\ndef swiglu_kernel(") and source.endswith("* up[i]")
    with pytest.raises(AssertionError, match="has no nothing"):
        lab.kernel_source("pointwise", "nothing")


@pytest.mark.parametrize("simulated", ["0", "1"])
def test_kernels_run_somewhere(simulated: str) -> None:
    """In a fresh process: on the GPU where there is one and no one asked for the simulator, else in the simulator."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": simulated}
    command = [sys.executable, "-W", "error", "-c", WHERE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=lab.ROOT)
    assert done.returncode == 0, done.stderr
    said, device = done.stdout.splitlines()
    assert ("simulator" in said) == ("simulator" in device.lower())
    assert simulated == "0" or "simulator" in said


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_twins_call_both_with_the_same_values(dtype: str) -> None:
    """1 + 2^-9 is 1 in bf16, and NumPy is given what the kernel multiplies."""
    x, weight = np.full((1, 8), 1 + 2.0**-9, np.float32), np.ones((2, 8), np.float32)
    [(got, want)] = Twins(dtype).run("linear", Factor(x), Matrix(weight), Out(1, 2))
    exact = 8.0 if dtype == "bf16" else 8 * (1 + 2.0**-9)
    assert want.dtype == np.float64 and want.tolist() == [[exact] * 2] == got.tolist()


@pytest.mark.simulator
def test_twins_return_what_was_written_into_a_cache() -> None:
    rows, cache = np.ones((2, 1, 4), np.float32), np.full((5, 1, 4), np.nan, np.float32)
    [(got, want)] = Twins("bf16").run("append_rows", rows, Count(1), Matrix(cache))
    assert (
        np.array_equal(got, want, equal_nan=True) and np.isfinite(got[1:3]).all() and np.isnan(got[3:]).all()
    )


@pytest.mark.simulator
def test_an_output_is_poisoned() -> None:
    [out] = Twins().launch("embed", np.zeros(0, np.int32), Matrix(np.ones((1, 4), np.float32)), Out(0, 4))
    assert out.shape == (0, 4)
    twins = Twins()
    assert np.isnan(twins.kernels.read(twins._on_device(Out(3)))).all()


@pytest.mark.simulator
def test_quick_cases_are_held_to_their_references(monkeypatch) -> None:
    found = lab.check_cases(("rope", "fill"))
    assert {name.split()[0] for name in found} == {"rope", "fill"} and len(found) == 4
    monkeypatch.setattr("ddtree.bench_kernels.outputs_of", lambda work, placed: {"out": np.ones(3)})
    with pytest.raises((AssertionError, ValueError)):
        lab.check_cases(("rope",))
