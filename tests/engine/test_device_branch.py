"""branch_aware rounds on a GPU: autoregressive tokens and logits, the host's trees of the device's own tables."""

import functools

import numpy as np
import pytest
from compare_arrays import assert_same_bits
from engine.test_device_rounds import DTYPES, SAMPLINGS, prompt, same, trees_of, walk
from support import branched

from ddtree.config import DecodeConfig
from ddtree.decode import decode
from ddtree.engine import Engine
from ddtree.reference.branch_scores import branch_scores
from ddtree.shapes import get_shape

pytestmark = pytest.mark.gpu
BUDGETS = (1, 2, 16, 33, 64, 512)
SHAPE = "branch_aware"
COUNT = 32


@functools.cache
def open_engine(dtype="f32", **options):
    """A GPU engine on the shipped model with a random branch head, opened once for those options."""
    return Engine(
        branched(), backend="cuda", dtype=dtype, **{"max_budget": 512, "max_context": 400} | options
    )


def tables_of(engine):
    """What the last round's tree was made of: token_ids, log_probs, places and sorted conditionals."""
    state, ops, config = engine.device_state, engine.ops, engine.drafter.config
    flat, cube = (config.horizon, config.candidates), (config.horizon, *[config.candidates] * 2)
    ids, log_probs = (ops.read(array)[: np.prod(flat)] for array in (state.table_ids, state.table_log_probs))
    places, ordered = (ops.read(array) for array in (state.branch_places, state.branch_log_probs))
    return ids.reshape(flat), log_probs.reshape(flat), places.reshape(cube), ordered.reshape(cube)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_tree_is_autoregressive_bit_for_bit(dtype, sampling):
    engine, accepted = open_engine(dtype), 0
    for index in (0, 9, 33):
        want = walk(engine, prompt(index), "ar", 0, COUNT, sampling, index)
        for budget in BUDGETS:
            got = walk(engine, prompt(index), "tree", budget, COUNT, sampling, index, SHAPE)
            same(got, want)
            accepted += sum(len(this.path) - 1 for this in got[0])
    assert accepted > 0, "drafts were really taken"


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_eager_rounds_are_the_graphs(dtype, sampling):
    for budget in (1, 16, 33, 512):
        captured = walk(open_engine(dtype), prompt(3), "tree", budget, 24, sampling, 0, SHAPE)
        eager = walk(open_engine(dtype, graphs=False), prompt(3), "tree", budget, 24, sampling, 0, SHAPE)
        same(eager, captured)
        assert trees_of(eager[0]) == trees_of(captured[0])


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("budget", [1, 16, 64, 512])
def test_trees_are_the_hosts_of_the_same_table(budget, graphs):
    """Bit for bit, path sums too; and the table is the formula's, of the device's own hidden states, within f32's."""
    engine, build = open_engine(graphs=graphs), get_shape(SHAPE)
    left, root, unlike = COUNT, None, 0
    for this in decode(engine, list(prompt(4)), DecodeConfig("tree", budget, COUNT, shape=SHAPE)):
        if this.index and left > 1:
            token_ids, log_probs, places, ordered = tables_of(engine)
            conditional = np.empty_like(ordered)
            np.put_along_axis(conditional, places, ordered, axis=-1)
            depth = min(engine.horizon, left - 1)
            want = build(token_ids, conditional, budget, depth, root_token=root)
            for name in ("token_ids", "parents", "depths", "log_weights"):
                assert_same_bits(getattr(this.tree, name), getattr(want, name), name)
            require_formula(engine, root, token_ids, log_probs, conditional)
            plain = get_shape("best_first")(token_ids, log_probs, budget, depth, root_token=root)
            unlike += plain.token_ids.tolist() != want.token_ids.tolist()
        left, root = left - len(this.tokens), this.tokens[-1]
    assert unlike or budget == 1


def branch_tables(engine):
    """Host copies of the branch head's two tables, read by the engine that made them."""
    names, branch = ("parent_table", "child_table"), engine.drafter.weights.branch
    return {name: engine.ops.read(getattr(branch, name)) for name in names}


def require_formula(engine, root, token_ids, log_probs, conditional):
    """The device's conditionals are the host twin's of the device's tables and gates."""
    places, ordered = np.empty(conditional.shape, np.int32), np.empty_like(conditional)
    tables = engine.ops.read(engine.drafter.gated), *branch_tables(engine).values()
    branch_scores(token_ids, log_probs, np.array([root], np.int32), *tables, places, ordered)
    want = np.empty_like(conditional)
    np.put_along_axis(want, places, ordered, axis=-1)
    finite = np.isfinite(want)
    assert (finite == np.isfinite(conditional)).all()
    assert np.abs(want[finite] - conditional[finite]).max() < 1e-4


def test_budgets_and_shapes_change_on_one_engine():
    engine = open_engine()
    want = walk(engine, prompt(5), "ar", 0)
    first = walk(engine, prompt(5), "tree", 64, shape=SHAPE)
    for budget, shape in (
        (2, SHAPE),
        (64, "best_first"),
        (0, SHAPE),
        (33, SHAPE),
        (512, SHAPE),
        (3, "best_first"),
    ):
        same(walk(engine, prompt(5), "tree", budget, shape=shape), want)
    again = walk(engine, prompt(5), "tree", 64, shape=SHAPE)
    same(again, want)
    assert trees_of(again[0]) == trees_of(first[0])
    plain = walk(engine, prompt(5), "tree", 64)
    assert trees_of(plain[0])[1] != trees_of(first[0])[1]


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_stand_when_the_engine_is_made(dtype):
    """The default stream, which waits for no engine's, finds them whole."""
    engine = open_engine(dtype, max_budget=4, prefill_chunk=5)  # of this test alone
    branch = engine.drafter.weights.branch
    found = {name: getattr(branch, name).copy_to_host() for name in ("child_table", "parent_table")}
    for name, want in branch_tables(engine).items():
        assert_same_bits(found[name], want, name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_do_not_depend_on_the_engines_sizes(dtype):
    """They are made in chunks of as many rows as the largest call has."""
    mine, theirs = (
        branch_tables(engine)
        for engine in (open_engine(dtype), open_engine(dtype, max_budget=3, prefill_chunk=7))
    )
    host = Engine(branched(), max_context=8).drafter.weights.branch
    for name, table in mine.items():
        assert_same_bits(table, theirs[name], name)
        want = getattr(host, name)
        error = np.abs(table - want).max() / np.abs(want).max()
        assert error < (1e-6 if dtype == "f32" else 2e-2), name
