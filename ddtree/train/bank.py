"""A bank of the target's own continuations: what the drafter learns to foretell.

Each sequence follows a plan of segments: real tokens, own ones (greedy or sampled), and bursts, sampled to vary what
follows. Labels are own tokens alone, and a block's labels all come from one segment.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ddtree.kdtr import KdtrFile, save
from ddtree.metrics import LOOP_LENGTH, LOOP_PERIOD
from ddtree.train.device import check_memory, room, tf32
from ddtree.train.generate import continue_prompts
from ddtree.train.presets import BankRun, Segment
from ddtree.train.target import Target


def segment_ends(plan: tuple[Segment, ...]) -> np.ndarray:
    """Where the own segment of each position ends, i64 [length]; 0 at positions that hold no label."""
    return np.concatenate(
        [
            np.full(segment.length, end if segment.kind == "own" else 0)
            for segment, end in zip(plan, np.cumsum([s.length for s in plan]), strict=True)
        ]
    )


def plan_temperatures(plan: tuple[Segment, ...]) -> np.ndarray:
    """The temperature that each position's token was drawn at, f32 [length]; 0 for real ones."""
    return np.concatenate([np.full(s.length, s.temperature, np.float32) for s in plan])


@torch.inference_mode()
def loops(tokens: Tensor) -> Tensor:
    """bool [B, S]: `ddtree.metrics.in_loop` of each row of tokens."""
    batch, length = tokens.shape
    looping = torch.zeros((batch, length), dtype=torch.bool, device=tokens.device)
    for period in range(1, min(LOOP_PERIOD, length - LOOP_LENGTH) + 1):
        equal = torch.zeros((batch, length - period + 1), dtype=torch.int32, device=tokens.device)
        equal[:, 1:] = (tokens[:, period:] == tokens[:, :-period]).cumsum(dim=1)
        looping[:, period + LOOP_LENGTH - 1 :] |= (
            equal[:, LOOP_LENGTH:] - equal[:, :-LOOP_LENGTH] == LOOP_LENGTH
        )
    return looping


def open_bank(
    model: Target, run: BankRun, corpus: np.ndarray, path: Path, made_of: dict[str, Any], seed: int
) -> dict[str, np.ndarray]:
    """Read the bank at `path`, or make it there: tokens u16 [N, S], plan u8 [N], looping bool [N, S].

    `made_of` says what target and corpus it comes from; a bank of anything else is made anew.
    """
    recipe = json.dumps({"run": asdict(run), "seed": seed} | made_of, sort_keys=True)
    digest = hashlib.sha256(recipe.encode()).hexdigest()
    if path.exists():
        file = KdtrFile(path)
        if file.meta.get("recipe_sha256") == digest:
            return {name: file[name] for name in file}
    arrays = make_bank(model, run, corpus, seed)
    save(path, arrays, {"kind": "bank", "recipe_sha256": digest, "recipe": json.loads(recipe)})
    return arrays


def make_bank(model: Target, run: BankRun, corpus: np.ndarray, seed: int) -> dict[str, np.ndarray]:
    """Generate it, plans in turn. A prompt begins anywhere in the corpus i32 [n]."""
    device, rng = model.head.device, np.random.default_rng([seed, 2])
    generator = torch.Generator(device).manual_seed(seed)
    batch = _affordable(model, run, device)
    each = max(1, run.tokens // run.length // len(run.plans))
    made: dict[str, list[np.ndarray]] = {"tokens": [], "plan": [], "looping": []}
    with (
        tqdm(total=each * len(run.plans) * run.length, desc="bank", unit="token", unit_scale=True) as bar,
        tf32(),
    ):
        for index, plan in enumerate(run.plans):
            for start in range(0, each, batch):
                count = min(batch, each - start)
                first = plan[0].length
                starts = rng.integers(len(corpus) - first, size=count)
                prompts = torch.from_numpy(corpus[starts[:, None] + np.arange(first)]).long().to(device)
                lengths = torch.full((count,), first, device=device)
                temperatures = list(chain.from_iterable([s.temperature] * s.length for s in plan[1:]))
                own = continue_prompts(model, prompts, lengths, temperatures, generator)
                tokens = torch.cat([prompts, own], dim=1)
                made["tokens"].append(tokens.cpu().numpy().astype(np.uint16))
                made["looping"].append(loops(tokens).cpu().numpy())
                made["plan"].append(np.full(count, index, np.uint8))
                bar.update(count * run.length)
    return {name: np.concatenate(parts) for name, parts in made.items()}


def _affordable(model: Target, run: BankRun, device: torch.device) -> int:
    """Sequences at once: the run's `batch`, fewer where half of the room holds no more."""
    c = model.config
    cache = 4 * c.num_hidden_layers * run.length * (c.kv_lora_rank + c.qk_rope_head_dim)
    experts = 3 * (c.n_routed_experts + c.n_shared_experts) * c.moe_intermediate_size
    each = cache + 4 * (4 * c.vocab_size + experts) + 8 * run.length * c.num_attention_heads
    check_memory(device, 2 * 64 * each, "a bank")
    return min(run.batch, room(device) // 2 // each)
