"""Prompt files: JSON Lines of {"id", "kind", "text"}. It knows no tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from ddtree.bundle import DATA
from ddtree.errors import UsageError

DEFAULT_PROMPTS = DATA / "prompts" / "python.jsonl"


@dataclass(frozen=True)
class Prompt:
    """One prompt: its name, what kind of text it is, and the text."""

    id: str
    kind: str
    text: str


def load_prompts(path: Path | str = DEFAULT_PROMPTS) -> list[Prompt]:
    """Read a prompt file; UsageError names the file, the line and what is wrong with it."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read prompts: {error}") from None
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _parse(path, number, line)
        if prompt.id in prompts:
            raise UsageError(f"{path}: line {number}: the id {prompt.id!r} stands there twice")
        prompts[prompt.id] = prompt
    if not prompts:
        raise UsageError(f"{path}: expected JSON Lines of prompts, found none")
    return list(prompts.values())


def _parse(path: Path | str, number: int, line: str) -> Prompt:
    wanted = f'{path}: line {number}: expected {{"id": .., "kind": .., "text": ..}} with text in each'
    try:
        record = json.loads(line)
        prompt = Prompt(record["id"], record["kind"], record["text"])
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UsageError(wanted) from None
    if not all(isinstance(value, str) and value for value in (prompt.id, prompt.kind, prompt.text)):
        raise UsageError(wanted)
    return prompt
