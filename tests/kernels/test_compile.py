"""Every kernel compiles and assembles without a GPU, in f32, without local memory, and grows by no register unseen.

The resources are compared with those recorded in data/results/kernels_resources.json by one release of the compilers.
"""

import dataclasses
import importlib.util

import pytest
from conftest import SIMULATED
from kernels import resources
from numba import cuda, float32, types

from kernels_numba import compiling, registry

REGISTER_FILE = 65536  # 32-bit registers of a multiprocessor, which one block must fit in
REGISTER_UNIT = 8  # they are handed out in eights a thread
STATIC_SHARED = 48 * 1024  # what a plain launch may ask for


def why_not():
    """Why this process can compile nothing; empty when it can."""
    if SIMULATED:
        return "the CUDA simulator (NUMBA_ENABLE_CUDASIM) compiles nothing"
    if importlib.util.find_spec("numba_cuda") is None:
        return "numba-cuda is not installed: the extra `ptx` brings it"
    return "" if compiling.find_ptxas() else "no ptxas is installed: the extra `ptx` brings nvidia-cuda-nvcc"


WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
SPECS = [] if WHY_NOT else registry.all_specs()
PTXAS = None if WHY_NOT else compiling.find_ptxas()


def breaches(spec, ptx, row, recorded):
    """A line for each rule that one kernel on one architecture breaks; `recorded` is its row of the table or None."""
    where = f"{spec.name} on {row['arch']}"
    found = []
    if f".target {row['arch']}\n" not in ptx:
        found.append(f"{where}: the PTX names another target")
    f64 = compiling.f64_instructions(ptx)
    if f64 and not spec.uses_f64:
        found.append(f"{where}: {len(f64)} f64 instructions, first {f64[0]!r}; is a literal not wrapped?")
    for name in ("spills", "stack"):
        if row[name]:
            found.append(f"{where}: {name} was 0, is {row[name]} bytes: local memory is used")
    granted = -(-row["registers"] // REGISTER_UNIT) * REGISTER_UNIT
    if granted * spec.threads > REGISTER_FILE:
        found.append(f"{where}: {granted} registers x {spec.threads} threads > {REGISTER_FILE}: cannot start")
    if row["shared"] > STATIC_SHARED:
        found.append(f"{where}: {row['shared']} bytes of static shared memory > {STATIC_SHARED}")
    if recorded is None:
        found.append(f"{where}: not in {resources.TABLE.name}; record it: {resources.RECORD}")
    elif row["registers"] > recorded["registers"]:
        found.append(
            f"{where}: registers was {recorded['registers']}, is {row['registers']}; "
            f"if the growth is meant, record it: {resources.RECORD}"
        )
    return found


@pytest.mark.parametrize("spec", SPECS or [None], ids=lambda spec: spec.name if spec else "none")
def test_resources(spec):
    recorded, rows = resources.load_table()
    found, f64 = [], []
    for capability in compiling.capabilities_of(spec):
        ptx, row = resources.measure(spec, capability, PTXAS)
        found += breaches(spec, ptx, row, rows.get((spec.name, row["arch"])))
        f64 += compiling.f64_instructions(ptx)
    if spec.uses_f64 and not f64:
        found.append(f"{spec.name}: says uses_f64, has no f64 instruction")
    if found and recorded != resources.versions(PTXAS):
        found.append(f"recorded by {recorded}, compiled by {resources.versions(PTXAS)}")
    assert not found, "\n" + "\n".join(found)


def test_the_table_is_of_these_compilers_and_kernels():
    """Registers of another ptxas are no measure; and a kernel that is gone leaves the table.

    What makes the PTX may be newer than what did when the table was recorded: `test_resources` says so if it matters.
    """
    recorded, rows = resources.load_table()
    here = resources.versions(PTXAS)
    assert recorded.keys() == here.keys()
    assert recorded["ptxas"] == here["ptxas"], f"recorded by another ptxas: {resources.RECORD}"
    made = {(s.name, compiling.arch_name(at)) for s in SPECS for at in compiling.capabilities_of(s)}
    stale = rows.keys() - made
    assert not stale, f"recorded, and no longer there: {sorted(stale)}; {resources.RECORD}"


# --- the checks themselves: kernels that break a rule are caught ------------------------------------------------------


def spec_of(function, *signature, **words):
    """A KernelSpec of a plain function."""
    return registry.KernelSpec(
        function.__name__, cuda.jit(function), signature, words.pop("threads", 32), **words
    )


def in_f64(x, out):
    out[0] = x[0] * 1.1


def in_f32(x, out):
    out[0] = x[0] * float32(1.1)


def in_local_memory(x, out):
    local = cuda.local.array(64, float32)
    for i in range(64):
        local[int(x[i])] = x[i + 1]
    out[0] = local[int(x[64])]


FLAT = types.Array(types.float32, 1, "C")


def found_in(function, recorded, **words):
    """What `breaches` says of a function on sm_90."""
    spec = spec_of(function, FLAT, FLAT, **words)
    ptx, row = resources.measure(spec, (9, 0), PTXAS)
    return breaches(spec, ptx, row, {**row, **recorded} if recorded is not None else None)


def test_a_clean_kernel_is_clean():
    assert found_in(in_f32, {}) == []
    assert found_in(in_f32, {"registers": 255}) == []


@pytest.mark.parametrize(
    ("function", "recorded", "words", "wanted"),
    [
        (in_f64, {}, {}, "f64 instructions, first"),
        (in_local_memory, {}, {}, "stack was 0, is 256 bytes"),
        (in_f32, {"registers": 1}, {}, "on sm_90: registers was 1, is "),
        (in_f32, {}, {"threads": 8192}, "cannot start"),
        (in_f32, None, {}, "record it: make record-resources"),
    ],
)
def test_a_breach_is_found(function, recorded, words, wanted):
    found = found_in(function, recorded, **words)
    assert len(found) == 1 and wanted in found[0], found


def test_ptx_for_one_architecture_is_not_kept_for_another():
    """Device functions stay compiled between architectures; the code is each architecture's own all the same."""

    @cuda.jit(device=True)
    def helper(value):
        return value * value + float32(1)

    def calls_helper(x, out):
        out[0] = helper(x[0])

    spec = spec_of(calls_helper, FLAT, FLAT)
    for capability in (*compiling.ARCHITECTURES, compiling.ARCHITECTURES[0]):
        ptx, row = resources.measure(spec, capability, PTXAS)
        assert [line for line in ptx.splitlines() if line.startswith(".target")] == [f".target {row['arch']}"]
        assert 0 < row["registers"] <= 255


def test_options_of_the_decorator_reach_the_compiler():
    spec = spec_of(in_f32, FLAT, FLAT)
    bounded = dataclasses.replace(spec, kernel=cuda.jit(in_f32, launch_bounds=64))
    assert ".maxntid" not in resources.measure(spec, (9, 0), PTXAS)[0]
    assert ".maxntid 64" in resources.measure(bounded, (9, 0), PTXAS)[0]
