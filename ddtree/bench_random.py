"""Models of random weights at any shape, made where they run: what a large model costs, without its checkpoint.

The weights go through `ddtree.weights` like a checkpoint's; where the loader would copy an array's values into a
backend's memory, that memory is filled in its place. Quantised weights are random words or bytes, which a block of four
million bytes fixes that is repeated, and scales that give the values the deviation of plain weights.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ddtree.bundle import DATA
from ddtree.checkpoint_formats import holds_fp8, stored_tensors
from ddtree.checkpoint_names import BIAS, expected_tensors
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import UsageError
from ddtree.quantised import E4M3_VALUES, GROUP, MIDDLE
from ddtree.reference import fill as reference_fill
from ddtree.reference.philox import WORD, philox4x32_10
from ddtree.weights import DrafterWeights, TargetWeights, WeightReader, load_drafter, load_target

CONFIGS = DATA / "configs"
PROMPT_TOKENS = 128
GAIN = 1.5  # standard deviation of a weight, times the square root of its fan-in
BIAS_AMPLITUDE = 0.1
TARGET, DRAFTER = 0, 1 << 16  # array numbers, so that the two share no random number
WEIGHTS = ("bf16", "fp8", "int4")
PLAIN_IN_FP8 = ("kv_b_proj.weight", "embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")
PERIOD = 1_048_573  # random words before they repeat: a prime, which no row of a matrix divides
FINITE = 0xBFBFBFBF  # of four bytes, those that as e4m3 are below 2 and never NaN
NIBBLE_RMS = float(np.sqrt(np.mean((np.arange(16) - MIDDLE) ** 2.0)))
BYTE_RMS = float(np.sqrt(np.mean(E4M3_VALUES[np.arange(256) & FINITE & 255].astype(np.float64) ** 2)))


def stored_format(name: str, shape: tuple[int, ...], weights: str) -> str:
    """How a random model's weight is stored: in int4, routed experts are; in fp8, all matrices of layers but kv_b."""
    if weights == "int4" and ".mlp.experts." in name:
        return "int4"
    if weights == "fp8" and len(shape) == 2 and not name.endswith(PLAIN_IN_FP8):
        return "fp8"
    return "plain"


def stored_shapes(expected: dict[str, tuple[int, ...]], weights: str) -> dict[str, tuple[int, ...]]:
    """Every array of a model whose weights have the shapes `expected`; UsageError where INT4 groups do not fit."""
    shapes = {}
    for name, shape in expected.items():
        stored = stored_format(name, shape, weights)
        if stored == "int4" and shape[1] % GROUP:
            raise UsageError(f"weights: int4 needs inputs in groups of {GROUP}, {name} has {shape[1]}")
        shapes |= {each: size for each, (_, size) in stored_tensors(name, shape, stored).items()}
    return shapes


class _RandomReader(WeightReader):
    """What the loader's arrays come through: memory is filled where a checkpoint's bytes would be copied to it.

    `file` is (the shapes by name, seed, the first array number); norms are ones, a bias is small, all else random.
    """

    def __init__(self, file: tuple[dict[str, tuple[int, ...]], int, int], ops: Any, upload: Any):
        super().__init__(file, ops, upload)
        self.shapes, self.seed, self.index = file

    @property
    def names(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def stored_shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def copy(self, out: Any, name: str, start: int = 0, part: Any = None) -> Any:
        """Fill all of `out`, once, like the array `name` that would end it: a stack of experts comes expert by expert.

        Nothing is done for a backend that only counts.
        """
        index, self.index = self.index, self.index + 1
        last = start + math.prod(self.stored_shape(name)) >= math.prod(out.shape)
        if self.upload is None or not last:
            return out
        if "norm" in name:
            self.upload(out, 0, np.ones(out.shape, np.float32))
        elif name.endswith("_packed"):
            self._fill_words(out, index, WORD)
        elif out.dtype == np.uint8:
            self._fill_words(out, index, FINITE)
        elif name.endswith("_scale_inv"):
            length = self.stored_shape(name.removesuffix("_scale_inv"))[-1]
            self.upload(out, 0, np.full(out.shape, GAIN * length**-0.5 / BYTE_RMS, np.float32))
        elif self.ops.name == "cuda":
            from kernels_numba import fill

            fill.fill(out, self.seed, index, self._amplitude(name), self.ops.stream)
        else:
            values = out if out.dtype.kind == "f" else np.empty(out.shape, np.float32)
            reference_fill.fill(values, self.seed, index, self._amplitude(name))
            if values is not out:
                self.upload(out, 0, values)
        return out

    fill = copy  # a matrix that a backend wants plain is random as such

    def _amplitude(self, name: str) -> float:
        if name.endswith(BIAS):
            return BIAS_AMPLITUDE
        length, rms = self.stored_shape(name)[-1], 1.0
        if name.endswith("_scale"):  # of both signs: the nibbles' mean is not 0
            length, rms = length * GROUP, NIBBLE_RMS
        deviation = 1.0 if "embed" in name else GAIN * length**-0.5
        return deviation / rms * 3**0.5

    def _fill_words(self, out: Any, index: int, mask: int) -> None:
        """Random bits under a mask: PERIOD words of Philox, as `reference.fill` counts them, again and again."""
        itemsize = out.dtype.itemsize
        count = min(PERIOD, -(-math.prod(out.shape) * itemsize // 4))
        counter = np.zeros((-(-count // 4), 4), np.uint32)
        counter[:, 0], counter[:, 2] = np.arange(len(counter)), index
        words = philox4x32_10(counter, (self.seed & WORD, self.seed >> 32)).reshape(-1)[:count]
        block = (words.astype(np.uint32) & np.uint32(mask)).view(out.dtype)[: math.prod(out.shape)]
        self.upload(out, 0, block)
        self.ops.repeat(out, len(block))


@dataclass(frozen=True)
class RandomBundle:
    """What an Engine asks of a `ddtree.bundle.Bundle`, of random weights that `seed` fixes; it has no tokenizer.

    `weights` is how the target's are stored, one of WEIGHTS; a drafter's are plain.
    """

    path: Path
    config: ModelConfig
    drafter_config: DrafterConfig | None
    seed: int = 0
    weights: str = "bf16"
    shapes: dict[str, tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.weights not in WEIGHTS:
            raise UsageError(f"weights: expected one of {', '.join(WEIGHTS)}, found {self.weights!r}")
        object.__setattr__(self, "shapes", stored_shapes(expected_tensors(self.config), self.weights))

    def sha256(self) -> dict[str, str]:
        """No file, no checksum: the config's name and the seed, which fix the weights."""
        stored = "" if self.weights == "bf16" else f" in {self.weights}"
        return {"target": f"{self.path.stem}, random weights{stored} of seed {self.seed}"}

    @property
    def weight_bytes(self) -> int:
        """None that a file holds."""
        return 0

    @property
    def fp8(self) -> bool:
        """Whether the target has fp8 matrices outside its routed experts."""
        return holds_fp8(self.shapes)

    def target_weights(self, num_positions: int, ops: Any) -> TargetWeights:
        """The target's random weights in `ops` memory, with rotary tables for `num_positions` positions."""
        file = self.shapes, self.seed, TARGET
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


def open_random(name: str, layers: int | None = None, seed: int = 0, weights: str = "bf16") -> RandomBundle:
    """A bundle of the config file `name`, or of data/configs/`name`.json, with NAME-drafter.json beside it if there.

    `layers` keeps the first layers only, and no drafter. `weights` is how the target's are stored: bf16 (plain: in the
    engine's matmul format), int4 (routed experts INT4, the rest plain) or fp8 (all matrices but kv_b, embedding, head
    and router). Raises UsageError when there is no such file or it is no JSON object, and for weights that are not
    offered or do not fit, ConfigError when it is no config.
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
    return RandomBundle(path, config, drafter, seed, weights)


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
