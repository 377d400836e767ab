"""Rotary embedding against rotation of complex numbers, and the query split and latent append built on it."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.pointwise import rms_norm
from ddtree.reference.position import append_latent, append_rows, rope, split_query
from ddtree.rope import RopeConfig, rotary_tables

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
NUM_POSITIONS = 200


def turned(x, positions, theta, amplitude=1.0):
    """x f64 [M, heads, D], halves order: pair i of the row at position p turned by p x theta^(-2i/D)."""
    half = x.shape[-1] // 2
    numbers = x[..., :half] + 1j * x[..., half:]
    angles = positions[:, None] * float(theta) ** (-2 * np.arange(half) / x.shape[-1])
    numbers = numbers * np.exp(1j * angles)[:, None, :] * amplitude
    return np.concatenate([numbers.real, numbers.imag], axis=-1)


def tables(dim, dtype, theta=10000.0, amplitude=1.0):
    """cos and sin in dtype, and the positions' f64 angle error that rounding them leaves."""
    return [
        t.astype(DTYPES[dtype])
        for t in rotary_tables(RopeConfig(theta, amplitude=amplitude), dim, NUM_POSITIONS)
    ]


@each_dtype
@pytest.mark.parametrize("dim", [2, 6, 8, 64])
@pytest.mark.parametrize("context_len", [0, 1, 63, 64, 120])
def test_rope_turns_halves_by_position(dim, context_len, dtype):
    rng = np.random.default_rng(dim + context_len)
    depths = np.array([0, 1, 1, 2, 2, 3, 7, 70], np.int32)  # siblings share a position
    x = rng.standard_normal((len(depths), 3, dim)).astype(DTYPES[dtype])
    x[2] *= 1e4
    x[3] = 0
    out = np.full(x.shape, np.nan, DTYPES[dtype])
    rope(x, *tables(dim, dtype, 50000.0, 1.416), depths, context_len, out)
    want = turned(x.astype(np.float64), context_len + depths, 50000.0, 1.416)
    assert_close(out, want, 4 * EPS[dtype], f"rope {dim} at {context_len}", scale=pair_size(x) * 1.416)
    rope(x, *tables(dim, dtype, 50000.0, 1.416), depths, context_len, x)
    assert_same_bits(x, out, "in place")


def pair_size(x):
    """The modulus of each element's pair."""
    half = x.shape[-1] // 2
    size = np.abs(x[..., :half].astype(np.float64) + 1j * x[..., half:])
    return np.concatenate([size, size], axis=-1) + 1e-300


def test_halves_order_is_interleaved_pairs_permuted():
    """Permute pairs (2i, 2i + 1) to halves, rotate, permute back: the interleaved rotation, literally."""
    x = np.random.default_rng(0).standard_normal((5, 2, 8))
    depths, context_len = np.arange(5, dtype=np.int32), 31
    want = np.empty_like(x)
    for row in range(5):
        for i in range(4):
            angle = (context_len + row) * 10000.0 ** (-2 * i / 8)
            a, b = x[row, :, 2 * i], x[row, :, 2 * i + 1]
            want[row, :, 2 * i] = a * np.cos(angle) - b * np.sin(angle)
            want[row, :, 2 * i + 1] = b * np.cos(angle) + a * np.sin(angle)
    halves = np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    out = np.full(x.shape, np.nan)
    rope(halves, *tables(8, "f64"), depths, context_len, out)
    assert_close(
        np.concatenate([out[..., :4], out[..., 4:]], -1),
        np.concatenate([want[..., 0::2], want[..., 1::2]], -1),
        1e-14,
        "interleaved",
    )
    assert np.abs(out - want).max() > 0.1  # the two orders are told apart by this input


def test_scores_depend_on_the_distance_alone():
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((2, 1, 1, 64))
    at = tables(64, "f64")

    def turn(x, position):
        out = np.empty_like(x)
        rope(x, *at, np.array([0], np.int32), position, out)
        return out

    near, far = (float((turn(query, p + 7) * turn(key, p)).sum()) for p in (0, 150))
    assert abs(near - far) < 1e-12 and abs(near - float((query * key).sum())) > 1e-3


@each_dtype
@pytest.mark.parametrize("m", ODD_SIZES)
def test_split_query_copies_nope_and_turns_rope(m, dtype):
    rng = np.random.default_rng(m)
    query = rng.standard_normal((m, 3, 5 + 8)).astype(DTYPES[dtype])
    depths = rng.integers(20, size=m).astype(np.int32)
    q_nope, q_rope = np.full((m, 3, 5), np.nan, DTYPES[dtype]), np.full((m, 3, 8), np.nan, DTYPES[dtype])
    split_query(query, *tables(8, dtype), depths, 100, q_nope, q_rope)
    assert_same_bits(q_nope, query[..., :5], "nope")
    part = query[..., 5:]
    want = turned(part.astype(np.float64), 100 + depths, 10000.0)
    assert_close(q_rope, want, 4 * EPS[dtype], "rope", scale=pair_size(part))


@each_dtype
@pytest.mark.parametrize("m", ODD_SIZES)
def test_append_latent_writes_its_rows_and_no_other(m, dtype):
    rng = np.random.default_rng(m)
    context_len, query, rank, dim = 61, 17, 33, 8
    qkv = rng.standard_normal((m, query + rank + dim)).astype(DTYPES[dtype])
    weight = rng.standard_normal(query + rank).astype(DTYPES[dtype])
    q_lora = np.full((m, query), np.nan, DTYPES[dtype])
    depths = rng.integers(20, size=m).astype(np.int32)  # a tree's: rows and positions differ
    latents, ropes = (np.full((NUM_POSITIONS, width), np.nan, DTYPES[dtype]) for width in (rank, dim))
    append_latent(qkv, weight, 1e-6, *tables(dim, dtype), depths, context_len, q_lora, latents, ropes)
    new = slice(context_len, context_len + m)
    normed = np.empty((m, rank), DTYPES[dtype])
    rms_norm(qkv[:, query : query + rank], weight[query:], 1e-6, normed)
    assert_same_bits(latents[new], normed, "latents")
    rms_norm(qkv[:, :query], weight[:query], 1e-6, want_query := np.empty_like(q_lora))
    assert_same_bits(q_lora, want_query, "the query's part")
    key = qkv[:, None, query + rank :]
    want = turned(key.astype(np.float64), context_len + depths, 10000.0)[:, 0]
    assert_close(ropes[new], want, 4 * EPS[dtype], "ropes", scale=pair_size(key)[:, 0])
    for cache in (latents, ropes):
        assert np.isnan(cache[: new.start]).all() and np.isnan(cache[new.stop :]).all()


def test_append_latent_up_to_the_last_row_and_not_past_it():
    kv, weight, at = np.ones((3, 12)), np.ones(4), tables(8, "f64")
    depths = np.arange(3, dtype=np.int32)
    caches = np.full((10, 4), np.nan), np.full((10, 8), np.nan)
    none = np.empty((3, 0))
    append_latent(kv, weight, 1e-6, *at, depths, 7, none, *caches)
    assert np.isfinite(caches[0][7:]).all()
    with pytest.raises(AssertionError):
        append_latent(kv, weight, 1e-6, *at, depths, 8, none, *caches)


@each_dtype
def test_append_rows_writes_its_rows_and_no_other(dtype):
    rows = np.random.default_rng(0).standard_normal((3, 2, 5)).astype(DTYPES[dtype])
    for context_len in (0, 4, 7):
        cache = np.full((10, 2, 5), np.nan, DTYPES[dtype])
        append_rows(rows, context_len, cache)
        assert_same_bits(cache[context_len : context_len + 3], rows, f"rows at {context_len}")
        assert np.isnan(cache[:context_len]).all() and np.isnan(cache[context_len + 3 :]).all()
    with pytest.raises(AssertionError):
        append_rows(rows, 8, np.zeros((10, 2, 5), DTYPES[dtype]))
