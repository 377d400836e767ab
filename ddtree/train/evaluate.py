"""What a drafter is worth on text that nothing was trained on: loss and accuracy by depth, and rounds of trees.

Everything here runs in f32 on the device that the models are on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ddtree.train.acceptance import Continuation, marginal_tree, mean_acceptance
from ddtree.train.bank import loops
from ddtree.train.branch import CANDIDATES, BranchHead
from ddtree.train.drafter import Drafter
from ddtree.train.generate import continue_prompts
from ddtree.train.presets import END_OF_TEXT
from ddtree.train.target import Target

TABLE = 64  # candidates of each depth that a table keeps
BUDGETS = (16, 64)
SEQUENCES = {"cpu": 16, "cuda": 64}  # at once


def held_out_prompts(tokens: np.ndarray, count: int, length: int) -> list[list[int]]:
    """Prompts of that many tokens at even distances in the held-out ids i32 [m], fewer if they do not fit."""
    count = min(count, max(1, len(tokens) // (length + 1)))
    starts = np.linspace(0, max(0, len(tokens) - length), count).astype(int)
    return [tokens[start : start + length].tolist() for start in starts]


@torch.inference_mode()
def continuations(
    target: Target,
    drafter: Drafter,
    branch: BranchHead | None,
    prompts: Sequence[Sequence[int]],
    new: int,
    temperature: float = 0.0,
) -> tuple[list[Continuation], dict[str, Any]]:
    """Continuations of `new` tokens, greedy or drawn at a temperature, with the drafter's tables, and its loss
    and accuracy by depth.

    Loss and accuracy are means over all roots outside loops, and over roots alike, whether a decode would start a
    round there or not.
    """
    made: list[Continuation] = []
    sums = torch.zeros(3, drafter.config.horizon, dtype=torch.float64, device=target.head.device)
    generator = torch.Generator(target.head.device).manual_seed(0)
    at_once = SEQUENCES[target.head.device.type]
    for start in tqdm(range(0, len(prompts), at_once), desc="evaluation", unit="batch"):
        some = prompts[start : start + at_once]
        made += _some(target, drafter, branch, some, [temperature] * new, generator, sums)
    count, right, loss = sums.cpu().numpy()
    count = np.maximum(count, 1)
    by_depth = {"top1": (right / count).round(4).tolist(), "loss": (loss / count).round(4).tolist()}
    return made, by_depth | {"roots": int(count[0])}


def _some(
    target: Target,
    drafter: Drafter,
    branch: BranchHead | None,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    generator: torch.Generator,
    sums: Tensor,
) -> list[Continuation]:
    """The same for a few prompts; adds counts, hits and losses of roots outside loops to sums f64 [3, horizon]."""
    device, horizon, new = target.head.device, drafter.config.horizon, len(temperatures)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    padded = torch.full((len(prompts), int(lengths.max())), END_OF_TEXT, device=device)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt, device=device)
    own = continue_prompts(target, padded, lengths, temperatures, generator)
    whole = torch.full((len(prompts), padded.shape[1] + new), END_OF_TEXT, device=device)
    whole[:, : padded.shape[1]] = padded
    within = lengths.unsqueeze(1) + torch.arange(new, device=device)
    whole.scatter_(1, within, own)
    _, features = target.run(whole, drafter.config.target_layer_ids)
    anchors = within[:, :-1]
    hidden = drafter(features, whole.gather(1, anchors), anchors, target.embedding)
    logits = functional.linear(hidden, target.head)
    log_probs, ids = logits.log_softmax(dim=-1).topk(min(TABLE, logits.shape[-1]), dim=-1)
    made = []
    for row, prompt in enumerate(prompts):
        tokens = own[row].cpu().numpy()
        stops = np.flatnonzero(tokens == END_OF_TEXT)
        count = int(stops[0]) + 1 if len(stops) else new
        _measure(whole[row, : len(prompt) + new], len(prompt), count, logits[row], sums)
        table = [t[row, : count - 1].cpu().numpy() for t in (ids, log_probs)]
        plain = Continuation(
            np.array(prompt), tokens[:count], table[0].astype(np.int32), table[1].astype(np.float32)
        )
        scores = None
        if branch is not None:
            few = log_probs[row, : count - 1, :, :CANDIDATES], ids[row, : count - 1, :, :CANDIDATES]
            roots = own[row, : count - 1]
            scores = branch.conditional(hidden[row, : count - 1], *few, roots, target.embedding, target.head)
            scores = scores.cpu().numpy()
        made.append(Continuation(plain.prompt, plain.tokens, plain.token_ids, plain.log_probs, scores))
    assert horizon == logits.shape[2]
    return made


def _measure(tokens: Tensor, first: int, count: int, logits: Tensor, sums: Tensor) -> None:
    """Add one sequence: roots first .. first + count - 2 that are in no loop, at depths whose token is known."""
    depths = torch.arange(1, sums.shape[1] + 1, device=tokens.device)
    places = torch.arange(count - 1, device=tokens.device)
    after = places.unsqueeze(1) + depths  # place of each depth's token among the own ones
    looping = loops(tokens[: first + count].unsqueeze(0))[0, first : first + count - 1]
    counted = (after < count) & ~looping.unsqueeze(1)
    labels, rows = tokens[first + after.clamp(max=count - 1)], logits[: count - 1]
    loss = functional.cross_entropy(rows.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
    sums[0] += counted.sum(dim=0)
    sums[1] += ((rows.argmax(dim=-1) == labels) & counted).sum(dim=0)
    sums[2] += (loss * counted).sum(dim=0)


def evaluate(target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], new: int) -> dict[str, Any]:
    """Loss and top-1 by depth, and rounds of greedy trees at each of BUDGETS."""
    made, by_depth = continuations(target, drafter, None, prompts, new)
    made = [this for this in made if len(this.tokens) > 1]
    report: dict[str, Any] = {"prompts": len(prompts), "new_tokens": new, **by_depth}
    for budget in BUDGETS:
        report[f"tree_{budget}"] = mean_acceptance(made, marginal_tree, budget)
    return report


def lines(name: str, report: dict[str, Any]) -> list[str]:
    """A report as text."""
    depths = [1, 2, 4, 8, 15]
    picked = [d for d in depths if d <= len(report["top1"])]
    text = [
        f"{name}: {report['prompts']} prompts, {report['new_tokens']} greedy tokens each",
        f"  {report['roots']} roots outside loops, by depth",
        "  depth      " + "".join(f"{d:8d}" for d in picked),
        "  top-1      " + "".join(f"{report['top1'][d - 1]:8.3f}" for d in picked),
        "  loss, nats " + "".join(f"{report['loss'][d - 1]:8.3f}" for d in picked),
    ]
    for key, value in report.items():
        if isinstance(value, dict):
            kind, budget = key.rsplit("_", 1)
            text.append(
                f"  {kind + ' ' + budget:10s} {value['acceptance']:.3f} tokens a round with the bonus token, "
                f"{value['acceptance_outside']:.3f} outside loops ({value['rounds_outside']} rounds)"
            )
    return text
