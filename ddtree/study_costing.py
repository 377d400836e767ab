"""Ways to cost a round on a model: rounds timed whole, one layer timed and multiplied, or bytes and FLOPs alone.

Each counts a round in rounds of a single row without a draft, and says how it counts the experts that rows touch:

- independent: each row chooses evenly, apart from the others.
- random router: as the layer bench's own rows did, of random weights.
- recorded: as the shipped model's trees did (16 experts, top 4), by effective rows (`study_experts`): if this router
  shared as that one.
- recorded small: likewise, as the trees of another model of that shape did, which is not shipped.
- recorded wide: likewise, as trees of a model of 128 experts, top 8, did, trained as that one was and not shipped.
- measured: whole rounds were timed, experts and all.
- as timed: the layer bench's own rows again, by their experts' times and not by a fit (`bench_estimate`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ddtree.bundle import DEFAULT_MODEL, open_bundle
from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.study_analytic import (
    WeightBytes,
    drafter_seconds,
    expected_experts,
    forward_seconds,
)
from ddtree.study_cost import CostCurve, drafted_curve, measured_cost
from ddtree.study_experts import EffectiveRows, Sharing, effective_curve
from ddtree.study_layers import FITTED_ROWS, LayerCosts
from ddtree.study_models import (
    DRAFT_BY_BYTES,
    MACHINE,
    ROUTERS,
    ScaleModel,
    default_draft_ms,
    drafter_of,
    model_of,
    recorded_sharing,
    target_config,
    timed_layers,
)

OTHER_MS = 0.0551  # logits to a tree of 64 at a vocabulary of 163,840, accept and compaction of 61 layers: kernels.json

COUNTED = {
    "independent": "rows choose experts evenly and independently",
    "random router": "experts as the bench's rows of random weights touched them",
    "recorded": "experts by the effective rows of the shipped model's trees (16 experts, top 4)",
    "recorded small": "experts by the effective rows of the trees of a second model (16 experts, top 4)",
    "recorded wide": "experts by the effective rows of the trees of a model with finer experts (128 experts, top 8)",
    "as timed": "experts as the bench's rows of random weights touched them, and their time",
}

# Distinct experts of a layer by shape, temperature and rows of one sequence; NaN where not known
Touch = Callable[[str, float, float], float]


@dataclass(frozen=True)
class Costing:
    """One way: `milliseconds(temperature, rows, touched)` of a round, a draft included from two rows on.

    `touch` counts experts, None where `milliseconds` needs no count; `horizon` is the drafter's, `assumption` the way
    in words.
    """

    source: str
    experts: str
    assumption: str
    horizon: int
    milliseconds: Callable[[float, float, float], float]
    touch: Touch | None = None

    def round_cost(self, shape: str, temperature: float, rows: float) -> tuple[float, float | None] | None:
        """A round's cost in rounds of a single row, and the experts it touches; None where it is not known."""
        touched, one = (self.touch(shape, temperature, n) if self.touch else 0.0 for n in (rows, 1.0))
        cost = self.milliseconds(temperature, rows, touched) / self.milliseconds(temperature, 1.0, one)
        return (float(cost), float(touched) if self.touch else None) if np.isfinite(cost) else None


def costings(
    name: str, context: int, batch: int = 1, sharing: Sequence[Sharing] | None = None
) -> Iterator[Costing]:
    """Every way to cost rounds of that model there; UsageError for a model that is none of MODELS."""
    model = model_of(name)
    if model is None:
        yield from _whole_rounds(context, batch)
        return
    config, drafter = target_config(model.config), drafter_of(model)
    timed = timed_layers(model, context) if batch == 1 else None
    if timed:
        words = f"a layer of {model.layers} times {config.num_hidden_layers}, as if one GPU held them"
        cost = layers_ms(timed, config, default_draft_ms(name, context))
        for experts, touch in touches(config, 1, sharing, timed).items():
            said = _said(words, experts, model)
            yield Costing("measured layers", experts, said, drafter.horizon, cost, touch)
    words = "bytes and FLOPs alone, no launch and no traffic between GPUs"
    draft_ms = 1e3 * drafter_seconds(drafter, context, MACHINE, batch)
    cost = _analytic_ms(config, model.weights, context, batch, draft_ms)
    untimed = replace(model, note=DRAFT_BY_BYTES) if model.draft_ms else model
    for experts, touch in touches(config, batch, sharing).items():
        yield Costing("analytic", experts, _said(words, experts, untimed), drafter.horizon, cost, touch)


def layers_cost(
    name: str,
    context: int,
    experts: str = "independent",
    shape: str = "best_first",
    temperature: float = 0.0,
    draft_ms: float | None = None,
    sharing: Sequence[Sharing] | None = None,
) -> CostCurve:
    """The curve of rounds of 1 to 65 rows on a model whose layers were timed after that many positions.

    An estimate: a timed layer of each kind times the layers of that kind, and the head: one GPU's time, though a model
    as large as Kimi K2.6 needs many (`study_analytic.forward_bytes` says what it reads). `experts` is one of the ways
    of this module, of trees of that shape and temperature where they were recorded; `draft_ms` is `default_draft_ms`
    unless given. UsageError where no layer was timed, or the experts are not known.
    """
    model = model_of(name)
    timed = timed_layers(model, context) if model else None
    if timed is None:
        raise UsageError(f"scale: no layer of {name} was timed after {context} positions")
    config = target_config(model.config)
    ways = touches(config, 1, sharing, timed)
    if experts not in ways:
        raise UsageError(f"scale: experts: expected one of {', '.join(ways)}, found {experts!r}")
    rows = np.arange(1.0, FITTED_ROWS + 1)
    touched = np.array([ways[experts](shape, temperature, n) for n in rows])
    verify = timed.verify_ms(config, rows, touched)
    known = np.isfinite(verify)
    if known.sum() < 2:
        raise UsageError(f"scale: what {shape} shares at temperature {temperature:g} was not recorded")
    draft_ms = default_draft_ms(name, context) if draft_ms is None else draft_ms
    return drafted_curve(rows[known], verify[known], draft_ms, OTHER_MS)


def touches(
    config: ModelConfig, batch: int, sharing: Sequence[Sharing] | None, timed: LayerCosts | None = None
) -> dict[str, Touch]:
    """Ways to count the experts that a batch's rows touch; sequences choose apart from one another.

    `sharing` is a record of routing, `recorded`; without one there is a way for each of ROUTERS.
    """
    of = config.n_routed_experts, config.num_experts_per_tok
    ways: dict[str, Touch] = {
        "independent": lambda shape, temperature, rows: expected_experts(*of, batch * rows),
    }
    records = {way: recorded_sharing(way) for way in ROUTERS} if sharing is None else {"recorded": sharing}
    ways |= {way: _recorded_touch(of, batch, record) for way, record in records.items()}
    if timed:
        ways["random router"] = lambda shape, temperature, rows: float(timed.bench_touched(config, rows))
    return ways


def _whole_rounds(context: int, batch: int) -> Iterator[Costing]:
    """The shipped model's: its prompts and continuations are some 100 to 200 tokens, its sequences one at a time."""
    if (context, batch) != (128, 1):
        return
    curves = {greedy: measured_cost(0.0 if greedy else 1.0) for greedy in (True, False)}
    horizon = open_bundle(DEFAULT_MODEL).drafter_config.horizon
    words = (
        "whole rounds timed on an H200, at prompts of about 100 tokens; between measured rows a straight line"
    )

    def milliseconds(temperature: float, rows: float, touched: float) -> float:
        return float(curves[temperature == 0](rows))

    yield Costing("measured rounds", "measured", words, horizon, milliseconds)


def _said(source: str, experts: str, model: ScaleModel) -> str:
    return "; ".join([source, COUNTED[experts], *([model.note] if model.note else [])])


def layers_ms(
    timed: LayerCosts, config: ModelConfig, draft_ms: float
) -> Callable[[float, float, float | None], float]:
    """What a `Costing` calls: the verify of all layers, and from two rows on a draft and what else a round does.

    Without `touched` the experts take what they took the bench's own rows.
    """

    def milliseconds(temperature: float, rows: float, touched: float | None) -> float:
        drafted = draft_ms + OTHER_MS if rows > 1 else 0.0
        return float(timed.verify_ms(config, rows, touched)) + drafted

    return milliseconds


def _analytic_ms(
    config: ModelConfig, weights: WeightBytes, context: int, batch: int, draft_ms: float
) -> Callable[[float, float, float], float]:
    moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))

    def milliseconds(temperature: float, rows: float, touched: float) -> float:
        experts = [touched] * moe
        verify = forward_seconds(config, batch * rows, context, MACHINE, weights, experts, batch)
        return 1e3 * verify + (draft_ms if rows > 1 else 0.0)

    return milliseconds


def _recorded_touch(of: tuple[int, int], batch: int, sharing: Sequence[Sharing]) -> Touch:
    """Effective rows of one sequence's tree; sequences choose apart from one another. NaN where nothing is recorded."""
    curves: dict[tuple[str, float], EffectiveRows | None] = {}

    def touch(shape: str, temperature: float, rows: float) -> float:
        if rows == 1:
            return expected_experts(*of, batch)
        key = shape, temperature
        if key not in curves:
            try:
                curves[key] = effective_curve(sharing, shape, temperature)
            except UsageError:
                curves[key] = None
        curve = curves[key]
        return np.nan if curve is None else float(expected_experts(*of, batch * curve(rows)))

    return touch
