"""Rotary settings (plain and YaRN) and the cos/sin tables made from them, in float64. It knows no layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import ConfigError
from ddtree.fields import FieldReader


@dataclass(frozen=True)
class RopeConfig:
    """Rotary settings; `factor` None means plain rotary embedding, else YaRN (arXiv 2309.00071).

    `amplitude` is what cos and sin are multiplied by; `softmax_mscale` multiplies the attention scale.
    """

    theta: float
    factor: float | None = None
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    softmax_mscale: float = 1.0

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str, with_mscale: bool = True) -> RopeConfig:
        """Read `rope_theta` + `rope_scaling`, or `rope_parameters`, of a Hugging Face config.

        Without `with_mscale` YaRN's mscale fields are passed over, as Qwen3 layers were trained: the amplitude is then
        attention_factor, or 0.1 ln(factor) + 1.
        """
        name = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
        scaling = hf.get(name) or {}
        read = FieldReader(scaling, f"{where}: {name}")
        theta = read.number("rope_theta", None) or FieldReader(hf, where).number("rope_theta")
        if theta <= 1.0:
            raise ConfigError(f"{where}: rope_theta: expected a number above 1, found {theta!r}")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind == "default":
            return cls(theta)
        if kind != "yarn":
            raise ConfigError(f"{where}: rope type: expected default or yarn, found {kind!r}")
        factor = read.number("factor")
        mscale, mscale_all = read.number("mscale", None, False), read.number("mscale_all_dim", None, False)
        if min(mscale or 0, mscale_all or 0) < 0:
            raise ConfigError(f"{where}: {name}: mscale and mscale_all_dim: expected numbers >= 0")
        amplitude = _mscale(factor, 1.0)
        if not with_mscale:
            mscale = mscale_all = None
        if mscale and mscale_all:
            amplitude = _mscale(factor, mscale) / _mscale(factor, mscale_all)
        return cls(
            theta,
            factor,
            read.integer("original_max_position_embeddings"),
            read.number("beta_fast", 32.0),
            read.number("beta_slow", 1.0),
            read.number("attention_factor", amplitude),
            _mscale(factor, mscale_all) ** 2 if mscale_all else 1.0,
        )


def _mscale(factor: float, mscale: float) -> float:
    """YaRN's 0.1 mscale ln(factor) + 1, and 1 for a factor up to 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def inverse_frequencies(rope: RopeConfig, dim: int) -> np.ndarray:
    """Rotary inverse frequencies, f64[dim / 2]; YaRN blends interpolated and plain ones by a linear ramp.

    The ramp runs between the rotations beta_fast and beta_slow, floored, ceiled and clipped to [0, dim - 1]
    (arXiv 2309.00071, section 3.2, as the DeepSeek-V3 implementation does it).
    """
    plain = rope.theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    if rope.factor is None:
        return plain

    def dimension_of(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_of(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_of(rope.beta_slow)), dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(dim // 2, dtype=np.float64) - low) / (high - low), 0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1.0 - ramp)


def rotary_tables(rope: RopeConfig, dim: int, num_positions: int) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin of position x frequency, times the amplitude, each f64[num_positions, dim / 2]."""
    angles = np.arange(num_positions, dtype=np.float64)[:, None] * inverse_frequencies(rope, dim)
    return np.cos(angles) * rope.amplitude, np.sin(angles) * rope.amplitude
