"""Every kernel of kernels_numba stands in its module's SPECS, so that the tests that walk the registry miss none.

Kernels are found in the sources, so those that a factory makes are found like the rest.
"""

import ast
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import SIMULATED
from kernels.registry_rules import arrays_in, kernels_in, operation_sources, owner_of, problems, starts_early

from kernels_numba import checks, registry

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the extra `ptx` brings it")
pytestmark = pytest.mark.skipif(
    SIMULATED, reason="the CUDA simulator (NUMBA_ENABLE_CUDASIM) has other kernels"
)


def test_every_kernel_is_listed():
    modules = {module.__name__.rpartition(".")[2]: module for module in registry.operation_modules()}
    sources, found = operation_sources(), []
    assert modules.keys() <= sources.keys()
    for name, path in sorted(sources.items()):
        owner = owner_of(name, modules)
        has_test = (Path(__file__).parent / f"test_{owner or name}.py").is_file()
        found += problems(name, path.read_text("utf-8"), modules.get(name), has_test, owner)
    assert not found, "\n" + "\n".join(found)


def test_spec_names_are_unique():
    names = Counter(spec.name for module in registry.operation_modules() for spec in module.SPECS)
    assert [name for name, count in names.items() if count > 1] == []
    assert len(registry.all_specs()) == len(names)


GOOD = '''"""out = x + 1."""
from numba import cuda

@cuda.jit(device=True, forceinline=True)
def after_previous(): return 1

@cuda.jit
def plain(x): after_previous(); x[0] = 1

def make(count):
    @cuda.jit(launch_bounds=32)
    def made(x, y):
        "Documented."
        after_previous()
        x[0] = count
    return made

def launch(x, stream=0): plain[1, 1, stream](x)
'''


def module_of(source, specs):
    """A module run from source, its SPECS made by `specs` out of its names."""
    names = {}
    exec(source, names)
    return SimpleNamespace(SPECS=[SimpleNamespace(name="s", kernel=k, signature=t) for k, t in specs(names)])


def both(names):
    return [(names["plain"], (0,)), (names["make"](3), (0, 0))]


@pytest.mark.parametrize(
    ("source", "specs", "wanted"),
    [
        (GOOD, both, []),
        (GOOD, lambda n: both(n)[:1], ["op.py:11: the kernel made is not in SPECS"]),
        (GOOD, lambda n: both(n)[1:], ["op.py:7: the kernel plain is not in SPECS"]),
        (GOOD, lambda n: [(n["plain"], (0, 0)), both(n)[1]], ["op.py: s: 2 types, 1 parameters"]),
        (GOOD, lambda n: [], ["op.py: no SPECS, the list of its kernels as they are launched"]),
        (GOOD.replace("out = x + 1.", "Adds."), both, ["op.py: its docstring has no formula"]),
        (GOOD.replace("x, stream=0", "x, stream"), both, ["op.py: no launcher"]),
        (GOOD.replace("def launch", "def _launch"), both, ["op.py: no launcher"]),
        (GOOD + "cuda.jit(launch)\ncuda.jit(opt=True)(launch)", both, ["op.py:19: make", "op.py:20: make"]),
        (GOOD + "cuda.jit(launch, device=True)", both, []),
        (GOOD.replace("(x): after_previous();", "(x):"), both, ["op.py:7: plain: waits 0 times"]),
        (GOOD.replace("        after_previous()\n", ""), both, ["op.py:11: made: waits 0 times"]),
        (GOOD.replace("x[0] = 1", "x[0] = 1; after_previous()"), both, ["op.py:7: plain: waits 2 times"]),
    ],
)
def test_a_broken_module_is_found(source, specs, wanted):
    found = problems("op", source, module_of(source, specs))
    assert len(found) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(found, wanted, strict=True)), found


EARLY = """
@cuda.jit
def early(x, weight, rows, out):
    first = min(rows, weight.shape[0])
    words = weight[first:]
    after_previous()
    out[0] = x[0] * words[0]
"""
STEPS = ("first = min(rows, weight.shape[0])", "    after_previous()\n    out[0]")


@pytest.mark.parametrize(
    ("old", "new", "wanted"),
    [
        (STEPS[0], STEPS[0], []),
        (STEPS[0], "first = x[0]", ["early: touches x before it waits"]),
        (STEPS[0], "first = load4(out, 0)", ["early: touches out before it waits"]),
        (STEPS[0], "other = x", ["early: touches x before it waits"]),
        (STEPS[0], "weight[0] = 1", ["early: writes weight before it waits"]),
        (STEPS[0], "first = load_settled(settled, 0)", []),
        (STEPS[0], "settled_depths[0] = 1", ["early: writes settled_depths before it waits"]),
        (STEPS[0], "if rows == 0: return", ["early: may leave before it waits"]),
        (STEPS[1], "    out[0]", ["early: waits 0 times in its own body, not once"]),
        (STEPS[1], "    after_previous()\n    after_previous()\n    out[0]", ["early: waits 2 times"]),
        (
            STEPS[1],
            "    if rows: after_previous()\n    out[0]",
            ["early: waits 0 times", "after_previous(): stands elsewhere"],
        ),
    ],
)
def test_only_weights_are_read_before_the_wait(old, new, wanted):
    assert old in EARLY
    arrays = {"x", "weight", "settled", "settled_depths", "out"}
    found = [
        f"{name}: {why}"
        for name, _, why in starts_early(ast.parse(EARLY.replace(old, new)), lambda *_: arrays)
    ]
    assert len(found) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(found, wanted, strict=True)), found


def test_what_is_an_array_is_known_from_the_specs():
    """Of a kernel without any, every parameter counts as one."""
    tree = ast.parse(EARLY)
    assert [why for *_, why in starts_early(tree, arrays_in(()))] == ["touches rows before it waits"]
    modules = registry.operation_modules()
    arrays = {
        name: arrays_in(module.SPECS) for module in modules for name in [module.__name__.rpartition(".")[2]]
    }
    source = operation_sources()["linear_mma"].read_text("utf-8")
    ((name, line),) = kernels_in(ast.parse(source))
    assert arrays["linear_mma"](name, line) == {"x", "weight", "out"}
    broken = source.replace("        after_previous()\n", "        x[0]\n        after_previous()\n")
    assert [why for *_, why in starts_early(ast.parse(broken), arrays["linear_mma"])] == [
        "touches x before it waits"
    ]


def test_a_device_function_does_not_wait():
    part = "def load(x): after_previous(); return x[0]"
    (found,) = problems("primitives_more", part, None)
    assert found.startswith("primitives_more.py:1: after_previous(): stands elsewhere")


def test_other_breaches_are_found():
    part = GOOD.replace("def launch", "def _launch")
    assert owner_of("attention_combine", ["accept", "attention"]) == "attention"
    assert owner_of("attention", ["attention_combine", "attention"]) is None
    assert problems("attention_part", part, module_of(part, both), owner="attention") == []
    assert "test_op.py" in problems("op", GOOD, module_of(GOOD, both), test_exists=False)[0]
    assert len(problems("primitives_more", GOOD, None)) == 2
    assert checks.__name__ not in {module.__name__ for module in registry.operation_modules()}
