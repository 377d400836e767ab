"""What a verify costs by rows and experts touched: layers' times out of a document of `bench layers`, added up.

Of a model too large for one GPU a few layers are timed; the whole is then an estimate: one GPU's time if it could hold
all layers, without what several would say to each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.study_analytic import expected_experts
from ddtree.study_cost import SLACK, straight_line
from ddtree.study_experts import effective_rows

KIND = "ddtree layer bench"
SHARED = ("linear ", "head_linear ", "experts ", "attention")  # operations that GPUs can share
FITTED_ROWS = 65  # of the fit: with more rows an expert's rows cost too, not only its weights


@dataclass(frozen=True)
class ExpertFit:
    """Microseconds of one layer's experts, shared ones included: base_us + expert_us x distinct routed experts.

    Least squares of the relative errors over `points` timed forwards of at most `most_rows` rows and `most_touched`
    experts; `worst` and `rms` are the relative errors at them (0 of two points, which say nothing of the error).
    """

    base_us: float
    expert_us: float
    points: int
    most_rows: int
    most_touched: float
    worst: float
    rms: float

    def __call__(self, touched: Any) -> Any:
        """Microseconds where that many routed experts are touched."""
        return self.base_us + self.expert_us * np.asarray(touched, float)


@dataclass(frozen=True)
class LayerCosts:
    """One context of a layer bench: microseconds by rows, all f64[P], `rows` ascending.

    `dense` of a dense layer, `beside` of a MoE layer without its experts, `ends` of embedding and head, `touched` the
    routed experts that the bench's own rows touched a layer (mean), `experts_us` what a layer's experts took them.
    Means over the layers of a kind that were timed.
    """

    context_len: int
    rows: np.ndarray
    dense: np.ndarray
    beside: np.ndarray
    ends: np.ndarray
    touched: np.ndarray
    experts_us: np.ndarray
    experts: ExpertFit

    def verify_ms(self, config: ModelConfig, rows: Any, touched: Any = None) -> np.ndarray:
        """Milliseconds of a forward of all layers of `config`, between measured rows as a CostCurve, NaN beyond.

        `touched` are the distinct routed experts of a MoE layer at each of `rows`; without them the experts take what
        they took the bench's own rows, as timed and not as fitted.
        """
        moe = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
        dense, beside, ends = (self._at(rows, values) for values in (self.dense, self.beside, self.ends))
        experts = self._at(rows, self.experts_us) if touched is None else self.experts(touched)
        layers = (config.num_hidden_layers - moe) * dense + moe * (beside + experts)
        return (layers + ends) / 1e3

    def bench_touched(self, config: ModelConfig, rows: Any) -> np.ndarray:
        """Experts that the bench's rows touched; between measured rows their effective rows are a straight line.

        Rows of random tokens through random weights: their states resemble one another more than independent draws
        do, so they touch fewer experts than `expected_experts`, and what a trained router does they do not say. Rows
        that touched all experts count as independent ones: no number of rows says more.
        """
        of = config.n_routed_experts, config.num_experts_per_tok
        effective = effective_rows(*of, self.touched)
        effective = np.where(np.isfinite(effective), effective, self.rows)
        return expected_experts(*of, self._at(rows, effective))

    def _at(self, rows: Any, values: np.ndarray) -> np.ndarray:
        rows = np.asarray(rows, float)
        outside = (rows < self.rows[0]) | (rows > SLACK * self.rows[-1])
        return np.where(outside, np.nan, straight_line(rows, self.rows, values))


def layer_costs(document: Mapping[str, Any], context_len: int) -> LayerCosts:
    """The costs at one context of a document of `bench layers`, from a GPU; UsageError where it was not timed.

    A MoE layer's time by stamps in the forward's graph, less its experts' time alone, is what is beside them.
    """
    times = document.get("times") or ()
    if document.get("kind") != KIND:
        raise UsageError(f"layers: expected a document of kind {KIND!r}, found {document.get('kind')!r}")
    mine = sorted((t for t in times if t["context_len"] == context_len), key=lambda each: each["rows"])
    if not mine:
        known = ", ".join(str(n) for n in sorted({each["context_len"] for each in times})) or "none"
        raise UsageError(f"layers: context {context_len} was not timed; there is {known}")
    for kind in ("dense", "moe"):
        if not all(_layers(each, kind) for each in mine):
            raise UsageError(f"layers: expected a timed {kind} layer in every forward, found none")
    dense, moe = (np.array([np.mean(_layers(each, kind)) for each in mine]) for kind in ("dense", "moe"))
    experts = np.array([_experts_us(each) for each in mine])
    return LayerCosts(
        context_len,
        np.array([each["rows"] for each in mine], float),
        dense,
        moe - experts,
        np.array([sum(_layers(each, "")) for each in mine]),
        np.array([np.mean(each["forward"]["experts_touched"]) for each in mine]),
        experts,
        fit_experts(document),
    )


def divided(document: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    """The document as each of `gpus` GPUs would write it at best, if they shared every layer and the head evenly.

    What belongs to no weight and no head, each does whole: norms, gates, rotary and cache appends, by their times
    alone. All else takes the same part of its time as a GPU has of the work, even what lies between launches. What GPUs
    say to each other, and experts that are not chosen evenly, are not counted: nothing real is as fast.
    """
    return {**document, "times": [_part_of(each, gpus) for each in document["times"]]}


def _part_of(record: Mapping[str, Any], gpus: int) -> dict[str, Any]:
    whole: dict[str, float] = defaultdict(float)  # microseconds that each GPU takes, by kind of layer
    operations = []
    for one in record["operations"]:
        shared = one["operation"].startswith(SHARED)
        operations.append(one | {"us": one["us"] / gpus} if shared else one)
        whole[one["kind"]] += 0.0 if shared else one["us"]
    layers = []
    for layer in record["layers"]:
        kept = min(whole[layer["kind"]], layer["us"]) if layer["kind"] else 0.0
        kept = layer["us"] if layer["layer"] == "embedding" else kept
        layers.append(layer | {"us": kept + (layer["us"] - kept) / gpus})
    return {**record, "layers": layers, "operations": operations}


def fit_experts(document: Mapping[str, Any], most_rows: int = FITTED_ROWS) -> ExpertFit:
    """The fit over all contexts of a document: experts read the same weights at any. UsageError below two points."""
    mine = [each for each in document.get("times") or () if each["rows"] <= most_rows]
    touched = np.array([np.mean(each["forward"]["experts_touched"]) for each in mine], float)
    if len(set(touched)) < 2:
        raise UsageError(f"layers: expected two numbers of experts touched by up to {most_rows} rows to fit")
    times = np.array([_experts_us(each) for each in mine])
    if not (times > 0).all():
        raise UsageError(f"layers: expected experts that took time, found {times.min():g} us")
    slope, base = np.polyfit(touched, times, 1, w=1 / times)
    errors = (base + slope * touched) / times - 1
    return ExpertFit(
        base_us=float(base),
        expert_us=float(slope),
        points=len(mine),
        most_rows=max(each["rows"] for each in mine),
        most_touched=float(touched.max()),
        worst=float(np.abs(errors).max()),
        rms=float(np.sqrt(np.mean(errors**2))),
    )


def _layers(record: Mapping[str, Any], kind: str) -> list[float]:
    return [layer["us"] for layer in record["layers"] if layer["kind"] == kind]


def _experts_us(record: Mapping[str, Any]) -> float:
    return sum(each["us"] for each in record["operations"] if each["operation"].startswith("experts "))
