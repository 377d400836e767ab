"""Where training runs: the device asked for, its precision, and how much memory is left."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch._inductor.config as inductor

from ddtree.errors import DeviceMemoryError, UsageError

MOST_ON_CPU = 2**30  # bytes
# cuBLAS's word for products that repeat bit for bit; PyTorch reads it once, at its first product
WORKSPACES = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
Function = TypeVar("Function", bound=Callable)


def open_device(name: str) -> torch.device:
    """`cpu`, or `cuda` when PyTorch finds a GPU that does bf16; UsageError otherwise.

    For a GPU it sets WORKSPACES in this process's environment, unless that variable is set.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise UsageError(f"device: expected cpu or cuda, found {name!r}")
    if not torch.cuda.is_available():
        raise UsageError("device: PyTorch finds no CUDA GPU; give --device cpu")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("device: this GPU has no bf16, which training needs; give --device cpu")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise UsageError(
            "device: steps are compiled for a GPU with Triton, which finds no gcc or clang; install one"
        )
    os.environ.setdefault(*WORKSPACES)
    try:
        with repeatable():
            torch.ones(1, 1, device="cuda").mm(torch.ones(1, 1, device="cuda"))
    except RuntimeError as error:
        if WORKSPACES[0] not in str(error):
            raise
        setting, reason = "=".join(WORKSPACES), str(error).split(".")[0]
        raise UsageError(f"device: set {setting} before Python starts ({reason})") from None
    return torch.device("cuda")


@contextmanager
def repeatable() -> Iterator[None]:
    """PyTorch's deterministic algorithms: a GPU then adds in a fixed order, and a run repeats bit for bit."""
    modes = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    filled = torch.utils.deterministic.fill_uninitialized_memory
    compiler = getattr(inductor, "deterministic", None)  # some versions of PyTorch set it with the mode
    torch.use_deterministic_algorithms(True)
    # it costs time, and no step reads what it has not set
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(modes[0], warn_only=modes[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
        if compiler is not None:
            inductor.deterministic = compiler


def autocast(device: torch.device) -> torch.autocast:
    """bf16 matrix products on a GPU; on a CPU everything stays f32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def compiled(function: Function, device: torch.device) -> Function:
    """A function of fixed shapes, compiled for a GPU; as it is on a CPU.

    Methods of modules alike in all but their weights, as a model's layers are, share what is compiled.
    """
    return torch.compile(function, fullgraph=True, dynamic=False) if device.type == "cuda" else function


@contextmanager
def tf32() -> Iterator[None]:
    """f32 products of a GPU in TF32, in which weights rounded to f16 are exact; outside of it they are f32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def room(device: torch.device) -> int:
    """Bytes that may be filled: those free on a GPU, once PyTorch has given back what it keeps, or MOST_ON_CPU."""
    if device.type != "cuda":
        return MOST_ON_CPU
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


@contextmanager
def memory_errors() -> Iterator[None]:
    """PyTorch's own error of a full GPU as a DeviceMemoryError; checkpoints on disk stay as they are."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = " ".join(str(error).split())[:160]
        raise DeviceMemoryError(
            f"device: the GPU is full; free it and run the same command again ({reason})"
        ) from None


def check_memory(device: torch.device, wanted: int, what: str) -> None:
    """DeviceMemoryError before the work is begun when a GPU lacks `wanted` bytes for it."""
    if device.type == "cuda" and (free := room(device)) < wanted:
        raise DeviceMemoryError(
            f"device: {what} takes {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        )
