"""Muon of many matrices at once against PyTorch's, which goes one by one."""

import pytest

SHAPES = ((16, 16), (8, 16), (16, 8), (48, 16), (16, 48), (16, 16))


def test_steps_are_those_of_pytorchs_muon(torch):
    from ddtree.train.muon import Muon

    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(shape, generator=generator).requires_grad_() for shape in SHAPES]
    theirs = [matrix.detach().clone().requires_grad_() for matrix in ours]
    together = Muon(ours, lr=0.02, weight_decay=0.1)
    single = torch.optim.Muon(theirs, 0.02, 0.1, 0.95, adjust_lr_fn="match_rms_adamw")
    begun = [matrix.detach().clone() for matrix in ours]
    for step in range(4):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = a.grad.clone()
        together.param_groups[0]["lr"] = torch.tensor(0.02) if step % 2 else 0.02
        together.step()
        single.step()
    for a, b, before in zip(ours, theirs, begun, strict=True):
        moved = (b - before).norm()
        assert (a - b).norm() < 2e-2 * moved, a.shape  # products in bf16, in another order


def test_what_comes_out_is_near_orthogonal(torch):
    from ddtree.train.muon import orthogonal

    values = torch.linalg.svdvals(orthogonal(torch.randn(3, 24, 64)).float())
    assert values.min() > 0.5 and values.max() < 1.4


def test_a_checkpoint_holds_the_momentum(torch):
    from ddtree.train.muon import Muon

    matrices = [torch.zeros(4, 8, requires_grad=True) for _ in range(2)]
    optimizer = Muon(matrices, lr=0.1, weight_decay=0.0)
    for number, matrix in enumerate(matrices):
        matrix.grad = torch.full((4, 8), number + 1.0)
    optimizer.step()
    again = Muon(matrices, lr=0.1, weight_decay=0.0)
    again.load_state_dict(optimizer.state_dict())
    for number, matrix in enumerate(matrices):
        assert again.state[matrix]["momentum_buffer"].flatten().tolist() == pytest.approx(
            [0.05 * (number + 1)] * 32
        )
