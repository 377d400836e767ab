"""The branch head's own training: its rows, its steps, what it writes, what is reported."""

import dataclasses
import json

import numpy as np
import pytest

from ddtree.errors import UsageError
from ddtree.kdtr import KdtrFile
from ddtree.reference.branch_scores import branch_scores
from ddtree.train.acceptance import Continuation
from ddtree.train.presets import TINY, BranchRun


def tiny_models(torch):
    from ddtree.config import DrafterConfig, ModelConfig
    from ddtree.train.drafter import Drafter
    from ddtree.train.target import Target

    torch.manual_seed(4)
    hf = TINY.target_hf()
    target, config = Target(ModelConfig.from_hf(hf)), DrafterConfig.from_hf(TINY.drafter_hf(hf))
    return target.eval(), Drafter(config, 128).eval()


def test_conditional_tables_are_the_references(torch):
    from ddtree.train.branch import BranchHead

    torch.manual_seed(3)
    embedding, head, hidden = torch.randn(40, 24), torch.randn(40, 24), torch.randn(2, 5, 24)
    module = BranchHead(24, 8, embedding)
    for weight in (module.gate, module.child):
        weight.data.normal_(std=0.2)
    log_probs, ids = (hidden @ head.T).log_softmax(-1).topk(16, dim=-1)
    roots = torch.tensor([7, 30])
    found = module.conditional(hidden, log_probs, ids, roots, embedding, head).numpy()
    parent, gate, child = (t.detach().double() for t in (module.parent, module.gate, module.child))
    for row in range(2):
        tables = hidden[row].double() @ gate.T, embedding.double() @ parent.T, head.double() @ child.T
        places, best_first, out = (np.empty((5, 16, 16), kind) for kind in (np.int32, np.float32, np.float32))
        block = roots[row : row + 1].int().numpy()
        of_table = (ids[row].int().numpy(), log_probs[row].numpy(), block)
        branch_scores(*of_table, *(t.numpy() for t in tables), places, best_first)
        np.put_along_axis(out, places, best_first, axis=-1)
        assert (found[row, 0, 1:] == -np.inf).all() and (out[0, 1:] == -np.inf).all()
        assert np.allclose(found[row, 0, 0], out[0, 0], atol=2e-5)
        assert np.allclose(found[row, 1:], out[1:], atol=2e-5)


def test_rows_are_slots_with_the_texts_token_before_and_the_targets_choice(torch, monkeypatch):
    from ddtree.train import branch_rows
    from ddtree.train.branch_rows import rows_of

    monkeypatch.setattr(branch_rows, "CANDIDATES", 500)  # models that know nothing agree on few
    target, drafter = tiny_models(torch)
    tokens = torch.stack([torch.arange(10, 60), torch.arange(100, 150)])  # a token tells its place
    run = BranchRun(None, anchors=40, epochs=1, batch=1, warmup=1)
    with torch.inference_mode():
        rows = rows_of(target, drafter, run, tokens, torch.Generator().manual_seed(0))
        state, features = target.run(tokens, drafter.config.target_layer_ids)
        choices = (state @ target.head.T).argmax(dim=-1)
    assert len(rows["labels"]) > 100 and set(rows["depths"].tolist()) == set(range(1, 16))
    for row in range(0, len(rows["labels"]), 7):
        window = int(rows["parents"][row] >= 100)
        place = int(rows["parents"][row]) - int(tokens[window, 0])
        depth, label = int(rows["depths"][row]), int(rows["labels"][row])
        anchor = torch.tensor([[place - depth + 1]])
        assert 0 < anchor.item() < 49 and label == choices[window, place]
        with torch.inference_mode():
            at = features[window : window + 1], tokens[window, anchor], anchor, target.embedding
            slot = drafter(*at)[0, 0, depth - 1]
            ids = rows["token_ids"][row]
            expected = (slot @ target.head.T).log_softmax(-1)[ids]
        assert len(ids) == 500 and label in ids
        assert torch.allclose(rows["hidden"][row], slot, atol=1e-4)
        assert torch.allclose(rows["log_probs"][row], expected, atol=1e-4)


def test_blocks_in_loops_and_far_depths_are_rare(torch, monkeypatch):
    from ddtree.train import branch_rows

    monkeypatch.setattr(branch_rows, "CANDIDATES", 512)
    target, drafter = tiny_models(torch)
    tokens = torch.randint(4, 256, (8, 60), generator=torch.Generator().manual_seed(1))
    tokens[:, 28:32] += 256
    tokens[:, 32:] = tokens[:, 28:32].repeat(
        1, 7
    )  # a loop from place 47 on, and a label of its tokens from 28 on
    run = BranchRun(None, anchors=8, epochs=1, batch=1, warmup=1, decay=2.0)
    generator, depths, roots = torch.Generator().manual_seed(2), [], []
    with torch.inference_mode():
        for _ in range(30):
            rows = branch_rows.rows_of(target, drafter, run, tokens, generator)
            depths.append(rows["depths"].numpy())
            roots.append(rows["parents"][rows["depths"] == 1].numpy())
    counts, roots = np.bincount(np.concatenate(depths), minlength=16), np.concatenate(roots)
    assert counts[1] == 8 * 8 * 30  # depth 1 is always kept
    assert 0.5 < counts[3] / counts[1] / np.exp(-1) < 1.2 and counts[9] < counts[1] / 20
    assert (roots >= 256).mean() == pytest.approx((19 + 12 * 0.15) / (46 + 12 * 0.15), abs=0.04)


def test_an_epoch_goes_through_all_rows_once(torch):
    from ddtree.train.fit_branch import Draws

    draws, again = Draws(103, 10, seed=5), Draws(103, 10, seed=5)
    seen = np.concatenate([draws.of(step) for step in range(10)])
    assert len(set(seen.tolist())) == 100 and seen.max() < 103
    assert (again.of(4) == seen[40:50]).all()
    assert not (draws.of(10) == seen[:10]).all() and not (Draws(103, 10, seed=6).of(0) == seen[:10]).all()
    with pytest.raises(UsageError, match="9 of them"):
        Draws(9, 10, seed=5)


@pytest.fixture(scope="module")
def branched_folder(torch, text, trained_folder, tmp_path_factory):
    """A folder after `train branch` for the drafter of trained_folder, and what it said."""
    from ddtree.train import stages

    said, folder = [], tmp_path_factory.mktemp("branched")
    work = stages.start(str(text), str(folder), trained_folder.preset, 0, "cpu", None, said.append)
    assert stages.train_branch(work, trained_folder.path)
    return work, "\n".join(said)


def test_the_head_learns_beside_a_drafter_that_stays(torch, trained_folder, branched_folder):
    work, said = branched_folder
    log = [json.loads(line) for line in (work.out / "branch.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(log[0]["marginal"], abs=1e-4)  # a head begins as the marginal
    assert log[-1]["loss"] < log[-1]["marginal"] - 0.05
    assert (work.out / "branch.png").stat().st_size > 10_000
    drafter, both = (
        KdtrFile(p / n) for p, n in ((trained_folder.path, "drafter.kdtr"), (work.out, "drafter_branch.kdtr"))
    )
    assert all(np.array_equal(both[name], drafter[name]) for name in drafter if name != "config.json")
    assert {name for name in both if name not in drafter} == {
        f"branch.{part}.weight" for part in ("parent", "gate", "child")
    }
    trained = torch.load(work.out / "branch.pt", weights_only=True)["modules"]["branch"]
    for name, scale in (("parent", 1), ("gate", 1), ("child", work.preset.branch.scale)):
        assert np.array_equal(both[f"branch.{name}.weight"], (trained[name] * scale).half().numpy()), name
    found = json.loads((work.out / "branch.json").read_text())
    for place in ("held-out files", "shipped prompts"):
        for temperature in ("0", "0.6"):
            each = found[f"{place}, temperature {temperature}"]
            assert each["budget_8"]["all"]["branch"] >= 1 and each["prompts"] > 1
    assert "child of a right second-best sibling" in said


def test_a_stopped_run_goes_on_to_the_same_bits(torch, text, trained_folder, branched_folder, tmp_path):
    from ddtree.train import stages

    class Stops:
        left = 9

        @property
        def over(self):
            self.left -= 1
            return self.left <= 0

    whole, _ = branched_folder
    work = stages.start(str(text), str(tmp_path), trained_folder.preset, 0, "cpu", None, lambda line: None)
    assert stages.train_branch(dataclasses.replace(work, clock=Stops()), trained_folder.path) is False
    assert not (tmp_path / "drafter_branch.kdtr").exists()
    made = (tmp_path / "rows.kdtr").stat().st_mtime_ns
    assert stages.train_branch(work, trained_folder.path) is True
    assert (tmp_path / "rows.kdtr").stat().st_mtime_ns == made
    for name in ("branch_bank.kdtr", "rows.kdtr", "drafter_branch.kdtr"):
        assert (tmp_path / name).read_bytes() == (whole.out / name).read_bytes(), name
    other = dataclasses.replace(work.preset, branch=dataclasses.replace(work.preset.branch, lr=1e-3))
    with pytest.raises(UsageError, match=r"run\.lr"):
        stages.train_branch(dataclasses.replace(work, preset=other), trained_folder.path)


def test_a_file_of_another_origin_is_not_overwritten(torch, text, trained_folder, tmp_path):
    from ddtree.train import stages

    work = stages.start(str(text), str(tmp_path), trained_folder.preset, 0, "cpu", None, lambda line: None)
    (tmp_path / "drafter_branch.kdtr").write_bytes(b"someone's")
    with pytest.raises(UsageError, match="not made by train branch there"):
        stages.train_branch(work, trained_folder.path)
    assert (tmp_path / "drafter_branch.kdtr").read_bytes() == b"someone's"


def test_siblings_are_first_misses_whose_second_best_was_right(torch):
    from ddtree.train.branch_report import siblings

    ids = np.tile(np.array([[1, 2], [3, 4], [5, 6]], np.int32), (4, 1, 1))
    conditional = np.zeros((4, 3, 2, 2), np.float32)
    conditional[:, 1, 1] = (0, 1)  # below candidate 2 of depth 1: token 4 rather than 3
    tokens = np.array(
        [9, 2, 4, 1, 3], np.int32
    )  # from the root 9 the spine misses at depth 1, and 2 was right
    this = Continuation(np.array([8]), tokens, ids, np.zeros((4, 3, 2), np.float32), conditional)
    # root 2 misses with nothing right, root 4 stays on the spine, root 1 misses at its only depth
    assert siblings(this) == (1, 0, 1)
    conditional[:, 1, 1] = (1, 0)
    assert siblings(this) == (1, 0, 0)


def test_a_ratio_draws_the_same_prompts_on_both_sides(torch):
    from ddtree.train.branch_report import _compared

    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 40, 30)
    sides = {"marginal": np.stack([rounds * 3.0, rounds], 1), "branch": np.stack([rounds * 3.3, rounds], 1)}
    sides["marginal"][:, 0] *= (scale := rng.uniform(0.5, 2, 30))
    sides["branch"][:, 0] *= scale
    found = _compared(sides, rng.integers(30, size=(500, 30)))
    assert found["ratio"] == 1.1 and found["ratio_interval"] == [1.1, 1.1]
    low, high = found["marginal_interval"]
    assert low < found["marginal"] < high and high - low > 0.1


def test_what_never_happened_has_no_ratio(torch):
    from ddtree.train.branch_report import _compared, _gain

    drawn = np.random.default_rng(0).integers(3, size=(50, 3))
    counts = {
        "marginal": np.array([[0, 2], [0, 1], [0, 4.0]]),
        "branch": np.array([[1, 2], [1, 1], [2, 4.0]]),
    }
    found = _compared(counts, drawn)
    assert (found["marginal"], found["ratio"], found["ratio_interval"]) == (0.0, None, [])
    assert json.loads(json.dumps(found, allow_nan=False)) == found and _gain(found) == "ratio -"
    nothing = _compared({name: np.zeros((3, 2)) for name in counts}, drawn)
    assert nothing["branch"] is None and nothing["branch_interval"] == []
