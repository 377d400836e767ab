"""`linear` on warpgroup products: against f64, and its rows' bits, which are those of the other tensor-core kernels."""

import itertools

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from kernels.test_linear import (
    check_heads,
    check_linear,
    check_rows_keep_their_bits,
    make,
    plans_of,
    run,
)
from kernels.test_linear_edges import check_bf16_rounds_to_even, check_infinities_stay_in_their_rows
from seeds import fresh_seed

from kernels_numba import linear, linear_wgmma
from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_columns import share_of, split_bits_of
from kernels_numba.primitives_linear_plan import (
    MULTIPROCESSORS,
    SHARED_LIMIT,
    GroupTiling,
    group_tiling_of,
    shared_bytes_of,
    tiling_for,
)
from kernels_numba.primitives_linear_wgmma import ROWS

LARGE = [
    *(
        (m, k, n)
        for m in (9, 17, 65, 73, 129)
        for k, n in ((8, 1), (200, 65), (1032, 130), (4096, 384), (7168, 576))
    ),
    *((m, 7168, 6400) for m in (33, 64, 65, 257)),
    (72, 18432, 264),
]
# K and N of products of a large model and of a small one.
SHAPES = [
    (7168, 18432),
    (18432, 7168),
    (8192, 7168),
    (7168, 2112),
    (1536, 12288),
    (7168, 576),
    (2048, 768),
    (768, 2048),
    (2048, 2112),
]


@pytest.fixture
def groups(monkeypatch):
    """Let `linear` take these kernels wherever it may, in the simulator too; skip where they cannot run."""
    plain = linear.tensor_plan

    def plan_of(num_rows, heads, width, length):
        bits, share, few, many = plain(num_rows, heads, width, length)
        if num_rows > linear.FEW_ROWS and length:
            few, many = None, group_tiling_of(num_rows, heads, width, length, share, bits)[1]
        return bits, share, few, many

    if SIMULATED:
        monkeypatch.setattr(linear_wgmma, "can_take", lambda: True)
    elif not linear_wgmma.can_take():
        pytest.skip("needs a GPU of compute capability 9.0")
    monkeypatch.setattr(linear, "tensor_plan", plan_of)


def cuts_of(m, k, n, columns):
    """The tilings of any number of columns a block, the shares of K side by side or in turn, and of few stages."""
    bits = split_bits_of(1, n, k)
    share = share_of(k, bits)
    for some, apart in itertools.product(columns, (False, True) if bits else (False,)):
        whole = tiling_for(m, 1, n, share, bits, some, apart)
        if whole:
            yield bits, share, None, whole
            yield bits, share, None, whole._replace(stages=2, blocks=max(1, whole.blocks // 3))


def check_kernels_give_the_same_bits(m, k, n, columns, warps, monkeypatch, seed):
    """The result of these kernels, however a launch is cut, and of those that every GPU has."""
    x, weight, *_ = make(np.random.default_rng(seed), (m, k), (n, k), "bf16")
    found = {}
    for forced in (*plans_of(m, k, n, warps), *cuts_of(m, k, n, columns)):
        monkeypatch.setattr(linear, "tensor_plan", lambda *_, forced=forced: forced)
        found[forced] = run(linear.linear, x, weight, (m, n))
    want = next(iter(found.values()))
    for forced, got in found.items():
        assert_same_bits(got, want, f"{m} x {k} x {n}, {forced}, seed {seed}")


@pytest.mark.simulator
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(("m", "k", "n"), [(9, 64, 17), (10, 264, 9), (17, 136, 33)])
def test_small(m, k, n):
    check_linear(m, k, n, "bf16", seed=m * k + n)


@pytest.mark.gpu
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(("m", "k", "n"), LARGE)
def test_large(m, k, n):
    check_linear(m, k, n, "bf16", fresh_seed())


@pytest.mark.simulator
@pytest.mark.usefixtures("groups")
def test_small_heads():
    check_heads(9, 2, 72, 9, "bf16", seed=9)


@pytest.mark.gpu
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(("m", "heads", "a", "b"), [(17, 16, 128, 512), (65, 16, 512, 128), (33, 8, 64, 40)])
def test_large_heads(m, heads, a, b):
    check_heads(m, heads, a, b, "bf16", fresh_seed())


@pytest.mark.gpu
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_a_row_keeps_its_bits_in_every_kernel(k, n):
    """Alone, where `linear_mma` makes the product, and among so many that `linear_wgmma` does."""
    check_rows_keep_their_bits(
        (1, 8, 9, 16, 17, 24, 33, 64, 65, 72, 73, 128, 129, 256), k, n, "bf16", fresh_seed()
    )


@pytest.mark.simulator
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(("m", "k", "n"), [(9, 264, 12), (18, 72, 20)])
def test_kernels_give_the_same_bits_small(m, k, n, monkeypatch):
    check_kernels_give_the_same_bits(m, k, n, (8,) if k > 72 else (24,), (2,), monkeypatch, seed=m)


@pytest.mark.gpu
@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("m", "k", "n"), [(10, 2048, 768), (65, 4104, 2000), (130, 1000, 6500), (9, 120, 33)]
)
def test_kernels_give_the_same_bits_large(m, k, n, monkeypatch):
    check_kernels_give_the_same_bits(m, k, n, (8, 56, 72, 144, 192), (1, 8), monkeypatch, fresh_seed())


@pytest.mark.simulator
def test_shares_in_turn_small(monkeypatch):
    """Four shares, the last of one piece."""
    k, n, bits, share = 392, 12, 2, 128
    x, weight, *_ = make(np.random.default_rng(1), (9, k), (n, k), "bf16")
    found = []
    for apart in (True, False):
        tiling = tiling_for(9, 1, n, share, bits, 8, apart)
        monkeypatch.setattr(linear, "tensor_plan", lambda *_, t=tiling: (bits, share, None, t))
        monkeypatch.setattr(linear, "linear_scratch", lambda *_: 1 << 14)
        found.append(run(linear.linear, x, weight, (9, n)))
    assert_same_bits(found[1], found[0], "in turn, and side by side")


@pytest.mark.simulator
@pytest.mark.usefixtures("groups")
def test_edges_small():
    check_infinities_stay_in_their_rows(9, 16, 2, "bf16")
    check_bf16_rounds_to_even(8)


def test_a_tiling_fits_and_covers_everything():
    for m in (9, 33, 64, 65, 129, 1024):
        for heads, width, length in ((1, 18432, 7168), (1, 100, 64), (16, 512, 128), (1, 576, 7168)):
            bits = split_bits_of(heads, width, length)
            share = share_of(length, bits)
            _, tiling = group_tiling_of(m, heads, width, length, share, bits)
            assert isinstance(tiling, GroupTiling) and tiling.columns % 8 == 0 and tiling.stages >= 2
            assert tiling.rows >= min(m, ROWS[-1])
            assert shared_bytes_of(tiling, m) <= SHARED_LIMIT
            assert 0 < tiling.blocks <= MULTIPROCESSORS
