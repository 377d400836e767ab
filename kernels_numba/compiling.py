"""Kernels to PTX and machine code without a GPU, and what the compiler made of them: registers, spills, f64."""

import contextlib
import functools
import importlib.util
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (12, 0))
SLOW = "Potential Performance Loss"  # ptxas, of products that wait for one another or registers not given


def arch_name(capability):
    """sm_90 of (9, 0), and sm_90a of (9, 0, "a")."""
    return f"sm_{''.join(map(str, capability))}"


def capabilities_of(spec):
    """The compute capabilities that a KernelSpec is compiled for."""
    return spec.capabilities or ARCHITECTURES


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel on one architecture; bytes, and registers a thread."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


class _Device:
    def __init__(self, capability):
        self.compute_capability = capability


@contextlib.contextmanager
def pretend_device(capability):
    """Let numba-cuda compile device functions for `capability` where there is no GPU to ask."""
    from numba.cuda import dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: _Device(capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = real


@functools.lru_cache(maxsize=1)
def _library(kernel, signature):
    """A kernel typed and lowered to LLVM IR, under the options of its @cuda.jit: what takes most of a compilation.

    The IR is one for all ARCHITECTURES: numba-cuda looks at the capability for f64 atomics below 6.0 and the fast tanh
    below 7.5 alone. `cuda.compile_ptx` does the same steps, but types and lowers anew for every capability.
    """
    from numba.cuda import compiler

    words = {name: kernel.targetoptions.get(name) for name in ("fastmath", "launch_bounds")}
    words |= {
        "device": False,
        "abi": "numba",
        "abi_info": None,
        "opt": None,
        "debug": None,
        "lineinfo": False,
    }
    capability = ARCHITECTURES[0]
    with pretend_device(capability):
        library, _ = compiler._compile_pyfunc_with_fixup(
            kernel.py_func, signature, cc=capability, forceinline=False, lto=False, **words
        )
    return library


def compile_to_ptx(spec, capability):
    """The PTX of a KernelSpec for a compute capability (major, minor[, "a"]), 8.0 or later."""
    return _library(spec.kernel, spec.signature).get_asm_str(cc=capability)


def find_ptxas():
    """The pip-installed ptxas of nvidia-cuda-nvcc, or None."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = (nvidia and nvidia.submodule_search_locations) or ()
    found = [path for folder in folders for path in Path(folder).glob("cu*/bin/ptxas*")]
    return found[0] if found else None


def ptxas_version(ptxas):
    """The release that ptxas names, such as 13.5."""
    text = subprocess.run([ptxas, "--version"], capture_output=True, text=True, check=True).stdout
    return re.search(r"release (\S+),", text)[1]


def assemble(ptx, capability, ptxas, max_registers=None):
    """Assemble PTX with ptxas; returns Resources. Raises RuntimeError, in its words, when it refuses or is SLOW."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"-arch={arch_name(capability)}", source, "-o", Path(folder) / "kernel.cubin"]
        if max_registers:
            command.append(f"-maxrregcount={max_registers}")
        run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode or SLOW in run.stderr:
        raise RuntimeError(run.stderr)
    return Resources(
        registers=_number(r"Used (\d+) registers", run.stderr),
        spill_bytes=_number(r"(\d+) bytes spill stores", run.stderr)
        + _number(r"(\d+) bytes spill loads", run.stderr),
        stack_bytes=_number(r"(\d+) bytes stack frame", run.stderr),
        shared_bytes=_number(r"(\d+) bytes smem", run.stderr),
    )


def _number(pattern, text):
    """The largest number that a pattern finds: a kernel and its callees report in turn."""
    return max((int(value) for value in re.findall(pattern, text)), default=0)


# Whatever has an f64 type and does more than move it.
F64_ARITHMETIC = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?!(?:ld|st|mov)\.)[a-z]\w*(?:\.\w+)*\.f64\b")


def f64_instructions(ptx):
    """The PTX lines that compute in f64."""
    return [line.strip() for line in ptx.splitlines() if F64_ARITHMETIC.match(line)]
