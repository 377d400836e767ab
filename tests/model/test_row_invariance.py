"""A row's bits do not depend on who rides along: prefill == n decodes == chain verify == each tree path alone.

Everything here is equality of bits, in logits, features and the cache rows of every layer.
"""

import functools

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from model.quantised_models import quantised_tiny
from support import (
    commit_chain,
    make_model,
    poison,
    poisoned_cache,
    random_order,
    random_tree,
    reordered,
    tiny,
    trained,
)

from ddtree.batch import ForwardBatch, chain_batch, tree_batch
from ddtree.cache import LatentCache
from ddtree.errors import CapacityError
from ddtree.tree import DraftTree

NUM_TOKENS = 140  # two tile boundaries and some
MODELS = [(name, dtype) for name in ("py12m", "dsv3_yarn") for dtype in ("f32", "f64")]
MODELS += [("int4", "f32"), ("fp8", "f32")]  # the tiny target, quantised
CONTEXTS = (1, 62, 63, 64, 65, 66, 127, 128, 129)
ROOT_TOKEN = 5
each_model = pytest.mark.parametrize(("name", "dtype"), MODELS)


def bundle_of(name):
    if name in ("int4", "fp8"):
        return quantised_tiny(name)
    return trained() if name == "py12m" else tiny(name)


@functools.cache
def model_of(name, dtype):
    return make_model(bundle_of(name), dtype, max_rows=NUM_TOKENS)


def text(name):
    """NUM_TOKENS token ids, every id of the vocabulary as likely."""
    vocab = model_of(name, "f32").config.vocab_size
    return np.random.default_rng(7).integers(vocab, size=NUM_TOKENS).astype(np.int32)


@functools.cache
def one_by_one(name, dtype):
    """(logits, features, caches) of the text, a forward a token: what autoregressive decoding computes."""
    model = model_of(name, dtype)
    cache = poisoned_cache(model)
    logits, features = commit_chain(model, cache, text(name), chunk=1)
    return logits, features, [array[:NUM_TOKENS].copy() for array in cache.arrays]


def committed(name, dtype, context_len, token_ids=None):
    """A cache with the text's first rows committed, NaN beyond them, and the scratch poisoned."""
    model = model_of(name, dtype)
    cache = poisoned_cache(model)
    for array, rows in zip(cache.arrays, one_by_one(name, dtype)[2], strict=True):
        array[:context_len] = rows[:context_len]
    cache.context_len = context_len
    return cache


def forward(model, cache, batch):
    """(logits, features, caches' new rows) of one forward."""
    logits, features = model.forward(batch, cache)
    start = cache.context_len
    return [logits, features, *(array[start : start + batch.num_rows] for array in cache.arrays)]


def assert_rows(got, want, what):
    """Same bits in logits, features and every cache."""
    for index, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        part = {0: "logits", 1: "features"}.get(index, f"cache array {index - 2}")
        assert_same_bits(mine, theirs, f"{what}: {part}")


def path_alone(model, cache, tree):
    """Every row of a tree decoded alone, M = 1, its ancestors committed: [logits, features, caches' rows]."""
    context_len, rows = cache.context_len, {}
    waiting = [0]
    while waiting:  # depth first, so that the rows below a node are its own ancestors'
        row = waiting.pop()
        waiting.extend(tree.children(row).tolist())
        cache.context_len = context_len + int(tree.depths[row])
        poison([array[cache.context_len :] for array in cache.arrays])
        rows[row] = [
            array.copy()
            for array in forward(model, cache, chain_batch(tree.token_ids[[row]], cache.context_len))
        ]
    cache.context_len = context_len
    return [np.concatenate(part) for part in zip(*(rows[row] for row in sorted(rows)), strict=True)]


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 3, 31, 32, 33, 63, 64, 65])
@each_model
def test_prefill_in_any_chunks_is_n_decodes(name, dtype, chunk):
    model = model_of(name, dtype)
    cache = poisoned_cache(model)
    logits, features = commit_chain(model, cache, text(name), chunk)
    want_logits, want_features, want_caches = one_by_one(name, dtype)
    got = [logits, features, *(array[:NUM_TOKENS] for array in cache.arrays)]
    assert_rows(got, [want_logits, want_features, *want_caches], f"{name} {dtype} chunks of {chunk}")
    assert all(np.isnan(array[NUM_TOKENS:]).all() for array in cache.arrays)


@pytest.mark.parametrize("context_len", CONTEXTS)
@each_model
def test_a_verified_chain_is_n_decodes(name, dtype, context_len):
    rows = slice(context_len, min(context_len + 16, NUM_TOKENS))
    tokens = text(name)[rows]
    depths = np.arange(len(tokens), dtype=np.int32)
    tree = DraftTree(tokens, depths - 1, depths, -depths.astype(np.float64))
    want = [array[rows] for array in (*one_by_one(name, dtype)[:2], *one_by_one(name, dtype)[2])]
    for width in (None, len(tokens) + 9):  # a lineage wider than the tree, -1 beyond it, says the same
        batch = ForwardBatch(tree.token_ids, tree.depths, tree.lineage(width), context_len)
        got = forward(model_of(name, dtype), committed(name, dtype, context_len), batch)
        assert_rows(got, want, f"{name} {dtype} at {context_len}, lineage width {width}")


@pytest.mark.parametrize("context_len", CONTEXTS)
@each_model
def test_each_row_of_a_tree_is_its_own_path_alone_and_any_order_of_the_rows_will_do(name, dtype, context_len):
    model = model_of(name, dtype)
    rng = np.random.default_rng(context_len)
    tree = random_tree(rng, 20, model.config.vocab_size, ROOT_TOKEN)
    assert tree.max_depth >= 3 and len(set(tree.parents.tolist())) < tree.num_nodes  # deep, and it branches
    want = path_alone(model, committed(name, dtype, context_len), tree)
    got = forward(model, committed(name, dtype, context_len), tree_batch(tree, context_len))
    assert_rows(got, want, f"{name} {dtype} tree at {context_len}")
    order = random_order(rng, tree)
    assert order.tolist() != sorted(order)
    other = reordered(tree, order)
    got = forward(model, committed(name, dtype, context_len), tree_batch(other, context_len))
    assert_rows(
        got, [part[order] for part in want], f"{name} {dtype} tree at {context_len}, rows {order.tolist()}"
    )


@pytest.mark.parametrize("others", [0, 1, 2, 7, 33, 130])
@each_model
def test_a_row_among_others(name, dtype, others):
    """The path root, a, b keeps its bits with any number of other rows before, between and after its own."""
    model, context_len = model_of(name, dtype), 64
    rng = np.random.default_rng(others)
    path = np.array([ROOT_TOKEN, 17, 23], np.int32)
    depths = np.arange(3, dtype=np.int32)
    alone = DraftTree(path, depths - 1, depths, np.zeros(3))
    want = path_alone(model, committed(name, dtype, context_len), alone)
    crowd = random_tree(rng, others, model.config.vocab_size - 100, ROOT_TOKEN)
    tokens = np.concatenate([crowd.token_ids + 100, path[1:]]).astype(np.int32)
    tokens[0] = ROOT_TOKEN
    parents = np.concatenate([crowd.parents, [0, others + 1]]).astype(np.int32)
    tree = DraftTree(
        tokens, parents, np.concatenate([crowd.depths, [1, 2]]).astype(np.int32), np.zeros(others + 3)
    )
    order = random_order(rng, tree)
    got = forward(model, committed(name, dtype, context_len), tree_batch(reordered(tree, order), context_len))
    at = [order.tolist().index(row) for row in (0, others + 1, others + 2)]
    assert_rows([part[at] for part in got], want, f"{name} {dtype} among {others} others, rows {at}")


@pytest.mark.parametrize("context_len", [60, 63, 64, 126])
@each_model
def test_before_and_after_ancestors_are_committed(name, dtype, context_len):
    """The rows below each node of the deepest path, verified once that node is the root, keep their bits."""
    model = model_of(name, dtype)
    tree = random_tree(np.random.default_rng(99), 18, model.config.vocab_size, ROOT_TOKEN)
    cache = committed(name, dtype, context_len)
    want = [part.copy() for part in forward(model, cache, tree_batch(tree, context_len))]
    path = tree.path(int(tree.depths.argmax()))
    assert len(path) >= 4
    for depth, top in enumerate(path[1:], start=1):
        rows = np.array([row for row in range(len(tree.depths)) if top in tree.path(row)])
        parents = np.array([-1] + [rows.tolist().index(tree.parents[row]) for row in rows[1:]], np.int32)
        below = DraftTree(
            tree.token_ids[rows], parents, tree.depths[rows] - np.int32(depth), tree.log_weights[rows]
        )
        cache = committed(name, dtype, context_len)
        for array, stored in zip(cache.arrays, want[2:], strict=True):
            array[context_len : context_len + depth] = stored[path[:depth]]
        cache.context_len += depth
        got = forward(model, cache, tree_batch(below, cache.context_len))
        assert_rows(got, [part[rows] for part in want], f"{name} {dtype} at {context_len}, {depth} committed")


@each_model
def test_a_row_of_nan_leaves_the_others_alone(name, dtype):
    """A row whose embedding is NaN makes NaN of itself and what stands below it, of no other row."""
    model, context_len = model_of(name, dtype), 70
    broken = make_model(bundle_of(name), dtype, max_rows=NUM_TOKENS)
    tree = random_tree(np.random.default_rng(4), 16, model.config.vocab_size, ROOT_TOKEN)
    bad_row = 3
    assert (tree.token_ids == tree.token_ids[bad_row]).sum() == 1 and len(tree.children(bad_row))
    broken.weights.embedding[tree.token_ids[bad_row]] = np.nan
    batch = tree_batch(tree, context_len)
    below = batch.visible[:, bad_row]
    want = [part.copy() for part in forward(model, committed(name, dtype, context_len), batch)]
    got = forward(broken, committed(name, dtype, context_len), batch)
    assert np.isnan(got[0][below]).all() and below.sum() >= 2
    assert_rows([part[~below] for part in got], [part[~below] for part in want], f"{name} {dtype} beside NaN")


def test_too_many_rows_or_too_full_a_cache_is_refused_before_any_write():
    model = model_of("dsv3_yarn", "f32")
    cache = LatentCache(model.config, 20, model.ops)
    poison(cache.arrays)
    for count, context_len, says in (
        (NUM_TOKENS + 1, 0, f"{NUM_TOKENS + 1} rows"),
        (5, 16, "5 rows on top of 16"),
    ):
        cache.context_len = context_len
        with pytest.raises(CapacityError, match=says) as caught:
            model.forward(chain_batch(np.zeros(count, np.int32), context_len), cache)
        assert "\n" not in str(caught.value)
        assert cache.context_len == context_len and all(np.isnan(array).all() for array in cache.arrays)


# --- these tests can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_plain_matrix_products_break_the_equality(monkeypatch, dtype):
    """With x @ w.T in place of `linear`, whose order of summation BLAS chooses by shape, rows change their bits."""
    model = model_of("py12m", dtype)
    want = one_by_one("py12m", dtype)[0]
    monkeypatch.setattr(
        model.ops, "linear", lambda x, weight, out: np.matmul(x, weight.T, out=out), raising=False
    )
    for chunk in (3, 31, 33, 64, NUM_TOKENS):
        got, _ = commit_chain(model, poisoned_cache(model), text("py12m"), chunk)
        if got.tobytes() != want.tobytes():
            with pytest.raises(AssertionError, match="logits: bits differ"):
                assert_rows([got], [want], "plain")
            return
    pytest.skip("this machine's BLAS gives every shape tried the same bits")


def test_attention_that_counts_from_the_root_breaks_the_equality(monkeypatch):
    """With keys tiled from the context's end on, an ancestor's being committed changes the order of summation."""
    model, context_len = model_of("py12m", "f32"), 65
    want = [part[context_len : context_len + 8] for part in one_by_one("py12m", "f32")[:2]]
    monkeypatch.setattr(model.ops, "attention", _attention_from_the_root, raising=False)
    cache = committed("py12m", "f32", context_len)
    got = forward(model, cache, chain_batch(text("py12m")[context_len : context_len + 8], context_len))
    with pytest.raises(AssertionError, match="bits differ"):
        assert_rows(got[:2], want, "counted from the root")


def _attention_from_the_root(
    q_latent, q_rope, latent_cache, rope_cache, lineage, depths, context_len, scale, out
):
    """The same softmax, committed keys summed first and the tree's after them."""
    for row in range(len(q_latent)):
        rows = [np.arange(context_len), context_len + lineage[row, : depths[row] + 1]]
        scores = [
            (q_latent[row] @ latent_cache[r].T + q_rope[row] @ rope_cache[r].T) * q_latent.dtype.type(scale)
            for r in rows
        ]
        peak = np.maximum(scores[0].max(1), scores[1].max(1))[:, None]
        weights = [np.exp(score - peak) for score in scores]
        total = sum(weight.sum(1, keepdims=True) for weight in weights)
        out[row] = sum(weight @ latent_cache[r] for weight, r in zip(weights, rows, strict=True)) / total
