"""The products at their edges: infinities, rounding to bf16, arguments that do not fit, how work is cut."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, bf16_values
from kernels.test_linear import DTYPES, run

from kernels_numba import linear, linear_mma, linear_wide
from kernels_numba.checks import LaunchError
from kernels_numba.primitives import SIMULATED
from kernels_numba.primitives_columns import own_piece, piece_to_give, split_bits_of
from kernels_numba.primitives_lanes import WARPS
from kernels_numba.primitives_wide import MOST_WARPS, ROW_TILES, WIDTH


def check_infinities_stay_in_their_rows(m, k, n, dtype):
    """-inf and NaN in two rows of ones, under weights that no sum cancels."""
    x, weight = np.ones((m, k), np.float32), np.ones((n, k), np.float32)
    x[1, k - 1], x[2, 0] = -np.inf, np.nan
    got = run(linear.linear, x, weight if dtype == "f32" else bf16_bits(weight), (m, n))
    want = np.full((m, n), float(k))
    want[1], want[2] = -np.inf, np.nan
    assert_close(got, want, 0, f"-inf and NaN, {dtype}")


@pytest.mark.simulator
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_small(dtype):
    check_infinities_stay_in_their_rows(4, 9, 3, dtype)
    check_infinities_stay_in_their_rows(3, 16, 2, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_large(dtype):
    check_infinities_stay_in_their_rows(9, 2048, 65, dtype)
    check_infinities_stay_in_their_rows(65, 1001, 33, dtype)


def check_bf16_rounds_to_even(k):
    """Inputs between two bf16 go to the even one; the sum is not rounded."""
    inputs = np.array(
        [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8), 2**-133 * 1.5, 3.4e38], np.float32
    )
    x = np.zeros((len(inputs), k), np.float32)
    x[:, k // 2] = inputs
    got = run(linear.linear, x, bf16_bits(np.ones((2, k), np.float32)), (len(inputs), 2))
    want = np.array([1, 1 + 2**-6, 1 + 2**-7, -1, 2**-132, np.inf])
    want[5] = float(bf16_values(bf16_bits(inputs[5:]))[0])
    assert_same_bits(got, np.repeat(want.astype(np.float32)[:, None], 2, axis=1), f"rounded inputs, K {k}")


@pytest.mark.simulator
@pytest.mark.parametrize("k", [1, 8])
def test_bf16_rounds_to_even_small(k):
    check_bf16_rounds_to_even(k)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 8, 1000, 1001])
def test_bf16_rounds_to_even_large(k):
    check_bf16_rounds_to_even(k)


@pytest.mark.parametrize(
    ("x", "weight", "out", "message"),
    [
        (
            np.zeros((2, 8)),
            np.zeros((3, 8), np.float32),
            np.zeros((2, 3), np.float32),
            "linear: x: expected dtype float32",
        ),
        (
            np.zeros((2, 8), "f4"),
            np.zeros((3, 7), "f4"),
            np.zeros((2, 3), "f4"),
            "linear: weight: expected shape",
        ),
        (
            np.zeros((2, 8), "f4"),
            np.zeros((3, 8), "i2"),
            np.zeros((2, 3), "f4"),
            "linear: weight: expected dtype",
        ),
        (
            np.zeros((2, 8), "f4"),
            np.zeros((3, 8), "u2"),
            np.zeros((2, 4), "f4"),
            "linear: out: expected shape",
        ),
        (
            np.zeros((8, 2), "f4").T,
            np.zeros((3, 8), "u2"),
            np.zeros((2, 3), "f4"),
            "linear: x: expected a C-contiguous",
        ),
    ],
)
def test_arguments_that_do_not_fit(x, weight, out, message):
    with pytest.raises(LaunchError, match=message):
        linear.linear(x, weight, out)


def test_heads_that_do_not_fit():
    with pytest.raises(LaunchError, match="head_linear: weight: expected shape"):
        linear.head_linear(np.zeros((2, 3, 8), "f4"), np.zeros((2, 5, 8), "f4"), np.zeros((2, 3, 5), "f4"))


def test_the_split_depends_on_the_weight_alone():
    """Few columns and a long K use all warps of a block, many columns or a short K one."""
    assert linear.split_bits_of(576, 7168) == WARPS.bit_length() - 1
    assert linear.split_bits_of(18432, 7168) == linear.split_bits_of(256, 256) == 0


@pytest.mark.skipif(SIMULATED, reason="the simulator's blocks are small")
def test_the_split_of_bf16_weights():
    shapes = {
        (163840, 7168): 0,
        (18432, 7168): 1,
        (7168, 18432): 2,
        (7168, 8192): 2,
        (7168, 2048): 0,
        (1536, 7168): 3,
        (576, 7168): 3,
        (768, 2048): 3,
        (3072, 768): 2,
        (33, 96): 0,
    }
    assert {shape: split_bits_of(1, *shape) for shape in shapes} == shapes


def test_a_tiling_covers_everything_once():
    for m in (1, 4, 5, 8, 9, 33, 64, 65, 1024):
        for heads, width, length in ((1, 18432, 7168), (1, 100, 64), (16, 512, 128), (1, 576, 2048)):
            bits = split_bits_of(heads, width, length)
            _, few = linear_mma.tiling_of(m, heads, width, length, bits)
            assert 0 < few.groups << bits <= linear_mma.MOST_WARPS
            assert few.grid == (-(-m // 8), -(-width // (16 * few.groups)), heads)
            for may_part in (False, True):
                _, many = linear_wide.wide_tiling_of(m, heads, width, length, bits, may_part)
                assert many.tiles in ROW_TILES and 0 < many.warps <= MOST_WARPS[many.tiles]
                assert not many.apart or (may_part and bits)
                across = many.warps * WIDTH
                assert many.grid == (
                    -(-m // (16 * many.tiles)), -(-width // across), heads << (bits if many.apart else 0)
                )  # fmt: skip


def test_scratch_that_is_too_small(monkeypatch):
    tiling = linear_wide.WideTiling(ROW_TILES[0], 1, False, (5, 1, 1))
    monkeypatch.setattr(linear, "tensor_plan", lambda *_: (0, 128, None, tiling))
    x, weight = np.zeros((65, 128), "f4"), np.zeros((8, 128), "u2")
    with pytest.raises(LaunchError, match=r"linear: scratch: expected \d+ elements at least, found 0"):
        linear.linear(x, weight, np.zeros((65, 8), "f4"))


def test_fewer_rows_want_no_more_scratch():
    for heads, width, length in ((1, 18432, 7168), (1, 7168, 18432), (16, 512, 128), (1, 576, 2048)):
        sizes = [linear.linear_scratch(rows, heads, width, length) for rows in range(1, 1025)]
        assert sizes[0] == 0 and sizes == sorted(sizes)


@pytest.mark.skipif(SIMULATED, reason="reads the functions that a GPU runs")
def test_pieces_of_weight_meet_in_no_bank():
    """Eight lanes at a time copy 16 bytes each to all 32 banks, and ldmatrix reads eight pieces from all of them."""
    copied, given = ([place.py_func(lane) // 4 for lane in range(32)] for place in (own_piece, piece_to_give))
    assert all(
        given[column + 8 * piece] == copied[4 * column + piece] for column in range(8) for piece in range(4)
    )
    for places in (copied, given):
        assert [len({place % 8 for place in places[lane : lane + 8]}) for lane in range(0, 32, 8)] == [8] * 4
