"""What the bench's cases share: random f32 and bf16 arrays, poisoned outputs, rotary tables, and the comparison."""

from __future__ import annotations

import zlib

import ml_dtypes
import numpy as np

EPS = float(np.finfo(np.float32).eps)


def generator(name: str) -> np.random.Generator:
    """Random numbers that a case's name fixes."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal f32 of a standard deviation."""
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(scale)
    return values


def bf16(values: np.ndarray) -> np.ndarray:
    """f32 rounded to bf16, as u16 bits."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def values_of(array: np.ndarray) -> np.ndarray:
    """The f64 values of f32, or of bf16 as u16 bits."""
    if array.dtype == np.uint16:
        array = array.view(ml_dtypes.bfloat16).astype(np.float32)
    return array.astype(np.float64)


def stored(array: np.ndarray, dtype: str) -> np.ndarray:
    """f32 as a weight or a cache of `dtype` (f32 or bf16) holds it."""
    return bf16(array) if dtype == "bf16" else array


def poisoned(*shape: int, dtype: type = np.float32) -> np.ndarray:
    """An output before its kernel: every byte 0xFF, which is NaN, -1 or the greatest unsigned integer."""
    array = np.empty(shape, dtype)
    array.reshape(-1).view(np.uint8)[:] = 0xFF
    return array


def scalar(value: int) -> np.ndarray:
    """A device scalar, i32[1], on the host."""
    return np.array([value], np.int32)


def rotary_tables(positions: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """f32 cosines and sines [positions, dim / 2]."""
    angles = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def require_close(
    what: str, got: np.ndarray, want: np.ndarray, bound: float, scale: np.ndarray | float | None = None
) -> None:
    """Raise AssertionError unless |got - want| <= bound * scale everywhere; NaN only where both have it.

    `scale` is each element's own magnitude when it is None.
    """
    got, want = values_of(got), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, want {want.shape}"
    with np.errstate(invalid="ignore"):  # infinities and NaN must be met exactly, their differences are void
        close = np.abs(got - want) <= bound * (np.abs(want) if scale is None else scale)
        close &= np.isfinite(want) & np.isfinite(got)
    wrong = ~close & (got != want) & ~(np.isnan(got) & np.isnan(want))
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.size} elements off by more than {bound:.3g}, first at {where}: "
            f"got {got[where]!r}, want {want[where]!r}"
        )


def require_equal(what: str, got: np.ndarray, want: np.ndarray) -> None:
    """Raise AssertionError unless two arrays have the same bits."""
    got, want = np.ascontiguousarray(got), np.ascontiguousarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        f"{what}: {got.dtype} {got.shape}, want {want.dtype} {want.shape}"
    )
    if got.tobytes() != want.tobytes():
        wrong = np.argwhere(got != want)
        where = tuple(int(i) for i in wrong[0]) if len(wrong) else "the sign of a zero or a NaN"
        raise AssertionError(f"{what}: {len(wrong)} of {got.size} elements differ, first at {where}")


def require_norm(what: str, got: np.ndarray, want: np.ndarray, bound: float) -> None:
    """Raise AssertionError unless ||got - want|| <= bound * ||want||; a NaN never passes."""
    error = np.linalg.norm(values_of(got) - want) / np.linalg.norm(want)
    assert error <= bound, f"{what}: off by {error:.3g} of its norm, more than {bound:.3g}"
