"""Every kernel of the package with the signatures and block sizes it is launched with. The tests walk this list."""

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

# Modules that are no operations, and those whose names start so.
NOT_OPERATIONS = ("checks", "compiling", "intrinsics", "launching", "primitives", "registry")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel as it is compiled: its dispatcher, numba argument types, threads a block, and whether f64 is meant.

    `capabilities` are those it is made for, where it is not made for all: (9, 0, "a") has instructions of 9.0 alone.
    """

    name: str
    kernel: Any
    signature: tuple
    threads: int
    uses_f64: bool = False
    capabilities: tuple | None = None


def operation_modules():
    """The modules of this package that hold an operation."""
    package = importlib.import_module("kernels_numba")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [
        importlib.import_module(f"kernels_numba.{name}")
        for name in names
        if not name.startswith(NOT_OPERATIONS)
    ]


def all_specs():
    """The KernelSpecs of every operation module's SPECS, in order; names are unique."""
    specs = [spec for module in operation_modules() for spec in module.SPECS]
    assert len({spec.name for spec in specs}) == len(specs), "two kernels share a name"
    return specs
