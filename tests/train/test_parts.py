"""Parts of training: the routing bias, windows, the bank, anchors, loops, the branch head, branch-aware trees."""

import numpy as np
import pytest

from ddtree.errors import UsageError
from ddtree.metrics import in_loop
from ddtree.reference.branch_scores import branch_scores
from ddtree.train.presets import PLANS, TINY, TargetRun


def test_the_bias_moves_load_to_experts_that_have_less(torch):
    from ddtree.config import ModelConfig
    from ddtree.train.target import Gate

    torch.manual_seed(0)
    gate = Gate(ModelConfig.from_hf(TINY.target_hf()))
    x = torch.randn(4096, 64) + 0.5  # a common part, so that some experts are liked by most rows
    gate.counting = True

    def spread():
        gate(x)
        load = gate.load / gate.load.sum()
        gate.balance(1e-3)
        return (load.max() - load.min()).item()

    before = spread()
    gate.load.fill_(0)
    for _ in range(60):
        after = spread()
    assert before > 0.1
    assert after < before / 4
    gates = gate(x)
    assert ((gates > 0).sum(dim=1) == 2).all()
    assert torch.allclose(gates.sum(dim=1), torch.tensor(2.5))  # weights are the unbiased scores, normalised


def test_balance_is_the_sign_of_what_an_expert_lacks(torch):
    from ddtree.config import ModelConfig
    from ddtree.train.target import Gate

    gate = Gate(ModelConfig.from_hf(TINY.target_hf()))
    gate.load.copy_(torch.tensor([10.0, 30.0, 20.0, 20.0]))
    gate.balance(1e-3)
    assert gate.bias.tolist() == pytest.approx([1e-3, -1e-3, 0, 0])
    assert not gate.load.any()


def test_windows_cover_the_corpus_once_an_epoch(torch):
    from ddtree.train.fit_target import Windows

    run = TargetRun(steps=1, batch=4, window=10, lr=1, warmup=1, dropout=0)
    windows, again = Windows(505, run, seed=5), Windows(505, run, seed=5)
    seen = np.concatenate([windows.starts_of(step) for step in range(windows.batches)])
    assert len(set(seen)) == len(seen) == windows.batches * 4
    assert len(set(seen % 10)) == 1
    assert seen.min() >= 0 and seen.max() + 11 <= 505
    assert (again.starts_of(3) == seen[12:16]).all()
    assert not (Windows(505, run, seed=6).starts_of(0) == seen[:4]).all()
    assert len({int(windows.starts_of(windows.batches * epoch)[0] % 10) for epoch in range(12)}) > 3
    with pytest.raises(UsageError, match="30 tokens"):
        Windows(30, run, seed=5)


def test_loops_are_those_of_the_metrics(torch):
    from ddtree.train.bank import loops

    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50, (6, 150))
    rows[1, 40:] = np.resize(rng.integers(0, 50, 7), 110)
    rows[2, 60:140] = np.resize(rng.integers(0, 50, 33), 80)
    rows[3, 20:60] = 4
    found = loops(torch.from_numpy(rows)).numpy()
    assert (found == np.stack([in_loop(row) for row in rows])).all()
    assert found.any(axis=1).tolist() == [False, True, True, True, False, False]
    assert loops(torch.from_numpy(rows[:, :10])).sum() == 0


def test_labels_are_own_tokens_of_one_segment():
    from ddtree.train.presets import burst, own, real

    pytest.importorskip("torch", reason="PyTorch is not installed: the extra `train` brings it")
    from ddtree.train.bank import plan_temperatures, segment_ends

    plan = (real(2), own(3), burst(2), own(2, 0.6))
    assert segment_ends(plan).tolist() == [0, 0, 5, 5, 5, 0, 0, 9, 9]
    assert plan_temperatures(plan).tolist() == pytest.approx([0, 0, 0, 0, 0, 1, 1, 0.6, 0.6])


def test_anchors_have_labels_and_rarely_lie_in_loops(torch):
    from ddtree.train.drafter_batches import LEAST_LABELS, Batches
    from ddtree.train.presets import DrafterRun

    rng = np.random.default_rng(1)
    length = sum(s.length for s in PLANS[0])
    bank = {
        "tokens": rng.integers(4, 2048, (12, length)).astype(np.uint16),
        "plan": np.arange(12).astype(np.uint8) % 3,
        "looping": rng.random((12, length)) < 0.5,
    }
    run = DrafterRun(steps=1, batch=12, anchors=32, lr=1, warmup=1)
    batches, shares = Batches(bank, PLANS, run, 0, torch.device("cpu")), []
    for step in range(20):
        torch.manual_seed(step)
        batch = batches.of(torch.from_numpy(batches.rows_of(step)))
        assert (batch.weight > 0).all()
        assert (batch.ends - batch.anchors - 1 >= LEAST_LABELS).all()
        assert all(len(set(row)) == 32 for row in batch.anchors.tolist())
        shares.append((batch.weight < 1).float().mean().item())
        for row in range(12):
            for anchor, end in zip(batch.anchors[row].tolist(), batch.ends[row].tolist(), strict=True):
                assert anchor + 1 < end <= length
    assert 0.1 < np.mean(shares) < 0.25  # half of all places, drawn 0.15 times as often


def test_the_branch_head_is_its_reference(torch):
    from ddtree.train.branch import BranchHead, pair_loss

    torch.manual_seed(2)
    embedding, head = torch.randn(40, 24), torch.randn(40, 24)
    module = BranchHead(24, 8, embedding)
    for weight in (module.gate, module.child):
        weight.data.normal_(std=0.2)
    hidden = torch.randn(5, 24)
    logits = hidden @ head.T
    log_probs, ids = logits.log_softmax(-1).topk(16, dim=-1)  # a frozen drafter's
    places, best_first, out = (np.empty((5, 16, 16), kind) for kind in (np.int32, np.float32, np.float32))
    parent, gate, child = (t.detach().double() for t in (module.parent, module.gate, module.child))
    parts = (hidden.double() @ gate.T, embedding.double() @ parent.T, head.double() @ child.T)
    block = np.array([7], np.int32)
    branch_scores(
        ids.int().numpy(), log_probs.numpy(), block, *(t.numpy() for t in parts), places, best_first
    )
    np.put_along_axis(out, places, best_first, axis=-1)
    parents = torch.tensor([7, *ids[:-1, 3].tolist()])
    labels = ids[:, 5].clone()
    labels[4] = next(t for t in range(40) if t not in ids[4])
    loss, known = pair_loss(log_probs + module(hidden, parents, ids, embedding, head), ids, labels)
    assert known.tolist() == [True] * 4 + [False]
    for depth in range(4):
        row = out[depth, 0 if depth == 0 else 3]
        total = np.logaddexp.reduce(log_probs[depth].numpy().astype(np.float64))
        assert loss[depth].item() == pytest.approx(total - row[5], abs=2e-5)
    loss[known].sum().backward()
    assert module.parent.grad.abs().sum() > 0 and module.gate.grad.abs().sum() > 0


def test_labels_and_weights_are_those_of_the_batch(torch):
    from ddtree.train.drafter_batches import Batch
    from ddtree.train.fit_drafter import losses

    tokens = torch.arange(10, 50)[None]
    ends = torch.tensor([[8, 40]])  # the first block has labels at distances 1 and 2 alone
    batch = Batch(tokens, torch.tensor([[5, 20]]), torch.tensor([[1.0, 0.15]]), ends, torch.zeros(1, 40))
    logits = torch.zeros(1, 2, 15, 512)
    for row, anchor in enumerate((5, 20)):
        for distance in range(1, 16):
            logits[0, row, distance - 1, 10 + anchor + distance] = 30.0 - 20.0 * (row == 0 and distance == 2)
    soft = (tokens.roll(-1, 1).unsqueeze(-1).expand(-1, -1, 8), torch.full((1, 40, 8), 1 / 8))
    decay = torch.exp(-torch.arange(15) / 7.0)
    _, parts = losses(logits, torch.eye(512), batch, soft, decay, TINY.drafter.soft)
    wrong = torch.log(1 + 511 * torch.exp(torch.tensor(-10.0))) * decay[1]
    expected = wrong / (1 + decay[1] + 0.15 * decay.sum())
    assert parts["loss"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert parts["hard"].item() == pytest.approx(expected.item(), rel=1e-4)
    assert parts["top1_depth1"] == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_the_loss_and_its_gradient_are_those_of_cross_entropy(torch, share):
    from ddtree.train.drafter_batches import Batch
    from ddtree.train.fit_drafter import losses

    torch.manual_seed(4)
    vocabulary, tokens = 50, torch.randint(0, 50, (2, 30))
    anchors, ends = torch.tensor([[3, 9], [5, 14]]), torch.tensor([[16, 30], [7, 30]])
    batch = Batch(tokens, anchors, torch.rand(2, 2) + 0.1, ends, torch.rand(2, 30).round())
    ids = torch.stack([torch.randperm(vocabulary)[:8] for _ in range(60)]).view(2, 30, 8)
    soft = ids, torch.rand(2, 30, 8).softmax(dim=-1)
    hidden = torch.randn(2, 2, 15, 24, dtype=torch.float64, requires_grad=True)
    head, decay = torch.randn(vocabulary, 24, dtype=torch.float64), torch.exp(-torch.arange(15) / 7.0)
    loss, parts = losses(hidden, head, batch, soft, decay, share)
    (gradient,) = torch.autograd.grad(loss, hidden)

    log_probs, expected, hard, total = (hidden @ head.T).log_softmax(dim=-1), 0.0, 0.0, 0.0
    for row, block in np.ndindex(2, 2):
        anchor, end = int(anchors[row, block]), int(ends[row, block])
        for place in range(anchor + 1, min(end, anchor + 16)):
            at, label = log_probs[row, block, place - anchor - 1], int(tokens[row, place])
            weight = float(batch.weight[row, block] * decay[place - anchor - 1])
            of_target = share if batch.temperatures[row, place] == 0 else 1.0
            mixture = (soft[1][row, place - 1] * at[ids[row, place - 1]]).sum()
            expected = expected - weight * ((1 - of_target) * at[label] + of_target * mixture)
            hard, total = hard - weight * at[label].item(), total + weight
    (theirs,) = torch.autograd.grad(expected / total, hidden)
    assert loss.item() == pytest.approx(expected.item() / total, rel=1e-6)
    assert parts["hard"].item() == pytest.approx(hard / total, rel=1e-6)
    assert torch.allclose(gradient, theirs, rtol=1e-5, atol=1e-8)


def test_what_a_sure_drafter_learns_is_no_rounding_of_bf16(torch):
    """Both parts of a gradient must be of one rounding: where the label is all but certain they all but cancel."""
    from ddtree.train.drafter_batches import Batch
    from ddtree.train.fit_drafter import losses

    torch.manual_seed(6)
    tokens = torch.randint(0, 512, (4, 60))
    head = 0.05 * torch.randn(512, 64)
    anchors, ends = torch.randint(1, 40, (4, 8)), torch.full((4, 8), 60)
    batch = Batch(tokens, anchors, torch.ones(4, 8), ends, torch.zeros(4, 60))
    soft = torch.zeros(4, 60, 8, dtype=torch.int64), torch.full((4, 60, 8), 1 / 8)
    labels = tokens[torch.arange(4).view(-1, 1, 1), anchors.unsqueeze(-1) + torch.arange(1, 16)]
    hidden = 75 * head[labels] + 0.3 * torch.randn(4, 8, 15, 64)

    def gradient(dtype):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            x = hidden.to(dtype).requires_grad_(True)
            loss, parts = losses(x, head.to(dtype), batch, soft, torch.ones(15), 0.0)
        return torch.autograd.grad(loss, x)[0].double(), parts["hard"].item()

    exact, hard = gradient(torch.float64)
    ours, _ = gradient(torch.float32)
    assert 1e-3 < hard < 0.05
    assert ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).median() < 0.1


def test_gates_and_their_gradient_are_those_of_the_chosen_scores(torch):
    from ddtree.config import ModelConfig
    from ddtree.train.target import Gate

    torch.manual_seed(5)
    gate = Gate(ModelConfig.from_hf(TINY.target_hf()))
    gate.bias.copy_(torch.tensor([0.3, -0.3, 0.0, 0.1]))
    x, wanted = torch.randn(40, 64), torch.randn(40, 4)
    gate.counting = True
    gates = gate(x)
    scores = (x @ gate.weight.T).sigmoid()
    best = (scores + gate.bias).topk(2, dim=1).indices
    few = scores.gather(1, best)
    plain = torch.zeros(40, 4).scatter(1, best, 2.5 * few / few.sum(dim=1, keepdim=True))
    assert torch.allclose(gates, plain, atol=1e-6) and ((gates > 0) == (plain > 0)).all()
    ours, theirs = (torch.autograd.grad((t * wanted).sum(), gate.weight)[0] for t in (gates, plain))
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert gate.load.tolist() == torch.bincount(best.flatten(), minlength=4).tolist()
