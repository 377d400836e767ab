"""Quantised weights for kernel tests, their exact values, and how far a product on tensor cores may be from f64."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from conftest import SIMULATED
from kernels.device import bf16_bits, bf16_values

EPS = float(np.finfo(np.float32).eps) / 2  # of one rounding
# A step of 16 products on tensor cores may cut each of its 17 summands off at 2**-24 of the largest: 9 x 2**-23.
ROUNDINGS_A_STEP = 18  # of 2**-24
LARGE = 4 if SIMULATED else 1000  # the simulator's exp warns where it overflows
GROUPS = {"int4": 32, "fp8": 128}
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


@dataclass
class Weight:
    """What a launcher takes, and what it stands for: f64 values [.., N, K] of nibbles or bytes, and their scales."""

    kind: str
    arrays: tuple
    values: np.ndarray
    scales: np.ndarray

    @property
    def dense(self):
        return self.values * self.scales

    @property
    def largest(self):
        """The greatest scale of each column, [.., N, 1]."""
        return np.abs(self.scales).max(axis=-1, keepdims=True)


def scales_like(rng, shape, size):
    """Scales of either sign around `size`, a few of them zero, subnormal or LARGE times larger."""
    scales = rng.uniform(0.5, 1.5, shape) * size * rng.choice([-1, 1], shape)
    draw = rng.random(shape)
    scales[draw < 0.02] = 0
    scales[(draw > 0.02) & (draw < 0.04)] = 1e-39
    scales[(draw > 0.04) & (draw < 0.05)] *= LARGE
    return scales.astype(np.float32)


def int4(rng, *shape, size=0.05):
    """A random INT4 weight; every nibble is there where there is room."""
    nibbles = rng.integers(0, 16, shape).astype(np.uint32)
    some = nibbles.reshape(-1)[:16]
    some[:] = rng.permutation(16)[: len(some)]
    words = nibbles.reshape(*shape[:-1], -1, 8) << np.arange(0, 32, 4, dtype=np.uint32)
    packed = np.bitwise_or.reduce(words, axis=-1).view(np.int32)
    bits = bf16_bits(scales_like(rng, (*shape[:-1], shape[-1] // 32), size))
    scales = np.repeat(bf16_values(bits).astype(np.float64), 32, axis=-1)
    return Weight("int4", (packed, bits), nibbles.astype(np.float64) - 8, scales)


def fp8(rng, *shape, size=0.002):
    """A random fp8 weight; every byte but NaN is there where there is room."""
    finite = np.flatnonzero(np.isfinite(E4M3)).astype(np.uint8)
    values = rng.choice(finite, shape)
    some = values.reshape(-1)[: len(finite)]
    some[:] = rng.permutation(finite)[: len(some)]
    *outer, rows, length = shape
    scales = scales_like(rng, (*outer, -(-rows // 128), -(-length // 128)), size)
    wide = np.repeat(np.repeat(scales.astype(np.float64), 128, axis=-2), 128, axis=-1)
    return Weight("fp8", (values, scales), E4M3[values], wide[..., :rows, :length])


MAKE = {"int4": int4, "fp8": fp8}


def product(x, weight, at=(), splits=1):
    """x @ weight.T of bf16 values in f64, and how far f32 sums on tensor cores may be from it.

    A group's sum errs by its steps' roundings, of its own terms; the scale multiplies that and the running sum is
    rounded once a group, and once a share of K.
    """
    dense = weight.dense[at]
    length, group = dense.shape[-1], GROUPS[weight.kind]
    steps, groups = -(-min(group, length) // 32) * 2, -(-length // group)
    with np.errstate(under="ignore"):
        want = x @ dense.T
        terms = np.abs(x) @ np.abs(dense).T
        error = (steps * ROUNDINGS_A_STEP + groups + splits) * EPS * terms + groups * 2.0**-149
    return want, error


def rounded(array):
    """An input of a product as f64, rounded to bf16."""
    return bf16_values(bf16_bits(array)).astype(np.float64)
