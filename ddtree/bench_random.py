"""Models of random weights at any shape, made where they run: what a large model costs, without its checkpoint.

The weights go through `ddtree.weights` like a checkpoint's; where the loader would copy an array's values into a
backend's memory, that memory is filled in its place.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bundle import DATA
from ddtree.checkpoint_names import BIAS, expected_tensors
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import UsageError
from ddtree.reference import fill as reference_fill
from ddtree.weights import DrafterWeights, TargetWeights, WeightReader, load_drafter, load_target

CONFIGS = DATA / "configs"
PROMPT_TOKENS = 128
GAIN = 1.5  # standard deviation of a weight, times the square root of its fan-in
BIAS_AMPLITUDE = 0.1
TARGET, DRAFTER = 0, 1 << 16  # array numbers, so that the two share no random number


class _RandomReader(WeightReader):
    """What the loader's arrays come through: memory is filled where a checkpoint's bytes would be copied to it.

    `file` is (the shapes by name, seed, the first array number); norms are ones, a bias is small, all else random.
    """

    def __init__(self, file: tuple[dict[str, tuple[int, ...]], int, int], ops: Any, upload: Any):
        super().__init__(file, ops, upload)
        self.shapes, self.seed, self.index = file

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def fill(self, out: Any, name: str, start: int = 0, part: Any = None) -> Any:
        """Fill all of `out`, once, like the array `name` that would end it: a stack of experts comes expert by expert.

        Nothing is done for a backend that only counts.
        """
        index, self.index = self.index, self.index + 1
        last = start + math.prod(self.shape(name)) >= math.prod(out.shape)
        if self.upload is None or not last:
            return out
        if "norm" in name:
            self.upload(out, 0, np.ones(out.shape, np.float32))
        elif self.ops.name == "cuda":
            from kernels_numba import fill

            fill.fill(out, self.seed, index, self._amplitude(name), self.ops.stream)
        else:
            reference_fill.fill(out, self.seed, index, self._amplitude(name))
        return out

    def _amplitude(self, name: str) -> float:
        if name.endswith(BIAS):
            return BIAS_AMPLITUDE
        deviation = 1.0 if "embed" in name else GAIN * self.shape(name)[-1] ** -0.5
        return deviation * 3**0.5


@dataclass(frozen=True)
class RandomBundle:
    """What an Engine asks of a `ddtree.bundle.Bundle`, of random weights that `seed` fixes; it has no tokenizer."""

    path: Path
    config: ModelConfig
    drafter_config: DrafterConfig | None
    seed: int = 0

    def sha256(self) -> dict[str, str]:
        """No file, no checksum: the config's name and the seed, which fix the weights."""
        return {"target": f"{self.path.stem}, random weights of seed {self.seed}"}

    @property
    def weight_bytes(self) -> int:
        """None that a file holds."""
        return 0

    def target_weights(self, num_positions: int, ops: Any) -> TargetWeights:
        """The target's random weights in `ops` memory, with rotary tables for `num_positions` positions."""
        file = expected_tensors(self.config), self.seed, TARGET
        return load_target(file, self.config, num_positions, ops, _RandomReader)

    def drafter_weights(self, num_positions: int, ops: Any) -> DrafterWeights:
        """The drafter's likewise; ask only where there is one."""
        file = expected_tensors(self.drafter_config), self.seed, DRAFTER
        return load_drafter(file, self.drafter_config, num_positions, ops, _RandomReader)

    def encode(self, text: str) -> list[int]:
        """PROMPT_TOKENS token ids that a text fixes."""
        rng = np.random.default_rng(zlib.crc32(text.encode()))
        return rng.integers(0, self.config.vocab_size, PROMPT_TOKENS).tolist()

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids themselves as text."""
        return " ".join(str(int(token)) for token in token_ids)


def open_random(name: str, layers: int | None = None, seed: int = 0) -> RandomBundle:
    """A bundle of the config file `name`, or of data/configs/`name`.json, with NAME-drafter.json beside it if there.

    `layers` keeps the first layers only, and no drafter. Raises UsageError when there is no such file or it is no
    JSON object, ConfigError when it is no config.
    """
    path = _find(name)
    config = ModelConfig.from_hf(_read(path), str(path))
    beside = path.with_name(f"{path.stem}-drafter.json")
    drafter = None
    if layers is not None:
        if not 1 <= layers <= config.num_hidden_layers:
            raise UsageError(f"layers: expected 1 to {config.num_hidden_layers}, found {layers}")
        dense = min(config.first_k_dense_replace, layers)
        config = replace(config, num_hidden_layers=layers, first_k_dense_replace=dense)
    elif beside.exists():
        drafter = DrafterConfig.from_hf(_read(beside), str(beside))
        drafter.check_target(config)
    return RandomBundle(path, config, drafter, seed)


def _find(name: str) -> Path:
    shipped = CONFIGS / f"{name}.json"
    path = shipped if shipped.exists() else Path(name)
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json") if not p.stem.endswith("-drafter")))
        raise UsageError(f"config: expected a config.json or one of {names}; found {name!r}")
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot read the config: {error}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{path}: expected a JSON object")
    return record
