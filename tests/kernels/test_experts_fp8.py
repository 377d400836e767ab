"""The expert product of fp8 weights, as test_experts_int4; a NaN byte makes the columns that it reaches NaN."""

import numpy as np
import pytest
from kernels.quantised_experts import (
    Case,
    check,
    check_rows_keep_their_bits,
    check_shared,
    check_twin,
    make,
    run,
)
from seeds import fresh_seed

from kernels_numba.checks import LaunchError
from kernels_numba.experts_fp8 import experts_fp8
from kernels_numba.experts_plan import plan_size

SMALL = [
    Case(1, 2, 1, 32, 16),
    Case(2, 2, 1, 144, 32),  # a chunk, and one in part
    Case(10, 1, 1, 32, 48),
]
LARGE = [
    *(Case(rows, 4, 2, 144, 80) for rows in (1, 3, 9, 33)),
    *(Case(rows, 16, 4, 256, 96) for rows in (1, 2, 5, 17, 65, 512)),  # the trained model's sizes
    *(Case(rows, 256, 8, 256, 128) for rows in (1, 16, 65, 257)),
    *(Case(rows, 8, 4, 1024, 512) for rows in (1, 8, 65)),
    *(Case(rows, 12, 8, 7168, 2048) for rows in (1, 9)),
    *(Case(rows, 2, 1, 2320, 800, used=1) for rows in (8, 16, 31)),
    Case(1000, 64, 8, 64, 32),
]


@pytest.mark.simulator
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case):
    check(experts_fp8, case, "fp8", seed=case.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case):
    check(experts_fp8, case, "fp8", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize("case", [Case(65, 16, 8, 1024, 512), Case(65, 4, 2, 1296, 160)], ids=str)
def test_rows_keep_their_bits(case):
    check_rows_keep_their_bits(experts_fp8, case, (1, 2, 3, 8, 9, 16, 17, 64), "fp8", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "shared"), [(1, 1), (7, 2), (65, 1)])
def test_shared_experts(rows, shared):
    check_shared(experts_fp8, Case(rows, 64, 6, 256, 96), "fp8", shared, fresh_seed())


@pytest.mark.gpu
def test_the_twin():
    check_twin(experts_fp8, Case(9, 8, 3, 256, 96), "fp8", fresh_seed())


def check_nan(case, seed):
    """A NaN byte of `gate` makes its column of hidden NaN for its expert's pairs, one of `down` that of pair_out."""
    rng = np.random.default_rng(seed)
    x, gates, weights = make(rng, case, "fp8")
    expert = int(np.flatnonzero(gates.any(axis=1))[0])
    own, (gate, _, down) = slice(np.count_nonzero(gates[expert])), weights
    for weight, byte, column, k in ((gate, 0x7F, 3, case.hidden - 1), (down, 0xFF, 2, case.width - 3)):
        before, weight.arrays[0][expert, column, k] = weight.arrays[0][expert, column, k], byte
        _, *stages = run(experts_fp8, case, x, gates, weights)
        for stage in stages[weight is down :]:
            where = np.isnan(stage)
            assert where[own, column].all() and not where[own.stop :].any()
            if stage is stages[weight is down]:
                assert where.sum() == own.stop, "the column alone"
        weight.arrays[0][expert, column, k] = before


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 40])
def test_nan(rows):
    check_nan(Case(rows, 4, 2, 272, 96), fresh_seed())


def arguments():
    case = Case(3, 4, 2, 64, 32)
    x, gates, weights = make(np.random.default_rng(0), case, "fp8")
    scratch = [np.empty(shape, np.float32) for shape in ((6, 32), (3, 64), (6, 64))]
    plan = np.empty(plan_size(3, 4, 2), np.int32)
    return [x, gates, *(weight.arrays for weight in weights), *scratch, plan, 2]


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (
            2,
            (np.zeros((4, 32, 64), "i1"), np.zeros((4, 1, 1), "f4")),
            "experts_fp8: gate: expected dtype uint8",
        ),
        (
            3,
            (np.zeros((4, 32, 64), "u1"), np.zeros((4, 2, 1), "f4")),
            "experts_fp8: scales of up: expected shape",
        ),
        (4, (np.zeros((4, 64, 16), "u1"), np.zeros((4, 1, 1), "f4")), "experts_fp8: down: expected shape"),
        (5, np.zeros((6, 40), "f4"), "experts_fp8: hidden: expected rows of a multiple of 16, found 40"),
        (6, np.zeros((3, 48), "f4"), "experts_fp8: out: expected shape"),
        (9, 0, "experts_fp8: num_chosen: expected 1 to 32, found 0"),
    ],
)
def test_arguments_that_do_not_fit(index, value, message):
    given = arguments()
    given[index] = value
    with pytest.raises(LaunchError, match=message):
        experts_fp8(*given)
