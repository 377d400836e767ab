"""A Hugging Face checkpoint directory, opened and checked whole before any weight is read.

Knows file names, shards and the index; which tensors there must be is said by `ddtree.checkpoint_names`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddtree.checkpoint_formats import SHAPE, check_scheme, check_shape
from ddtree.checkpoint_names import (
    VISION_PREFIXES,
    abbreviated,
    check_tensors,
    expected_tensors,
    skip_reason,
)
from ddtree.checkpoint_rotary import check_blocks
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.config_quantisation import read_scheme
from ddtree.errors import CheckpointError
from ddtree.fields import FieldReader
from ddtree.kdtr import KdtrFile
from ddtree.safetensors_io import TensorInfo, read_header, read_tensor, strict_json

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"
CARRIED = (CONFIG, "generation_config.json", "tokenizer.json")
PREFIX = "language_model."
KDTR_DTYPES = {
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
    "F8_E4M3": "f8_e4m3",
    "I32": "i32",
    "I64": "i64",
}


@dataclass(frozen=True)
class Shard:
    """One safetensors file: its name, its metadata, and the tensors kept, by name without prefix."""

    file: str
    metadata: dict[str, str] | None
    tensors: dict[str, TensorInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class HfCheckpoint:
    """An opened directory. `index_metadata` is None where a single file holds all tensors.

    `formats` is the format, fp8 or int4, of each weight that is quantised.
    """

    path: Path
    hf_config: dict[str, Any]
    config: ModelConfig | DrafterConfig
    files: dict[str, bytes]
    prefix: str
    shards: list[Shard]
    index_metadata: dict[str, Any] | None
    skipped: dict[str, dict[str, Any]]
    formats: dict[str, str]


def check_arrays(file: KdtrFile, config: ModelConfig | DrafterConfig) -> list[str]:
    """The tensor names of a KDTR file; CheckpointError unless they fit the config and rotary rows are in halves."""
    names = [name for name in file if name not in CARRIED]
    check_tensors(
        {name: (file.info(name).dtype, file.info(name).shape) for name in names}, config, str(file.path)
    )
    if file.meta.get("rope_layout") != "halves":
        raise CheckpointError(
            f"{file.path}: rope_layout: expected 'halves', found {file.meta.get('rope_layout')!r}"
        )
    return names


def read_config(hf: Any, where: str) -> ModelConfig | DrafterConfig:
    """The config of a DFlash drafter (it has `dflash_config`) or of an MLA target (it has `kv_lora_rank`)."""
    if not isinstance(hf, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {type(hf).__name__}")
    architectures = FieldReader(hf, where).names("architectures", ())
    if "dflash_config" in hf or "DFlashDraftModel" in architectures:
        return DrafterConfig.from_hf(hf, where)
    text = hf.get("text_config") or hf
    if not isinstance(text, dict) or "kv_lora_rank" not in text:
        raise CheckpointError(
            f"{where}: expected DeepSeek-V2/V3, Kimi K2 or a DFlash drafter, found architectures {list(architectures)}"
        )
    return ModelConfig.from_hf(hf, where)


def is_shard_name(name: Any) -> bool:
    """Whether `name` is a plain file name that a shard may have, so that it cannot leave its directory."""
    return isinstance(name, str) and name.endswith(".safetensors") and not set(name) & set("/\\\0")


def open_hf(hf_dir: str | Path) -> HfCheckpoint:
    """Open a checkpoint directory, reading headers only, and the shapes that INT4 weights carry.

    Raises CheckpointError for files that are missing or broken and for tensors that do not fit config.json, and
    ConfigError for settings that are wrong.
    """
    path = Path(hf_dir)
    if not path.is_dir():
        raise CheckpointError(
            f"{path}: no such directory: expected a Hugging Face checkpoint with config.json"
        )
    files = {name: _read(path / name) for name in CARRIED if name == CONFIG or (path / name).exists()}
    hf = strict_json(files[CONFIG], str(path / CONFIG))
    config = read_config(hf, str(path / CONFIG))
    scheme = read_scheme(hf, str(path / CONFIG))
    index = _read_index(path)
    shards = _read_shards(path, index)
    names = [name for shard in shards for name in shard.tensors]
    prefix = _prefix(names, path)
    kept, skipped = _keep(shards, config, prefix)
    tensors = {name: info for shard in kept for name, info in shard.tensors.items()}
    found = {name: (KDTR_DTYPES.get(info.dtype, info.dtype), info.shape) for name, info in tensors.items()}
    formats = check_tensors(found, config, str(path))
    check_scheme(formats, scheme, str(path))
    check_blocks(formats, config, str(path))
    shapes = expected_tensors(config)
    for name, stored in formats.items():
        if stored == "int4":
            check_shape(name, read_tensor(tensors[name + SHAPE]), shapes[name], str(path))
    return HfCheckpoint(path, hf, config, files, prefix, kept, _index_metadata(index), skipped, formats)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def _read_index(path: Path) -> dict[str, Any] | None:
    """The index of a sharded checkpoint, or None where there is one file."""
    where = path / INDEX
    if not where.exists():
        if not (path / SINGLE).exists():
            raise CheckpointError(f"{path}: no weights: expected {SINGLE} or {INDEX}")
        return None
    index = strict_json(_read(where), str(where))
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(map(is_shard_name, weight_map.values())):
        raise CheckpointError(f"{where}: weight_map: expected tensor names -> shard file names, both text")
    return index


def _index_metadata(index: dict[str, Any] | None) -> dict[str, Any] | None:
    if index is None:
        return None
    return index["metadata"] if isinstance(index.get("metadata"), dict) else {}


def _read_shards(path: Path, index: dict[str, Any] | None) -> list[Shard]:
    """Every shard's header, in the order of their names, held against the index."""
    weight_map = index["weight_map"] if index else None
    shards = []
    for file in sorted(set(weight_map.values())) if index else [SINGLE]:
        if not (path / file).exists():
            raise CheckpointError(f"{path / INDEX}: lists shard {file}, which is missing: fetch it again")
        tensors, metadata = read_header(path / file)
        shards.append(Shard(file, metadata, tensors))
    _check_places(shards, weight_map, path)
    return shards


def _check_places(shards: list[Shard], weight_map: dict[str, str] | None, path: Path) -> None:
    """Each tensor lies in one shard, the one that the index says."""
    place: dict[str, str] = {}
    for shard in shards:
        for name in shard.tensors:
            if name in place:
                raise CheckpointError(f"{path}: tensor {name} is both in {place[name]} and in {shard.file}")
            place[name] = shard.file
    for name, file in (weight_map or {}).items():
        if place.get(name) != file:
            raise CheckpointError(f"{path / INDEX}: lists tensor {name} in {file}, which does not hold it")
    if weight_map is not None and len(place) > len(weight_map):
        name = next(name for name in place if name not in weight_map)
        raise CheckpointError(f"{path / INDEX}: does not list tensor {name} of {place[name]}")


def _prefix(names: list[str], where: Path) -> str:
    """`language_model.` where every name outside the vision tower has it, else nothing."""
    lacking = [name for name in names if not name.startswith((PREFIX, *VISION_PREFIXES))]
    if lacking and any(name.startswith(PREFIX) for name in names):
        raise CheckpointError(
            f"{where}: {len(lacking)} tensors lack the prefix {PREFIX} ({abbreviated(lacking)})"
        )
    return "" if lacking else PREFIX


def _keep(
    shards: list[Shard], config: ModelConfig | DrafterConfig, prefix: str
) -> tuple[list[Shard], dict[str, dict[str, Any]]]:
    """Shards with the tensors that are converted, prefix cut, and what was skipped: reason -> count, modules."""
    kept, skipped = [], {}
    for shard in shards:
        tensors = {}
        for full_name, info in shard.tensors.items():
            name = full_name.removeprefix(prefix)
            if reason := skip_reason(name, config):
                _note(skipped, *reason)
            else:
                tensors[name] = info
        if tensors:
            kept.append(Shard(shard.file, shard.metadata, tensors))
    return kept, skipped


def _note(skipped: dict[str, dict[str, Any]], reason: str, module: str) -> None:
    entry = skipped.setdefault(reason, {"count": 0, "modules": []})
    entry["count"] += 1
    if module not in entry["modules"]:
        entry["modules"].append(module)
