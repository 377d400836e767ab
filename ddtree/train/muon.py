"""Muon, with matrices of one shape orthogonalised together: a drafter's are many, small, and of three shapes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of a step of Newton and Schulz, as Muon's author published them
STEPS = 5
SMALLEST = 1e-7


def orthogonal(matrices: Tensor) -> Tensor:
    """About the nearest orthogonal matrices, bf16 [N, R, C] with R <= C: singular values between 0.5 and 1.5."""
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=SMALLEST)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x


class Muon(torch.optim.Optimizer):
    """Muon (kellerjordan.github.io/posts/muon) with Nesterov's momentum and steps as large as AdamW's.

    The arithmetic is `torch.optim.Muon`'s with adjust_lr_fn="match_rms_adamw", which goes matrix by matrix. A group's
    "lr" may be a 0-d tensor on the matrices' device. Every matrix must have a gradient.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            shapes: dict[tuple[int, int], list[Tensor]] = {}
            for matrix in group["params"]:
                short, long = sorted(matrix.shape)
                shapes.setdefault((short, long), []).append(matrix)
            for (_, long), matrices in shapes.items():
                self._step(matrices, group, 0.2 * long**0.5)

    def _step(self, matrices: list[Tensor], group: dict, scale: float) -> None:
        """`scale` times the learning rate is the step of matrices whose sides are alike."""
        momentum, lr = group["momentum"], group["lr"]
        grads = [m.grad for m in matrices]
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [self.state[m]["momentum_buffer"] for m in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)
        tall = [m.shape[0] > m.shape[1] for m in matrices]
        updates = orthogonal(torch.stack([u.T if t else u for u, t in zip(ahead, tall, strict=True)]))
        updates = updates.float() * (-scale * lr)
        torch._foreach_mul_(matrices, 1 - lr * group["weight_decay"])
        torch._foreach_add_(matrices, [u.T if t else u for u, t in zip(updates, tall, strict=True)])
