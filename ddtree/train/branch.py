"""The branch head: what a candidate is worth after a given parent, which a depth's marginal cannot say.

Trained on pairs (the bank's previous token, its next token) beside the drafter, whose hidden states it reads and does
not change. The formula is that of `ddtree.reference.branch_scores`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.train.layers import matrix

CANDIDATES = 16  # of each depth


class BranchHead(nn.Module):
    """parent, gate, child [R, H]: the three low-rank maps; R x 3 x H parameters."""

    def __init__(self, hidden: int, rank: int, embedding: Tensor):
        super().__init__()
        scale = embedding.float().square().mean().sqrt().item()
        self.parent = matrix(rank, hidden, 1 / (scale * hidden**0.5))
        self.gate = nn.Parameter(torch.zeros(rank, hidden))
        self.child = nn.Parameter(torch.zeros(rank, hidden))  # so the head begins as the marginal

    def forward(
        self, hidden: Tensor, parents: Tensor, candidates: Tensor, embedding: Tensor, head: Tensor
    ) -> Tensor:
        """s [N, K] of hidden [N, H], the drafter's at a depth, parents i64 [N] and candidates i64 [N, K]."""
        a = functional.embedding(parents, functional.linear(embedding, self.parent))
        b = functional.embedding(candidates, functional.linear(head, self.child))
        gated = a * (1 + functional.linear(hidden, self.gate))
        return torch.einsum("nr,nkr->nk", gated.float(), b.float())


def branch_loss(
    module: BranchHead,
    hidden: Tensor,
    logits: Tensor,
    parents: Tensor,
    labels: Tensor,
    embedding: Tensor,
    head: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cross-entropy [N] among a depth's CANDIDATES best, and which rows have one: where the label is among them.

    hidden [N, H] and logits [N, V] of the drafter come without their gradient; parents and labels i64 [N].
    """
    best, candidates = logits.detach().topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
    scores = best.float() + module(hidden.detach(), parents, candidates, embedding, head)
    is_label = candidates == labels.unsqueeze(-1)
    loss = -scores.log_softmax(dim=-1).masked_fill(~is_label, 0.0).sum(dim=-1)
    return loss, is_label.any(dim=-1)
