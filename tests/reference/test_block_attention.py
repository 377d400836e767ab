"""The drafter's attention against loops over heads, queries and keys, in f64."""

import math

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from support import DTYPES, EPS, ODD_SIZES

from ddtree.reference.block_attention import block_attention

BLOCK, DIM = 5, 6
LAYOUTS = [(1, 1), (4, 2), (6, 2), (3, 3), (8, 1)]  # heads, key heads


def literal(query, keys, values, scale):
    """keys and values [S, G, D] are all those seen; head h reads key head h // (H / G)."""
    query, keys, values = (a.astype(np.float64) for a in (query, keys, values))
    block, heads, dim = query.shape
    per_group = heads // keys.shape[1]
    out = np.empty(query.shape)
    for i in range(block):
        for h in range(heads):
            g = h // per_group
            scores = [scale * math.fsum(query[i, h] * key[g]) for key in keys]
            weights = [math.exp(score - max(scores)) for score in scores]
            for d in range(dim):
                terms = (w * value[g, d] for w, value in zip(weights, values, strict=True))
                out[i, h, d] = math.fsum(terms) / math.fsum(weights)
    return out


def make(heads, groups, capacity, dtype, seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(BLOCK, heads, DIM), *[(capacity, groups, DIM)] * 2, *[(BLOCK, groups, DIM)] * 2]
    return [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]


def run(query, keys, values, block_key, block_value, context_len, window, scale=0.4):
    """Into NaN, with NaN in every cache row outside the window; the literal result beside it."""
    keys, values = keys.copy(), values.copy()
    start = max(0, context_len - window) if window else 0
    for cache in (keys, values):
        cache[:start] = cache[context_len:] = np.nan
    out = np.full(query.shape, np.nan, query.dtype)
    block_attention(query, keys, values, block_key, block_value, context_len, window, scale, out)
    seen = (
        np.concatenate([cache[start:context_len], block])
        for cache, block in ((keys, block_key), (values, block_value))
    )
    return out, literal(query, *seen, scale)


# context_len and window; a window of 0 is all of the context
WINDOWS = [(0, 0), (0, 5), (1, 0), (1, 1), (7, 0), (7, 1), (7, 4), (7, 6), (7, 7), (7, 100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups"), LAYOUTS)
@pytest.mark.parametrize(("context_len", "window"), WINDOWS)
def test_window_and_block(context_len, window, heads, groups, dtype):
    out, want = run(*make(heads, groups, 9, dtype), context_len, window)
    assert_close(
        out, want, 20 * EPS[dtype], f"{heads}/{groups} heads, context {context_len}, window {window}"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("context_len", ODD_SIZES)
def test_context_lengths(context_len, dtype):
    out, want = run(*make(4, 2, context_len, dtype), context_len, 0)
    assert_close(out, want, 20 * EPS[dtype], f"context {context_len}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_and_ties(dtype):
    arrays = make(4, 2, 9, dtype, seed=1)
    arrays[1][4] = 1e4  # one key of the context takes or loses all
    out, want = run(*arrays, 9, 0)
    assert_close(out, want, 20 * EPS[dtype], "one key of 1e4")
    query, keys, values, block_key, block_value = make(4, 2, 9, dtype, seed=2)
    keys[:], block_key[:] = 1, 1
    out, _ = run(query, keys, values, block_key, block_value, 9, 7)
    mean = np.concatenate([values[2:9], block_value]).astype(np.float64).mean(axis=0)
    want = np.broadcast_to(np.repeat(mean, 2, axis=0), out.shape)
    assert_close(out, want, 20 * EPS[dtype], "equal keys")


def test_the_block_has_no_causality():
    """The first query sees the last key of the block."""
    arrays = make(4, 2, 3, "f64")
    first, _ = run(*arrays, 3, 0)
    arrays[4][-1] += 1
    second, _ = run(*arrays, 3, 0)
    assert (np.abs(second[0] - first[0]) > 1e-3).all()


def test_rows_of_a_block_do_not_depend_on_the_cache_capacity():
    arrays = make(4, 2, 40, "f32")
    large, _ = run(*arrays, 9, 6)
    small, _ = run(arrays[0], arrays[1][:9].copy(), arrays[2][:9].copy(), *arrays[3:], 9, 6)
    assert_same_bits(large, small, "capacity 40 and 9")
