"""What a kernel module must hold to, read from its source and its SPECS; test_registry applies it and breaks it."""

import ast
import re
from pathlib import Path

from kernels_numba import registry

EARLY = re.compile(
    r"weight|settled\w*"
)  # what no launch of a round writes, and what the launch ahead does not
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
    Before that it leaves alone all its arrays but those named as EARLY says; arrays_of(name, line) are the names of a
    kernel's arrays, None where that is not known: then they are all its parameters.
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
        forbidden = {one for one in (parameters if arrays is None else arrays) if not EARLY.fullmatch(one)}
        for inner in (inner for item in node.body[: waits[0]] for inner in ast.walk(item)):
            if isinstance(inner, ast.Name) and inner.id in forbidden:
                found.append((node.name, line, f"touches {inner.id} before it waits"))
            elif isinstance(inner, ast.Subscript) and not isinstance(inner.ctx, ast.Load):
                if EARLY.fullmatch(ast.unparse(inner.value)):
                    found.append((node.name, line, f"writes {ast.unparse(inner.value)} before it waits"))
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
