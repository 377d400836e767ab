"""What tests of the model, its operations and the loop share: models, random trees, poisoned memory, decodes."""

import atexit
import functools
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from fixtures.seeded import checkpoint_dir

from ddtree.batch import ForwardBatch, chain_batch
from ddtree.bundle import DEFAULT_MODEL, open_bundle
from ddtree.cache import LatentCache
from ddtree.checkpoint import convert_to_kdtr
from ddtree.checkpoint_names import BRANCH_MAPS
from ddtree.decode import decode
from ddtree.kdtr import save
from ddtree.model import Model
from ddtree.ops import get_ops
from ddtree.tree import DraftTree
from ddtree.weights import load_target

FIXTURES = Path(__file__).resolve().parent / "fixtures"
ODD_SIZES = (1, 3, 31, 32, 33, 63, 64, 65)
EPS = {"f32": float(np.finfo(np.float32).eps), "f64": float(np.finfo(np.float64).eps)}
DTYPES = {"f32": np.float32, "f64": np.float64}
# Training on a GPU compiles steps, and PyTorch's compiler warns of its own parts.
OF_THE_COMPILER = ("The .grad attribute of a Tensor", ".torch.jit.script_method. is deprecated")
TRAINS_ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(*(f"default:{words}" for words in OF_THE_COMPILER)),
]


# --- models -------------------------------------------------------------------------------------------------------


@functools.cache
def trained():
    """The bundle of the trained model that the project carries."""
    return open_bundle(DEFAULT_MODEL)


@functools.cache
def branched(rank=8, candidates=16):
    """The trained model, its drafter with a branch head of random maps besides, made once a process."""
    directory = Path(tempfile.mkdtemp(prefix="ddtree-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_branch_head(trained().drafter, directory / "drafter_branch.kdtr", rank, candidates)
    return open_bundle(DEFAULT_MODEL, directory / "drafter_branch.kdtr")


def write_branch_head(drafter, path, rank, candidates=16):
    """Write a drafter's file once more, with a branch head of random maps, f16, as `ddtree.train` exports one."""
    rng, meta = np.random.default_rng(5), json.loads(json.dumps(dict(drafter.meta)))
    hidden = meta["config"]["hidden_size"]
    meta["config"]["dflash_config"]["branch"] = {"rank": rank, "candidates": candidates}
    meta["shards"][0]["count"] += len(BRANCH_MAPS)
    maps = (2 * rng.standard_normal((len(BRANCH_MAPS), rank, hidden)) * hidden**-0.5).astype(np.float16)
    weights = {name: drafter[name] for name in drafter if name != "config.json"}
    weights |= {f"branch.{name}.weight": each for name, each in zip(BRANCH_MAPS, maps, strict=True)}
    text = np.frombuffer(json.dumps(meta["config"]).encode(), np.uint8)
    save(path, weights | {"config.json": text}, meta)


@functools.cache
def tiny(name, spelling="config.json"):
    """The bundle of fixture `name` (dsv3, dsv3_yarn), converted once a process.

    `spelling` is the target's config file: config.json or config_legacy.json.
    """
    directory = Path(tempfile.mkdtemp(prefix="ddtree-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    source, target = directory / "source", checkpoint_dir(name, "target")
    source.mkdir()
    shutil.copyfile(target / spelling, source / "config.json")
    os.symlink(target / "model.safetensors", source / "model.safetensors")
    convert_to_kdtr(source, directory / "target.kdtr", progress=False)
    convert_to_kdtr(checkpoint_dir(name, "draft"), directory / "drafter.kdtr", progress=False)
    return open_bundle(directory)


@functools.cache
def arrays_of(file):
    """All arrays of a fixture file, e.g. dsv3_f64.npz."""
    with np.load(FIXTURES / file) as arrays:
        return {name: arrays[name] for name in arrays.files}


def make_model(bundle, dtype="f32", route="device", max_rows=160, positions=320, ops=None):
    """A Model of a bundle's target alone, its features those its drafter wants."""
    ops = ops or get_ops("numpy", dtype, route)
    weights = load_target(bundle.target, bundle.config, positions, ops)
    features = bundle.drafter_config.target_layer_ids
    return Model(bundle.config, weights, max_rows, features, ops)


# --- one forward --------------------------------------------------------------------------------------------------


def poison(arrays, value=np.nan):
    """Fill arrays, so that whatever reads what it must not shows."""
    for array in arrays:
        array[...] = value


def poisoned_cache(model, capacity=320):
    """An empty cache that holds NaN alone; the model's scratch is filled with NaN as well."""
    cache = LatentCache(model.config, capacity, model.ops)
    poison(cache.arrays)
    poison(vars(model.buffers).values())
    return cache


def commit_chain(model, cache, token_ids, chunk=64):
    """Commit tokens in chunks; their logits and features."""
    logits, features = [], []
    for start in range(0, len(token_ids), chunk):
        part = np.asarray(token_ids[start : start + chunk])
        out = model.forward(chain_batch(part, cache.context_len), cache)
        logits.append(out[0].copy())
        features.append(out[1].copy())
        cache.context_len += len(part)
    return np.concatenate(logits), np.concatenate(features)


def observed(model, batch, cache):
    """Logits, features and a copy of every step the model names, by (name, layer)."""
    seen = {}
    logits, features = model.forward(
        batch, cache, lambda name, at, array: seen.update({(name, at): array.copy()})
    )
    return logits.copy(), features.copy(), seen


# --- trees --------------------------------------------------------------------------------------------------------


def random_tree(rng, num_nodes, vocab, root_token=0, max_depth=None):
    """A random DraftTree whose parents precede children and whose siblings differ."""
    tokens, parents, depths = [root_token], [-1], [0]
    taken = {}
    while len(tokens) <= num_nodes:
        parent = int(rng.integers(max(0, len(tokens) - 6), len(tokens)))
        if max_depth is not None and depths[parent] >= max_depth:
            parent = 0
        token = int(rng.integers(vocab))
        if token in taken.setdefault(parent, set()):
            continue
        taken[parent].add(token)
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    columns = [np.array(column, np.int32) for column in (tokens, parents, depths)]
    return DraftTree(*columns, -np.arange(len(tokens), dtype=np.float64)).validate()


def reordered(tree, order):
    """The same tree, its rows in another `order` (old row numbers, the root first, parents before children)."""
    new_row = np.empty(len(order), np.int32)
    new_row[order] = np.arange(len(order), dtype=np.int32)
    parents = tree.parents[order]
    parents = np.where(parents < 0, -1, new_row[parents]).astype(np.int32)
    return DraftTree(tree.token_ids[order], parents, tree.depths[order], tree.log_weights[order])


def random_order(rng, tree):
    """A random order of a tree's rows in which parents precede children."""
    waiting, order = [0], []
    while waiting:
        row = waiting.pop(int(rng.integers(len(waiting))))
        order.append(row)
        waiting.extend(tree.children(row).tolist())
    return np.array(order)


def batch_of(token_ids, depths, lineage, context_len):
    """A ForwardBatch from anything array-like."""
    return ForwardBatch(*(np.asarray(a, np.int32) for a in (token_ids, depths, lineage)), context_len)


# --- decoding -----------------------------------------------------------------------------------------------------


def run(engine, prompt, config, sequence=0):
    """All rounds of a decode."""
    return list(decode(engine, [int(token) for token in prompt], config, sequence))


def tokens_of(rounds):
    """The tokens that rounds returned."""
    return [token for this in rounds for token in this.tokens]


def committed_rows(engine):
    """A copy of all committed cache rows."""
    return [array[: engine.context_len].copy() for array in engine.cache.arrays]


def assert_one_line(error):
    """The message of a caught error is one line that says something."""
    assert str(error) and "\n" not in str(error)


def with_continuation(token_ids, vocab, rank=0, horizon=15, k=64):
    """A drafter's table whose candidate of `rank` at each depth is the given token: (ids i32, log_probs f32)."""
    table = np.empty((horizon, k), np.int32)
    for depth in range(horizon):
        token = int(token_ids[depth]) if depth < len(token_ids) else 0
        others = [(token + 1 + i) % vocab for i in range(k - 1)]
        table[depth] = others[:rank] + [token] + others[rank:]
    log_probs = np.broadcast_to(-1 - 0.05 * np.arange(k, dtype=np.float32), (horizon, k))
    return table, log_probs.copy()
