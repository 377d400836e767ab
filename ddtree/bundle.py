"""A bundle: a target, perhaps its drafter, and the tokenizer, as KDTR files. It opens and checks, no more."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from ddtree.checkpoint import load_config
from ddtree.checkpoint_formats import holds_fp8
from ddtree.checkpoint_names import BRANCH_MAPS
from ddtree.checkpoint_source import check_arrays
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import ConfigError, UsageError
from ddtree.kdtr import KdtrFile
from ddtree.weights import DrafterWeights, TargetWeights, load_drafter, load_target

DATA = Path(__file__).resolve().parent.parent / "data"
DEFAULT_MODEL = DATA / "models" / "py12m"


@dataclass(frozen=True)
class Bundle:
    """Open files of one model: `drafter` and `drafter_config` are None when the bundle has no drafter."""

    path: Path
    target: KdtrFile
    config: ModelConfig
    drafter: KdtrFile | None
    drafter_config: DrafterConfig | None
    tokenizer: Tokenizer | None

    @property
    def files(self) -> list[KdtrFile]:
        return [file for file in (self.target, self.drafter) if file is not None]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in the files: all arrays but those of bytes, which are texts."""
        return sum(info.nbytes for file in self.files for info in file.arrays.values() if info.dtype != "u8")

    @property
    def fp8(self) -> bool:
        """Whether target or drafter has fp8 matrices outside routed experts."""
        return any(holds_fp8(file.arrays) for file in self.files)

    def sha256(self) -> dict[str, str]:
        """The sha256 of the target and, where there is one, of the drafter; traces carry it."""
        return {
            kind: _sha256(Path(file.path))
            for kind, file in zip(("target", "drafter"), self.files, strict=False)
        }

    def target_weights(self, num_positions: int, ops: Any) -> TargetWeights:
        """The target's weights in `ops` memory, with rotary tables for `num_positions` positions."""
        return load_target(self.target, self.config, num_positions, ops)

    def drafter_weights(self, num_positions: int, ops: Any) -> DrafterWeights:
        """The drafter's weights likewise; ask only where there is one."""
        return load_drafter(self.drafter, self.drafter_config, num_positions, ops)

    def encode(self, text: str) -> list[int]:
        """Token ids of a prompt; UsageError when it is no Unicode text, or the bundle carries no tokenizer."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"prompt: expected Unicode text, found {error.reason} at character {error.start}"
            ) from None
        return self._tokenizer().encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens left out; UsageError when the bundle carries no tokenizer."""
        return self._tokenizer().decode(token_ids, skip_special_tokens=True)

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise UsageError(
                f"{self.path}: the bundle has no tokenizer; convert its checkpoint with tokenizer.json"
            )
        return self.tokenizer


def open_bundle(path: Path | str = DEFAULT_MODEL, drafter: Path | str | None = None) -> Bundle:
    """Open a folder with target.kdtr (and drafter.kdtr), or one target file; `drafter` names another drafter.

    Raises KdtrError for a broken file, ConfigError for a wrong kind or a drafter that does not fit, UsageError when
    there is nothing at `path`.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"{path}: no such model; give a .kdtr file or a folder with target.kdtr")
    beside = path / "drafter.kdtr"
    if drafter is None and path.is_dir() and beside.exists():
        drafter = beside
    target = KdtrFile(path / "target.kdtr" if path.is_dir() else path)
    config = load_config(target)
    if not isinstance(config, ModelConfig):
        raise ConfigError(f"{target.path}: expected a target, found a drafter")
    check_arrays(target, config)
    drafter_file = KdtrFile(drafter) if drafter is not None else None
    drafter_config = load_config(drafter_file) if drafter_file is not None else None
    if drafter_config is not None:
        if not isinstance(drafter_config, DrafterConfig):
            raise ConfigError(f"{drafter}: expected a drafter, found a target")
        drafter_config.check_target(config)
        check_arrays(drafter_file, drafter_config)
        _check_branch(drafter_file, drafter_config)
    return Bundle(path, target, config, drafter_file, drafter_config, _read_tokenizer(target))


def _check_branch(file: KdtrFile, config: DrafterConfig) -> None:
    """Raise ConfigError for a branch head that would score nothing: one with a NaN or an infinity."""
    for name in (f"branch.{name}.weight" for name in BRANCH_MAPS if config.branch):
        if not np.isfinite(file[name].astype(np.float32)).all():
            raise ConfigError(f"{file.path}: {name}: expected finite numbers, found a NaN or an infinity")


def _read_tokenizer(target: KdtrFile) -> Tokenizer | None:
    if "tokenizer.json" not in target:
        return None
    try:
        return Tokenizer.from_str(target["tokenizer.json"].tobytes().decode())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{target.path}: tokenizer.json: {error}") from None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
