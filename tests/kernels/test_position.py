"""Rotary embedding, the query split and the latent append against f64, and that they stay inside tables and caches."""

from dataclasses import dataclass

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.device import bf16_bits, poisoned, scalar, to_device, to_host
from seeds import fresh_seed

from ddtree.rope import RopeConfig, rotary_tables
from kernels_numba import norm, position
from kernels_numba.checks import LaunchError

EPS = np.finfo(np.float32).eps


@dataclass(frozen=True)
class Case:
    """Sizes of a call; `dim` are the rotary dimensions, `nope`, or `query` and `rank`, what stands before them."""

    rows: int
    heads: int = 1
    nope: int = 0
    rank: int = 1
    dim: int = 8
    context_len: int = 7
    table: int = 40
    bf16: bool = False
    query: int = 0

    def __str__(self):
        return "-".join(f"{name}{value}" for name, value in vars(self).items())


SMALL = [
    Case(1, dim=2),
    Case(3, heads=2, nope=3, rank=9, dim=6, query=5),
    Case(3, nope=5, rank=32, dim=8, bf16=True, query=48),
    Case(2, heads=3, nope=4, rank=20, dim=4, context_len=0),
    Case(5, rank=3, dim=2, context_len=30, table=31, query=40),  # positions pass the table
]
LARGE = [
    Case(rows, heads, 128, 512, 64, 8191, 9000, bf16, 1536)
    for rows, heads in ((1, 64), (3, 128), (64, 64), (65, 16), (513, 64))
    for bf16 in (False, True)
] + [
    Case(16, 8, 32, 64, 16, 100, 1024),
    Case(33, 3, 5, 33, 6, 61, 200, True, 35),
    Case(9, 4, 1, 1, 2, 0, 9),
    Case(64, 1, 0, 512, 64, 950, 1000, True),
    Case(5, 1, 0, 256, 64, 0, 9, True, 3072),
]


def host_tables(case, context_len, depths):
    """f32 cos and sin of the positions that are read, NaN in every other row."""
    rope = RopeConfig(50000.0, amplitude=1.416)
    tables = [table.astype(np.float32) for table in rotary_tables(rope, case.dim, case.table)]
    unread = np.setdiff1d(np.arange(case.table), positions_of(case, context_len, depths))
    for table in tables:
        table[unread] = np.nan
    return tables


def positions_of(case, context_len, depths):
    return np.clip(context_len + depths.astype(np.int64), 0, case.table - 1)


def turned(x, cos, sin, positions):
    """x [M, heads, D] turned in f64, and the size of what was added for each element."""
    half = x.shape[-1] // 2
    a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    c, s = (table[positions].astype(np.float64)[:, None, :] for table in (cos, sin))
    want = np.concatenate([a * c - b * s, b * c + a * s], axis=-1)
    size = np.concatenate([abs(a * c) + abs(b * s), abs(b * c) + abs(a * s)], axis=-1)
    return want, size + 1e-30


def draw(case, seed):
    """(rng, depths, f32 tables, their device copies with depths and context_len) of a call."""
    rng = np.random.default_rng(seed)
    depths = rng.integers(0, 9, case.rows).astype(np.int32)
    cos, sin = host_tables(case, case.context_len, depths)
    at = (to_device(cos), to_device(sin), to_device(depths), scalar(case.context_len))
    return rng, depths, (cos, sin), at


def row_at(at, row):
    """The same with the depth of one row alone."""
    return (*at[:2], at[2][row : row + 1], at[3])


def check_rope(case, seed):
    what = f"rope {case}, seed {seed}"
    rng, depths, tables, at = draw(case, seed)
    x = rng.standard_normal((case.rows, case.heads, case.dim)).astype(np.float32)
    x[::4] *= 1e4
    whole = poisoned((case.rows + 1, case.heads, case.dim))
    position.rope(to_device(x), *at, whole[:-1])
    got = to_host(whole)
    assert np.isnan(got[-1]).all(), f"{what}: wrote past its rows"
    want, size = turned(x, *tables, positions_of(case, case.context_len, depths))
    # A product rounds, then the fused sum: half an eps of each.
    assert_close(got[:-1], want, EPS, what, scale=size)
    in_place = to_device(x)
    position.rope(in_place, *at, in_place)
    assert_same_bits(to_host(in_place), got[:-1], f"{what}, in place")
    if case.bf16:
        rounded = poisoned(x.shape, np.uint16)
        position.rope(to_device(x), *at, rounded)
        assert_same_bits(to_host(rounded), bf16_bits(got[:-1]), f"{what}, bf16")
    last = poisoned((1, case.heads, case.dim))
    position.rope(to_device(x[-1:]), *row_at(at, case.rows - 1), last)
    assert_same_bits(to_host(last), got[-2:-1], f"{what}, last row alone")


def check_split_query(case, seed):
    what = f"split_query {case}, seed {seed}"
    rng, depths, tables, at = draw(case, seed)
    query = rng.standard_normal((case.rows, case.heads, case.nope + case.dim)).astype(np.float32)
    nope, rope = (poisoned((case.rows + 1, case.heads, width)) for width in (case.nope, case.dim))
    position.split_query(to_device(query), *at, nope[:-1], rope[:-1])
    assert_same_bits(to_host(nope)[:-1], query[..., : case.nope], f"{what}: nope")
    want, size = turned(query[..., case.nope :], *tables, positions_of(case, case.context_len, depths))
    assert_close(to_host(rope)[:-1], want, EPS, f"{what}: rope", scale=size)
    assert np.isnan(to_host(nope)[-1]).all() and np.isnan(to_host(rope)[-1]).all(), f"{what}: past its rows"


def norm_oracle(x, weight):
    wide = x.astype(np.float64)
    return weight * (wide / np.sqrt(np.square(wide).mean(axis=-1, keepdims=True) + 1e-6))


def check_append_latent(case, seed, room=3):
    """`room` rows fit behind context_len; any others must leave no trace in the caches."""
    what = f"append_latent {case}, room {room}, seed {seed}"
    rng, _, _, at = draw(case, seed)
    query, both = case.query, case.query + case.rank
    qkv = rng.standard_normal((case.rows, both + case.dim)).astype(np.float32)
    weight = rng.standard_normal(both).astype(np.float32)
    dtype = np.uint16 if case.bf16 else np.float32
    capacity = case.context_len + room
    whole = [poisoned((capacity + 2, width), dtype) for width in (case.rank, case.dim)]
    caches = [cache[:capacity] for cache in whole]
    found = poisoned((case.rows + 1, max(query, 1)))
    position.append_latent(to_device(qkv), to_device(weight), 1e-6, *at, found[:-1], *caches)

    written = min(case.rows, room)
    new = slice(case.context_len, case.context_len + written)
    got = [to_host(cache) for cache in whole]
    for cache in got:
        untouched = np.delete(cache, np.arange(new.start, new.stop), axis=0)
        assert_same_bits(untouched, to_host(poisoned(untouched.shape, dtype)), f"{what}: other rows")
    latents, keys = poisoned((case.rows, case.rank)), poisoned((case.rows, 1, case.dim))
    norm.rms_norm(to_device(qkv[:, query:both]), to_device(weight[query:]), 1e-6, latents)
    position.rope(to_device(qkv[:, None, both:]), *at, keys)
    wide = norm.is_wide(query, case.rank, case.dim)

    def same_sum(width):  # wide alike, and each thread has one piece, however many threads there are
        return norm.is_wide(width) == wide and norm.norm_threads(width, wide) * (4 if wide else 1) >= width

    want = [to_host(latents)[:written], to_host(keys)[:written, 0]]
    want = [bf16_bits(values) for values in want] if case.bf16 else want
    if same_sum(case.rank):
        assert_same_bits(got[0][new], want[0], f"{what}: latents")
    assert_same_bits(got[1][new], want[1], f"{what}: keys")
    normed = to_host(found)
    assert np.isnan(normed[-1]).all(), f"{what}: past the query's rows"
    if not query:
        assert np.isnan(normed).all(), f"{what}: there is no query"
        return
    wanted = norm_oracle(qkv[:, :query], weight[:query])
    assert_close(normed[:-1], wanted, (query / 2 + 8) * EPS, f"{what}: query", elementwise=True)
    if same_sum(query):
        alone = poisoned((case.rows, query))
        norm.rms_norm(to_device(qkv[:, :query]), to_device(weight[:query]), 1e-6, alone)
        assert_same_bits(normed[:-1], to_host(alone), f"{what}: query")


@pytest.mark.simulator
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_small(case):
    check_rope(case, seed=1)
    check_split_query(case, seed=2)
    check_append_latent(case, seed=3)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case):
    check_rope(case, fresh_seed())
    if case.nope:  # a slice of an empty device array is an error of Numba's own
        check_split_query(case, fresh_seed())
    for room in (case.rows - 1, case.rows, case.rows + 5):
        check_append_latent(case, fresh_seed(), room)


@pytest.mark.simulator
def test_no_room_writes_nothing():
    check_append_latent(Case(2, rank=4, dim=2), seed=4, room=0)


@pytest.mark.simulator
def test_wrong_arguments_are_refused():
    def f32(*shape):
        return to_device(np.zeros(shape, np.float32))

    at = [f32(9, 2), f32(9, 2), to_device(np.zeros(3, np.int32)), scalar(0)]
    replacements = [
        (0, f32(9, 3)),
        (1, f32(8, 2)),
        (1, to_device(np.zeros((9, 2)))),
        (2, to_device(np.zeros(3, np.int64))),
        (2, to_device(np.zeros(2, np.int32))),
        (3, to_device(np.zeros(2, np.int32))),
        (0, f32(0, 2)),
    ]
    for index, array in replacements:
        wrong = [*at[:index], array, *at[index + 1 :]]
        for launch in (
            lambda at: position.rope(f32(3, 1, 4), *at, f32(3, 1, 4)),
            lambda at: position.split_query(f32(3, 1, 5), *at, f32(3, 1, 1), f32(3, 1, 4)),
            lambda at: position.append_latent(f32(3, 7), f32(3), 1e-6, *at, f32(3, 1), f32(9, 2), f32(9, 4)),
        ):
            with pytest.raises(LaunchError):
                launch(wrong)
    bits = to_device(np.zeros((9, 4), np.uint16))
    for launch in (
        lambda: position.rope(f32(3, 1, 4), *at, f32(3, 2, 4)),
        lambda: position.rope(f32(3, 1, 4), *at, to_device(np.zeros((3, 1, 4)))),
        lambda: position.rope(f32(3, 1, 3), *at, f32(3, 1, 3)),
        lambda: position.split_query(f32(3, 1, 5), *at, f32(3, 1, 2), f32(3, 1, 4)),
        lambda: position.append_latent(f32(3, 7), f32(3), 0, *at, f32(3, 1), f32(9, 2), f32(9, 4)),
        lambda: position.append_latent(f32(3, 7), f32(3), 1e-6, *at, f32(3, 1), f32(9, 2), f32(8, 4)),
        lambda: position.append_latent(f32(3, 7), f32(3), 1e-6, *at, f32(3, 1), f32(9, 2), bits),
        lambda: position.append_latent(f32(3, 8), f32(3), 1e-6, *at, f32(3, 1), f32(9, 2), f32(9, 4)),
        lambda: position.append_latent(f32(3, 7), f32(3), 1e-6, *at, f32(3, 2), f32(9, 2), f32(9, 4)),
        lambda: position.append_latent(f32(3, 5), f32(1), 1e-6, *at, f32(3, 0), f32(9, 2), f32(9, 4)),
    ):
        with pytest.raises(LaunchError):
            launch()
