"""Every kernel of kernels_numba stands in its module's SPECS, so that the tests that walk the registry miss none.

Kernels are found in the sources, so those that a factory makes are found like the rest.
"""

import ast
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import SIMULATED

from kernels_numba import checks, registry

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the extra `ptx` brings it")
pytestmark = pytest.mark.skipif(
    SIMULATED, reason="the CUDA simulator (NUMBA_ENABLE_CUDASIM) has other kernels"
)

FORMULA = re.compile(r"\S = \S|<-|->|:=")


def makes_kernels(node):
    """Whether an expression is cuda.jit, called or not, for kernels: without device=True."""
    call = node if isinstance(node, ast.Call) else None
    if ast.unparse(call.func if call else node) != "cuda.jit":
        return False
    return not any(word.arg == "device" for word in (call.keywords if call else ()))


def kernels_in(tree):
    """Name and first line (its decorator's) of each kernel of a module, inside functions too."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return {
        (node.name, node.decorator_list[0].lineno)
        for node in functions
        if any(makes_kernels(decorator) for decorator in node.decorator_list)
    }


def undecorated(tree):
    """Lines that hand a function to cuda.jit otherwise than as a decorator: cuda.jit(f) or cuda.jit(..)(f)."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    made = (node if not isinstance(node.func, ast.Call) else node.func for node in calls)
    return [node.lineno for node in made if makes_kernels(node)]


def is_wait(node):
    """Whether a node calls after_previous, however it is named."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "after_previous"


def starts_early(tree, arrays_of):
    """(name, line, why) of each kernel that may read what is not there yet, and of each wait that is no kernel's own.

    A kernel waits once, in a statement of its own body, so that every block does and the next launch may count on it.
    Before that it leaves alone all its arrays but `weight`, which no launch of a round writes; arrays_of(name, line)
    are the names of a kernel's arrays, None where that is not known: then they are all its parameters.
    """
    found, own = [], set()
    for node in ast.walk(tree):
        if not (
            isinstance(node, ast.FunctionDef) and any(makes_kernels(item) for item in node.decorator_list)
        ):
            continue
        line, parameters = node.decorator_list[0].lineno, [argument.arg for argument in node.args.args]
        waits = [
            at for at, item in enumerate(node.body) if isinstance(item, ast.Expr) and is_wait(item.value)
        ]
        own |= {node.body[at].value for at in waits}
        if len(waits) != 1:
            found.append((node.name, line, f"waits {len(waits)} times in its own body, not once"))
            continue
        arrays = arrays_of(node.name, line)
        forbidden = set(parameters if arrays is None else arrays) - {"weight"}
        for inner in (inner for item in node.body[: waits[0]] for inner in ast.walk(item)):
            if isinstance(inner, ast.Name) and inner.id in forbidden:
                found.append((node.name, line, f"touches {inner.id} before it waits"))
            elif isinstance(inner, ast.Subscript) and not isinstance(inner.ctx, ast.Load):
                if ast.unparse(inner.value) == "weight":
                    found.append((node.name, line, "writes weight before it waits"))
            elif isinstance(inner, ast.Return | ast.Raise):
                found.append((node.name, line, "may leave before it waits"))
    others = [node for node in ast.walk(tree) if is_wait(node) and node not in own]
    return found + [
        ("after_previous()", node.lineno, "stands elsewhere than in a kernel's own body") for node in others
    ]


def arrays_in(specs):
    """arrays_of for `starts_early`: parameters with an array's type in any spec of the kernel."""
    found = {}
    for spec in specs:
        code = spec.kernel.py_func.__code__
        names = found.setdefault((code.co_name, code.co_firstlineno), set())
        names |= {
            name
            for name, kind in zip(code.co_varnames, spec.signature, strict=False)
            if hasattr(kind, "ndim")
        }
    return lambda name, line: found.get((name, line))


def launchers_in(tree):
    """The public functions of a module whose last parameter is `stream`, 0 by default."""
    return [
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and node.args.args
        and node.args.args[-1].arg == "stream"
        and node.args.defaults
        and ast.unparse(node.args.defaults[-1]) == "0"
    ]


def problems(name, source, module, test_exists=True, owner=None):
    """A line for each way in which an operation's module breaks the rules.

    `owner` is the operation that it is a part of, which launches its kernels and whose test is its own.
    """
    tree = ast.parse(source)
    kernels, specs = kernels_in(tree), getattr(module, "SPECS", None)
    early = [
        f"{name}.py:{line}: {what}: {why}" for what, line, why in starts_early(tree, arrays_in(specs or ()))
    ]
    if name.startswith(registry.NOT_OPERATIONS):
        return [f"{name}.py is no operation, yet holds the kernel {kernel}" for kernel, _ in kernels] + early
    found = [f"{name}.py:{line}: make kernels with the decorator, @cuda.jit" for line in undecorated(tree)]
    doc = ast.get_docstring(tree) or ""
    if not FORMULA.search(doc):
        found.append(f"{name}.py: its docstring has no formula (such as out = x + y)")
    if not launchers_in(tree) and owner is None:
        found.append(f"{name}.py: no launcher: a public function whose last parameter is stream=0")
    if not test_exists:
        found.append(f"{name}.py: there is no tests/kernels/test_{owner or name}.py")
    found += early
    if not specs:
        return [*found, f"{name}.py: no SPECS, the list of its kernels as they are launched"]
    codes = {spec.kernel.py_func.__code__ for spec in specs}
    listed = {(code.co_name, code.co_firstlineno) for code in codes}
    for kernel, line in sorted(kernels - listed):
        found.append(f"{name}.py:{line}: the kernel {kernel} is not in SPECS")
    for spec in specs:
        wanted = spec.kernel.py_func.__code__.co_argcount
        if len(spec.signature) != wanted:
            found.append(f"{name}.py: {spec.name}: {len(spec.signature)} types, {wanted} parameters")
    return found


def operation_sources():
    """Name and path of every module of the package."""
    return {
        path.stem: path for path in Path(registry.__file__).parent.glob("*.py") if path.stem != "__init__"
    }


def owner_of(name, modules):
    """The operation that a module is a part of: `attention` of `attention_combine`; None of one that stands alone."""
    return next((other for other in modules if name.startswith(f"{other}_")), None)


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
    arrays = {"x", "weight", "out"}
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
