"""Bytes that an engine takes on the device: counted on its parts, or foretold without a GPU and without its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, fields
from typing import Any

from ddtree.bundle import Bundle
from ddtree.drafter import Drafter
from ddtree.engine_parts import EngineParts, EngineSizes, allocate
from ddtree.errors import DeviceMemoryError
from ddtree.ops.plan_ops import PlanOps
from ddtree.quantised import Fp8Matrix, Int4Matrix
from ddtree.weights import BranchWeights, DrafterWeights, MlpWeights, MoeWeights, TargetWeights

Areas = dict[str, dict[str, int]]
GROUPS = {
    **dict.fromkeys(("cos", "sin"), "rotary tables"),
    "fc": "context projection",
    "bias": "router",
    **dict.fromkeys(("parent", "gate", "child"), "branch head"),
    **dict.fromkeys(("parent_table", "child_table"), "branch tables"),
}
MLPS = {"experts": "experts", "shared": "shared experts", "mlp": "dense mlp"}
ATTENTION = ("qkv_a", "q_b", "q", "k", "v", "w_kc", "w_vc", "o")
STATE_VIEWS = ("times", "report", "host_buffer")  # parts of `buffer`, and where the host receives it


@dataclass(frozen=True)
class MemoryReport:
    """Bytes by area and group, for an engine of the settings named."""

    model: str
    dtype: str
    gemm: str
    max_budget: int
    max_context: int
    prefill_chunk: int
    areas: Areas

    @property
    def total(self) -> int:
        return sum(map(sum_of, self.areas.values()))

    def to_json(self) -> dict[str, Any]:
        """The report as plain values, with `total`, in bytes."""
        return asdict(self) | {"total": self.total}


def plan_memory(
    bundle: Bundle, sizes: EngineSizes, dtype: str = "f32", gemm: str = "invariant"
) -> MemoryReport:
    """What an engine on the backend cuda would allocate; needs no GPU and reads no weight."""
    ops = PlanOps(dtype, "device", gemm)
    areas = measure(allocate(bundle, sizes, ops), ops)
    assert sum(map(sum_of, areas.values())) == ops.allocated
    return MemoryReport(str(bundle.path), dtype, gemm, *asdict(sizes).values(), areas)


def check_free(report: MemoryReport, free: int, device: str) -> None:
    """Raise DeviceMemoryError unless that many bytes hold what the report counts."""
    if report.total > free:
        largest = sorted(report.areas, key=lambda area: -sum_of(report.areas[area]))[:3]
        parts = ", ".join(f"{area} {sum_of(report.areas[area]):,}" for area in largest)
        raise DeviceMemoryError(
            f"device memory: the engine needs {report.total:,} bytes ({parts}), {free:,} are free on {device}; "
            "lower --budget or the context, use --dtype bf16, or end what else runs there"
        )


def measure(parts: EngineParts, ops: Any) -> Areas:
    """Bytes of the arrays that an engine's parts hold, by area and group."""
    buffers = parts.model.buffers
    areas: Areas = {
        "target weights": _weights(parts.model.weights),
        "latent cache": {"latent": bytes_of(parts.cache.latent), "rope": bytes_of(parts.cache.rope)},
        "model buffers": {field.name: bytes_of(getattr(buffers, field.name)) for field in fields(buffers)},
    }
    if parts.drafter is not None:
        areas |= _drafter(parts.drafter)
    if parts.state is not None:
        areas["round state"] = {
            name: bytes_of(array) for name, array in vars(parts.state).items() if name not in STATE_VIEWS
        }
        areas["kernels' scratch"] = {name: bytes_of(array) for name, array in ops.scratches.items()}
    return areas


def bytes_of(array: Any) -> int:
    """Bytes of an array of any backend, or of both arrays of a quantised matrix."""
    if isinstance(array, Int4Matrix | Fp8Matrix):
        return sum(map(bytes_of, array.arrays))
    return math.prod(map(int, array.shape)) * array.dtype.itemsize


def sum_of(groups: dict[str, int]) -> int:
    """Bytes of an area."""
    return sum(groups.values())


def _drafter(drafter: Drafter) -> Areas:
    caches = {name: sum(map(bytes_of, getattr(drafter, name))) for name in ("keys", "values")}
    buffers = {name: bytes_of(array) for name, array in vars(drafter).items() if hasattr(array, "shape")}
    return {
        "drafter weights": _weights(drafter.weights),
        "drafter cache": caches,
        "drafter buffers": buffers,
    }


def _weights(weights: TargetWeights | DrafterWeights) -> dict[str, int]:
    """Bytes by group; a head that is the embedding counts once."""
    count: Counter[str] = Counter()
    for field in fields(weights):
        value = getattr(weights, field.name)
        if field.name == "layers":
            for layer in value:
                _add(count, layer)
        elif isinstance(value, BranchWeights):
            _add(count, value)
        elif value is not None and (field.name != "head" or value is not weights.embedding):
            count[_group_of(field.name)] += bytes_of(value)
    return dict(count)


def _add(count: Counter[str], layer: Any) -> None:
    """Add the arrays of a layer, of the experts inside it, or of a branch head."""
    for field in fields(layer):
        value = getattr(layer, field.name)
        if isinstance(value, MoeWeights):
            _add(count, value)
        elif isinstance(value, MlpWeights):
            count[MLPS[field.name]] += sum(bytes_of(getattr(value, part.name)) for part in fields(value))
        elif value is not None:
            count[_group_of(field.name)] += bytes_of(value)


def _group_of(name: str) -> str:
    if name.endswith("norm"):
        return "norms"
    return "attention" if name in ATTENTION else GROUPS.get(name, name)


def format_memory(report: MemoryReport) -> str:
    """The report as a table: a line a group, a line an area, and the total; buffers are summed."""
    rows = []
    for area, groups in report.areas.items():
        rows.append((area, sum_of(groups)))
        if "weights" in area or "scratch" in area or "cache" in area:
            rows += [(f"  {group}", size) for group, size in groups.items()]
    rows.append(("total", report.total))
    wide, digits = max(len(name) for name, _ in rows), len(f"{report.total:,}")
    lines = [f"{name:<{wide}}  {size:>{digits},}  {size / 2**30:9.3f} GiB" for name, size in rows]
    head = (
        f"{report.model}: bytes on the device, {report.dtype}, gemm {report.gemm}, budget {report.max_budget}, "
        f"context {report.max_context}, prefill {report.prefill_chunk} rows a chunk"
    )
    return "\n".join([head, "", *lines])
