"""Layer by layer against the Hugging Face implementation: target, tree and drafter, in both widths, by both routes."""

import functools
import re

import numpy as np
import pytest
from compare_arrays import assert_close
from support import arrays_of, make_model, observed, poison, poisoned_cache, tiny

from ddtree.batch import chain_batch, tree_batch
from ddtree.drafter import Drafter
from ddtree.tree import DraftTree
from ddtree.weights import load_drafter

BOUND = {"f64": 1e-10, "f32": 2e-5}
NAMES, PROMPTS = ("dsv3", "dsv3_yarn"), (0, 1, 2)
CASES = [(n, d, r, p) for n in NAMES for d in BOUND for r in ("device", "host") for p in PROMPTS]
STEPS = {
    "ln1": "input_norm",
    "attn": "attention",
    "ln2": "post_norm",
    "mlp": "mlp",
    "router_logits": "router",
}
NUM_LAYERS = 3


@functools.cache
def model_of(name, dtype, route, spelling="config.json"):
    return make_model(tiny(name, spelling), dtype, route)


@functools.cache
def forwarded(name, dtype, route, prompt, spelling="config.json"):
    """The prompt in one forward, then its tree on top: two (logits, features, steps), the cache, the tree's batch."""
    model, z = model_of(name, dtype, route, spelling), arrays_of(f"{name}_f64.npz")
    cache = poisoned_cache(model, capacity=128)
    chain = observed(model, chain_batch(z[f"p{prompt}_ids"], 0), cache)
    cache.context_len = len(z[f"p{prompt}_ids"])
    poison([array[cache.context_len :] for array in cache.arrays])
    rows = [z[f"t{prompt}_{key}"].astype(np.int32) for key in ("ids", "parents", "depths")]
    batch = tree_batch(DraftTree(*rows, np.zeros(len(rows[0]))), cache.context_len)
    return chain, observed(model, batch, cache), cache, batch


def prompt_values(seen, logits, cache, rows):
    """What the workspace computed, under the fixture's keys less the prompt's."""
    values = {
        "logits": logits,
        "hs00": seen["embedding", 0],
        "lastraw": seen["layer", 2],
        "hs03": seen["norm", 3],
    }
    for layer in range(NUM_LAYERS):
        for key, step in STEPS.items():
            if (step, layer) in seen:
                values[f"l{layer}_{key}"] = seen[step, layer]
        values[f"l{layer}_kv_nope"] = cache.latents[layer][:rows]
        values[f"l{layer}_k_rot"] = cache.ropes[layer][:rows]
    return values | {f"hs0{layer + 1}": seen["layer", layer] for layer in range(NUM_LAYERS - 1)}


@pytest.mark.parametrize(("name", "dtype", "route", "prompt"), CASES)
def test_every_operation_of_a_prompt(name, dtype, route, prompt):
    (logits, _, seen), _, cache, _ = forwarded(name, dtype, route, prompt)
    z = arrays_of(f"{name}_f64.npz")
    values = prompt_values(seen, logits, cache, len(logits))
    keys = [key for key in z if re.match(rf"p{prompt}_", key) and not re.search("ids|topk", key)]
    assert len(keys) == {0: 26, 1: 26, 2: 7}[prompt]  # every array of the fixture has its counterpart here
    for key in keys:
        assert_close(values[key[3:]], z[key], BOUND[dtype], f"{name} {dtype} {route} {key}")


@pytest.mark.parametrize(("name", "dtype", "route", "prompt"), CASES)
def test_chosen_experts_and_their_weights(name, dtype, route, prompt):
    (_, _, seen), _, _, _ = forwarded(name, dtype, route, prompt)
    for file in (f"{name}_f64.npz", f"{name}_f32.npz"):
        for layer in (1, 2):
            z, gates = arrays_of(file), seen["gates", layer]
            chosen = z[f"p{prompt}_l{layer}_topk_idx"]
            want = np.zeros(gates.shape)
            want[chosen.T, np.arange(len(chosen))] = 1
            np.testing.assert_array_equal(gates != 0, want != 0)
            if f"p{prompt}_l{layer}_topk_w" in z:
                want[chosen.T, np.arange(len(chosen))] = z[f"p{prompt}_l{layer}_topk_w"].T
                assert_close(gates, want, BOUND[dtype], f"{name} {dtype} {route} gates of layer {layer}")


@pytest.mark.parametrize(("name", "dtype", "route", "prompt"), CASES)
def test_a_tree_on_top_of_the_prompt(name, dtype, route, prompt):
    _, (logits, _, seen), cache, batch = forwarded(name, dtype, route, prompt)
    z = arrays_of(f"{name}_f64.npz")
    np.testing.assert_array_equal(batch.positions, z[f"t{prompt}_pos"])
    mask = z[f"t{prompt}_mask"]
    assert mask[:, : cache.context_len].all()
    np.testing.assert_array_equal(batch.visible, mask[:, cache.context_len :])
    values = {
        "hs00": seen["embedding", 0],
        "hs01": seen["layer", 0],
        "hs02": seen["layer", 1],
        "hs03": seen["norm", 3],
        "logits": logits,
        "pathlogits": logits,  # each row alone on its own path
    }
    keys = [key for key in z if re.match(rf"t{prompt}_(hs|.*logits)", key)]
    assert len(keys) == {0: 6, 1: 6, 2: 4}[prompt]
    for key in keys:
        assert_close(values[key[3:]], z[key], BOUND[dtype], f"{name} {dtype} {route} {key}")
    beyond = [array[cache.context_len + batch.num_rows :] for array in cache.arrays]
    assert all(np.isnan(array).all() for array in beyond), "the forward wrote past its own rows"


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_as_close_to_float64_as_the_published_float32(name):
    """The workspace's f32 error is at most four times that of the reference's own f32 run."""
    wide, narrow = arrays_of(f"{name}_f64.npz"), arrays_of(f"{name}_f32.npz")
    for prompt in PROMPTS:
        (logits, _, _), (tree_logits, _, _), _, _ = forwarded(name, "f32", "device", prompt)
        for got, key in ((logits, f"p{prompt}_logits"), (tree_logits, f"t{prompt}_logits")):
            theirs = np.abs(narrow[key] - wide[key]).max() / np.abs(wide[key]).max()
            assert_close(got, wide[key], 4 * theirs, f"{name} {key}")


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_the_config_give_one_model(name):
    one, other = (forwarded(name, "f64", "device", 1, s) for s in ("config.json", "config_legacy.json"))
    assert one[0][0].tobytes() == other[0][0].tobytes()
    assert one[1][0].tobytes() == other[1][0].tobytes()


def drafted(name, dtype, prompt):
    """Yield (call, output, logits, fixture's) of the drafter's two calls, its caches full of NaN before."""
    bundle, z, model = tiny(name), arrays_of(f"{name}_f64.npz"), model_of(name, dtype, "device")
    config = bundle.drafter_config
    weights = load_drafter(bundle.drafter, config, 128, model.ops)
    drafter = Drafter(config, weights, 128, 64, model.ops)
    for value in vars(drafter).values():
        poison([a for a in (value if isinstance(value, list) else [value]) if _is_float(a)])
    context_len = 0
    for call in (1, 2):
        features = z[f"d{prompt}_ctx{call}"].astype(model.ops.dtype)
        drafter.extend(features, context_len)
        context_len += len(features)
        block = z[f"d{prompt}_block{call}"].astype(np.int32)
        logits = drafter.draft(block, context_len, model.weights.embedding, model.weights.head)
        yield call, drafter.normed.copy(), logits.copy(), context_len, z


def _is_float(array):
    return isinstance(array, np.ndarray) and array.dtype.kind == "f"


@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_first_and_on_a_cached_context(name, dtype, prompt):
    for call, out, logits, context_len, z in drafted(name, dtype, prompt):
        what = f"{name} {dtype} d{prompt} call {call}"
        assert z[f"d{prompt}_pos{call}"][-16:].tolist() == list(range(context_len, context_len + 16))
        assert z[f"d{prompt}_block{call}"][1:].tolist() == [511] * 15
        assert_close(out, z[f"d{prompt}_out{call}"], BOUND[dtype], f"{what}: output")
        assert_close(logits, z[f"d{prompt}_logits{call}"][1:], BOUND[dtype], f"{what}: logits")


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("prompt", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_the_targets_features_are_the_drafters_context(name, prompt, dtype):
    (_, features, _), _, _, _ = forwarded(name, dtype, "device", prompt)
    assert_close(features, arrays_of(f"{name}_f64.npz")[f"d{prompt}_ctx1"], BOUND[dtype], f"{name} features")
