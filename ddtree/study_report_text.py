"""Markdown that the report's parts share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def table_of(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows]


def interval(mean: float, low: float, high: float) -> str:
    """A mean with its interval."""
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"
