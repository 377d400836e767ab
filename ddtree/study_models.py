"""The models of the study at scale: their configs, what was measured of them, and the routing that was recorded.

Knows files under data/, not how a round is costed (`study_costing`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddtree.bundle import DATA
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import UsageError
from ddtree.study_analytic import Machine, WeightBytes, drafter_seconds
from ddtree.study_experts import Sharing
from ddtree.study_experts_table import read_summary
from ddtree.study_layers import LayerCosts, layer_costs

RESULTS = DATA / "results"
# Routers whose trees were recorded, by the way to count experts that they give
ROUTERS = {"recorded": "routing_py12m", "recorded small": "routing_small", "recorded wide": "routing_wide"}
MACHINE = Machine(
    4.17e12, 632e12
)  # copy bandwidth and bf16 products of an H200, as layer benches measured them


DRAFT_BY_BYTES = "draft by its bytes, not timed"


@dataclass(frozen=True)
class ScaleModel:
    """A model of the study: files under data/, bytes an element as it is served, and what was measured of it.

    `config` and `drafter` are names in data/configs. `layers` names a layer bench; `draft_ms` is a draft that was
    timed, else its bytes are counted; `note` goes into every assumption.
    """

    config: str
    drafter: str
    weights: WeightBytes
    layers: str | None = None
    draft_ms: float | None = None
    note: str = ""


MODELS = {
    "py12m": None,  # rounds of its own were timed
    "random-4.8b": ScaleModel(
        "random-4.8b",
        "random-4.8b-drafter",
        WeightBytes(),
        layers="layers_random-4.8b",
        draft_ms=0.550,  # decode_random-4.8b.json, trees of 64
        note="draft timed in rounds with trees of 64 nodes",
    ),
    "kimi-k2.6": ScaleModel(
        "kimi-k2.6",
        "kimi-k2.6-drafter",
        WeightBytes(2, 0.5625, 2),
        layers="layers_kimi-k2.6_int4",
        draft_ms=3.06,  # draft_kimi-k2.6.json, after 8192 positions; after 128 2.83
        note="draft of random weights timed after 8192 positions",
    ),
    "deepseek-v3": ScaleModel(
        "deepseek-v3",
        "kimi-k2.6-drafter",
        WeightBytes(1, 1, 2),
        note="draft by the bytes of Kimi's drafter: none is published for this model",
    ),
}


def default_draft_ms(name: str, context: int) -> float:
    """Milliseconds of a draft of one block: as timed where MODELS says so, else the drafter's bytes or FLOPs alone."""
    model = model_of(name)
    return model.draft_ms or 1e3 * drafter_seconds(drafter_of(model), context, MACHINE)


def model_of(name: str) -> ScaleModel | None:
    """The model of that name, None for the shipped one, whose own rounds were timed; UsageError for another."""
    if name not in MODELS:
        raise UsageError(f"scale: expected a model of {', '.join(MODELS)}, found {name!r}")
    return MODELS[name]


def drafter_of(model: ScaleModel) -> DrafterConfig:
    """The drafter's config, with the target's vocabulary: its head is the target's."""
    return replace(drafter_config(model.drafter), vocab_size=target_config(model.config).vocab_size)


def timed_layers(model: ScaleModel, context: int) -> LayerCosts | None:
    """Its layers' costs after that many positions, None where none was timed."""
    if model.layers is None:
        return None
    document = _read(RESULTS / "h200" / f"{model.layers}.json")
    if context not in {each["context_len"] for each in document["times"]}:
        return None
    return layer_costs(document, context)


@lru_cache
def target_config(name: str) -> ModelConfig:
    """The config of data/configs of that name."""
    return ModelConfig.from_hf(_read(DATA / "configs" / f"{name}.json"), name)


@lru_cache
def drafter_config(name: str) -> DrafterConfig:
    """The drafter config of data/configs of that name."""
    return DrafterConfig.from_hf(_read(DATA / "configs" / f"{name}.json"), name)


@lru_cache
def recorded_sharing(router: str = "recorded") -> tuple[Sharing, ...]:
    """What trees were seen to share under one of ROUTERS: `recorded` is the shipped model's."""
    return tuple(read_summary(_read(RESULTS / f"{ROUTERS[router]}.json")))


@lru_cache
def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8"))
