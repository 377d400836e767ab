"""What `bench layers` ends with: rounds of the whole model, out of the layers and the head that were timed.

An estimate: a timed layer counts for all of its kind. Costs are those of `study_layers` and `study_costing`. It runs no
model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from ddtree.bench_memory import GPU_BYTES, stage_bytes
from ddtree.bench_random import WEIGHTS, RandomBundle, open_random
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import UsageError
from ddtree.lab import counted, dash_or, text_table
from ddtree.study_analytic import drafter_seconds
from ddtree.study_costing import COUNTED, OTHER_MS, Touch, layers_ms, touches
from ddtree.study_layers import LayerCosts, divided, layer_costs
from ddtree.study_models import DRAFT_BY_BYTES, MACHINE, MODELS, default_draft_ms, drafter_of

GPUS = (1, 8, 16)
PIPELINE, PARALLEL = "pipeline", "tensor/expert parallel"
AS_TIMED = "as timed"
SHAPES = {"ar": "best_first", "chain": "chain", "tree": "best_first"}  # by method, of recorded sharing
DRAFT_BENCH = "ddtree draft bench"
NO_DRAFTER, TIMED = "no drafter is known, so no draft is counted", "timed, with what a round learns after it"


def estimate(
    document: Mapping[str, Any], config: str | None = None, draft: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The estimate of a document of `bench layers`, as its key `estimate` holds it.

    `config` names the whole model, the document's own by default; `draft` is a document of `bench draft`, without which
    a draft costs `default_draft_ms`. `rounds` has a record for each context, way to split the model over GPUs, way to
    count experts, method and number of rows: milliseconds, and `over_ar`, in rounds of one row without a draft: the
    tokens a round that equal autoregressive decoding. `memory` has the bytes of weights, caches and drafter that a GPU
    holds after the longest context. UsageError for what `layer_costs` and `draft_costs` refuse, and where no forward is
    of one row.
    """
    contexts = sorted({each["context_len"] for each in document.get("times") or ()})
    if not contexts:
        raise UsageError("layers: expected a document of bench layers with times, which need a GPU")
    stored = document.get("weights") or WEIGHTS[0]
    model = document.get("model", "")
    whole = open_random(config or model, weights=stored)
    if whole.path.stem != model:
        raise UsageError(
            f"config: expected that of {model!r}, whose layers were timed, found {whole.path.stem!r}"
        )
    drafter = _drafter_of(whole)
    drafts = draft_costs(whole, contexts, draft)
    most = max(each["rows"] for each in document["times"])
    kinds = [layer["kind"] for layer in document["times"][0]["layers"] if layer["kind"]]
    moe = sum(whole.config.is_moe(layer) for layer in range(whole.config.num_hidden_layers))
    return {
        "model": whole.path.stem,
        "weights": document["times"][0]["dtype"] if stored == WEIGHTS[0] else stored,
        "layers": {"dense": whole.config.num_hidden_layers - moe, "moe": moe},
        "timed_layers": {kind: kinds.count(kind) for kind in ("dense", "moe")},
        "draft": NO_DRAFTER if drafter is None else TIMED if draft else _said_of_draft(whole),
        "fit_of_rows": layer_costs(document, contexts[0]).experts.most_rows,
        "gpu_bytes": GPU_BYTES,
        "memory": [
            {"split": split, "gpus": gpus, "bytes_per_gpu": each, "fits": each <= GPU_BYTES}
            for split, gpus, each in _memory(
                whole, drafter, document["times"][0]["dtype"], contexts[-1] + most
            )
        ],
        "rounds": [
            {"context_len": context, "split": split, "gpus": gpus, **each}
            for context, (split, gpus) in product(contexts, _splits())
            for each in _rounds(
                layer_costs(divided(document, gpus), context),
                whole.config,
                drafter.horizon if drafter else 0,
                drafts[context] / gpus,
            )
        ],
    }


def _splits() -> list[tuple[str, int]]:
    """A pipeline takes the same time on any number of GPUs."""
    return [(PIPELINE, 1), *((PARALLEL, gpus) for gpus in GPUS if gpus > 1)]


def _memory(
    whole: RandomBundle, drafter: DrafterConfig | None, dtype: str, positions: int
) -> Iterator[tuple[str, int, float]]:
    weights, caches = stage_bytes(whole, drafter, dtype, positions)
    stages = [sum(each) for each in zip(weights, caches, strict=True)]
    for gpus in GPUS:
        yield PIPELINE, gpus, largest_part(stages, gpus)
        if gpus > 1:  # each GPU keeps the whole cache: all heads read the same latents
            yield PARALLEL, gpus, sum(weights) / gpus + sum(caches)


def largest_part(stages: Sequence[int], parts: int) -> int:
    """The least that the largest of so many consecutive parts of the stages can sum to."""
    low, high = max(stages), sum(stages)
    while low < high:
        middle = (low + high) // 2
        count, filled = 1, 0
        for each in stages:
            count, filled = (count + 1, each) if filled + each > middle else (count, filled + each)
        low, high = (low, middle) if count <= parts else (middle + 1, high)
    return low


def draft_costs(
    whole: RandomBundle, contexts: Sequence[int], document: Mapping[str, Any] | None = None
) -> dict[int, float]:
    """Milliseconds of a draft by context, 0 where no drafter is known.

    As timed in a document of `bench draft`: a pass over the block, and learning as many rows as a round may commit.
    Without one, `default_draft_ms`, or a drafter's bytes. UsageError for another document, model or context.
    """
    model, drafter = whole.path.stem, _drafter_of(whole)
    if document is None:
        by_name = MODELS.get(model) is not None
        bytes_ms = {
            each: 1e3 * drafter_seconds(drafter, each, MACHINE) if drafter else 0.0 for each in contexts
        }
        return {each: default_draft_ms(model, each) for each in contexts} if by_name else bytes_ms
    if document.get("kind") != DRAFT_BENCH or drafter is None or document.get("model") != model:
        found = f"{document.get('kind')!r} of {document.get('model')!r}"
        raise UsageError(f"draft: expected a document of bench draft of {model}, found {found}")
    wanted, costs = {("draft", drafter.block_size), ("extend", drafter.horizon + 1)}, {}
    for context in contexts:
        mine = [
            t for t in document["times"] if t["context_len"] == context and (t["what"], t["rows"]) in wanted
        ]
        if len(mine) != len(wanted):
            known = ", ".join(str(n) for n in sorted({each["context_len"] for each in document["times"]}))
            raise UsageError(f"draft: context {context} was not timed; there is {known or 'none'}")
        costs[context] = sum(each["us"] for each in mine) / 1e3
    return costs


def _said_of_draft(whole: RandomBundle) -> str:
    known = MODELS.get(whole.path.stem)
    return known.note if known else DRAFT_BY_BYTES


def _drafter_of(whole: RandomBundle) -> DrafterConfig | None:
    """The drafter beside the config, else the one that the study at scale takes for the model."""
    known = MODELS.get(whole.path.stem)
    return whole.drafter_config or (drafter_of(known) if known else None)


def _rounds(
    costs: LayerCosts, config: ModelConfig, horizon: int, draft_ms: float
) -> Iterator[dict[str, Any]]:
    """A record for each way to count experts, method and number of rows that these costs know."""
    ways: dict[str, Touch] = {
        AS_TIMED: lambda shape, temperature, rows: float(costs.bench_touched(config, rows))
    }
    ways |= {way: each for way, each in touches(config, 1, None).items() if way in COUNTED}
    total = layers_ms(costs, config, draft_ms)
    if costs.rows[0] > 1:
        raise UsageError(f"layers: expected a forward of 1 row, found {costs.rows[0]:g} and more")
    trees = [("tree", float(rows)) for rows in costs.rows if rows > 1]
    for way, touch in ways.items():
        alone = None
        for method, rows in [("ar", 1.0), *([("chain", horizon + 1.0)] if horizon else []), *trees]:
            touched = float(touch(SHAPES[method], 0.0, rows))
            milliseconds = total(0.0, rows, None if way == AS_TIMED else touched)
            if not math.isfinite(milliseconds) or (way != AS_TIMED and rows > costs.experts.most_rows):
                continue
            alone = alone or milliseconds
            other = (draft_ms, OTHER_MS) if rows > 1 else (0.0, 0.0)
            yield {
                **{"experts": way, "method": method, "rows": int(rows), "touched": touched},
                **{"verify_ms": milliseconds - sum(other), "draft_ms": other[0], "other_ms": other[1]},
                **{"ms": milliseconds, "over_ar": milliseconds / alone},
            }


def format_estimate(found: Mapping[str, Any]) -> str:
    """The estimate as text; each line of figures says that it is one."""
    of, timed = found["layers"], found["timed_layers"]
    lines = [
        f"estimate, not measured: {found['model']}, {found['weights']}: {of['dense']} dense and {of['moe']} MoE layers "
        f"from {timed['dense']} and {timed['moe']} that were timed, and the head",
        f"{_spread(found)}{found['draft']}",
        "",
        _round_table(found),
        "",
        "1 GPU: as if one held all layers; a pipeline over several takes as long: a round's layers follow each other",
        "8, 16 GPUs: tensor and expert parallel: weights, experts and heads evenly divided, all-reduces NOT counted:",
        "an upper bound of speed that nothing reaches",
        "touched: experts of a MoE layer; x ar: in rounds of one row without a draft, so the tokens that equal ar",
        *(f"{way}: {COUNTED[way]}" for way in dict.fromkeys(each["experts"] for each in found["rounds"])),
        f"experts were fitted up to {counted(found['fit_of_rows'], 'row')}: larger trees are {AS_TIMED} alone",
        "",
        _memory_table(found),
        "GB a GPU: weights, caches at the longest context and the drafter; buffers are not counted",
    ]
    return "\n".join(lines)


def _spread(found: Mapping[str, Any]) -> str:
    """Least and most milliseconds of a draft on one GPU, by context; nothing where none is counted."""
    drafts = [each["draft_ms"] for each in found["rounds"] if each["gpus"] == 1 and each["draft_ms"]]
    ends = dict.fromkeys(f"{end(drafts):.2f}" for end in (min, max)) if drafts else ()
    return f"a draft takes {' to '.join(ends)} ms: " if drafts else ""


def _round_table(found: Mapping[str, Any]) -> str:
    at: dict[tuple, dict[int, Mapping[str, Any]]] = {}
    for each in found["rounds"]:
        key = tuple(each[name] for name in ("context_len", "experts", "method", "rows"))
        at.setdefault(key, {})[each["gpus"]] = each
    counts = [gpus for _, gpus in _splits()]
    rows = []
    for (context, *key), by_gpus in at.items():
        cells = [dash_or(by_gpus[gpus][name]) for gpus in counts for name in ("ms", "over_ar")]
        rows.append(("estimate", context, *key, f"{by_gpus[1]['touched']:.0f}", *cells))
    headings = [(f"{counted(gpus, 'GPU')} ms", "x ar") for gpus in counts]
    names = ("", "context", "experts", "method", "rows", "touched")
    return text_table((*names, *(name for pair in headings for name in pair)), rows)


def _memory_table(found: Mapping[str, Any]) -> str:
    limit = f"{found['gpu_bytes'] / 1e9:.0f} GB"
    rows = [
        (
            *("estimate", each["gpus"], each["split"]),
            *(f"{each['bytes_per_gpu'] / 1e9:.1f}", "yes" if each["fits"] else "no"),
        )
        for each in found["memory"]
    ]
    return text_table(("", "GPUs", "split", "GB a GPU", f"fits {limit}"), rows)
