"""Whole runs of a short preset on a CPU: what they write, that they learn, and that they go on where they stopped."""

import dataclasses
import json

import numpy as np
import pytest
from support import TRAINS_ON_GPU, run, tokens_of, trained

from ddtree.bundle import open_bundle
from ddtree.config import DecodeConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.kdtr import KdtrFile
from ddtree.train.presets import PRESETS, TINY


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_loss_falls_and_the_log_says_so(trained_folder):
    for name, fall in (("target", 1.0), ("drafter", 1.0)):
        log = records(trained_folder.path / f"{name}.jsonl")
        assert [r["step"] for r in log] == [1, 20, 40, 60]
        assert {"step", "loss", "tokens_per_second", "lr_factor", "seconds"} <= log[0].keys()
        assert log[-1]["loss"] < log[0]["loss"] - fall
        assert (trained_folder.path / f"{name}.png").stat().st_size > 10_000
    report = json.loads((trained_folder.path / "target.json").read_text())
    assert report["nats_per_token"] < np.log(512) - 1.2


def test_the_bundle_decodes_with_tree_tokens_equal_to_ar(trained_folder):
    bundle = open_bundle(trained_folder.path)
    engine = Engine(bundle, max_budget=16)
    for text in ("def f(x):\n", "import numpy"):
        prompt = bundle.encode(text)
        plain = tokens_of(run(engine, prompt, DecodeConfig("ar", 0, 24)))
        rounds = run(engine, prompt, DecodeConfig("tree", 16, 24))
        assert tokens_of(rounds) == plain
        assert len(plain) == 24 and len(rounds) < 24


def test_the_reports_are_of_what_was_written(trained_folder):
    report = json.loads((trained_folder.path / "drafter.json").read_text())
    file = KdtrFile(trained_folder.path / "drafter.kdtr")
    weights = sum(int(np.prod(i.shape)) for i in file.arrays.values() if i.dtype == "f16")
    assert report["parameters"] == weights
    both = KdtrFile(trained_folder.path / "drafter_branch.kdtr")
    assert both.meta["config"]["dflash_config"]["branch"] == {"rank": 16, "candidates": 16}
    assert {name: both.info(name).shape for name in both if name not in file} == {
        f"branch.{part}.weight": (16, 64) for part in ("parent", "gate", "child")
    }
    assert all(np.array_equal(both[name], file[name]) for name in file if name != "config.json")
    for place in ("held-out files, trained", "shipped prompts, trained"):
        assert report[place]["tree_16"]["acceptance"] >= 1.0
        assert len(report[place]["top1"]) == 15


class StopsAfter:
    """A clock that is over after so many steps; with `kills`, the process dies there instead."""

    def __init__(self, steps, kills=False):
        self.left, self.kills = steps, kills

    @property
    def over(self):
        self.left -= 1
        if self.left <= 0 and self.kills:
            raise KeyboardInterrupt
        return self.left <= 0


@pytest.mark.parametrize(
    "device, kills", [("cpu", False), ("cpu", True), pytest.param("cuda", False, marks=TRAINS_ON_GPU)]
)
def test_a_stopped_run_goes_on_to_the_same_bits(torch, text, short, tmp_path, monkeypatch, device, kills):
    from ddtree.train import loop, stages

    monkeypatch.setattr(loop, "CHECKPOINT_EVERY", -1.0 if kills else 1e9)
    whole = tmp_path / "whole"
    dropout = dataclasses.replace(short, target=dataclasses.replace(short.target, dropout=0.1))
    work = stages.start(str(text), str(whole), dropout, 3, device, None, lambda line: None)
    stages.train_target(work)
    stages.train_drafter(work)
    parts = stages.start(str(text), str(tmp_path / "parts"), dropout, 3, device, None, lambda line: None)
    for stage, name in ((stages.train_target, "target"), (stages.train_drafter, "drafter")):
        stopped = dataclasses.replace(parts, clock=StopsAfter(25, kills))
        if kills:
            with pytest.raises(KeyboardInterrupt):
                stage(stopped)
        else:
            assert stage(stopped) is False
        assert not (parts.out / f"{name}.kdtr").exists()
        assert stage(parts) is True
        for file in (f"{name}.kdtr", *(["bank.kdtr"] if name == "drafter" else [])):
            assert (parts.out / file).read_bytes() == (whole / file).read_bytes(), file
        ours, theirs = records(parts.out / f"{name}.jsonl"), records(whole / f"{name}.jsonl")
        steps = {r["step"]: r["loss"] for r in ours}
        assert [r["step"] for r in ours] == sorted(steps)
        # a mean over steps since the last line, which a stop makes shorter
        assert all(steps[r["step"]] == r["loss"] for r in theirs if r["step"] not in (40, 25))


def test_training_in_bf16_as_on_a_gpu_learns_too(torch, text, short, tmp_path, monkeypatch):
    from ddtree.train import drafter_batches, fit_drafter, fit_target, stages

    for module in (fit_target, fit_drafter, drafter_batches):
        monkeypatch.setattr(module, "autocast", lambda device: torch.autocast("cpu", torch.bfloat16))
    work = stages.start(str(text), str(tmp_path), short, 0, "cpu", None, lambda line: None)
    assert stages.train_target(work) and stages.train_drafter(work)
    for name in ("target", "drafter"):
        log = records(tmp_path / f"{name}.jsonl")
        assert log[-1]["loss"] < log[0]["loss"] - 1.0


def test_other_settings_are_refused(torch, text, short, tmp_path):
    from ddtree.train import stages

    work = stages.start(str(text), str(tmp_path), short, 0, "cpu", None, lambda line: None)
    stages.train_target(dataclasses.replace(work, clock=StopsAfter(5)))
    with pytest.raises(UsageError, match=r"seed: 0 there, 1 now"):
        stages.train_target(dataclasses.replace(work, seed=1))
    other = dataclasses.replace(short, target=dataclasses.replace(short.target, lr=1e-3))
    with pytest.raises(UsageError, match=r"run\.lr"):
        stages.train_target(dataclasses.replace(work, preset=other))
    (tmp_path / "target.pt").write_bytes(b"damaged")
    with pytest.raises(UsageError, match="not a checkpoint"):
        stages.train_target(work)


def test_a_model_of_another_origin_is_not_overwritten(torch, text, short, tmp_path):
    from ddtree.train import stages

    work = stages.start(str(text), str(tmp_path), short, 0, "cpu", None, lambda line: None)
    for stage, name in ((stages.train_target, "target"), (stages.train_drafter, "drafter")):
        (tmp_path / f"{name}.kdtr").write_bytes(b"someone's")
        with pytest.raises(UsageError, match="not trained there"):
            stage(work)
        assert (tmp_path / f"{name}.kdtr").read_bytes() == b"someone's"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configs_that_fit_each_other(name):
    from ddtree.config import DrafterConfig, ModelConfig

    preset = PRESETS[name]
    target = ModelConfig.from_hf(preset.target_hf())
    drafter = DrafterConfig.from_hf(preset.drafter_hf(preset.target_hf()))
    drafter.check_target(target)
    assert len({sum(s.length for s in plan) for plan in preset.bank.plans}) == 1
    assert all(plan[0].kind == "real" for plan in preset.bank.plans)
    assert preset.bank.length + drafter.block_size <= target.max_position_embeddings


def test_small_is_the_shape_of_the_model_that_is_shipped():
    small, shipped = PRESETS["small"], trained()
    assert small.target_hf() == shipped.target.meta["config"]
    assert small.drafter_hf(small.target_hf()) == shipped.drafter.meta["config"]


def test_parameters_are_counted_as_the_model_uses_them(torch):
    from ddtree.train.export import parameters

    counted = parameters(trained().target, trained().config)
    assert counted == {"total": 12_052_224, "active": 4_810_496}


def test_a_wrong_call_is_one_line(command, tmp_path, monkeypatch):
    code, _, error = command("train", "all", "--out", tmp_path, "--preset", "huge")
    assert code == 2 and error.count("\n") == 1 and "tiny, small, wide" in error
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, error = command("train", "all", "--out", tmp_path, "--preset", TINY.name)
    assert code == 2 and error.count("\n") == 1 and "[train]" in error
