"""The tree-verify attention against a plain gather and softmax in f64, and its rows against themselves, bit for bit."""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.attention_tree import (
    Case,
    check_a_row_keeps_its_bits,
    check_committed_ancestors_change_nothing,
    launch,
    make,
    scale_of,
    textbook,
)
from kernels.device import bf16_bits, bf16_values
from kernels.softmax import EPS, softmax_average

from kernels_numba.attention_combine import MAX_SPLITS, SHORT_SPLITS, TILE, span_of, splits_for
from kernels_numba.primitives import SIMULATED

SHORT = 16 if SIMULATED else 64  # a step of small shapes: from here on a row has two splits
LONG = MAX_SPLITS * TILE  # from here on a split has two tiles
SMALL = [
    Case(0),
    Case(1, heads=3),
    *(Case(SHORT + past, half=past == 0) for past in (-2, -1, 0)),
    *(Case(TILE + past, half=past == 0) for past in (-1, 0)),
    Case(LONG),
    Case(LONG + 5, half=True),
    Case(SHORT - 3, rows=5, tree="chain"),
    Case(5, rows=4, heads=5, rank=24, rope=16, tree="spine"),
    Case(5, rows=3, heads=8, rank=16, half=True),
    Case(9, heads=17, rank=32, rope=40),
    *(Case(9, rows=2, kind=kind) for kind in ("outliers", "one key wins")),
]
KIMI, MODEL = {"rank": 512, "rope": 64}, {"rank": 64, "rope": 16, "heads": 8}
LARGE = [
    *(Case(context_len, rows=5, **MODEL) for context_len in (0, 1, 62, 63, 64, 65, 66, 127, 128, 129, 1000)),
    *(Case(61, rows=rows, half=True, **MODEL) for rows in (1, 3, 31, 32, 33, 63, 64, 65)),
    *(Case(300, rows=65, tree=tree, **MODEL) for tree in ("chain", "bushy", "spine")),
    Case(0, rows=300, tree="chain", **MODEL),
    *(
        Case(context_len, rows=3, heads=64, half=half, **KIMI)
        for context_len in (0, 15, 16, 31, 32, 62, 127, 128, 255, 256, 257, 512, 768, 1000, 8192)
        for half in (False, True)
    ),
    *(Case(LONG + past, heads=64, half=True, **KIMI) for past in (-1, 0, 1)),
    Case(3 * LONG + 77, heads=16, half=True, **KIMI),
    Case(700, rows=2, heads=128, half=True, **KIMI),
    *(Case(200, rows=4, heads=heads, half=True, **KIMI) for heads in (1, 3, 5, 17)),
    *(
        Case(200, rows=4, heads=3, rank=rank, rope=rope)
        for rank, rope in ((8, 8), (24, 40), (72, 16), (256, 32))
    ),
    *(Case(100, rows=9, kind=kind, **MODEL) for kind in ("outliers", "equal keys", "one key wins", "tiny")),
]
CASES = [pytest.param(case, id=str(case), marks=pytest.mark.simulator) for case in SMALL] + [
    pytest.param(case, id=str(case), marks=pytest.mark.gpu) for case in LARGE
]


@pytest.mark.parametrize("case", CASES)
def test_is_textbook_attention(case):
    tree, queries, caches = make(case)
    got = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len)
    want, allowed = textbook(case, tree, queries, caches)
    assert_close(got, want, EPS, str(case), scale=allowed)


INVARIANT = [
    pytest.param(Case(SHORT - 3, rows=3, tree="chain"), marks=pytest.mark.simulator),
    pytest.param(Case(TILE - 2, rows=4, tree="spine", half=True), marks=pytest.mark.simulator),
    *(
        pytest.param(case, marks=pytest.mark.gpu)
        for case in (
            Case(62, rows=33, **MODEL),
            Case(125, rows=65, tree="spine", **MODEL),
            *(
                Case(edge - 3, rows=9, tree="chain", heads=16, half=half, **KIMI)
                for edge in (32, 128, 256, 512, 768)
                for half in (False, True)
            ),
            Case(300, rows=64, tree="chain", half=True, **MODEL),
            Case(LONG - 3, rows=9, tree="chain", heads=8, half=True, **KIMI),
            Case(1000, rows=17, heads=64, half=True, **KIMI),
            Case(1000, rows=7, heads=5, **KIMI),
        )
    ),
]


@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_a_row_keeps_its_bits(case):
    check_a_row_keeps_its_bits(case, (0, case.rows - 1) if SIMULATED else range(case.rows))


@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_committed_ancestors_change_nothing(case):
    check_committed_ancestors_change_nothing(
        case, lambda length: {1, length - 1} if SIMULATED else range(1, length)
    )


PADDED = [
    pytest.param(Case(0, rows=2), marks=pytest.mark.simulator),
    pytest.param(Case(SHORT, rows=2, half=True), marks=pytest.mark.simulator),
    pytest.param(Case(0, rows=9, **MODEL), marks=pytest.mark.gpu),
    pytest.param(Case(1000, rows=9, heads=64, half=True, **KIMI), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_rows(case):
    """Rows of lineage -1 and depth 0 see the context alone, 0 where there is none, and disturb no other row."""
    tree, queries, caches = make(case)
    lineage, extra = tree.lineage(), 2
    want = launch(case, queries, caches, lineage, tree.depths, case.context_len)
    padded = [np.concatenate([query, np.ones((extra, *query.shape[1:]), np.float32)]) for query in queries]
    unknown = np.full((extra, lineage.shape[1]), -1, np.int32)
    depths = np.concatenate([tree.depths, np.zeros(extra, np.int32)])
    got = launch(case, padded, caches, np.concatenate([lineage, unknown]), depths, case.context_len)
    assert_same_bits(got[: case.rows], want, "the tree's rows")
    if case.context_len:
        seen = [bf16_values(bf16_bits(cache)) if case.half else cache for cache in caches]
        keys = np.concatenate(seen, axis=1)[: case.context_len]
        ones, chains = np.ones((1, keys.shape[1])), (keys.shape[1], len(keys) + 8)
        average, allowed = softmax_average(ones, keys, keys[:, : case.rank], scale_of(case), *chains)
        shape = (extra, case.heads, case.rank)
        want, allowed = np.broadcast_to(average, shape), np.broadcast_to(allowed, shape)
        assert_close(got[case.rows :], want, EPS, "padding rows", scale=allowed)
    else:
        assert (got[case.rows :] == 0).all()


POISON = [
    pytest.param(Case(SHORT + 2, rows=3), marks=pytest.mark.simulator),
    pytest.param(Case(200, rows=9, **MODEL), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("case", POISON, ids=str)
def test_a_nan_that_is_seen_is_shown(case):
    """A NaN in a row's own key reaches every head of that row and of its descendants, and no other row."""
    tree, queries, caches = make(case)
    caches[0][case.context_len + case.rows - 1, 3] = np.nan
    got = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len)
    assert np.isnan(got[-1]).all()
    assert np.isfinite(got[:-1]).all()


@pytest.mark.simulator
def test_cache_row_0_need_not_be_seen():
    """No context, and the root's row stands third: what is before it may be anything."""
    case = Case(0)
    tree, queries, caches = make(case)
    want = launch(case, queries, caches, tree.lineage(), tree.depths, 0)
    caches = [np.roll(cache, 2, axis=0) for cache in caches]
    assert_same_bits(launch(case, queries, caches, tree.lineage() + 2, tree.depths, 0), want, "two rows on")


@pytest.mark.skipif(SIMULATED, reason="the simulator's tiles are small")
@pytest.mark.parametrize("step", [16, 32, 64])
def test_how_a_row_is_split(step):
    """A step a block for the shortest rows, tiles before 900 keys; never more splits than there is room for."""
    most = 0
    for keys in (*range(1, 1100), *range(1100, 20000, 37), 4224, 4225, 8192, 8448, 8449, 163840):
        span = int(span_of.py_func(keys, np.uint32(step)))
        used = -(-keys // span)
        most = max(most, used)
        assert span % step == 0
        assert most <= splits_for(keys), keys
        if keys <= step * SHORT_SPLITS:
            assert span == step
        if keys > SHORT_SPLITS * (TILE - step):
            assert span == -(-keys // (TILE * MAX_SPLITS)) * TILE
    assert span_of.py_func(0, np.uint32(step)) == 0
    assert span_of.py_func(8192, np.uint32(step)) == 256


EXACT = [
    pytest.param(Case(0, rows=2, heads=2, tree="spine", half=half), marks=pytest.mark.simulator)
    for half in (False, True)
] + [
    pytest.param(Case(0, rows=9, half=half, **{**MODEL, **more}), marks=pytest.mark.gpu)
    for half in (False, True)
    for more in ({}, {"rank": 512, "rope": 64})
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_a_row_that_sees_one_key_returns_its_latent(case):
    """Bit for bit: the three bf16 of an f32 make it again, and a weight of 1 has no error."""
    tree, queries, caches = make(case)
    got = launch(case, queries, caches, tree.lineage(), tree.depths, 0)[0]
    latent = bf16_values(bf16_bits(caches[0][0])) if case.half else caches[0][0]
    assert_same_bits(got, np.broadcast_to(latent, got.shape), "the root's output")


@pytest.mark.simulator
@pytest.mark.parametrize("half", [False, True])
def test_an_average_of_equal_latents_is_the_latent(half):
    """Few roundings to nearest in the simulator, where a term left out of a weight or a value shows."""
    case = Case(1, heads=16, half=half)
    tree, queries, caches = make(case)
    caches[0][1] = caches[0][0]
    got = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len)
    latent = bf16_values(bf16_bits(caches[0][0])) if half else caches[0][0]
    want = np.broadcast_to(latent.astype(np.float64), got.shape)
    assert_close(got, want, 6 * EPS, "the average", elementwise=True)
