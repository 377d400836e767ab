"""The branch head: what a candidate is worth after a given parent, which a depth's marginal cannot say.

It reads a frozen drafter's hidden states. The formula is that of `ddtree.reference.branch_scores`; docs/branch_log.md
says which others were tried.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ddtree.train.layers import matrix

CANDIDATES = 16  # of each depth


def combine(parent: Tensor, gate: Tensor) -> Tensor:
    """What the gate makes of a parent's entry, elementwise; the one place of this formula in PyTorch."""
    return functional.silu(parent + gate)


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
        left = combine(a, functional.linear(hidden, self.gate))
        return torch.einsum("nr,nkr->nk", left.float(), b.float())

    @torch.inference_mode()
    def conditional(
        self,
        hidden: Tensor,
        log_probs: Tensor,
        token_ids: Tensor,
        roots: Tensor,
        embedding: Tensor,
        head: Tensor,
    ) -> Tensor:
        """`ddtree.reference.branch_scores` of many tables, f32 [N, L, K, K] with candidates in their own order.

        hidden [N, L, H]; log_probs f32 and token_ids i64 [N, L, K], finite; roots i64 [N].
        """
        first = roots.view(-1, 1, 1).expand(-1, 1, token_ids.shape[2])
        parents = torch.cat([first, token_ids[:, :-1]], dim=1)
        a = functional.embedding(parents, functional.linear(embedding, self.parent))
        b = functional.embedding(token_ids, functional.linear(head, self.child))
        left = combine(a, functional.linear(hidden, self.gate).unsqueeze(2))
        scores = log_probs.unsqueeze(2) + left @ b.transpose(2, 3)
        out = scores.log_softmax(dim=-1) + log_probs.logsumexp(dim=-1)[..., None, None]
        out[:, 0, 1:] = -torch.inf
        return out


def pair_loss(scores: Tensor, candidates: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy [N] of labels i64 [N] among candidates i64 [N, K] of those scores, and which rows hold theirs."""
    is_label = candidates == labels.unsqueeze(-1)
    loss = -scores.log_softmax(dim=-1).masked_fill(~is_label, 0.0).sum(dim=-1)
    return loss, is_label.any(dim=-1)
