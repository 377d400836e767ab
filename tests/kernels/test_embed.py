"""The embedding gather and the column copy, to the bit: odd widths, both table formats, ids that are out of range."""

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from kernels.device import bf16_values, poisoned, to_device, to_host
from seeds import fresh_seed

from kernels_numba import embed
from kernels_numba.checks import LaunchError

SMALL = [(1, 3, 1), (5, 4, 3), (3, 9, 8), (2, 5, 24), (0, 3, 8)]  # rows, vocabulary, width
LARGE = [
    *((rows, 163840, 256) for rows in (1, 3, 64, 513)),
    (65, 32768, 2048),
    (64, 1000, 7168),
    (33, 129280, 33),
    (513, 77, 31),
    (3, 5, 1),
]
COLUMNS_SMALL = [(3, 4, 12, 8), (2, 3, 7, 4), (2, 8, 8, 0), (1, 4, 9, 5), (0, 4, 8, 4), (2, 0, 3, 3)]
COLUMNS_LARGE = [
    *((rows, 7168, 6 * 7168, column * 7168) for rows, column in ((1, 0), (64, 3), (513, 5))),
    (65, 33, 100, 67),
    (7, 64, 129, 64),
    (3, 256, 1280, 2),
]


def check_embed(rows, vocab, width, bf16, seed):
    what = f"embed {rows} of {vocab} x {width}, bf16 {bf16}, seed {seed}"
    rng = np.random.default_rng(seed)
    if bf16:
        table = rng.integers(0, 0x7F80, (vocab, width), dtype=np.uint16)  # any finite magnitude
        table[::2] |= 0x8000
        values = bf16_values(table)
    else:
        table = values = rng.standard_normal((vocab, width)).astype(np.float32)
    token_ids = rng.integers(vocab, size=rows).astype(np.int32)
    token_ids[: min(2, rows)] = [0, vocab - 1][: min(2, rows)]
    bad = np.zeros(rows, bool)
    for row, token in zip((2, 3, 4), (-1, vocab, np.iinfo(np.int32).max), strict=True):
        if row < rows:
            token_ids[row], bad[row] = token, True
    host = to_host(poisoned((rows + 2, width)))
    host[1:-1] = 0  # so that a bad id's NaN is the kernel's own
    whole = to_device(host)
    embed.embed(to_device(token_ids), to_device(table), whole[1:-1])
    got = to_host(whole)
    assert_same_bits(got[1:-1][~bad], values[token_ids[~bad]], what)
    assert np.isnan(got[1:-1][bad]).all(), f"{what}: a bad id is NaN throughout"
    assert_same_bits(got[[0, -1]], to_host(poisoned((2, width))), f"{what}: around its rows")


def check_copy_columns(rows, width, room, column, seed):
    what = f"copy_columns {rows} x {width} to {column} of {room}, seed {seed}"
    x = np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)
    whole = poisoned((rows + 2, room))
    want = to_host(whole)
    want[1:-1, column : column + width] = x
    embed.copy_columns(to_device(x), column, whole[1:-1])
    assert_same_bits(to_host(whole), want, what)


@pytest.mark.simulator
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("rows", "vocab", "width"), SMALL)
def test_embed_small(rows, vocab, width, bf16):
    check_embed(rows, vocab, width, bf16, seed=rows)


@pytest.mark.gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize(("rows", "vocab", "width"), LARGE)
def test_embed_large(rows, vocab, width, bf16):
    check_embed(rows, vocab, width, bf16, fresh_seed())


@pytest.mark.simulator
@pytest.mark.parametrize("sizes", COLUMNS_SMALL)
def test_copy_columns_small(sizes):
    check_copy_columns(*sizes, seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", COLUMNS_LARGE)
def test_copy_columns_large(sizes):
    check_copy_columns(*sizes, fresh_seed())


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    ids, table = to_device(np.zeros(2, np.int32)), to_device(np.zeros((5, 4), np.float32))
    out = to_device(np.zeros((2, 4), np.float32))
    for arguments in (
        (to_device(np.zeros(2, np.int64)), table, out),
        (ids, to_device(np.zeros((5, 4))), out),
        (ids, to_device(np.zeros((5, 3), np.float32)), out),
        (ids[:1], table, out),
        (ids, table, to_device(np.zeros((2, 4), np.uint16))),
    ):
        with pytest.raises(LaunchError, match="embed"):
            embed.embed(*arguments)
    for x, column in ((out, 2), (out, -1), (out[:1], 0), (to_device(np.zeros((2, 4))), 0)):
        with pytest.raises(LaunchError, match="copy_columns"):
            embed.copy_columns(x, column, to_device(np.zeros((2, 5), np.float32)))
