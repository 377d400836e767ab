"""Effective rows: how many independent rows would touch as many experts as a tree's rows do. It runs no model.

A tree of n rows that touches t of E experts, each row choosing k, counts as the m rows with E (1 - (1 - k / E)^m) = t.
m is 1 for one row whatever E and k are, so it can be carried from one model to another; whether another router shares
as this one does, only a measurement there can say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.errors import UsageError
from ddtree.study_analytic import expected_experts
from ddtree.study_overlap import RELATIONS
from ddtree.study_summary import DRAWS, interval_of


def effective_rows(experts: int, chosen: int, touched: Any) -> np.ndarray:
    """The rows whose independent, even choices touch as many; infinite where all experts are touched.

    UsageError unless 0 < chosen < experts.
    """
    if not 0 < chosen < experts:
        raise UsageError(f"experts: expected fewer than {experts} chosen, at least one, found {chosen}")
    with np.errstate(divide="ignore"):
        return np.log1p(-np.minimum(np.asarray(touched, float) / experts, 1)) / np.log1p(-chosen / experts)


@dataclass(frozen=True)
class Sharing:
    """What full verifies of one shape, budget and temperature touch of one MoE layer; `layer` None: mean over layers.

    Full are trees with all nodes of the budget: `rows` is budget + 1. `touched` is the mean over `rounds` such rounds
    of `prompts` prompts, with its 95% bootstrap interval over prompts; `independent` is what as many rows touch that
    choose evenly and independently, `by_load` the same where they choose by the layer's load over all prompts,
    `by_prompt_load` by that of their own prompt: what unlike loads explain without any tree. `effective` is
    `effective_rows` of touched (None where all experts are touched). `shared` are experts that two rows share by
    RELATIONS, None without a pair, `shared_interval` the 95% interval of each over prompts, None where one alone has
    pairs; like the loads, they are of all rounds, those of smaller trees too.
    """

    temperature: float
    shape: str
    budget: int
    layer: int | None
    experts: int
    experts_per_token: int
    prompts: int
    rounds: int
    rows: int
    touched: float
    touched_low: float
    touched_high: float
    independent: float
    by_load: float
    by_prompt_load: float
    effective: float | None
    effective_low: float | None
    effective_high: float | None
    touched_outside_loops: float | None
    shared: dict[str, float | None]
    shared_interval: dict[str, tuple[float, float] | None]


def summarise_routing(rows: Iterable[Mapping[str, Any]], seed: int = 0) -> list[Sharing]:
    """The rows of `study routing` by temperature, shape and budget: a Sharing a layer, then that over layers.

    Rows without a full round are left out. UsageError where there is no other, and for several models or sweeps.
    """
    rows = list(rows)
    if len({(row.get("target_sha256"), row["experts"], row["experts_per_token"]) for row in rows}) > 1:
        raise UsageError("rows: expected those of one model, found several; give each model's rows alone")
    grouped: dict[tuple, list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if not row["rounds_full"]:
            continue
        grouped[row["temperature"], row["shape"], row["budget"]].append(row)
    if not grouped:
        raise UsageError("rows: expected those of study routing, with full rounds; found none")
    return [each for key, mine in grouped.items() for each in _of_setting(key, mine, seed)]


def _of_setting(key: tuple, rows: Sequence[Mapping[str, Any]], seed: int) -> list[Sharing]:
    layers = sorted({row["layer"] for row in rows})
    prompts = list(dict.fromkeys(row["prompt"] for row in rows))
    at = {(row["prompt"], row["layer"]): row for row in rows}
    if not len(at) == len(rows) == len(layers) * len(prompts):
        raise UsageError("rows: expected those of one sweep, one a prompt and layer; give each sweep alone")
    grid = [[at[prompt, layer] for layer in layers] for prompt in prompts]
    rounds, outside = (
        np.array([mine[0][name] for mine in grid]) for name in ("rounds_full", "rounds_full_outside_loops")
    )
    touched, apart = (
        np.array([[row[name] or 0.0 for row in mine] for mine in grid])
        for name in ("touched_full", "touched_full_outside_loops")
    )
    load = np.array([[row["load"] for row in mine] for mine in grid], float)  # [prompts, layers, experts]
    drawn = np.random.default_rng(seed).integers(len(prompts), size=(DRAWS, len(prompts)))
    weight = rounds[:, None] / rounds.sum()
    resampled = (touched * rounds[:, None])[drawn].sum(axis=1) / rounds[drawn].sum(axis=1)[:, None]
    found, of, count = [], (rows[0]["experts"], rows[0]["experts_per_token"]), key[2] + 1
    columns = {
        "touched": (touched * weight).sum(axis=0),
        "independent": np.full(len(layers), expected_experts(*of, count)),
        "by_load": _by_load(load.sum(axis=0), of[1], count),
        "by_prompt_load": (_by_load(load, of[1], count) * weight).sum(axis=0),
        "touched_outside_loops": (apart * outside[:, None]).sum(axis=0) / max(outside.sum(), 1),
    }
    for places, layer in [
        *(([i], layer) for i, layer in enumerate(layers)),
        (list(range(len(layers))), None),
    ]:
        mean = {name: float(values[places].mean()) for name, values in columns.items()}
        if not outside.sum():
            mean["touched_outside_loops"] = None
        low, high = interval_of(resampled[:, places].mean(axis=1))
        ends = effective_rows(*of, [mean["touched"], low, high])
        effective = [float(end) if np.isfinite(end) else None for end in ends]
        shared = {
            name: _shared([[mine[p] for p in places] for mine in grid], name, drawn) for name in RELATIONS
        }
        found.append(
            Sharing(
                *key,
                layer,
                *of,
                prompts=len(prompts),
                rounds=int(rounds.sum()),
                rows=count,
                touched_low=float(low),
                touched_high=float(high),
                **dict(zip(("effective", "effective_low", "effective_high"), effective, strict=True)),
                **mean,
                shared={name: value for name, (value, _) in shared.items()},
                shared_interval={name: ends for name, (_, ends) in shared.items()},
            )
        )
    return found


def _by_load(load: np.ndarray, chosen: int, rows: int) -> np.ndarray:
    """Distinct experts that rows touch which go to each expert as often as `load` [.., E] says, independently."""
    share = chosen * load / load.sum(axis=-1, keepdims=True)  # of the rows, each of which chooses `chosen`
    return (1 - (1 - share) ** rows).sum(axis=-1)


def _shared(
    grid: Sequence[Sequence[Mapping[str, Any]]], name: str, drawn: np.ndarray
) -> tuple[float | None, tuple[float, float] | None]:
    """Experts that two rows of that relation share, over the rows of each prompt, and the interval over prompts.

    Neither without a pair, and no interval where one prompt alone has pairs: one says nothing of others.
    """
    pairs = np.array([sum(row[f"pairs_{name}"] for row in mine) for mine in grid])
    if not pairs.any():
        return None, None
    total = np.array(
        [
            sum(row[f"pairs_{name}"] * row[f"shared_{name}"] for row in mine if row[f"pairs_{name}"])
            for mine in grid
        ]
    )
    mean = float(total.sum() / pairs.sum())
    if np.count_nonzero(pairs) == 1:
        return mean, None
    count, resampled = pairs[drawn].sum(axis=1), total[drawn].sum(axis=1)
    return mean, interval_of(resampled[count > 0] / count[count > 0])


@dataclass(frozen=True)
class EffectiveRows:
    """Effective rows of trees by the rows they have: straight between measured points, from one row on.

    `rows` and `effective` f64[P] ascend from 1, 1. Beyond the last measured row the answer is NaN.
    """

    rows: np.ndarray
    effective: np.ndarray

    def __call__(self, rows: Any) -> np.ndarray:
        """Effective rows of trees of that many rows."""
        return np.interp(rows, self.rows, self.effective, left=np.nan, right=np.nan)

    def touched(self, experts: int, chosen: int, rows: Any) -> np.ndarray:
        """Distinct experts that such trees would touch of a layer of another model, if its router shared as this."""
        return expected_experts(experts, chosen, self(rows))


def effective_curve(sharing: Iterable[Sharing], shape: str, temperature: float) -> EffectiveRows:
    """The curve over layers of one shape and temperature; UsageError where it was not measured."""
    mine = [each for each in sharing if (each.shape, each.temperature) == (shape, temperature)]
    points = {each.rows: each.effective for each in mine if each.layer is None and each.effective is not None}
    if not points:
        raise UsageError(f"routing: {shape} at temperature {temperature:g} was not recorded")
    rows = sorted(points)
    return EffectiveRows(np.array([1.0, *rows]), np.array([1.0, *(points[n] for n in rows)]))
