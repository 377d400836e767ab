"""All cases of the kernel bench, in order."""

from __future__ import annotations

from ddtree import (
    bench_cases_attention,
    bench_cases_commit,
    bench_cases_experts,
    bench_cases_fill,
    bench_cases_matrix,
    bench_cases_quantised,
    bench_cases_round,
    bench_cases_rows,
    bench_cases_tree,
    bench_cases_vocab,
)
from ddtree.bench_kernels import Case

MODULES = (
    bench_cases_tree,
    bench_cases_commit,
    bench_cases_vocab,
    bench_cases_attention,
    bench_cases_experts,
    bench_cases_matrix,
    bench_cases_quantised,
    bench_cases_rows,
    bench_cases_round,
    bench_cases_fill,
)


def all_cases(quick: bool = False) -> list[Case]:
    """Every case at real sizes, or at small ones that run every launcher and each of its kernels."""
    cases = [case for module in MODULES for case in module.cases(quick)]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), f"two cases share a name: {sorted(names)}"
    return cases
