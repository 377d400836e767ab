"""Shared experts, which are experts that every row chose with gate 1; too many choices; arguments that do not fit."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from conftest import SIMULATED
from kernels.device import poisoned, to_device, to_host
from kernels.test_experts import Case, make, run
from seeds import fresh_seed

from kernels_numba import experts
from kernels_numba.checks import LaunchError
from kernels_numba.experts_fp8 import experts_fp8
from kernels_numba.experts_int4 import experts_int4
from kernels_numba.experts_mma import BLOCK_WARPS, block_warps


def launch(case, x, gates, weights, chosen):
    """The output for weights of more experts than there are gates, or of as many."""
    pairs = len(x) * chosen
    out, hidden, pair_out = (
        poisoned(shape) for shape in (x.shape, (pairs, case.width), (pairs, case.hidden))
    )
    plan = poisoned(experts.plan_size(len(x), len(weights[0]), chosen), np.int32)
    arrays = [to_device(array) for array in (x, gates, *weights)]
    experts.experts(*arrays, hidden, out, pair_out, plan, chosen)
    return to_host(out)


def check_shared(case, dtype, shared, seed):
    rng = np.random.default_rng(seed)
    total = Case(case.rows, case.experts + shared, case.chosen, case.hidden, case.width)
    x, gates, weights = make(rng, total, dtype)
    gates = gates[: case.experts].copy()
    for weight in weights:
        weight[np.concatenate([gates.any(axis=1), np.ones(shared, bool)])] = 0.25 if dtype == "f32" else 16000
        weight.reshape(-1)[::3] = 0.125 if dtype == "f32" else 15872
    chosen = case.chosen + shared
    got = launch(case, x, gates, weights, chosen)
    said = np.concatenate([gates, np.ones((shared, case.rows), np.float32)])
    assert_same_bits(got, launch(case, x, said, weights, chosen), f"{case}, {shared} shared, {dtype}")
    without = launch(case, x, gates, [weight[: case.experts] for weight in weights], chosen)
    assert (got != without).any(), "the shared experts count"


@pytest.mark.simulator
@pytest.mark.parametrize(("rows", "shared", "dtype"), [(1, 1, "f32"), (3, 2, "f32"), (3, 1, "bf16")])
def test_shared_experts_small(rows, shared, dtype):
    check_shared(Case(rows, 4, 2, 16, 8), dtype, shared, seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("rows", "shared"), [(1, 1), (7, 2), (65, 1), (130, 3)])
def test_shared_experts_large(rows, shared, dtype):
    check_shared(Case(rows, 64, 6, 256, 96), dtype, shared, fresh_seed())


def arguments():
    case = Case(3, 4, 2, 8, 16)
    x, gates, weights = make(np.random.default_rng(0), case, "f32")
    scratch = [np.empty(shape, np.float32) for shape in ((6, 16), (3, 8), (6, 8))]
    return [x, gates, *weights, *scratch, np.empty(experts.plan_size(3, 4, 2), np.int32), 2]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, np.zeros((4, 2), "f4"), "experts: gates: expected shape"),
        (1, np.zeros((5, 3), "f4"), "experts: gates: expected at most 4 experts, found 5"),
        (3, np.zeros((4, 16, 8), "u2"), "experts: w_up: expected dtype float32, found uint16"),
        (4, np.zeros((4, 16, 8), "f4"), "experts: w_down: expected shape"),
        (5, np.zeros((5, 16), "f4"), "experts: hidden: expected at least 6 rows, found 5"),
        (7, np.zeros((5, 8), "f4"), "experts: pair_out: expected at least 6 rows, found 5"),
        (8, np.zeros(37, "i4"), "experts: plan: expected at least 38 rows, found 37"),
        (8, np.zeros(38, "f4"), "experts: plan: expected dtype int32"),
        (9, 33, "experts: num_chosen: expected 1 to 32, found 33"),
        (9, 0, "experts: num_chosen: expected 1 to 32, found 0"),
        (1, np.zeros((1, 3), "f4"), "num_chosen: expected 3 to 32, found 2, with 3 shared experts"),
    ],
)
def test_arguments_that_do_not_fit(index, value, message):
    given = arguments()
    given[index] = value
    with pytest.raises(LaunchError, match=message):
        experts.experts(*given)


@pytest.mark.parametrize("name", ["experts", "experts_fp8", "experts_int4"])
@pytest.mark.parametrize(
    ("count", "routed", "width", "message"),
    [
        (4, 1, 32, "num_chosen: expected 3 to 32, found 2, with 3 shared experts"),
        (0, 0, 32, "weights: expected an expert at least, found none"),
        (4, 4, 0, "hidden: expected an activation of an expert at least, found none"),
    ],
)
def test_experts_that_no_kernel_takes(name, count, routed, width, message):
    """More shared experts than choices, none at all, or experts without activations, for weights of every kind."""
    shapes = (count, width, 32), (count, width, 32), (count, 32, width)
    weights = {
        "experts": [np.zeros(shape, "f4") for shape in shapes],
        "experts_fp8": [
            (np.zeros((e, n, k), "u1"), np.zeros((e, -(-n // 128), -(-k // 128)), "f4")) for e, n, k in shapes
        ],
        "experts_int4": [
            (np.zeros((e, n, k // 8), "i4"), np.zeros((e, n, k // 32), "u2")) for e, n, k in shapes
        ],
    }[name]
    launcher = {"experts": experts.experts, "experts_fp8": experts_fp8, "experts_int4": experts_int4}[name]
    x, gates, plan = np.zeros((3, 32), "f4"), np.zeros((routed, 3), "f4"), np.zeros(99, "i4")
    scratch = [np.zeros(shape, "f4") for shape in ((6, width), (3, 32), (6, 32))]
    with pytest.raises(LaunchError, match=f"^{name}: {message}$"):
        launcher(x, gates, *weights, *scratch, plan, 2)


def check_too_many_choices(case, dtype, seed):
    """Rows with more nonzero gates than `chosen` break the contract: nothing past the scratch is written, and while
    there is room for the pairs, other rows keep their results."""
    rng = np.random.default_rng(seed)
    x, gates, weights = make(rng, case, dtype)
    gates[:, :2], gates[:, -1] = 0, 0
    gates[: case.chosen, 1] = 1
    weights = [np.nan_to_num(weight) for weight in weights]
    want, *_ = run(case, x, gates, weights)
    gates[: case.chosen + 1, 0] = 1
    got, *_ = run(case, x, gates, weights)
    assert_same_bits(got[1:], want[1:], f"{case}: rows beside one with too many experts")
    gates[:] = 1
    run(case, x, gates, weights)


@pytest.mark.simulator
def test_too_many_choices_small():
    check_too_many_choices(Case(3, 4, 2, 8, 8), "f32", 0)
    check_too_many_choices(Case(2, 4, 2, 8, 8), "f32", 0)  # a thread for each gate


@pytest.mark.gpu
def test_too_many_choices_large():
    check_too_many_choices(Case(65, 64, 3, 64, 32), "f32", 0)
    check_too_many_choices(Case(512, 384, 8, 64, 32), "bf16", 0)


@pytest.mark.skipif(SIMULATED, reason="the simulator's blocks are small")
def test_blocks_spread_over_multiprocessors():
    """Tiles of 128 warps, as 1024 columns of gate and up are: fewer warps a block where each finds a multiprocessor."""
    wanted = {
        (6, 2): 6,
        (6, 1): 6,
        (4, 2): 4,
        (8, 2): BLOCK_WARPS,
        (12, 1): BLOCK_WARPS,
        (6, 8): BLOCK_WARPS,
        (6, 4): 8,
    }
    assert {(tiles, unit): block_warps("plain", 128, tiles, unit) for tiles, unit in wanted} == wanted
    assert block_warps("staged", 128, 6, 2) == BLOCK_WARPS
