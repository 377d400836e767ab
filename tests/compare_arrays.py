"""How tests compare arrays: NaN and infinities by place first, then the error against f64, the worst element named."""

import numpy as np


def assert_close(got, reference, bound, what, *, elementwise=False, scale=None):
    """Assert that `got` agrees with an f64 reference to `bound`.

    Shapes must be equal, and NaN, +inf and -inf stand in the same places. The error of the finite rest is relative to
    the reference's greatest finite magnitude; with `elementwise`, to each element's own (a zero must then be met
    exactly); with `scale`, an array of the reference's shape, to that (the sum of a product's absolute terms, say).
    """
    got, reference = np.asarray(got), np.asarray(reference)
    assert reference.dtype == np.float64, f"{what}: the reference is {reference.dtype}, want float64"
    assert got.shape == reference.shape, f"{what}: shape {got.shape}, want {reference.shape}"
    wide = got.astype(np.float64)
    for name, places in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
        wrong = places(wide) != places(reference)
        assert not wrong.any(), f"{what}: {name} " + _count_and_first(wrong, wide, reference)
    finite = np.isfinite(reference)
    if not finite.any():
        return
    error = np.zeros(reference.shape)
    error[finite] = np.abs(wide[finite] - reference[finite])
    largest = np.abs(reference[finite]).max()
    if scale is None:
        scale = np.abs(reference) if elementwise else np.full(reference.shape, largest or 1.0)
    over = finite & (error > bound * scale)
    if over.any():
        ratio = np.divide(error, scale, out=np.where(error > 0, np.inf, 0.0), where=finite & (scale > 0))
        worst = np.unravel_index(np.argmax(np.where(finite, ratio, -1)), ratio.shape)
        raise AssertionError(
            f"{what}: {int(over.sum())} of {over.size} elements are off by more than {bound:.3g}; the worst, "
            f"{_coordinates(worst)}: got {got[worst]!r}, want {reference[worst]!r}, error {ratio[worst]:.3g}"
        )


def assert_same_bits(got, want, what):
    """Assert that two arrays have one dtype, one shape and the same bits in every element."""
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape), (
        f"{what}: {got.dtype} {got.shape}, want {want.dtype} {want.shape}"
    )
    if got.tobytes() == want.tobytes():
        return
    bits = np.dtype(f"u{got.dtype.itemsize}")
    wrong = np.ascontiguousarray(got).view(bits) != np.ascontiguousarray(want).view(bits)
    raise AssertionError(f"{what}: bits " + _count_and_first(wrong, got, want))


def assert_within_ulps(got, reference, ulps, what):
    """Assert that two arrays of one float dtype agree to `ulps` units in the last place of the greater magnitude."""
    got, reference = np.asarray(got), np.asarray(reference)
    assert (got.dtype, got.shape) == (reference.dtype, reference.shape), f"{what}: dtype or shape differs"
    unit = np.spacing(np.maximum(np.abs(got), np.abs(reference)))
    wrong = ~((np.abs(got - reference) <= ulps * unit) | (got == reference))
    assert not wrong.any(), f"{what}: beyond {ulps} ulp " + _count_and_first(wrong, got, reference)


def _count_and_first(wrong, got, want):
    first = np.unravel_index(np.argmax(wrong), wrong.shape)
    return (
        f"differ in {int(wrong.sum())} of {wrong.size} elements, first {_coordinates(first)}: "
        f"got {got[first]!r}, want {want[first]!r}"
    )


def _coordinates(index):
    return "[" + ", ".join(str(int(i)) for i in index) + "]"
