"""One row's experts, added in the blocks that make them: the bits of many rows' product, at its edges too."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from conftest import SIMULATED
from kernels.device import bf16_values
from kernels.test_experts import Case, check_rows_keep_their_bits, make
from kernels.test_experts_edges import check_shared, launch
from seeds import fresh_seed

from kernels_numba import experts_one


@pytest.mark.simulator
@pytest.mark.parametrize(
    "case", [Case(2, 4, 2, 40, 24), Case(2, 5, 1, 296, 16), Case(2, 6, 4, 8, 264)], ids=str
)
def test_a_row_alone_keeps_its_bits_small(case):
    """Sums of pairs against sums in one block, over more chunks than a ring has, to ragged ends."""
    check_rows_keep_their_bits(case, (1, 1), "bf16", seed=case.width)


@pytest.mark.simulator
def test_large_experts_go_the_general_way_with_the_same_bits(monkeypatch):
    case = Case(2, 4, 2, 40, 24)
    monkeypatch.setattr(experts_one, "MOST_ELEMENTS", case.chosen * case.hidden * case.width - 1)
    monkeypatch.setattr(experts_one, "launch_one", None)  # called, it would fail
    check_rows_keep_their_bits(case, (1, 1), "bf16", seed=case.width)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case",
    [
        Case(9, 16, 6, 2048, 1024),
        Case(9, 384, 8, 7168, 256),
        Case(9, 512, 10, 264, 40),
        Case(9, 8, 2, 1024, 520),  # K of up and of down is split in 4
        Case(9, 16, 11, 256, 96),  # more experts a row than a block of `down` has warps
    ],
    ids=str,
)
def test_a_row_alone_keeps_its_bits_large(case):
    check_rows_keep_their_bits(case, (1, 1, 1), "bf16", fresh_seed())


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [1, 2])
def test_shared_experts_of_a_row_alone_large(shared):
    check_shared(Case(1, 64, 6, 264, 136), "bf16", shared, fresh_seed())


@pytest.mark.simulator
def test_a_shared_expert_of_a_row_alone():
    """Behind the routed ones; then where all gates are zero."""
    check_shared(Case(1, 4, 2, 16, 8), "bf16", 2, seed=1)
    x, _, weights = make(np.random.default_rng(2), Case(1, 5, 1, 16, 8), "bf16")
    weights = [np.where(np.isnan(bf16_values(weight)), np.uint16(16000), weight) for weight in weights]
    none, shared = np.zeros((4, 1), np.float32), [weight[4:] for weight in weights]
    want = launch(Case(1, 1, 1, 16, 8), x, np.ones((1, 1), np.float32), shared, 1)
    assert_same_bits(launch(Case(1, 4, 1, 16, 8), x, none, weights, 2), want, "the shared expert alone")


@pytest.mark.simulator
def test_too_many_choices_of_a_row_alone():
    """Experts behind as many as were said are left out."""
    x, _, weights = make(np.random.default_rng(3), Case(1, 4, 2, 16, 8), "bf16", np.ones((4, 1), np.float32))
    first = np.array([[1], [1], [0], [0]], np.float32)
    want = launch(Case(1, 4, 2, 16, 8), x, first, weights, 2)
    assert_same_bits(
        launch(Case(1, 4, 2, 16, 8), x, np.ones((4, 1), np.float32), weights, 2), want, "the first two"
    )


@pytest.mark.skipif(SIMULATED, reason="the simulator's blocks are small")
@pytest.mark.parametrize(
    ("slots", "column_tiles", "unit", "wanted"),
    [
        (7, 64, 2, 4),  # 112 blocks of 8 warps: no multiprocessor has more than 8 in any cut
        (9, 128, 2, 3),  # blocks of 8 warps would take two turns of two blocks a multiprocessor
        (5, 6, 2, 1),
        (5, 6, 8, 1),
    ],
)
def test_blocks_of_a_row_alone(slots, column_tiles, unit, wanted):
    assert experts_one.groups_of(slots, column_tiles, unit) == wanted
