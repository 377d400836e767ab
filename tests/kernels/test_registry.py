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


def starts_early(tree):
    """Name and line of each kernel whose first statement is not after_previous(): it may read what is not there yet."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(makes_kernels(item) for item in node.decorator_list):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if ast.unparse(body[0]) != "after_previous()":
                found.append((node.name, node.decorator_list[0].lineno))
    return found


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
    kernels = kernels_in(tree)
    if name.startswith(registry.NOT_OPERATIONS):
        return [f"{name}.py is no operation, yet holds the kernel {kernel}" for kernel, _ in kernels]
    found = [f"{name}.py:{line}: make kernels with the decorator, @cuda.jit" for line in undecorated(tree)]
    doc = ast.get_docstring(tree) or ""
    if not FORMULA.search(doc):
        found.append(f"{name}.py: its docstring has no formula (such as out = x + y)")
    if not launchers_in(tree) and owner is None:
        found.append(f"{name}.py: no launcher: a public function whose last parameter is stream=0")
    if not test_exists:
        found.append(f"{name}.py: there is no tests/kernels/test_{owner or name}.py")
    for kernel, line in starts_early(tree):
        found.append(f"{name}.py:{line}: the kernel {kernel} does not begin with after_previous()")
    specs = getattr(module, "SPECS", None)
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
        (
            GOOD.replace("(x): after_previous();", "(x):"),
            both,
            ["op.py:7: the kernel plain does not begin with"],
        ),
        (
            GOOD.replace("        after_previous()\n", ""),
            both,
            ["op.py:11: the kernel made does not begin with"],
        ),
    ],
)
def test_a_broken_module_is_found(source, specs, wanted):
    found = problems("op", source, module_of(source, specs))
    assert len(found) == len(wanted)
    assert all(line.startswith(start) for line, start in zip(found, wanted, strict=True)), found


def test_other_breaches_are_found():
    part = GOOD.replace("def launch", "def _launch")
    assert owner_of("attention_combine", ["accept", "attention"]) == "attention"
    assert owner_of("attention", ["attention_combine", "attention"]) is None
    assert problems("attention_part", part, module_of(part, both), owner="attention") == []
    assert "test_op.py" in problems("op", GOOD, module_of(GOOD, both), test_exists=False)[0]
    assert len(problems("primitives_more", GOOD, None)) == 2
    assert checks.__name__ not in {module.__name__ for module in registry.operation_modules()}
