"""Does a tree pay, here and on larger models? Replayed acceptance over what a round costs there, with what is assumed.

Tokens a round are those of the recordings' own model and drafter; a larger model's would differ. Nothing is printed and
no model runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddtree.study_costing import Costing, costings
from ddtree.study_experts import Sharing
from ddtree.study_models import MODELS
from ddtree.study_summary import Summary

CONTEXTS = (128, 8192, 32768, 131072)
TREE, CHAIN = "best_first", "chain"


@dataclass(frozen=True)
class Verdict:
    """One shape and budget on one model, at a context and batch, under one way to cost a round.

    `source` says what the cost is made of and `experts` how the touched experts are counted (`study_costing`);
    `assumption` says both in words. `tokens` is a round's, bonus token included, with its 95% interval over prompts;
    `cost` a round's in rounds of a single row without a draft, the draft counted; `touched` distinct experts a layer
    (None where rounds were timed whole). `speedup` is tokens / cost, its interval that of the tokens alone. `pays`:
    yes or no where the interval lies on one side of 1, else undecided, as it is of one prompt.
    """

    model: str
    source: str
    experts: str
    context: int
    batch: int
    temperature: float
    shape: str
    budget: int
    depth: int
    rows: float
    touched: float | None
    tokens: float
    tokens_low: float
    tokens_high: float
    cost: float
    speedup: float
    speedup_low: float
    speedup_high: float
    pays: str
    assumption: str


def verdicts(
    summaries: Iterable[Summary],
    models: Sequence[str] = tuple(MODELS),
    contexts: Sequence[int] = CONTEXTS,
    batches: Sequence[int] = (1,),
    sharing: Sequence[Sharing] | None = None,
) -> list[Verdict]:
    """A verdict for each summary with a draft, model, context, batch, and way to cost a round that is known there.

    What is measured is measured at a batch of 1 and at its own contexts; larger batches and other contexts are
    analytic. Of summaries of several depths a model takes, shape by shape and budget by budget, the deepest that its
    drafter reaches, else the shallowest. `sharing` is a record of routing, instead of those of
    `study_models.ROUTERS`; where a shape, temperature or size was not recorded there is no verdict by it. UsageError
    for an unknown model.
    """
    drafted, found = [each for each in summaries if each.nodes > 0], []
    for model in models:
        for context in contexts:
            for batch in batches:
                for way in costings(model, context, batch, sharing):
                    mine = _of_depth(drafted, way.horizon)
                    found += [one for each in mine if (one := _verdict(model, context, batch, way, each))]
    return found


def _of_depth(summaries: Sequence[Summary], horizon: int) -> list[Summary]:
    """Of each shape, budget and temperature the deepest within the horizon, else the shallowest."""
    grouped: dict[tuple, list[Summary]] = defaultdict(list)
    for each in summaries:
        grouped[each.shape, each.budget, each.temperature].append(each)
    return [
        max(
            mine,
            key=lambda each: (each.depth <= horizon, each.depth if each.depth <= horizon else -each.depth),
        )
        for mine in grouped.values()
    ]


def _verdict(model: str, context: int, batch: int, way: Costing, each: Summary) -> Verdict | None:
    """None where the way cannot cost such a round."""
    round_cost = way.round_cost(each.shape, each.temperature, each.nodes + 1)
    if round_cost is None:
        return None
    cost, touched = round_cost
    speedup, low, high = (tokens / cost for tokens in (each.acceptance, each.low, each.high))
    return Verdict(
        *(model, way.source, way.experts, context, batch),
        *(each.temperature, each.shape, each.budget, each.depth, each.nodes + 1, touched),
        *(float(each.acceptance), each.low, each.high, cost, float(speedup), low, high),
        pays=each.exceeds(cost),
        assumption=way.assumption,
    )


Place = tuple[str, str, str, int, int, float]  # model, source, experts, context, batch, temperature


def place_of(verdict: Verdict) -> Place:
    """What two verdicts share that may be held against one another."""
    v = verdict
    return v.model, v.source, v.experts, v.context, v.batch, v.temperature


def at_own_best(found: Iterable[Verdict]) -> dict[Place, dict[str, Verdict]]:
    """By place, each shape's fastest verdict."""
    best: dict[Place, dict[str, Verdict]] = defaultdict(dict)
    for each in found:
        mine = best[place_of(each)]
        if each.shape not in mine or each.speedup > mine[each.shape].speedup:
            mine[each.shape] = each
    return dict(best)


@dataclass(frozen=True)
class BatchLimit:
    """One shape at its own best budget by batch: `best` ascends in it; from `stops` on no batch is sure to pay.

    `stops` is None where the largest batch still pays. A tree may pay at a middle batch and not at one: there all
    experts are read anyway, and its rows are nearly free until arithmetic bounds the round.
    """

    model: str
    source: str
    experts: str
    context: int
    temperature: float
    shape: str
    best: tuple[Verdict, ...]
    stops: int | None


def batch_limits(found: Iterable[Verdict]) -> list[BatchLimit]:
    """The table of the batch at which a shape stops paying, of what has verdicts at several batches."""
    grouped: dict[tuple[Any, ...], list[Verdict]] = defaultdict(list)
    for place, by_shape in at_own_best(found).items():
        model, source, experts, context, _, temperature = place
        for shape, each in by_shape.items():
            grouped[model, source, experts, context, temperature, shape].append(each)
    limits = []
    for key, mine in grouped.items():
        if len(mine) == 1:
            continue
        mine.sort(key=lambda each: each.batch)
        paying = [place for place, each in enumerate(mine) if each.pays == "yes"]
        after = paying[-1] + 1 if paying else 0
        limits.append(BatchLimit(*key, tuple(mine), mine[after].batch if after < len(mine) else None))
    return limits
