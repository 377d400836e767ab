"""The expert product of INT4 weights, stage by stage against f64, in tiles of all sizes; a row's bits are its own."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from kernels.quantised import int4
from kernels.quantised_experts import (
    Case,
    check,
    check_rows_keep_their_bits,
    check_shared,
    check_twin,
    make,
)
from seeds import fresh_seed

from kernels_numba.checks import LaunchError
from kernels_numba.experts_int4 import experts_int4
from kernels_numba.experts_plan import plan_size

SMALL = [
    Case(1, 2, 1, 32, 32),
    Case(2, 2, 1, 160, 32),  # rows of scales start anywhere
    Case(1, 2, 1, 256, 32),  # at 16 bytes, and columns that fill no warp
    Case(10, 1, 1, 32, 64),
]
LARGE = [
    *(Case(rows, 4, 2, 160, 96) for rows in (1, 3, 9, 33)),
    *(Case(rows, 16, 4, 256, 96) for rows in (1, 2, 5, 17, 65, 512)),  # the trained model's sizes
    *(Case(rows, 384, 8, 256, 128) for rows in (1, 16, 65, 257)),
    *(Case(rows, 8, 4, 1024, 512) for rows in (1, 8, 65)),
    *(Case(rows, 16, 6, 2048, 1408) for rows in (1, 33)),  # 1408: scales go on behind a whole run of them
    *(Case(rows, 12, 8, 7168, 2048) for rows in (1, 9)),
    *(Case(rows, 2, 1, 2304, 800, used=1) for rows in (8, 16, 31)),
    Case(40, 5, 2, 32, 64),
    Case(1000, 64, 8, 64, 32),
]


@pytest.mark.simulator
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case):
    check(experts_int4, case, "int4", seed=case.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case):
    check(experts_int4, case, "int4", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case", [Case(65, 16, 8, 1024, 512), Case(65, 4, 2, 1312, 160), Case(130, 2, 1, 256, 96)], ids=str
)
def test_rows_keep_their_bits(case):
    check_rows_keep_their_bits(experts_int4, case, (1, 2, 3, 8, 9, 16, 17, 64), "int4", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "shared"), [(1, 1), (7, 2), (65, 1)])
def test_shared_experts(rows, shared):
    check_shared(experts_int4, Case(rows, 64, 6, 256, 96), "int4", shared, fresh_seed())


@pytest.mark.gpu
def test_the_twin():
    check_twin(experts_int4, Case(9, 8, 3, 256, 96), "int4", fresh_seed())


def test_every_nibble_is_drawn():
    weight = int4(np.random.default_rng(0), 1, 2, 32)
    assert set(weight.values.ravel()) == set(range(-8, 8))
    words = weight.arrays[0].view(np.uint32)
    assert_same_bits(
        (words[0, 0, 1] >> np.uint32(8)) & np.uint32(15), np.uint32(weight.values[0, 0, 10] + 8), "a nibble"
    )


def arguments():
    case = Case(3, 4, 2, 64, 32)
    x, gates, weights = make(np.random.default_rng(0), case, "int4")
    scratch = [np.empty(shape, np.float32) for shape in ((6, 32), (3, 64), (6, 64))]
    plan = np.empty(plan_size(3, 4, 2), np.int32)
    return [x, gates, *(weight.arrays for weight in weights), *scratch, plan, 2]


def packed(*shape):
    return np.zeros(shape, np.int32), np.zeros((*shape[:-1], shape[-1] // 4), np.uint16)


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, np.zeros((3, 48), "f4"), "experts_int4: out: expected shape"),
        (1, np.zeros((5, 3), "f4"), "experts_int4: gates: expected at most 4 experts, found 5"),
        (2, packed(4, 32, 4), "experts_int4: gate: expected shape"),
        (
            3,
            (packed(4, 32, 8)[0], np.zeros((4, 32, 2), "f4")),
            "experts_int4: scales of up: expected dtype uint16",
        ),
        (3, (np.zeros((4, 32, 8), "u4"), packed(4, 32, 8)[1]), "experts_int4: up: expected dtype int32"),
        (4, packed(4, 64, 8), "experts_int4: down: expected shape"),
        (5, np.zeros((5, 32), "f4"), "experts_int4: hidden: expected at least 6 rows, found 5"),
        (5, np.zeros((6, 40), "f4"), "experts_int4: hidden: expected rows of a multiple of 32, found 40"),
        (7, np.zeros((5, 64), "f4"), "experts_int4: pair_out: expected at least 6 rows, found 5"),
        (8, np.zeros(37, "i4"), "experts_int4: plan: expected at least 38 rows, found 37"),
        (9, 33, "experts_int4: num_chosen: expected 1 to 32, found 33"),
    ],
)
def test_arguments_that_do_not_fit(index, value, message):
    given = arguments()
    given[index] = value
    with pytest.raises(LaunchError, match=message):
        experts_int4(*given)
