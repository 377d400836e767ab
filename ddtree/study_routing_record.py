"""Decode, and keep which experts each row of each verify went to: the rows of `study routing`.

The gates are those of the decode's own forwards, so every tree met the roots and contexts of a real decode.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.decode import Round, checked_prompt, decode
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.metrics import in_loop
from ddtree.prompts import Prompt
from ddtree.study_analytic import expected_experts
from ddtree.study_experts import effective_rows
from ddtree.study_journal import Journal
from ddtree.study_overlap import RELATIONS, RoundRouting, round_routing
from ddtree.study_routing_rows import key_of
from ddtree.study_rows import shape_sha256
from ddtree.versions import package_version

Gates = dict[int, np.ndarray]


@dataclass(frozen=True)
class RoutedRound:
    """A round and the `gates` {layer: f32[experts, M]} of its verify, zero where not chosen; none of the prefill's."""

    round: Round
    gates: Gates


@contextmanager
def watched_gates(engine: Engine) -> Iterator[Gates]:
    """{layer: gates [experts, rows]} of the engine's last forward, as copies on the host.

    Works on every backend whose forwards run launch by launch: UsageError for captured graphs, which hand out nothing,
    and for a model without MoE layers.
    """
    config = engine.config
    if engine.runner and engine.runner.graphs:
        raise UsageError("routing: a captured graph hands out no gates; add --no-graphs")
    if not any(config.is_moe(layer) for layer in range(config.num_hidden_layers)):
        raise UsageError(f"{engine.bundle.path}: routing: the model has no MoE layer")
    seen: Gates = {}
    host = engine.ops.read if engine.runner else np.array

    def see(step: str, layer: int, array: Any) -> None:
        if step == "gates":
            seen[layer] = host(array)

    forward = engine.model.forward
    engine.model.forward = lambda batch, cache, observe=None: forward(batch, cache, see)
    try:
        yield seen
    finally:
        del engine.model.forward  # the method of the class again


def plan_trees(horizon: int, shapes: Sequence[str], budgets: Sequence[int]) -> list[tuple[str, int]]:
    """(shape, budget), each once and in order; a chain has at most `horizon` nodes, which a drafter can propose.

    UsageError for no shape, no node, or a horizon of 0: no drafter.
    """
    if horizon < 1:
        raise UsageError("routing: the bundle has no drafter, so there is no tree; name one with --drafter")
    found = [(s, min(b, horizon) if s == "chain" else b) for s in shapes for b in budgets]
    if not found or min(budget for _, budget in found) < 1:
        raise UsageError("routing: give at least one shape and budgets of at least 1")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Planned:
    """One decode of a sweep: a prompt with its place and token ids, and the settings; `shape` also names a chain."""

    prompt: Prompt
    sequence: int
    prompt_ids: Sequence[int]
    shape: str
    config: DecodeConfig

    def told_by(self) -> dict[str, Any]:
        """The columns of its rows that tell it from other decodes of the same model, code and backend."""
        prompt, config = self.prompt, self.config
        return {
            **{"prompt": prompt.id, "kind": prompt.kind, "sequence": self.sequence},
            **{"temperature": config.sampling.temperature, "shape": self.shape, "budget": config.budget},
            "prompt_sha256": hashlib.sha256(prompt.text.encode()).hexdigest(),
            **{name: getattr(config.sampling, name) for name in ("top_k", "top_p", "seed")},
            "max_new_tokens": config.max_new_tokens,
        }


def plan_decodes(
    engine: Engine,
    prompts: Sequence[Prompt],
    trees: Sequence[tuple[str, int]],
    config: DecodeConfig,
    temperatures: Sequence[float] = (0.0,),
) -> list[Planned]:
    """The decodes of prompts by each temperature and tree (shape, budget), in that order; errors as `decode` has them.

    `config` gives the tokens wanted, top-k, top-p, seed and stop tokens; a prompt's sequence index is its place.
    """
    samplings = [replace(config.sampling, temperature=t) for t in dict.fromkeys(map(float, temperatures))]
    plan = []
    for sequence, prompt in enumerate(prompts):
        prompt_ids = checked_prompt(engine, engine.bundle.encode(prompt.text))
        for sampling, (shape, budget) in product(samplings, trees):
            method, form = ("chain", "best_first") if shape == "chain" else ("tree", shape)
            own = replace(config, method=method, shape=form, budget=budget, sampling=sampling)
            plan.append(Planned(prompt, sequence, prompt_ids, shape, own))
    return plan


def record_routing(
    engine: Engine,
    plan: Sequence[Planned],
    progress: Callable[[int], None] | None = None,
    journal: Journal | None = None,
) -> list[dict[str, Any]]:
    """A row for each decode of the plan and MoE layer; `routing_row` says what it holds, KEY what it is told by.

    `progress(total)` hears of each decode. A `journal` of ROUTED rows keeps those of finished decodes as they come,
    gives those that it holds, and writes the whole file. Raises UsageError as `watched_gates`, `decode` and `Journal`.
    """
    config, ops, rows = engine.config, engine.ops, []
    made_by = {f"{name}_sha256": value for name, value in engine.bundle.sha256().items()} | {
        "backend": f"{ops.name} ({ops.device}), {ops.dtype_name}, route {ops.route}, gemm {ops.gemm}",
        "version": package_version("ddtree"),
    }
    shapes = {shape: shape_sha256(shape) for shape in dict.fromkeys(each.shape for each in plan)}
    heads = [each.told_by() | made_by | {"shape_sha256": shapes[each.shape]} for each in plan]
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    keys = [[key_of(head | {"layer": layer}) for layer in layers] for head in heads]
    with journal or nullcontext():
        found = journal.begin([key for mine in keys for key in mine]) if journal else {}
        for each, head, mine in zip(plan, heads, keys, strict=True):
            new = [found[key] | head for key in mine if key in found]  # a prompt may have another id now
            if not new or len(new) < len(mine):
                routed = list(routed_rounds(engine, each.prompt_ids, each.config, each.sequence))
                new = _rows(engine, head, routed, each.prompt_ids)
                if journal:
                    journal.add(new)
            rows += new
            if progress:
                progress(len(plan))
        if journal:
            journal.finish(rows)
    return rows


def first_verify(engine: Engine, plan: Sequence[Planned]) -> tuple[Planned, RoutedRound] | None:
    """The first verify of the first decode that has one, without the rest of it; None where none has."""
    for each in plan:
        with closing(routed_rounds(engine, each.prompt_ids, each.config, each.sequence)) as rounds:
            for this in rounds:
                if this.gates:
                    return each, this
    return None


def routed_rounds(
    engine: Engine, prompt_ids: Sequence[int], config: DecodeConfig, sequence: int = 0
) -> Iterator[RoutedRound]:
    """The rounds of `decode` with the gates of their verifies; errors as there and in `watched_gates`."""
    with watched_gates(engine) as seen:
        for this in decode(engine, [int(token) for token in prompt_ids], config, sequence):
            rows = len(this.tree.parents)  # a device's forward has rows of padding beyond
            verified = this.index > 0
            yield RoutedRound(
                this, {layer: each[:, :rows] for layer, each in seen.items()} if verified else {}
            )


def _rows(
    engine: Engine, told_by: Mapping[str, Any], routed: Sequence[RoutedRound], prompt_ids: Sequence[int]
) -> list[dict[str, Any]]:
    """The rows of one decode, one a layer; a decode without a round after the prefill has none."""
    config, tokens = engine.config, [token for this in routed for token in this.round.tokens]
    looping = in_loop([*prompt_ids, *tokens])[len(prompt_ids) :]
    roots = np.cumsum([len(this.round.tokens) for this in routed])[:-1] - 1
    found = [
        round_routing(this.round.tree, np.stack([gates.T != 0 for gates in this.gates.values()]))
        for this in routed[1:]
    ]
    of = config.n_routed_experts, config.num_experts_per_tok
    head = dict(told_by) | {"experts": of[0], "experts_per_token": of[1], "tokens": len(tokens)}
    return [
        head | {"layer": layer} | routing_row(found, place, ~looping[roots], told_by["budget"], *of)
        for place, layer in enumerate(routed[-1].gates)
    ]


def routing_row(
    found: Sequence[RoundRouting], place: int, outside: np.ndarray, budget: int, experts: int, chosen: int
) -> dict[str, Any]:
    """One layer over the rounds of a decode, `place` its place among the MoE layers, `outside` bool[rounds] no loops.

    `rows`, `touched` and `independent` are means over the rounds: rows verified, distinct experts, and those that as
    many rows touch that choose evenly and independently; `ratio` is touched over independent. `touched_full` is the
    mean over full rounds, whose tree has all nodes of its budget: a decode's last trees are cut, and where rows touch
    nearly all experts a few small rounds would decide the mean. `effective_rows` is made of it (`study_experts`), None
    without a full round or where all experts are touched. `shared_*` is the mean of experts that two rows of that
    relation share, None without a pair; independent rows share `shared_independent`. `load` are the rows each expert
    got. Pairs and load are of all rounds.
    """
    rows = np.array([each.rows for each in found])
    touched = np.array([each.touched[place] for each in found])
    full = rows == budget + 1
    pairs = np.sum([each.pairs for each in found], axis=0)
    shared = np.sum([each.shared[place] for each in found], axis=0)
    row: dict[str, Any] = {"rounds": len(found), "rows": _mean(rows), "touched": _mean(touched)}
    row["independent"] = _mean(expected_experts(experts, chosen, rows))
    row["ratio"] = row["touched"] / row["independent"]
    for name, kept in (("full", full), ("full_outside_loops", full & outside)):
        row |= {f"rounds_{name}": int(kept.sum()), f"touched_{name}": _mean(touched[kept])}
    whole = row["touched_full"]
    effective = np.nan if whole is None else float(effective_rows(experts, chosen, whole))
    row["effective_rows"] = effective if np.isfinite(effective) else None
    row["shared_independent"] = chosen * chosen / experts
    for name, count, total in zip(RELATIONS, pairs.tolist(), shared.tolist(), strict=True):
        row |= {f"pairs_{name}": count, f"shared_{name}": total / count if count else None}
    return row | {"load": np.sum([each.load[place] for each in found], axis=0).tolist()}


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
