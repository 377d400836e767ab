"""Hugging Face checkpoints <-> KDTR, one tensor in memory at a time and bit for bit there and back.

What changes on the way to KDTR, all of it recorded in `meta` so that the way back undoes it: rotary rows go from
interleaved pairs to halves, the router's bias becomes f32, a `language_model.` prefix is cut. Quantised weights stay
as they are: fp8 bytes and INT4 words with their scales, under the checkpoint's names. config.json,
generation_config.json and tokenizer.json travel as u8 arrays of those names. It runs no model.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.checkpoint_formats import check_numbers
from ddtree.checkpoint_names import BIAS
from ddtree.checkpoint_restore import convert_to_hf, load_config, progress_bar
from ddtree.checkpoint_rotary import rotary_weights, to_halves
from ddtree.checkpoint_source import CONFIG, KDTR_DTYPES, HfCheckpoint, open_hf
from ddtree.config import DrafterConfig
from ddtree.errors import CheckpointError
from ddtree.kdtr import NUMPY_DTYPES, KdtrFile, KdtrWriter
from ddtree.kdtr_header import MAGIC
from ddtree.safetensors_io import TensorInfo, read_tensor

__all__ = ["convert", "convert_to_hf", "convert_to_kdtr", "load_config"]

TAKES = f"convert takes a Hugging Face folder with {CONFIG}, or a .kdtr file made of one"


def convert(source: str | Path, output: str | Path) -> dict[str, Any]:
    """`convert_to_kdtr` of a folder, `convert_to_hf` of a file, and what they raise; their summary.

    CheckpointError for what is neither, before anything is written: what is missing, and what convert takes.
    """
    path = Path(source)
    if missing := _missing(path):
        raise CheckpointError(f"{path}: {missing}; {TAKES}")
    return convert_to_kdtr(path, output) if path.is_dir() else convert_to_hf(path, output)


def _missing(path: Path) -> str:
    """What makes `path` no checkpoint of either kind, in words; empty where it may be one."""
    if path.is_dir():
        return "" if (path / CONFIG).exists() else f"a folder without {CONFIG}"
    if not path.is_file():
        return "not a regular file" if path.exists() else "no such file or folder"
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return "not a .kdtr file"
    with KdtrFile(path) as file:
        return "" if "config" in file.meta else "a .kdtr file without a model's config"


def convert_to_kdtr(hf_dir: str | Path, out_path: str | Path, progress: bool = True) -> dict[str, Any]:
    """Convert a target or drafter directory into one KDTR file, and return a summary.

    Everything but the weights' bytes is checked before the file is begun, and the file appears only when complete.
    Summary: kind, source, output, tensors, bytes (of weights), dtypes (counts), quantised (format -> count of weights),
    permuted (count), shards, skipped (reason -> count, modules). Raises CheckpointError, ConfigError, or KdtrError
    for the output.
    """
    source = open_hf(hf_dir)
    specs, source_dtypes = _specs(source)
    meta = _meta(source, source_dtypes)
    blobs = {name: np.frombuffer(content, np.uint8) for name, content in source.files.items()}
    tensors = [pair for shard in source.shards for pair in shard.tensors.items()]
    total = sum(info.nbytes for _, info in tensors)
    all_specs = specs | {name: ("u8", blob.shape) for name, blob in blobs.items()}
    with KdtrWriter(out_path, all_specs, meta) as writer, progress_bar(total, progress, "to KDTR") as bar:
        for name, info in tensors:
            weight = _read_as(info, specs[name][0], name)
            check_numbers(name, weight, str(info.path))
            if name.endswith(tuple(meta["permuted"])):
                to_halves(weight, name, source.config)
            writer.write(name, weight)
            bar.update(info.nbytes)
            del weight  # or two would be in memory while the next is read
        for name, blob in blobs.items():
            writer.write(name, blob)
    return {
        "kind": meta["kind"],
        "source": str(hf_dir),
        "output": str(out_path),
        "tensors": len(tensors),
        "bytes": total,
        "dtypes": dict(Counter(dtype for dtype, _ in specs.values())),
        "quantised": dict(Counter(source.formats.values())),
        "permuted": sum(name.endswith(tuple(meta["permuted"])) for name, _ in tensors),
        "shards": len(source.shards),
        "skipped": source.skipped,
    }


def _specs(source: HfCheckpoint) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, str]]:
    """KDTR dtype and shape of each tensor, and the source dtypes of those that change (router biases)."""
    specs, changed = {}, {}
    for shard in source.shards:
        for name, info in shard.tensors.items():
            dtype = KDTR_DTYPES[info.dtype]
            if name.endswith(BIAS) and dtype != "f32":
                changed[name], dtype = dtype, "f32"
            specs[name] = (dtype, info.shape)
    return specs, changed


def _read_as(info: TensorInfo, dtype: str, name: str) -> np.ndarray:
    """One tensor in a KDTR dtype; CheckpointError where it must change dtype and holds NaN, whose bits would change."""
    stored = read_tensor(info)
    if stored.dtype == NUMPY_DTYPES[dtype]:
        return stored
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of the signalling ones
        has_nan = np.isnan(stored).any()
    if has_nan:
        raise CheckpointError(f"{info.path}: {name}: expected numbers, found NaN")
    return stored.astype(NUMPY_DTYPES[dtype])


def _meta(source: HfCheckpoint, source_dtypes: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "drafter" if isinstance(source.config, DrafterConfig) else "target",
        "config": source.hf_config,
        "rope_layout": "halves",
        "permuted": rotary_weights(source.config, source.formats),
        "name_prefix": source.prefix,
        "source_dtypes": source_dtypes,
        "shards": [
            {"file": shard.file, "count": len(shard.tensors), "metadata": shard.metadata}
            for shard in source.shards
        ],
        "index_metadata": source.index_metadata,
        "skipped": source.skipped,
    }
