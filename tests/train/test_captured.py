"""Steps as they run on a GPU: what a step draws and gives, what is kept of the target."""

import dataclasses
import json

import numpy as np
import pytest
from support import TRAINS_ON_GPU


def test_a_steps_draws_depend_on_its_seed_alone(torch):
    from ddtree.train.captured import Captured

    step = Captured(lambda rows: {"drawn": torch.rand(3) + rows.sum()}, torch.device("cpu"))
    first, other, again = (step([np.arange(4)], seed)["drawn"] for seed in (5, 6, 5))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_meter_keeps_no_parts_that_the_next_step_overwrites(torch):
    from ddtree.train.loop import Meter

    part, meter = torch.zeros(()), Meter()
    for value in (1.0, 2.0, 6.0):
        part.fill_(value)  # as a replay of a captured step does
        meter.add({"loss": part}, 1)
    assert meter.read()["loss"] == 3.0


def test_a_checkpoint_of_a_gpu_goes_on_with_plain_learning_rates(torch, tmp_path):
    from ddtree.train.loop import Run

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    run = Run("x", tmp_path, {}, 10, 0, 0, 1, {}, {"adamw": optimizer}, None, None)
    optimizer.param_groups[0] |= {"base_lr": 0.5, "lr": torch.tensor(0.1), "fused": True, "capturable": True}
    run._settle(torch.device("cpu"))
    assert run._set_rate(0) == 1.0
    group = optimizer.param_groups[0]
    assert (group["lr"], group["fused"], group["capturable"]) == (0.5, False, False)
    assert isinstance(group["lr"], float)


def test_what_the_target_says_is_the_same_kept_or_made_at_the_step(torch, short, monkeypatch):
    from ddtree.config import DrafterConfig, ModelConfig
    from ddtree.train import drafter_batches
    from ddtree.train.drafter_batches import Batches, Teacher
    from ddtree.train.target import Target

    torch.manual_seed(1)
    hf = short.target_hf()
    target, config = Target(ModelConfig.from_hf(hf)).eval(), DrafterConfig.from_hf(short.drafter_hf(hf))
    rng = np.random.default_rng(2)
    shape = (20, short.bank.length)
    bank = {
        "tokens": rng.integers(4, 512, shape).astype(np.uint16),
        "plan": (np.arange(20) % 3).astype(np.uint8),
        "looping": np.zeros(shape, bool),
    }
    batches = Batches(bank, short.bank.plans, short.drafter, 0, torch.device("cpu"))
    monkeypatch.setattr(drafter_batches, "AT_ONCE", 8)  # so that the last part is short
    kept = Teacher(target, config, batches)
    monkeypatch.setattr(drafter_batches, "room", lambda device: 0)
    made = Teacher(target, config, batches)
    assert kept.kept and not made.kept
    rows = torch.from_numpy(batches.rows_of(1))
    batch = batches.of(rows)
    (features, (ids, shares)), (theirs, (their_ids, their_shares)) = (t.of(rows, batch) for t in (kept, made))
    assert torch.allclose(features, theirs, atol=1e-6) and torch.equal(ids, their_ids)
    assert torch.allclose(shares, their_shares, atol=1e-5)
    assert shares.shape == (*batch.tokens.shape, 8) and ids.dtype == torch.int64


def test_blocks_together_see_what_each_alone_sees(torch, monkeypatch, short):
    from ddtree.config import DrafterConfig
    from ddtree.train import drafter as module
    from ddtree.train.drafter import Drafter

    torch.manual_seed(0)
    drafter = Drafter(DrafterConfig.from_hf(short.drafter_hf(short.target_hf())), 128).eval()
    features, roots = torch.randn(2, 40, 128), torch.randint(4, 512, (2, 12))
    anchors = torch.stack([torch.randperm(39)[:12] + 1 for _ in range(2)])
    embedding, found = torch.randn(512, 64), []
    for together in (1, 5, 12):  # of which 12 blocks make 12, 3 and 1 groups
        monkeypatch.setattr(module, "TOGETHER", together)
        with torch.no_grad():
            found.append(drafter(features, roots, anchors, embedding))
    assert torch.allclose(found[0], found[1], atol=1e-5) and torch.allclose(found[0], found[2], atol=1e-5)


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=TRAINS_ON_GPU) for name in ("target", "drafter", "branch")]
)
def test_replayed_steps_are_the_eager_ones(torch, text, short, trained_folder, tmp_path, monkeypatch, stage):
    from ddtree.train import captured, stages

    preset = dataclasses.replace(short, target=dataclasses.replace(short.target, dropout=0.1))
    of_stage = {"drafter": ["target.kdtr"], "branch": ["target.kdtr", "drafter.kdtr"]}
    given = [trained_folder.path / name for name in of_stage.get(stage, [])]
    losses = {}
    for name, eager in (("replayed", captured.EAGER), ("eager", 10**9)):
        monkeypatch.setattr(captured, "EAGER", eager)
        work = stages.start(str(text), str(tmp_path / name), preset, 0, "cuda", None, lambda line: None)
        assert getattr(stages, f"train_{stage}")(work, *given)
        log = (work.out / f"{stage}.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in log]
    assert losses["replayed"] == losses["eager"]
    assert losses["eager"][-1] < losses["eager"][0] - 1


def test_a_bank_on_a_cpu_takes_no_more_sequences_than_there_is_room_for(torch):
    from types import SimpleNamespace

    from ddtree.config import ModelConfig
    from ddtree.train.bank import _affordable
    from ddtree.train.device import MOST_ON_CPU
    from ddtree.train.presets import SMALL

    config, length = ModelConfig.from_hf(SMALL.target_hf()), SMALL.bank.length
    found = _affordable(SimpleNamespace(config=config), SMALL.bank, torch.device("cpu"))
    latents = 4 * config.num_hidden_layers * length * (config.kv_lora_rank + config.qk_rope_head_dim)
    assert 1 <= found < SMALL.bank.batch and found * latents < MOST_ON_CPU / 2
