"""The way back from KDTR: the Hugging Face directory that a file was made from, shard by shard.

`ddtree.checkpoint` offers what stands here. Mapped pages count as resident memory, so the file is mapped anew every
so often; the weights' bytes go from the map to the shard without a copy unless something must be undone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from ddtree.checkpoint_rotary import to_pairs
from ddtree.checkpoint_source import CARRIED, INDEX, KDTR_DTYPES, check_arrays, is_shard_name, read_config
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import CheckpointError, UsageError
from ddtree.kdtr import NUMPY_DTYPES, KdtrFile
from ddtree.safetensors_io import SafetensorsWriter

SAFETENSORS_DTYPES = {ours: theirs for theirs, ours in KDTR_DTYPES.items()}
META_KEYS = ("kind", "permuted", "name_prefix", "source_dtypes", "index_metadata", "skipped")
REMAP_BYTES = 64 << 20


def load_config(file: KdtrFile) -> ModelConfig | DrafterConfig:
    """The checked config of a converted checkpoint; CheckpointError or ConfigError where it has none."""
    return read_config(file.meta.get("config"), f"{file.path}: config")


def progress_bar(total: int, shown: bool, title: str) -> tqdm:
    """A bar over `total` bytes on stderr."""
    return tqdm(total=total, desc=title, unit="B", unit_scale=True, disable=not shown, file=sys.stderr)


def convert_to_hf(kdtr_path: str | Path, out_dir: str | Path, progress: bool = True) -> dict[str, Any]:
    """Write the checkpoint that a KDTR file was made from: same shards, names, dtypes, shapes and bits.

    Skipped tensors do not come back. `out_dir` appears only when complete; it must not exist, or be empty. Summary:
    kind, source, output, tensors, bytes, shards. Raises CheckpointError or KdtrError for the file, UsageError
    for the directory.
    """
    arrays = _Arrays(Path(kdtr_path))
    meta, config = arrays.file.meta, load_config(arrays.file)
    shards = _shards_of(arrays.file, config)
    total = sum(arrays.file.info(name).nbytes for _, names in shards for name in names)
    with _new_directory(Path(out_dir)) as directory, progress_bar(total, progress, "to safetensors") as bar:
        written = sum(_write_shard(directory, arrays, *shard, config, bar) for shard in shards)
        if meta["index_metadata"] is not None:
            (directory / INDEX).write_text(_index_text(meta, shards, written), "utf-8")
        for name in CARRIED:
            if name in arrays.file:
                (directory / name).write_bytes(arrays.read(name).tobytes())
    tensors = sum(len(names) for _, names in shards)
    return {
        "kind": meta["kind"],
        "source": str(kdtr_path),
        "output": str(out_dir),
        "tensors": tensors,
        "bytes": total,
        "shards": len(shards),
    }


def _shards_of(file: KdtrFile, config: ModelConfig | DrafterConfig) -> list[tuple[dict[str, Any], list[str]]]:
    """Each shard of `meta` with its tensor names; CheckpointError where meta or arrays are not a checkpoint's."""
    names = check_arrays(file, config)
    try:
        entries, start, shards = file.meta["shards"], 0, []
        for entry in entries:
            shards.append((entry, names[start : start + entry["count"]]))
            start += entry["count"]
        whole = start == len(names) and all(is_shard_name(entry["file"]) for entry in entries)
        whole = whole and all(key in file.meta for key in META_KEYS)
    except (KeyError, TypeError):
        whole = False
    if not whole:
        raise CheckpointError(f"{file.path}: meta does not say how to restore the shards: convert it again")
    return shards


def _write_shard(
    directory: Path, arrays: _Arrays, shard: dict[str, Any], names: list[str], config: Any, bar: tqdm
) -> int:
    """Restore one shard, tensor by tensor; returns its weights' bytes."""
    meta, num_bytes = arrays.file.meta, 0
    dtypes = {name: meta["source_dtypes"].get(name, arrays.file.info(name).dtype) for name in names}
    specs = {
        meta["name_prefix"] + name: (SAFETENSORS_DTYPES[dtypes[name]], arrays.file.info(name).shape)
        for name in names
    }
    with SafetensorsWriter(directory / shard["file"], specs, shard["metadata"]) as writer:
        for name in names:
            weight = arrays.read(name).astype(NUMPY_DTYPES[dtypes[name]], copy=False)
            if name.endswith(tuple(meta["permuted"])):
                weight = np.array(weight)
                to_pairs(weight, name, config)
            writer.write(meta["name_prefix"] + name, weight)
            num_bytes += weight.nbytes
            bar.update(arrays.file.info(name).nbytes)
            del weight  # it would keep the old map while the next tensor is read
    return num_bytes


def _index_text(meta: dict[str, Any], shards: list[tuple[dict[str, Any], list[str]]], total: int) -> str:
    """The index as Hugging Face writes it; total_size follows the tensors that are there."""
    places = {meta["name_prefix"] + name: shard["file"] for shard, names in shards for name in names}
    metadata = meta["index_metadata"] | ({"total_size": total} if meta["skipped"] else {})
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(places.items()))}, indent=2) + "\n"


class _Arrays:
    """Reads a KDTR file's arrays and keeps at most the largest one, or REMAP_BYTES, of it mapped in."""

    def __init__(self, path: Path):
        self.file = KdtrFile(path)
        self._most = max([REMAP_BYTES, *(info.nbytes for info in self.file.arrays.values())])
        self._mapped = 0

    def read(self, name: str) -> np.ndarray:
        """A read-only view, checked; drop it before the next call, or its map stays."""
        num_bytes = self.file.info(name).nbytes
        if self._mapped + num_bytes > self._most:
            self.file, self._mapped = KdtrFile(self.file.path), 0
        self._mapped += num_bytes
        return self.file[name]


@contextmanager
def _new_directory(path: Path) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place at a clean exit and goes at any other."""
    target, temporary = path.resolve(), None
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{path}: already there: give a new or an empty directory")
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield temporary
        temporary.chmod(0o777 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
