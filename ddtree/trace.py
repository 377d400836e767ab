"""Traces: JSON Lines that hold what a decode saw and decided, round by round. Plots and studies read them, no model.

The first line is the header; a `run` line (settings, prompt) precedes the `round` lines of each decode.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ddtree.config import DecodeConfig
from ddtree.decode import Round
from ddtree.engine import Engine
from ddtree.errors import ConfigError, UsageError
from ddtree.tree import DraftTree
from ddtree.versions import package_version

SCHEMA = 1
PACKAGES = ("ddtree", "python", "numpy", "numba", "numba-cuda", "cuda-core", "nvmath-python", "tokenizers")


@dataclass
class TraceRun:
    """One decode of a trace: its settings, and one dict a round (keys as `TraceWriter.round` writes them)."""

    settings: dict[str, Any]
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def tree(self, index: int) -> DraftTree:
        """The draft tree of round `index`."""
        return DraftTree.from_json(self.rounds[index]["tree"])


class TraceWriter:
    """Writes the lines of one trace; `run` starts a decode, `round` adds to it."""

    def __init__(self, file: TextIO, engine: Engine):
        self.file = file
        self._line(
            {
                "type": "header",
                "schema": SCHEMA,
                "packages": {name: package_version(name) for name in PACKAGES},
                "backend": engine.ops.name,
                "dtype": engine.ops.dtype_name,
                "route": engine.ops.route,
                "gemm": engine.ops.gemm,
                "device": engine.ops.device,
                "model_sha256": engine.bundle.sha256(),
            }
        )

    def run(self, prompt_id: str, prompt_ids: list[int], config: DecodeConfig, sequence: int) -> None:
        """Start a decode: its prompt and settings."""
        line = {
            "type": "run",
            "prompt_id": prompt_id,
            "sequence": sequence,
            "prompt_ids": [int(token) for token in prompt_ids],
        }
        self._line(line | asdict(config))

    def round(self, this: Round, with_table: bool = False) -> None:
        """Add one round; `with_table` stores the drafter's top-K table too, and what its branch head said of it."""
        line = {
            "type": "round",
            "index": this.index,
            "context_len": this.context_len,
            "tree": this.tree.to_json(),
            "target_tokens": this.target_tokens.tolist(),
            "path": this.path.tolist(),
            "bonus": this.bonus,
            "tokens": list(this.tokens),
            "seconds": this.seconds,
            "num_bad_rows": this.num_bad_rows,
            "finish": this.finish,
        }
        if with_table and this.table is not None:
            token_ids, log_probs = this.table
            line["table"] = {"token_ids": token_ids.tolist(), "log_probs": _finite(log_probs)}
            if this.conditional is not None:
                line["table"]["conditional"] = _finite(this.conditional)
        self._line(line)

    def _line(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")


@contextmanager
def write_trace(path: Path | str, engine: Engine) -> Iterator[TraceWriter]:
    """A TraceWriter on a temporary file that replaces `path` when the block ends well; UsageError if unwritable."""
    path = Path(os.path.realpath(path)) if str(path) else Path()
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: cannot write the trace: it is no regular file")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        file = open(temporary, "w", encoding="utf-8")  # noqa: SIM115 - closed below, whatever happens
    except OSError as error:
        raise UsageError(f"{path}: cannot write the trace: {error.strerror}") from None
    try:
        with file:
            yield TraceWriter(file, engine)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_trace(path: Path | str) -> tuple[dict[str, Any], list[TraceRun]]:
    """The header and the runs of a trace; UsageError names the first line that is not one."""
    header, runs = None, []
    try:
        with open(path, encoding="utf-8") as file:
            for number, text in enumerate(file, 1):
                record = _parse(path, number, text)
                kind = record.pop("type", None)
                if number == 1 and kind == "header" and record.get("schema") == SCHEMA:
                    header = record
                elif header is not None and kind == "run":
                    runs.append(TraceRun(record))
                elif runs and kind == "round":
                    _check_tree(path, number, record)
                    runs[-1].rounds.append(record)
                else:
                    raise UsageError(
                        f"{path}: line {number}: expected a trace of schema {SCHEMA}, found {kind!r}"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot read the trace: {error}") from None
    if header is None:
        raise UsageError(f"{path}: expected a trace, found an empty file")
    return header, runs


def _finite(log_probs: np.ndarray) -> list:
    """Numbers as lists, None for what is not finite: JSON has no infinities."""
    return np.where(np.isfinite(log_probs), log_probs.astype(float), None).tolist()


def _parse(path: Path | str, number: int, text: str) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: line {number}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise UsageError(f"{path}: line {number}: expected a JSON object")
    return record


def _check_tree(path: Path | str, number: int, record: dict[str, Any]) -> None:
    try:
        DraftTree.from_json(record["tree"])
    except (KeyError, AttributeError, ConfigError) as error:
        raise UsageError(f"{path}: line {number}: no draft tree: {error}") from None
