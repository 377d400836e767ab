"""Absorbed MLA attention of tree rows over the latent and rope caches, tiled by position.

Keys are cut into tiles of 64 positions. Each (row, tile) pair is a product of one fixed shape, and tiles are
summed in the order of position, so a row's bits depend on its own position and ancestors alone: not on other rows,
nor on whether an ancestor is committed or still a row of the tree.
"""

import numpy as np

TILE = 64
ROWS_AT_ONCE = 64  # bounds the temporary arrays; no row's arithmetic depends on it


def attention(
    q_latent: np.ndarray,
    q_rope: np.ndarray,
    latent_cache: np.ndarray,
    rope_cache: np.ndarray,
    lineage: np.ndarray,
    depths: np.ndarray,
    context_len: int,
    scale: float,
    out: np.ndarray,
) -> None:
    """out[i, h] = softmax(scale * (q_latent . latents + q_rope . ropes)) @ latents over positions 0..p of row i.

    q_latent and out [M, H, R], q_rope [M, H, P], latent_cache [capacity, R], rope_cache [capacity, P], lineage
    i32[M, D], depths i32[M]. Position q < context_len is cache row q, a later one the row
    context_len + lineage[i, q - context_len]. Cache rows outside these are never used, whatever they hold.
    """
    context = int(context_len)
    for start in range(0, len(q_latent), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        last = context + int(depths[part].max())
        shared = context // TILE  # tiles that are committed rows for every query
        source = _source_rows(lineage[part], depths[part], context, shared, last // TILE + 1)
        keys = [_tiles(cache, shared, source) for cache in (latent_cache, rope_cache)]
        _attend(q_latent[part], q_rope[part], keys[0], keys[1], source < 0, scale, out[part])


def _source_rows(lineage: np.ndarray, depths: np.ndarray, context: int, first: int, stop: int) -> np.ndarray:
    """Cache row behind each position of tiles first..stop-1, i64[rows, tiles, TILE]; -1 past the row's own."""
    positions = np.arange(first * TILE, stop * TILE)
    depth = np.clip(positions - context, 0, lineage.shape[1] - 1)
    rows = np.where(positions < context, positions, context + lineage[:, depth])
    rows = np.where(positions <= context + depths[:, None], rows, -1)
    return rows.reshape(len(lineage), stop - first, TILE)


def _tiles(cache: np.ndarray, shared: int, source: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tiles every row shares [1, shared, TILE, W] and each row's own [rows, tiles, TILE, W], zero where unused."""
    common = cache[: shared * TILE].reshape(1, shared, TILE, cache.shape[1])
    own = cache[np.maximum(source, 0)]
    own[source < 0] = 0
    return common, own


def _attend(
    q_latent: np.ndarray,
    q_rope: np.ndarray,
    latents: tuple[np.ndarray, np.ndarray],
    ropes: tuple[np.ndarray, np.ndarray],
    hidden: np.ndarray,
    scale: float,
    out: np.ndarray,
) -> None:
    """Softmax attention over the shared tiles followed by the own ones."""
    scores = []
    for latent, rope in zip(latents, ropes, strict=True):
        score = np.matmul(q_latent[:, None], latent.transpose(0, 1, 3, 2))
        score += np.matmul(q_rope[:, None], rope.transpose(0, 1, 3, 2))
        score *= q_latent.dtype.type(scale)
        scores.append(score)
    scores[1][np.broadcast_to(hidden[:, :, None, :], scores[1].shape)] = -np.inf
    peak = np.maximum.reduce([score.max(axis=(1, 3)) for score in scores if score.shape[1]])
    total = np.zeros(out.shape[:2] + (1,), out.dtype)
    out[...] = 0
    for score, latent in zip(scores, latents, strict=True):
        weight = np.exp(score - peak[:, None, :, None])
        sums, values = weight.sum(axis=-1, keepdims=True), np.matmul(weight, latent)
        for tile in range(weight.shape[1]):  # in the order of position: np.sum might pair the tiles up
            total += sums[:, tile]
            out += values[:, tile]
    out /= total
