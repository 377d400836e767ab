"""Every launcher on the GPU: right against its reference, and the same bits from a replayed graph as from a launch.

The launches are the bench's cases at quick sizes.
"""

import functools
import importlib.metadata
import warnings

import pytest
from compare_arrays import assert_same_bits
from kernels import resources

from ddtree.bench import compiled_kernels
from ddtree.bench_cases import all_cases
from ddtree.bench_kernels import run_captured, run_checked
from ddtree.ops.graphs import GpuStream

pytestmark = pytest.mark.gpu
CASES = all_cases(quick=True)


@functools.cache
def stream():
    """One stream for all tests."""
    return GpuStream()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_launch_and_replay(case):
    work = case.prepare()
    eager = run_checked(work, stream())
    captured = run_captured(work, stream())
    work.check(captured)
    for name in set(work.outputs) - set(work.varying):
        assert_same_bits(captured[name], eager[name], f"{case.name}: {name} of a graph against a launch")


def test_no_kernel_uses_local_memory():
    """What Numba compiles for this GPU, by link-time optimisation, is not the PTX that the compile tests assemble."""
    found = compiled_kernels()
    if not found:
        pytest.skip("no kernel was launched in this process")
    linker, wanted = importlib.metadata.version("nvidia-nvjitlink"), resources.load_table()[0]["ptxas"]
    if not linker.startswith(f"{wanted}."):
        pytest.skip(
            f"nvJitLink {linker}: registers are looked after for release {wanted}; see the bench's `kernels`"
        )
    assert [row for row in found if row["local_bytes"]] == []


def test_a_small_grid_gives_no_warning():
    """Few blocks are meant: kernels_numba turns Numba's warning off, which would be an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_checked(CASES[0].prepare(), stream())
