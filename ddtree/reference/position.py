"""Rotary embedding by position in NeoX (half-split) order, the query split and the latent append.

`cos` and `sin` are tables [positions, dim / 2]; a row at depth d of a call stands at position context_len + d.
"""

import numpy as np

from ddtree.reference.pointwise import rms_norm


def rope(
    x: np.ndarray, cos: np.ndarray, sin: np.ndarray, depths: np.ndarray, context_len: int, out: np.ndarray
) -> None:
    """Rotate the halves of the last axis: x and out [M, heads, D], cos and sin [P, D / 2], depths i32[M]."""
    positions = int(context_len) + depths
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]
    half = x.shape[-1] // 2
    first, second = x[..., :half].copy(), x[..., half:]
    out[..., :half], out[..., half:] = first * c - second * s, second * c + first * s


def split_query(
    query: np.ndarray,
    cos: np.ndarray,
    sin: np.ndarray,
    depths: np.ndarray,
    context_len: int,
    q_nope: np.ndarray,
    q_rope: np.ndarray,
) -> None:
    """Split each head of query [M, H, nope + rope] into q_nope [M, H, nope] and rotated q_rope [M, H, rope]."""
    nope = q_nope.shape[-1]
    q_nope[...] = query[..., :nope]
    rope(query[..., nope:], cos, sin, depths, context_len, q_rope)


def append_latent(
    qkv: np.ndarray,
    norm_weight: np.ndarray,
    eps: float,
    cos: np.ndarray,
    sin: np.ndarray,
    depths: np.ndarray,
    context_len: int,
    q_lora: np.ndarray,
    latent_cache: np.ndarray,
    rope_cache: np.ndarray,
) -> None:
    """Norm the query's part of each row, and write M new cache rows at context_len: normed latent, rotated shared key.

    qkv [M, Q + R + P] (q_a's and kv_a's outputs side by side), norm_weight [Q + R] (both norms'), q_lora [M, Q], where
    Q may be 0, latent_cache [capacity, R], rope_cache [capacity, P].
    """
    start, query = int(context_len), q_lora.shape[1]
    rows, rank = slice(start, start + len(qkv)), query + latent_cache.shape[1]
    assert rows.stop <= len(latent_cache), "the engine checks the capacity before it calls"
    if query:
        rms_norm(qkv[:, :query], norm_weight[:query], eps, q_lora)
    rms_norm(qkv[:, query:rank], norm_weight[query:], eps, latent_cache[rows])
    rope(qkv[:, None, rank:], cos, sin, depths, start, rope_cache[rows, None, :])


def append_rows(rows: np.ndarray, context_len: int, cache: np.ndarray) -> None:
    """cache[context_len + i] = rows[i]; rows [M, ...], cache [capacity, ...] of the same trailing shape."""
    start = int(context_len)
    assert start + len(rows) <= len(cache), "the engine checks the capacity before it calls"
    cache[start : start + len(rows)] = rows
