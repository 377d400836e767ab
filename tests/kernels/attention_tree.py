"""What tests of the tree-verify attention share: cases, their inputs, one launch of the kernel, and the f64 oracle."""

from dataclasses import dataclass

import numpy as np
from compare_arrays import assert_same_bits
from kernels.device import bf16_bits, bf16_values, poisoned, scalar, to_device, to_host
from kernels.softmax import softmax_average
from seeds import fresh_seed
from support import random_order, random_tree, reordered

from ddtree.tree import DraftTree
from kernels_numba.attention import attention_scratch, portable_attention
from kernels_numba.attention_combine import TILE
from kernels_numba.primitives_attend_steps import key_warps_for, plan_of

# A product of 16 elements on tensor cores cuts each of its 17 summands off at 2**-25 of the largest (Hopper keeps two
# bits more than an f32 has), and the sum to an f32: 17 x 2**-25 + 2**-23 at most of the sum of magnitudes.
PRODUCT_EPS = 5.25
GUARD = 64  # elements behind outputs


def chains_of(plan, num_keys, half):
    """The chains of roundings of a score and of a sum over keys, which `softmax_average` wants, at worst.

    A score: a warp's share of the dims, then the warps. A sum, all keys in one split: for each 16 keys the products of
    a weight's three bf16 with a value's one, or six of the nine with an f32 value's three; then the splits.
    """
    products = 3 if half else 6
    return PRODUCT_EPS * plan.own_steps + plan.dim_warps, PRODUCT_EPS * products * -(-num_keys // 16) + 8


SEED = fresh_seed()


@dataclass(frozen=True)
class Case:
    """`rows` rows of a tree on `context_len` committed ones; `kind` says what is hard about the numbers."""

    context_len: int
    rows: int = 1
    heads: int = 1
    rank: int = 8
    rope: int = 8
    half: bool = False
    tree: str = "bushy"
    kind: str = "normal"
    spare: int = 3  # cache rows behind the tree's

    def __str__(self):
        mode = "bf16" if self.half else "f32"
        sizes = f"context{self.context_len}-{self.tree}{self.rows}-heads{self.heads}-{self.rank}+{self.rope}"
        return f"{self.kind}-{sizes}-{mode}"


def make_tree(rng, case):
    """A DraftTree of `rows` rows: a chain, a random one, or a spine whose every row has siblings."""
    if case.tree == "bushy":
        return random_tree(rng, case.rows - 1, 10**6)
    rows = np.arange(case.rows, dtype=np.int32)
    parents = rows - 1 if case.tree == "chain" else np.where(rows, (rows - 1) // 3 * 3, -1).astype(np.int32)
    depths = np.zeros_like(rows)
    for row in rows[1:]:
        depths[row] = depths[parents[row]] + 1
    return DraftTree(rows, parents, depths, -rows.astype(np.float64)).validate()


def make(case, seed=SEED):
    """(tree, queries, caches): queries f32 [M, H, R] and [M, H, P], caches with NaN behind the tree's rows."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    tree, total = make_tree(rng, case), case.context_len + case.rows
    queries = [rng.standard_normal((case.rows, case.heads, width)) for width in (case.rank, case.rope)]
    caches = [rng.standard_normal((total, width)) for width in (case.rank, case.rope)]
    if case.kind == "outliers":
        caches[0][:: total // 5] *= 1e4
        queries[1][::3] *= 1e2
    elif case.kind == "equal keys":
        caches[0][:], caches[1][:] = caches[0][0], caches[1][0]
    elif case.kind == "one key wins":
        caches[1][case.context_len // 2] = 1e3
        queries[1] = np.abs(queries[1])
    elif case.kind == "tiny":
        caches[0], queries[0] = caches[0] * 1e-20, queries[0] * 1e-20
    caches = [np.concatenate([cache, np.full((case.spare, cache.shape[1]), np.nan)]) for cache in caches]
    return tree, *([np.asarray(array, np.float32) for array in arrays] for arrays in (queries, caches))


def scale_of(case):
    """The softmax scale: scores of a few units, as a model has them."""
    return 2.0 / (case.rank + case.rope) ** 0.5


def launch(case, queries, caches, lineage, depths, context_len, attention=portable_attention):
    """A launcher's output on the host; what stands behind the output and the scratch is found unchanged."""
    rows, heads, rank = queries[0].shape
    stored = [bf16_bits(cache) if case.half else cache for cache in caches]
    wanted = attention_scratch(rows, heads, rank, len(caches[0]))
    out, scratch = poisoned(rows * heads * rank + GUARD), poisoned(wanted + GUARD)
    attention(
        *(to_device(array) for array in (*queries, *stored, lineage, depths)),
        scalar(context_len),
        scale_of(case),
        out[: rows * heads * rank].reshape(rows, heads, rank),
        scratch[:wanted],
    )
    assert np.isnan(to_host(scratch)[wanted:]).all(), "written behind the scratch"
    host = to_host(out)
    assert np.isnan(host[rows * heads * rank :]).all(), "written behind the output"
    return host[: rows * heads * rank].reshape(rows, heads, rank)


def portable_chains(case, num_keys):
    """`chains_of` the portable kernel."""
    width = case.rank + case.rope
    plan = plan_of(width, width, case.half, key_warps_for(width, width, case.half))
    return chains_of(plan, num_keys, case.half)


def textbook(case, tree, queries, caches, chains=portable_chains):
    """(out, allowed), f64 [M, H, R]: a softmax over each row's gathered keys, and `softmax_average`'s error bound.

    chains(case, num_keys) are the chains of roundings that `softmax_average` wants.
    """
    rounded = [bf16_values(bf16_bits(array)) if case.half else array for array in (*queries, *caches)]
    query, cache = (np.concatenate(rounded[i : i + 2], axis=-1) for i in (0, 2))
    out, allowed = np.empty((2, case.rows, case.heads, case.rank))
    for row in range(case.rows):
        seen = [*range(case.context_len), *(case.context_len + at for at in tree.path(row))]
        keys = cache[seen]
        out[row], allowed[row] = softmax_average(
            query[row], keys, keys[:, : case.rank], scale_of(case), *chains(case, len(seen))
        )
    return out, allowed


def check_a_row_keeps_its_bits(case, picked, attention=portable_attention):
    """Rows alone, with the rows in another order, and in a cache of another capacity."""
    tree, queries, caches = make(case)
    lineage = tree.lineage()
    want = launch(case, queries, caches, lineage, tree.depths, case.context_len, attention)
    for row in picked:
        one = [query[row : row + 1] for query in queries]
        hidden = np.setdiff1d(np.arange(case.rows), tree.path(row))
        own = [cache.copy() for cache in caches]
        for cache in own:
            cache[case.context_len + hidden] = np.nan  # rejected rows, and those of other branches
        alone = lineage[row : row + 1], tree.depths[row : row + 1], case.context_len
        assert_same_bits(launch(case, one, own, *alone, attention)[0], want[row], f"row {row} alone")
    order = random_order(np.random.default_rng(1), tree)
    other = reordered(tree, order)
    moved = [cache.copy() for cache in caches]
    for cache, source in zip(moved, caches, strict=True):
        cache[case.context_len : case.context_len + case.rows] = source[case.context_len + order]
    moved = [
        np.concatenate([cache, np.full((3 * TILE, cache.shape[1]), np.nan, np.float32)]) for cache in moved
    ]
    shuffled = [query[order] for query in queries]
    wider = other.lineage(other.max_depth + 4)
    got = launch(case, shuffled, moved, wider, other.depths, case.context_len, attention)
    assert_same_bits(got, want[order], "reordered, in a larger cache")


def check_committed_ancestors_change_nothing(case, committed, attention=portable_attention):
    """The deepest row with the first of its ancestors moved into the context, and the rest of them in reverse order.

    `committed` of a path's length gives how many ancestors to move, one number after another.
    """
    tree, queries, caches = make(case)
    row = int(tree.depths.argmax())
    path = np.array(tree.path(row))
    want = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len, attention)[row]
    for moved in committed(len(path)):
        context_len, rest = case.context_len + moved, path[moved:]
        own = [np.full_like(cache, np.nan) for cache in caches]
        for cache, source in zip(own, caches, strict=True):
            cache[: case.context_len] = source[: case.context_len]
            cache[case.context_len : context_len] = source[case.context_len + path[:moved]]
            cache[context_len : context_len + len(rest)] = source[case.context_len + rest[::-1]]
        lineage = np.full((1, len(rest) + 2), -1, np.int32)
        lineage[0, : len(rest)] = np.arange(len(rest))[::-1]
        depth = np.array([len(rest) - 1], np.int32)
        one = [query[row : row + 1] for query in queries]
        got = launch(case, one, own, lineage, depth, context_len, attention)
        assert_same_bits(got[0], want, f"{moved} ancestors committed")
