"""SwiGLU against f64 at every size of gate, and the plain sum bit for bit; in place, and guards."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import poisoned, to_device, to_host
from seeds import fresh_seed

from kernels_numba import pointwise
from kernels_numba.checks import LaunchError
from kernels_numba.primitives import SIMULATED

SMALL = [(1,), (3,), (31,), (33,), (65,), (3, 33), (0, 4)]
LARGE = [(1,), (3,), (255,), (257,), (64, 7168), (513, 2048), (1, 18432), (3, 5, 7), (1 << 20, 3)]
# expf is within 2 units in the last place, then an add, a division and a product.
EXP_UNITS = 1 if SIMULATED else 2


def guarded(shape):
    """A poisoned flat array, and the part of it that is the output, in `shape`."""
    size = int(np.prod(shape))
    whole = poisoned(size + 8)
    return whole, whole[:size].reshape(shape)


def assert_guard(whole, what):
    assert_same_bits(to_host(whole)[-8:], to_host(poisoned(8)), f"{what}: behind the output")


def check_swiglu(shape, seed):
    rng = np.random.default_rng(seed)
    gate = (rng.standard_normal(shape) * 8).astype(np.float32)
    edges = np.array([0.0, -0.0, 1e-30, 80, -80, 87, -87, 103, -103, 1e4, -1e4], np.float32)
    edges = edges if not SIMULATED else edges[np.abs(edges) < 88]  # its exp warns of the infinity
    flat = gate.reshape(-1)
    flat[: len(edges)] = edges[: flat.size]
    up = rng.standard_normal(shape).astype(np.float32)
    whole, out = guarded(shape)
    pointwise.swiglu(to_device(gate), to_device(up), out)
    wide = gate.astype(np.float64)
    want = wide * np.exp(-np.logaddexp(0, -wide)) * up
    tiny = float(np.finfo(np.float32).tiny)  # what f32 cannot hold may round to 0
    eps = np.finfo(np.float32).eps
    scale = np.abs(want) + tiny / eps * np.abs(wide * up)
    assert_close(to_host(out), want, (2 + EXP_UNITS) * eps, f"swiglu {shape}, seed {seed}", scale=scale)
    assert_guard(whole, f"swiglu {shape}")
    in_place = to_device(gate)
    pointwise.swiglu(in_place, to_device(up), in_place)
    assert_same_bits(to_host(in_place), to_host(out), f"swiglu {shape} in place")


def check_add(shape, seed):
    rng = np.random.default_rng(seed)
    x, y = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    x.reshape(-1)[::3] *= 1e8
    whole, out = guarded(shape)
    pointwise.add(to_device(x), to_device(y), out)
    assert_same_bits(to_host(out), x + y, f"add {shape}, seed {seed}")
    assert_guard(whole, f"add {shape}")
    for place in range(2):
        both = [to_device(x), to_device(y)]
        pointwise.add(*both, both[place])
        assert_same_bits(to_host(both[place]), x + y, f"add {shape} in place of argument {place}")


@pytest.mark.simulator
@pytest.mark.parametrize("shape", SMALL)
def test_small(shape):
    check_swiglu(shape, seed=len(shape))
    check_add(shape, seed=len(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE)
def test_large(shape):
    check_swiglu(shape, fresh_seed())
    check_add(shape, fresh_seed())


@pytest.mark.simulator
@pytest.mark.parametrize("launch", [pointwise.swiglu, pointwise.add])
def test_wrong_arguments_are_refused(launch):
    x, wide = to_device(np.zeros((2, 4), np.float32)), to_device(np.zeros((2, 4)))
    for arguments in ((x, x, x[:1]), (x, x[:, :2], x), (wide, x, x), (x, x, wide), (x[:, ::2],) * 3):
        with pytest.raises(LaunchError):
            launch(*arguments)
