"""Imports run one way, from right to left of ORDER; files stay short; no file holds a path of one machine.

Sources are parsed, never imported, so that an import inside a function counts like one at the top.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

# A room is a module or subpackage of ddtree/, or kernels_numba; a module ROOM_part belongs to ROOM. It imports
# rooms to its left and of its own group.
ORDER = (
    ("errors", "versions"),
    ("fields", "rope", "config", "kdtr", "quantised", "safetensors_io", "inspect"),
    ("checkpoint", "weights", "bundle", "prompts"),
    ("kernels_numba", "reference"),
    ("ops",),
    ("batch", "cache", "tree", "shapes", "sampling", "model", "drafter"),
    ("engine",),
    ("decode", "rounds"),
    ("trace", "metrics"),
    ("study", "plots", "bench", "compare", "generate", "demo", "lab"),
    ("train",),
    ("cli", "__main__"),
)
RANK = {room: rank for rank, group in enumerate(ORDER) for room in group}

# Beyond the order: who may import these, whichever way the arrow points.
ONLY_FROM = {
    "kernels_numba": {"ops", "bench"},
    "train": {"cli"},
    "cuda": {"ops", "engine"},  # cuda.core, cuda.bindings
    "nvmath": {"ops", "engine"},
    "torch": {"train"},
}
LAUNCHER = "kernels_numba/launcher.py"  # may import cuda.core besides
KERNELS_MAY_IMPORT = {"numpy", "numba", "llvmlite", *sys.stdlib_module_names}
REFERENCE_MAY_IMPORT = {"errors", "quantised"}

MOST_LINES = 300
# A home, root, work or notebook folder; not a web address, nor a folder of the same name inside another.
MACHINE_PATH = re.compile(
    r"(?<![\w.~$})-])/(?:root|home|Users|work|workspace|mnt|tmp/ipykernel_\d+)/|[A-Z]:\\+Users\\"
)


def room_named(module: str) -> str:
    """Return the room of a module of ddtree/: `kdtr` of `kdtr_header`; the name itself where that is no room."""
    room = module if module in RANK else module.split("_")[0]
    return room if room in RANK else module


def room_of(path: PurePosixPath) -> str:
    """Return the room that a source file belongs to; `__init__` for ddtree's own."""
    return path.parts[0] if path.parts[0] != "ddtree" else room_named(path.parts[1].removesuffix(".py"))


def imported(path: PurePosixPath, source: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of all that a source imports, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = path.parts[: len(path.parts) - node.level] if node.level else ()
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def why_not(path: PurePosixPath, name: str) -> str:
    """Return why the file may not import the dotted name; empty when it may."""
    me, (top, *rest) = room_of(path), name.split(".")
    if name == "ddtree.__version__":
        return "" if me != "kernels_numba" else "kernels_numba knows nothing of ddtree"
    target = top if top != "ddtree" else room_named((rest or ["ddtree"])[0])
    ours = top in ("ddtree", "kernels_numba")
    if me == "__init__":
        return "every room imports ddtree/__init__.py first, so it imports none of them" if ours else ""
    if ours and target == me:
        return ""
    if me == "kernels_numba":
        if top == "ddtree":
            return "kernels_numba knows nothing of ddtree"
        if top == "cuda":
            return "" if str(path) == LAUNCHER else f"of kernels_numba only {LAUNCHER} imports cuda.core"
        return "" if top in KERNELS_MAY_IMPORT else "kernels_numba imports numpy, numba and llvmlite alone"
    if ours and target not in RANK:
        return f"there is no room {target!r} in ORDER; name the room that defines it, or place it"
    if ours and RANK[target] > RANK[me]:
        return f"{target} stands to the right of {me}"
    if ours and me == "reference" and target not in REFERENCE_MAY_IMPORT:
        return "reference stands alone: of ddtree it imports errors, quantised and itself"
    if (ours or top == target) and me not in ONLY_FROM.get(target, {me}):
        return f"only {' and '.join(sorted(ONLY_FROM[target]))} may import {target}"
    return ""


def problems(path: str, source: str) -> list[str]:
    """Return a line for each wrong import of one source file, and one if its room has no place in ORDER."""
    where = PurePosixPath(path)
    room = room_of(where)
    if room not in RANK and room != "__init__":
        return [
            f"{path}: room {room!r} has no place in ORDER of tests/workspace/test_imports.py: add it there"
        ]
    found = ((line, name, why_not(where, name)) for line, name in imported(where, source))
    return [f"{path}:{line}: imports {name}: {why}" for line, name, why in found if why]


def sources(root: Path) -> list[Path]:
    """Return the product's Python files; a room that does not exist yet is no error."""
    return sorted(path for folder in ("ddtree", "kernels_numba") for path in (root / folder).rglob("*.py"))


def test_imports_follow_the_order(root: Path) -> None:
    files = sources(root)
    assert files, "found no source to check"
    wrong = [
        line
        for path in files
        for line in problems(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    ]
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "why"),
    [
        ("ddtree/config.py", "from ddtree.weights import Weights", "weights stands to the right of config"),
        ("ddtree/kdtr.py", "import ddtree.checkpoint as c", "checkpoint stands to the right of kdtr"),
        ("ddtree/model.py", "from . import engine", "engine stands to the right of model"),
        ("ddtree/shapes/best_first.py", "from ..decode import loop", "decode stands to the right of shapes"),
        ("ddtree/plots.py", "def f():\n    from ddtree import cli", "cli stands to the right of plots"),
        (
            "ddtree/reference/rope.py",
            "from ddtree.ops import get_ops",
            "ops stands to the right of reference",
        ),
        ("ddtree/reference/rope.py", "from ddtree.config import ModelConfig", "reference stands alone"),
        ("ddtree/reference/rope.py", "import kernels_numba", "reference stands alone"),
        ("ddtree/model.py", "import kernels_numba.rope", "only bench and ops may import kernels_numba"),
        ("ddtree/engine.py", "from kernels_numba import rope", "only bench and ops may import kernels_numba"),
        (
            "ddtree/model.py",
            "import importlib\nimportlib.import_module('kernels_numba')",
            "only bench and ops",
        ),
        ("ddtree/decode.py", "from cuda.core import Device", "only engine and ops may import cuda"),
        ("ddtree/cache.py", "import nvmath", "only engine and ops may import nvmath"),
        ("ddtree/cli.py", "import torch", "only train may import torch"),
        ("ddtree/__main__.py", "from ddtree.train import loop", "only cli may import train"),
        ("ddtree/study.py", "from ddtree.train import loop", "train stands to the right of study"),
        ("ddtree/engine.py", "from ddtree import DraftTree", "there is no room 'DraftTree'"),
        ("ddtree/engine.py", "import ddtree", "there is no room 'ddtree'"),
        ("ddtree/__init__.py", "from ddtree.engine import Engine", "it imports none of them"),
        ("ddtree/helpers.py", "", "room 'helpers' has no place in ORDER"),
        ("kernels_numba/rope.py", "from ddtree.errors import UsageError", "knows nothing of ddtree"),
        ("kernels_numba/rope.py", "from cuda.core import Device", "only kernels_numba/launcher.py"),
        ("kernels_numba/rope.py", "import ml_dtypes", "numpy, numba and llvmlite alone"),
    ],
)
def test_a_wrong_import_is_found(path: str, source: str, why: str) -> None:
    found = problems(path, source)
    assert len(found) == 1
    assert why in found[0]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("ddtree/config.py", "from __future__ import annotations\nfrom ddtree.errors import ConfigError"),
        ("ddtree/tree.py", "from ddtree.cache import Cache"),
        ("ddtree/kdtr_header.py", "from ddtree.kdtr_writer import write"),
        ("ddtree/reference/rope.py", "from ddtree.reference import norm\nfrom . import norm\nimport numpy"),
        ("ddtree/ops/cuda.py", "import kernels_numba\nfrom cuda.core import Device\nimport nvmath"),
        ("ddtree/bench.py", "from kernels_numba.rope import launch"),
        ("ddtree/trace.py", "from ddtree import __version__, metrics"),
        ("ddtree/cli.py", "from ddtree.train import loop"),
        ("ddtree/train/loop.py", "import torch\nfrom ddtree.model import Model"),
        ("kernels_numba/rope.py", "import math\nfrom numba import cuda\nfrom kernels_numba import launcher"),
        ("kernels_numba/launcher.py", "from cuda.core import Device"),
    ],
)
def test_a_right_import_is_not(path: str, source: str) -> None:
    assert problems(path, source) == []


def test_files_stay_short(root: Path) -> None:
    files = [*sources(root), *(root / "tests").rglob("*.py")]
    lengths = {path.relative_to(root).as_posix(): len(path.read_text("utf-8").splitlines()) for path in files}
    assert {path: lines for path, lines in lengths.items() if lines > MOST_LINES} == {}


def checkout(root: Path) -> list[Path]:
    """Return the files that git tracks or would add; skip the test where git cannot tell."""
    listing = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(listing, capture_output=True, check=True, text=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot list the files of this checkout: {error}")
    return [root / name for name in names if name and (root / name).is_file()]


def test_no_file_names_a_path_of_one_machine(root: Path) -> None:
    found = []
    for path in checkout(root):
        content = path.read_bytes()
        if b"\0" in content[:8192]:
            continue  # not text
        for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), start=1):
            if hit := MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(root)}:{number}: {hit.group()}")
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("prefix", ["", '"', "file://", "see ", "PATH="])
def test_a_machine_path_is_found(prefix: str) -> None:
    assert MACHINE_PATH.search(prefix + "/".join(["", "home", "someone", "model.kdtr"]))


@pytest.mark.parametrize(
    "text", ["https://example.org/home/page", "the model's home/work split", "out/work/run.json"]
)
def test_other_text_is_not(text: str) -> None:
    assert not MACHINE_PATH.search(text)
