"""The PyTorch models against the workspace's own arithmetic, on the trained bundle that the project carries."""

import numpy as np
import pytest
from support import commit_chain, make_model, observed, poisoned_cache, run, tokens_of, trained

from ddtree.batch import chain_batch
from ddtree.config import DecodeConfig
from ddtree.drafter import Drafter
from ddtree.engine import Engine
from ddtree.model import Model
from ddtree.ops import get_ops
from ddtree.prompts import load_prompts

CPU = "cpu"
TOLERANCE = 3e-6  # of the largest number of an array, f32 on both sides; 5.6e-7 is seen


def close(ours, theirs):
    return np.abs(ours - theirs).max() <= TOLERANCE * np.abs(theirs).max()


@pytest.fixture(scope="module")
def models(torch):
    """The target and the drafter as PyTorch modules."""
    from ddtree.train.stages import open_drafter, open_target

    bundle, device = trained(), torch.device(CPU)
    return open_target(bundle, device), open_drafter(bundle.drafter, bundle.drafter_config, 1024, device)


@pytest.fixture(scope="module")
def prompt():
    return np.array(trained().encode(load_prompts()[0].text))


def test_target_has_the_hidden_states_and_routes_of_the_model(torch, models, prompt):
    target = models[0]
    seen, gates = {}, {}
    for index, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda m, i, out, index=index: seen.update({index: out[0].numpy()}))
    for index, gate in enumerate(target.gates(), 1):
        gate.register_forward_hook(lambda m, i, out, index=index: gates.update({index: out.numpy()}))
    with torch.no_grad():
        logits = target(torch.from_numpy(prompt)[None])[0].numpy()
    model = make_model(trained())
    expected, _, steps = observed(model, chain_batch(prompt, 0), poisoned_cache(model))
    assert close(logits, expected)
    for index in range(trained().config.num_hidden_layers):
        assert close(seen[index], steps["layer", index]), index
    for index in gates:
        ours, theirs = gates[index].T, steps["gates", index].reshape(-1, len(prompt))
        assert ((ours > 0) == (theirs > 0)).all(), index
        assert close(ours, theirs)
    assert sorted(gates) == list(range(1, 8))


def test_drafter_has_the_logits_of_the_drafter(torch, models, prompt):
    target, drafter = models
    bundle = trained()
    config, ops = bundle.drafter_config, get_ops("numpy", "f32", "device")
    model = make_model(bundle, positions=320)
    cache = poisoned_cache(model)
    long = np.concatenate([prompt, prompt, prompt])[:300]  # past the context window of 256
    _, features = commit_chain(model, cache, long)
    anchors = [5, 100, 255, 256, 257, 299]
    weights = bundle.drafter_weights(320, ops)
    with torch.no_grad():
        hidden = drafter(
            torch.from_numpy(features)[None],
            torch.from_numpy(long[anchors])[None],
            torch.tensor([anchors]),
            target.embedding,
        )
        logits = (hidden @ target.head.T)[0].numpy()
    for row, anchor in enumerate(anchors):
        own = Drafter(config, weights, 320, 320, ops)
        own.extend(features[:anchor], 0)
        block = np.full(config.block_size, config.mask_token_id, np.int32)
        block[0] = long[anchor]
        assert close(logits[row], own.draft(block, anchor, model.weights.embedding, model.weights.head)), (
            anchor
        )


def test_generation_continues_prompts_of_unequal_length_as_a_decode_does(torch, models, prompt):
    from ddtree.train.generate import continue_prompts

    lengths = [len(prompt), len(prompt) - 7, 3]
    padded = np.stack([np.where(np.arange(len(prompt)) < n, prompt, 9) for n in lengths])
    generator = torch.Generator()
    out = continue_prompts(
        models[0], torch.from_numpy(padded), torch.tensor(lengths), [0.0] * 16, generator
    ).numpy()
    engine = Engine(trained(), max_budget=1)
    for row, length in enumerate(lengths):
        expected = tokens_of(run(engine, prompt[:length], DecodeConfig("ar", 0, 16)))
        assert out[row, : len(expected)].tolist() == expected


def test_sampling_draws_from_the_softmax(torch):
    from ddtree.train.generate import choose

    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(200_000, -1)
    drawn = torch.bincount(choose(logits, 0.7, torch.Generator().manual_seed(1)), minlength=4) / 200_000
    expected = (logits[0] / 0.7).softmax(-1)
    assert (drawn - expected).abs().max() < 0.005


def test_evaluation_counts_the_rounds_of_decodes(torch, models):
    from ddtree.metrics import Tally
    from ddtree.train.evaluate import evaluate

    prompts = [trained().encode(p.text) for p in load_prompts()[:3]]
    report = evaluate(*models, prompts, 32)
    engine, tally = Engine(trained(), max_budget=16), Tally()
    for ids in prompts:
        tally.add(ids, run(engine, ids, DecodeConfig("tree", 16, 32)))
    assert report["tree_16"] == {
        "rounds": tally.rounds,
        "acceptance": tally.mean_acceptance,
        "rounds_outside": tally.rounds_outside,
        "acceptance_outside": tally.mean_acceptance_outside_loops,
    }


def test_several_shared_experts_come_out_as_they_went_in(torch, tmp_path):
    from tokenizers import Tokenizer, models

    from ddtree.bundle import open_bundle
    from ddtree.config import ModelConfig
    from ddtree.train.export import export_target
    from ddtree.train.presets import TINY
    from ddtree.train.stages import open_target
    from ddtree.train.target import Target
    from ddtree.weights import load_target

    torch.manual_seed(4)
    hf = TINY.target_hf() | {"n_shared_experts": 3, "n_routed_experts": 8, "num_experts_per_tok": 3}
    model = Target(ModelConfig.from_hf(hf))
    for parameter in model.parameters():
        parameter.data.normal_(std=0.2)
    export_target(model, hf, Tokenizer(models.BPE()), tmp_path / "target.kdtr")
    bundle = open_bundle(tmp_path)
    tokens = np.arange(5, 45)
    with torch.no_grad():
        rounded = open_target(bundle, torch.device(CPU))(torch.from_numpy(tokens)[None])[0].numpy()
        exact = model(torch.from_numpy(tokens)[None])[0].numpy()
    ops = get_ops("numpy", "f32", "device")
    model = Model(bundle.config, load_target(bundle.target, bundle.config, 64, ops), 64, (0,), ops)
    expected, _, _ = observed(model, chain_batch(tokens, 0), poisoned_cache(model, 64))
    assert close(rounded, expected)
    assert np.abs(exact - expected).max() < 0.02 * np.abs(expected).max()  # what rounding to f16 leaves
