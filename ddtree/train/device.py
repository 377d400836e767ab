"""Where training runs: the device asked for, its precision, and how much memory is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ddtree.errors import DeviceMemoryError, UsageError


def open_device(name: str) -> torch.device:
    """`cpu`, or `cuda` when PyTorch finds a GPU that does bf16; UsageError otherwise."""
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda":
        raise UsageError(f"device: expected cpu or cuda, found {name!r}")
    if not torch.cuda.is_available():
        raise UsageError("device: PyTorch finds no CUDA GPU; give --device cpu")
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UsageError("device: this GPU has no bf16, which training needs; give --device cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash and efficient attention do all that is needed
    return torch.device("cuda")


def autocast(device: torch.device) -> torch.autocast:
    """bf16 matrix products on a GPU; on a CPU everything stays f32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


@contextmanager
def tf32() -> Iterator[None]:
    """f32 products of a GPU in TF32, in which weights rounded to f16 are exact; outside of it they are f32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


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
    if device.type == "cuda" and (free := torch.cuda.mem_get_info()[0]) < wanted:
        raise DeviceMemoryError(
            f"device: {what} takes {wanted / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
        )
