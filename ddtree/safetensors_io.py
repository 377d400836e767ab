"""Safetensors files one tensor at a time: a reader that holds one tensor, a writer that streams them.

The format: u64 little-endian header length, a JSON header `{"__metadata__": {str: str}, name: {"dtype", "shape",
"data_offsets"}}` padded with spaces to 8 bytes, then the arrays end to end (github.com/huggingface/safetensors).
The safetensors library checks every header read here; only the bytes are moved by hand, because it maps whole
shards and its `save_file` wants all tensors at once. This file knows no model.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ddtree.errors import CheckpointError

DTYPES = {
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: file, safetensors dtype (may be one that DTYPES lacks), shape, byte range."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def strict_json(data: bytes, where: str) -> Any:
    """Parse UTF-8 JSON; duplicate keys, NaN and Infinity are CheckpointErrors as well as broken syntax is."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} stands twice")
        return values

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is no JSON number")

    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: expected JSON: {_one_line(error)}") from error


def read_header(path: Path) -> tuple[dict[str, TensorInfo], dict[str, str] | None]:
    """The tensors of a file in the order of their bytes, and its metadata.

    Raises CheckpointError where the file is unreadable, truncated or not safetensors.
    """
    try:
        with safe_open(path, framework="numpy"):
            pass
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = strict_json(file.read(length), str(path))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a whole safetensors file: {_one_line(error)}") from error
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = entry["data_offsets"]
        tensors[name] = TensorInfo(
            path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, end - start
        )
    return tensors, metadata


def read_tensor(info: TensorInfo) -> np.ndarray:
    """One tensor as a fresh array of its dtype and shape; nothing else of the file stays in memory."""
    array = np.empty(info.shape, DTYPES[info.dtype])
    try:
        with open(info.path, "rb", buffering=0) as file:
            file.seek(info.start)
            _read_into(file, memoryview(array.reshape(-1).view(np.uint8)))
    except OSError as error:
        raise CheckpointError(f"{info.path}: cannot be read: {_one_line(error)}") from error
    return array


def _read_into(file: Any, view: memoryview) -> None:
    while len(view):
        count = file.readinto(view)
        if not count:
            raise OSError("the file became shorter while it was read")
        view = view[count:]


class SafetensorsWriter:
    """Writes one file tensor by tensor, in the order of `specs`: name -> (safetensors dtype, shape).

    Use as a context manager: a clean exit checks that every tensor came and syncs. The caller removes what an
    exception leaves behind.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, tuple[str, tuple[int, ...]]],
        metadata: Mapping[str, str] | None = None,
    ):
        self._path, self._metadata = path, metadata
        self._specs, self._pending = dict(specs), list(specs)

    def __enter__(self) -> SafetensorsWriter:
        self._file = open(self._path, "wb")
        self._file.write(encode_header(self._specs, self._metadata))
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        with self._file:
            if kind is None:
                assert not self._pending, f"tensors never written: {self._pending[:3]}"
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, name: str, array: np.ndarray) -> None:
        """Append one tensor; it must be the next of `specs`, with that dtype and shape, and contiguous."""
        assert name == self._pending.pop(0), f"{name}: not the next tensor"
        dtype, shape = self._specs[name]
        assert array.dtype == DTYPES[dtype] and array.shape == shape, f"{name}: {array.dtype} {array.shape}"
        assert array.flags.c_contiguous, f"{name}: not contiguous"
        self._file.write(memoryview(array.reshape(-1).view(np.uint8)))


def encode_header(
    specs: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """Header bytes, length field included, for tensors that lie in the order of `specs`."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in specs.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _one_line(error: BaseException) -> str:
    return " ".join((str(error) or type(error).__name__).split())
