"""In Markdown: experts that the rows of draft trees were seen to share, a column a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddtree.errors import UsageError
from ddtree.study_experts import Sharing
from ddtree.study_report_text import table_of

TREES = {
    "tree of 4 nodes": ("best_first", 4),
    "tree of 16": ("best_first", 16),
    "tree of 64": ("best_first", 64),
    "chain of 15": ("chain", 15),
}
LARGEST = TREES["tree of 64"]
KINSHIP = {
    "parent and child": "parent_child",
    "siblings": "siblings",
    "of one depth, another token": "cousins",
    "of one depth, the same token": "cousins_same_token",
    "unrelated": "unrelated",
}


def sharing_lines(routers: Mapping[str, Sequence[Sharing]], temperature: float = 0.0) -> list[str]:
    """What trees touch and share, 95% intervals over prompts, then by layer, then by kinship in trees of 64 nodes.

    `routers` are records of routing by the name of their way to count experts. UsageError where one lacks a tree of
    TREES at that temperature.
    """
    columns = [_column(name, sharing, temperature) for name, sharing in routers.items()]
    first = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    said = [
        f"Experts that a verify's rows touch, {first}, mean over MoE layers: *touched* with its 95% interval over "
        "prompts, then what as many independent rows touch that choose *evenly*, and *by the layers' loads*, then the "
        "*effective rows*: even ones that touch as many. Below, experts that two rows share in rounds of trees of 64, "
        "in multiples of chance (k * k / E of k of E experts).",
        "",
    ]
    names = [*TREES, "tree of 64, its layers' effective rows", *(f"two rows: {name}" for name in KINSHIP)]
    headings, cells = zip(*columns, strict=True)
    return said + table_of((first, *headings), zip(names, *cells, strict=True))


def _column(name: str, sharing: Sequence[Sharing], temperature: float) -> tuple[str, list[str]]:
    """Heading and cells of one router."""
    mine = [each for each in sharing if each.temperature == temperature]
    means = {(each.shape, each.budget): each for each in mine if each.layer is None}
    missing = [tree for tree, key in TREES.items() if key not in means]
    if missing:
        raise UsageError(f"routing: {missing[0]} at temperature {temperature:g} was not recorded of {name}")
    largest = means[LARGEST]
    by_layer = [
        each.effective for each in mine if (each.shape, each.budget) == LARGEST and each.layer is not None
    ]
    known = [value for value in by_layer if value is not None]
    layers = f"{min(known):.1f} to {max(known):.1f}" if len(known) == len(by_layer) else "not known"
    of = largest.experts, largest.experts_per_token
    even = of[1] ** 2 / of[0]
    cells = [_touched(means[key]) for key in TREES.values()]
    cells += [layers, *(_shared(largest, relation, even) for relation in KINSHIP.values())]
    return f"{name}: {of[0]} experts, top {of[1]}, {largest.prompts} prompts", cells


def _touched(each: Sharing) -> str:
    """Touched, evenly, by load, effective rows."""
    ends = each.effective_low, each.effective_high
    rows = "not known" if None in (each.effective, *ends) else f"{each.effective:.1f} ({_ends(*ends)})"
    counted = (
        f"{each.touched:.1f} ({_ends(each.touched_low, each.touched_high)}), even {each.independent:.1f}"
    )
    return f"{counted}, by load {each.by_load:.1f}; {rows} effective of {each.rows}"


def _shared(each: Sharing, relation: str, even: float) -> str:
    """What two rows share in multiples of chance, with its interval where the record has one."""
    value, interval = each.shared[relation], each.shared_interval[relation]
    if value is None:
        return "-"
    ends = f" ({_ends(*(end / even for end in interval))})" if interval else ""
    return f"{value / even:.1f}{ends}"


def _ends(low: float, high: float) -> str:
    return f"{low:.1f} to {high:.1f}"
