"""The drafter's attention: a block of queries over a window of context and over the whole block, no causality."""

import numpy as np


def block_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_key: np.ndarray,
    block_value: np.ndarray,
    context_len: int,
    window: int,
    scale: float,
    out: np.ndarray,
) -> None:
    """Grouped-query attention over the last `window` rows of the context (0: all) and then the block's own rows.

    query and out [B, H, D], caches [capacity, G, D], block_key and block_value [B, G, D]; head h reads key head
    h // (H / G). B is the drafter's block size.
    """
    block, heads, dim = query.shape
    groups = key_cache.shape[1]
    context = slice(max(0, int(context_len) - window) if window else 0, int(context_len))
    keys = np.concatenate([key_cache[context], block_key]).transpose(1, 2, 0)  # [G, D, S]
    values = np.concatenate([value_cache[context], block_value]).transpose(1, 0, 2)  # [G, S, D]
    grouped = query.reshape(block, groups, heads // groups, dim).transpose(1, 2, 0, 3)  # [G, H/G, B, D]
    scores = np.matmul(grouped, keys[:, None]) * query.dtype.type(scale)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    result = np.matmul(weights, values[:, None])
    out[...] = result.transpose(2, 0, 1, 3).reshape(block, heads, dim)
