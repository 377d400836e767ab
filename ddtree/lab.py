"""What the notebooks call: where the kernels run, one operation on two backends at once, its error, its source.

Importing this imports no Numba, which chooses between a GPU and its simulator when it is first imported.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bench_data import bf16, poisoned, values_of
from ddtree.ops import get_ops

SIMULATOR = "NUMBA_ENABLE_CUDASIM"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "data" / "results"
EPS = float(np.finfo(np.float32).eps)


def recorded(name: str) -> dict[str, Any]:
    """The document of a bench that data/results/h200 holds as `name`.json."""
    return json.loads((RESULTS / "h200" / f"{name}.json").read_text("utf-8"))


def choose_kernels() -> str:
    """Where kernels will run in this process, said aloud: on a GPU, or in Numba's simulator, which this turns on.

    Asked in a process of its own, since asking imports Numba. Call it before anything does so here.
    """
    if os.environ.get(SIMULATOR, "0") in ("", "0"):
        assert "numba.cuda" not in sys.modules, "Numba is imported already: start from a fresh kernel"
        question = "from ddtree.ops import find_backend; print(find_backend())"
        answer = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, check=True, cwd=ROOT
        )
        if answer.stdout.strip() == "cuda":
            return "kernels run on this machine's GPU"
        os.environ[SIMULATOR] = "1"
    return "no GPU: kernels run in Numba's simulator, slowly and on the host's arithmetic"


@dataclass(frozen=True)
class Matrix:
    """A weight or a cache: bf16 where the kernels run in bf16, f32 elsewhere."""

    values: np.ndarray


@dataclass(frozen=True)
class Factor:
    """What a product multiplies with a matrix: f32, and the kernel rounds it to bf16 where the matrix is bf16."""

    values: np.ndarray


@dataclass(frozen=True)
class Count:
    """A number that a kernel reads from device memory, as context_len."""

    value: int


class Out:
    """An output, every byte of it 0xFF before the call (NaN, -1); it is read back."""

    def __init__(self, *shape: int, dtype: Any = np.float32):
        self.shape, self.dtype = shape, np.dtype(dtype)


class Twins:
    """The operations of the kernels in `dtype`, and of the NumPy backend in f64 on the same (rounded) values."""

    def __init__(self, dtype: str = "f32"):
        self.kernels, self.golden = get_ops("cuda", dtype), get_ops("numpy", "f64")
        self.half = dtype == "bf16"

    def launch(self, name: str, *arguments: Any) -> list[np.ndarray]:
        """Call a kernel; what it left in each Out, in the order of the arguments."""
        placed = [self._on_device(argument) for argument in arguments]
        getattr(self.kernels, name)(*placed)
        pairs = zip(arguments, placed, strict=True)
        return [self.kernels.read(array) for argument, array in pairs if isinstance(argument, Out)]

    def run(self, name: str, *arguments: Any) -> list[tuple[np.ndarray, np.ndarray]]:
        """Call operation `name` of both backends; (the kernel's, NumPy's in f64) of each output.

        Outputs are the Outs, and each Matrix that the operation wrote into, in the order of the arguments.
        """
        placed = [self._on_device(argument) for argument in arguments]
        wide = [self._in_f64(argument) for argument in arguments]
        getattr(self.kernels, name)(*placed)
        getattr(self.golden, name)(*wide)
        return [
            (_values(self.kernels.read(array)), want)
            for argument, array, want in zip(arguments, placed, wide, strict=True)
            if isinstance(argument, Out)
            or (isinstance(argument, Matrix) and _differs(want, self._in_f64(argument)))
        ]

    def _on_device(self, argument: Any) -> Any:
        ops = self.kernels
        if isinstance(argument, Matrix):
            return ops.put(argument.values)
        if isinstance(argument, Factor):
            return ops.put_exact(argument.values)
        if isinstance(argument, Count):
            return ops.integers(np.array([argument.value]))
        if isinstance(argument, Out):
            out = ops.empty(argument.shape, argument.dtype)
            ops.write(out, poisoned(*argument.shape, dtype=argument.dtype))
            return out
        if isinstance(argument, np.ndarray):
            copy = ops.empty(argument.shape, argument.dtype)
            ops.write(copy, np.array(argument, order="C"))
            return copy
        return argument

    def _in_f64(self, argument: Any) -> Any:
        if isinstance(argument, Matrix | Factor):
            return values_of(bf16(argument.values) if self.half else argument.values)
        if isinstance(argument, Count):
            return argument.value
        if isinstance(argument, Out):
            return poisoned(
                *argument.shape, dtype=np.float64 if argument.dtype.kind == "f" else argument.dtype
            )
        if isinstance(argument, np.ndarray) and argument.dtype.kind == "f":
            return values_of(argument)
        return argument


def _values(array: np.ndarray) -> np.ndarray:
    """Values behind the bits of bf16; anything else as it is."""
    return values_of(array) if array.dtype == np.uint16 else array


def _differs(left: np.ndarray, right: np.ndarray) -> bool:
    return not np.array_equal(left, right, equal_nan=True)


def error_of(
    got: np.ndarray, want: np.ndarray, bound: float, scale: np.ndarray | float | None = None
) -> np.ndarray:
    """|got - want| in units of bound x scale (each element's own magnitude by default): nothing may be above 1.

    0 where the two are equal, NaN in both included; infinite for any other NaN.
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    allowed = bound * (np.abs(want) if scale is None else np.broadcast_to(scale, want.shape))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    units = np.full(want.shape, np.inf)
    np.divide(np.abs(got - want), allowed, out=units, where=allowed > 0)
    return np.where(same, 0.0, np.where(np.isnan(units), np.inf, units))


def norm_error_of(got: np.ndarray, want: np.ndarray, bound: float) -> np.ndarray:
    """The same of whole vectors along the last axis: ||got - want|| in units of bound x ||want||."""
    wide = np.asarray(got, np.float64) - want
    return error_of(
        np.linalg.norm(wide, axis=-1), np.zeros(want.shape[:-1]), bound, np.linalg.norm(want, axis=-1)
    )


def check_cases(names: tuple[str, ...]) -> list[str]:
    """Run the quick cases of `bench kernels` whose operation is in `names`, here, each held to its reference.

    Returns the cases' names; AssertionError from the first whose outputs are not the reference's.
    """
    from ddtree.bench_cases import all_cases
    from ddtree.bench_kernels import outputs_of, place

    chosen = [case for case in all_cases(quick=True) if case.name.split()[0] in names]
    for case in chosen:
        work = case.prepare()
        placed = place(work)
        work.launch(placed, 0)
        work.check(outputs_of(work, placed))
    return [case.name for case in chosen]


def kernel_source(module: str, kernel: str) -> str:
    """The source of one kernel of kernels_numba, as it stands in its file."""
    text = (ROOT / "kernels_numba" / f"{module}.py").read_text("utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == kernel:
            first = min(line.lineno for line in (node, *node.decorator_list))
            return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
    raise AssertionError(f"kernels_numba/{module}.py has no {kernel}")


def dash_or(value: float | None, digits: int = 2) -> str:
    """A number for a table, `-` for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def counted(number: int, noun: str, several: str = "") -> str:
    """A number with its noun: 1 row, 2 rows; `several` where the plural is not the noun with an s."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"


def text_table(headings: tuple[str, ...], rows: list[tuple[Any, ...]]) -> str:
    """Rows under headings, in columns: numbers and shares to the right, `-` for none too, words to the left."""
    cells = [tuple(str(cell) for cell in row) for row in rows]
    columns = []
    for heading, *column in zip(headings, *cells, strict=True):
        width = max(map(len, (heading, *column)))
        numbers = all(re.fullmatch(r"-?[\d.,]+(e-?\d+)?%?|-", cell) for cell in column)
        columns.append([cell.rjust(width) if numbers else cell.ljust(width) for cell in (heading, *column)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))
