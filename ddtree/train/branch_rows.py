"""What a branch head learns from: a frozen drafter's slots along a bank, with the token before and the one to come.

The token before is the sequence's: real, sampled or greedy, so often not what the target would have chosen, and a head
is for what follows those. The label is the target's own greedy choice there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from ddtree.kdtr import KdtrFile, save
from ddtree.train.bank import loops
from ddtree.train.branch import CANDIDATES
from ddtree.train.device import tf32
from ddtree.train.drafter import Drafter
from ddtree.train.presets import BranchRun
from ddtree.train.target import Target

AT_ONCE = {"cpu": 8, "cuda": 64}  # sequences
OF_ROWS = ("bank", "anchors", "decay", "loop_weight")  # what of a run the rows depend on
Arrays = dict[str, np.ndarray]


def open_rows(
    target: Target,
    drafter: Drafter,
    run: BranchRun,
    bank: np.ndarray,
    path: Path,
    made_of: dict[str, Any],
    seed: int,
) -> Arrays:
    """Read the rows at `path`, or make them there: hidden f16 [N, H], log_probs f32 and token_ids u16 [N, K], the
    candidates; parents, labels u16 and depths u8 [N].

    bank u16 [B, S] are the sequences. `made_of` says what models and corpus all comes from; rows of anything else are
    made anew.
    """
    settings = {name: value for name, value in asdict(run).items() if name in OF_ROWS}
    recipe = json.dumps({"run": settings, "seed": seed} | made_of, sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    if path.exists():
        file = KdtrFile(path)
        if file.meta.get("recipe_sha256") == digest:
            return {name: file[name] for name in file}
    arrays = make_rows(target, drafter, run, bank, seed)
    save(path, arrays, {"kind": "branch rows", "recipe_sha256": digest, "recipe": json.loads(recipe)})
    return arrays


@torch.inference_mode()
def make_rows(target: Target, drafter: Drafter, run: BranchRun, bank: np.ndarray, seed: int) -> Arrays:
    """Run both models over the sequences; rows whose label is no candidate are left out."""
    device = target.head.device
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, list[np.ndarray]] = {}
    with tqdm(total=len(bank), desc="rows", unit="sequence") as bar, tf32():
        at_once = AT_ONCE[device.type]
        for start in range(0, len(bank), at_once):
            tokens = torch.from_numpy(bank[start : start + at_once].astype(np.int64)).to(device)
            for name, values in rows_of(target, drafter, run, tokens, generator).items():
                made.setdefault(name, []).append(values.cpu().numpy())
            bar.update(len(tokens))
    types = {"hidden": np.float16, "log_probs": np.float32, "depths": np.uint8}
    return {name: np.concatenate(parts).astype(types.get(name, np.uint16)) for name, parts in made.items()}


def rows_of(
    target: Target, drafter: Drafter, run: BranchRun, tokens: Tensor, generator: torch.Generator
) -> dict[str, Tensor]:
    """The rows of some sequences i64 [B, S], from `run.anchors` blocks of each.

    A block whose root is in a loop is drawn loop_weight times as often, and a row at depth d is kept with probability
    exp(-(d - 1) / decay).
    """
    horizon, length = drafter.config.horizon, tokens.shape[1]
    hidden, features = target.run(tokens, drafter.config.target_layer_ids)
    choices = functional.linear(hidden, target.head).argmax(dim=-1)  # after each position
    weight = torch.where(loops(tokens), run.loop_weight, 1.0)
    weight[:, 0], weight[:, length - 1 :] = 0, 0  # a block needs a row before it and a token after
    anchors = torch.multinomial(weight, run.anchors, generator=generator)
    slots = drafter(features, tokens.gather(1, anchors), anchors, target.embedding)
    log_probs = functional.linear(slots, target.head).log_softmax(dim=-1)
    log_probs, ids = log_probs.topk(min(CANDIDATES, log_probs.shape[-1]), dim=-1)
    steps = torch.arange(horizon, device=tokens.device)
    before = anchors.unsqueeze(-1) + steps  # the position whose successor depth d = steps + 1 foretells
    inside, before = before < length, before.clamp(max=length - 1)
    row = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
    parents, labels = tokens[row, before], choices[row, before]
    chance = torch.exp(-steps / run.decay).expand(before.shape)
    drawn = torch.rand(before.shape, generator=generator, device=tokens.device) < chance
    kept = drawn & inside & (ids == labels.unsqueeze(-1)).any(dim=-1)
    depths = (steps + 1).expand(before.shape)
    rows = {"hidden": slots, "log_probs": log_probs, "token_ids": ids, "parents": parents}
    return {name: values[kept] for name, values in (rows | {"labels": labels, "depths": depths}).items()}
