"""The warpgroup kernel of attention: against f64 and the portable kernel, its rows bit for bit, and replayed in graphs.

How items are shared out among blocks is tested without a GPU.
"""

import numpy as np
import pytest
from compare_arrays import assert_close, assert_same_bits
from kernels.attention_tree import (
    PRODUCT_EPS,
    SEED,
    Case,
    check_a_row_keeps_its_bits,
    check_committed_ancestors_change_nothing,
    launch,
    make,
    scale_of,
    textbook,
)
from kernels.device import bf16_bits, bf16_values, poisoned, to_device, to_host
from kernels.softmax import EPS
from numba import cuda, float32, int32, uint32

from kernels_numba import attention_wgmma, primitives_attend_panels
from kernels_numba.attention import attention, attention_scratch
from kernels_numba.attention_wgmma import cache_row
from kernels_numba.primitives_attend_items import (
    MAX_SPLITS,
    TILE,
    over,
    run_of,
    span_tiles,
    splits_for,
    starts_item,
    tiles_of,
)

# A weight rounded to bf16, 8 bits with the hidden one, is off by 2**-8 of itself at most.
WEIGHT_ROUNDING = 2.0**-8 / EPS


@pytest.fixture
def warpgroups():
    """Skip unless `attention` takes the warpgroup kernel here."""
    if not attention_wgmma.can_take(
        np.empty((1, 64, 512)), np.empty((1, 64, 64)), np.empty((1, 512), np.uint16)
    ):
        pytest.skip("needs a GPU of compute capability 9.0")


def chains(case, num_keys):
    """The chains of roundings of a score and of a sum, which `softmax_average` wants, at worst.

    A score: 36 products of 16 elements. A sum over all keys in one split: four products and a factor, which is a power
    of 2 and a product, for each tile; then the splits. A weight's rounding counts once.
    """
    tiles = -(-num_keys // TILE)
    return PRODUCT_EPS * 36, (PRODUCT_EPS * 4 + 4) * tiles + 8 + WEIGHT_ROUNDING


def case_of(context_len, rows=3, heads=64, **words):
    return Case(context_len, rows, heads, 512, 64, True, **words)


EDGES = (0, 1, 61, 62, 63, 64, 65, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 4095, 4096, 8191, 8192)
LARGE = [
    *map(case_of, EDGES),
    *(case_of(context_len, rows=1) for context_len in (0, 63, 64, 65535, 65536, 66000, 70000)),
    *(case_of(300, rows=rows, tree=tree) for rows in (33, 130) for tree in ("chain", "bushy", "spine")),
    *(case_of(700, heads=heads) for heads in (128, 192)),
    *(case_of(1000, kind=kind) for kind in ("outliers", "equal keys", "one key wins", "tiny")),
    case_of(
        100, rows=129, spare=66000
    ),  # splits for so large a cache leave scratch for some of the rows at once
]


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_is_textbook_attention(case):
    """Within the bound of f64, and of the portable kernel, whose own error is far below the weights' rounding."""
    tree, queries, caches = make(case)
    arguments = case, queries, caches, tree.lineage(), tree.depths, case.context_len
    got = launch(*arguments, attention)
    want, allowed = textbook(case, tree, queries, caches, chains)
    assert_close(got, want, EPS, str(case), scale=allowed)
    assert_close(got, launch(*arguments).astype(np.float64), 1.25 * EPS, "portable", scale=allowed)


INVARIANT = [
    *(case_of(edge - 3, rows=9, tree="chain") for edge in (64, 512, 1024, 2048, 8192)),
    case_of(62, rows=129),
    case_of(1000, rows=64, heads=128),
    case_of(100, rows=70, tree="spine", spare=66000),
    case_of(65536 - 2, rows=5, tree="chain"),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_a_row_keeps_its_bits(case):
    check_a_row_keeps_its_bits(case, range(0, case.rows, max(1, case.rows // 8)), attention)


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("case", INVARIANT, ids=str)
def test_committed_ancestors_change_nothing(case):
    check_committed_ancestors_change_nothing(case, lambda length: range(1, min(length, 9)), attention)


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("rows", [3, 64, 129])
def test_rows_of_a_larger_call_are_those_of_a_smaller(rows):
    """The first row of 1 and of many; the others repeat it, each as a root of its own."""
    case = case_of(8191, rows=1, spare=rows)
    tree, queries, caches = make(case)
    want = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len, attention)
    many = [np.repeat(query, rows, axis=0) for query in queries]
    lineage, depths = np.zeros((rows, 1), np.int32), np.zeros(rows, np.int32)
    got = launch(case, many, caches, lineage, depths, case.context_len, attention)
    assert_same_bits(got, np.repeat(want, rows, axis=0), "the same row again")


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
@pytest.mark.parametrize("context_len", [0, 1000])
def test_padding_rows(context_len):
    """Rows of lineage -1 and depth 0 see the context alone, 0 where there is none, and disturb no other row."""
    case, extra = case_of(context_len, rows=5), 2
    tree, queries, caches = make(case)
    lineage = tree.lineage()
    want = launch(case, queries, caches, lineage, tree.depths, context_len, attention)
    padded = [np.concatenate([query, query[:extra]]) for query in queries]
    unknown = np.full((extra, lineage.shape[1]), -1, np.int32)
    depths = np.concatenate([tree.depths, np.zeros(extra, np.int32)])
    got = launch(case, padded, caches, np.concatenate([lineage, unknown]), depths, context_len, attention)
    assert_same_bits(got[: case.rows], want, "the tree's rows")
    if context_len == 0:
        assert (got[case.rows :] == 0).all()
        return
    # The same queries as roots of their own, on the context but its last row: they see the same keys.
    roots = np.zeros((extra, 1), np.int32), np.zeros(extra, np.int32), context_len - 1
    alone = launch(case, [query[:extra] for query in queries], caches, *roots, attention)
    assert_same_bits(got[case.rows :], alone, "padding rows")


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
def test_a_nan_that_is_seen_is_shown():
    """A NaN in a row's own key reaches every head of that row and of its descendants, and no other row."""
    case = case_of(200, rows=9)
    tree, queries, caches = make(case)
    caches[0][case.context_len + case.rows - 1, 3] = np.nan
    got = launch(case, queries, caches, tree.lineage(), tree.depths, case.context_len, attention)
    assert np.isnan(got[-1]).all()
    assert np.isfinite(got[:-1]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
def test_a_row_that_sees_one_key_returns_its_latent():
    """Bit for bit: a weight of 1 has no error."""
    case = case_of(0, rows=3)
    tree, queries, caches = make(case)
    got = launch(case, queries, caches, tree.lineage(), tree.depths, 0, attention)[0]
    latent = bf16_values(bf16_bits(caches[0][0]))
    assert_same_bits(got, np.broadcast_to(latent, got.shape), "the root's output")


@pytest.mark.gpu
@pytest.mark.usefixtures("warpgroups")
def test_replays_follow_the_context():
    """A captured call gives, at each context, the bits of a call made for it."""
    from ddtree.ops.graphs import GpuStream

    case, contexts = case_of(8300, rows=17), (0, 1, 63, 64, 1000, 4096, 8300)
    tree, queries, caches = make(case)
    stored = [bf16_bits(np.nan_to_num(cache)) for cache in caches]
    arrays = [to_device(array) for array in (*queries, *stored, tree.lineage(), tree.depths)]
    context_len, stream = to_device(np.zeros(1, np.int32)), GpuStream()
    scratch = poisoned(attention_scratch(case.rows, case.heads, case.rank, len(caches[0])))
    out, again = poisoned(queries[0].shape), poisoned(queries[0].shape)
    cuda.synchronize()  # the copies went by another stream

    def call(to, numba_stream):
        attention(*arrays, context_len, scale_of(case), to, scratch, numba_stream)

    call(out, stream.numba)
    graph = stream.capture(lambda numba_stream: [call(out, numba_stream) for _ in range(3)])
    for context in contexts:
        context_len.copy_to_device(np.array([context], np.int32))
        cuda.synchronize()  # it went by another stream
        call(again, stream.numba)
        stream.replay(graph)
        stream.sync()
        assert_same_bits(to_host(out), to_host(again), f"context {context}")


# --- what needs no GPU ------------------------------------------------------------------------------------------------


@pytest.mark.simulator
def test_there_is_room_for_every_split():
    """Few splits of few tiles, splits of 8 tiles to 65,536 keys, and never more than there is room for."""
    most = 0
    for keys in (*range(1, 1100), *range(1100, 20000, 37), 65536, 65537, 163840, 2**20):
        tiles = -(-keys // TILE)
        span = max(min(-(-tiles // 8), 4), min(-(-tiles // 16), 8), -(-tiles // MAX_SPLITS))
        most = max(most, -(-tiles // span))
        assert most <= splits_for(keys) <= MAX_SPLITS
    assert splits_for(8192) == 16 and splits_for(65536) == splits_for(2**20) == MAX_SPLITS


@cuda.jit
def count_items(keys, most, units, owners, spans, runs):
    """owners[unit, tile] counts the blocks that have an item there, spans says of how many tiles: the kernel's walk."""
    block = cuda.grid(1)
    if block < runs[0]:
        unit, tile, stop = run_of(block, runs[0], most[0], units[0])
        while unit < units[0] and unit * most[0] < stop:
            tiles = tiles_of(keys[unit])
            span = span_tiles(tiles)
            tile = int32(over(tile, span) * span)
            while starts_item(unit, most[0], tile, tiles, stop):
                cuda.atomic.add(owners, (unit, tile), 1)
                spans[unit, tile] = span
                tile += span
            unit, tile = int32(unit + 1), int32(0)


@pytest.mark.simulator
@pytest.mark.parametrize(("units", "blocks"), [(1, 5), (3, 7), (7, 3), (40, 13)])
def test_every_item_has_one_block(units, blocks):
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    keys = rng.integers(0, 40 * TILE, units).astype(np.int32)
    keys[-1] = rng.integers(1, 130 * TILE)
    most = int(-(-keys.max() // TILE)) + 1
    owners, spans = (cuda.to_device(np.zeros((units, most), np.int32)) for _ in range(2))
    one = [cuda.to_device(np.array([value], np.int32)) for value in (most, units, blocks)]
    count_items[1, blocks](cuda.to_device(keys), one[0], one[1], owners, spans, one[2])
    owners, spans = to_host(owners), to_host(spans)
    assert owners.max() <= 1
    for unit in range(units):
        tiles = -(-int(keys[unit]) // TILE)
        span = max(min(-(-tiles // 8), 4), min(-(-tiles // 16), 8), 1)
        assert np.flatnonzero(owners[unit]).tolist() == list(range(0, tiles, span))
        assert (spans[unit][owners[unit] > 0] == span).all()


@cuda.jit
def place_queries(q_latent, q_rope, slot):
    held = cuda.local.array(primitives_attend_panels.QUERY_FLOATS, float32)
    primitives_attend_panels.fetch_queries(q_latent, q_rope, slot[0], held)
    primitives_attend_panels.put_queries(uint32(0), held)


@pytest.mark.simulator
def test_queries_come_to_swizzled_panels(monkeypatch):
    """Each element once a block, at the place that a product reads, whichever rows a block begins with."""
    rng, heads, blocks = np.random.default_rng(1), 64, 2
    queries = [rng.standard_normal((2 * heads, width)).astype(np.float32) for width in (512, 64)]
    memory, written = np.zeros(9 * 8192 // 4, np.uint32), np.zeros(9 * 8192 // 4, int)

    def put_two(address, *words):
        for i, word in enumerate(words):
            memory[address // 4 + i] = word
            written[address // 4 + i] += 1

    monkeypatch.setattr(primitives_attend_panels, "put_two", put_two, raising=False)
    monkeypatch.setattr(primitives_attend_panels, "show_to_products", lambda: None, raising=False)
    place_queries[blocks, 256](*(cuda.to_device(q) for q in (*map(np.ravel, queries), np.array([heads]))))
    assert (written == blocks).all()
    head, column = np.divmod(np.arange(heads * 576), 576)
    places = column // 64 * 4096 + head * 64 + (column % 64 // 8 ^ head % 8) * 8 + column % 8
    want = bf16_bits(np.concatenate([query[heads:] for query in queries], 1))
    assert_same_bits(memory.view(np.uint16)[places], want.reshape(-1), "the queries of the second 64 heads")


@cuda.jit
def find_rows(positions, numbers, lineage, found):
    i = cuda.grid(1)
    if i < positions.size:
        last, row, context, capacity = numbers[0], numbers[1], numbers[2], numbers[3]
        found[i] = cache_row(positions[i], last, lineage, row, context, capacity)


@pytest.mark.simulator
def test_rows_of_positions():
    """Committed rows, then the lineage's, then none; row 0 for a lineage that points out of the cache."""
    lineage = np.array([[0, 1, -1], [0, 2, 90]], np.int32)
    found = cuda.to_device(np.zeros(9, np.int32))
    numbers = np.array([8, 1, 5, 20], np.int32)
    find_rows[1, 9](*(cuda.to_device(a) for a in (np.arange(9, dtype=np.int32), numbers, lineage)), found)
    assert to_host(found).tolist() == [0, 1, 2, 3, 4, 5, 7, 0, -1]
