"""Recordings on disk: a folder with one KDTR file a prompt and temperature, and `index.jsonl` that names them.

The index's first line is the header (model, settings, versions); each other line is one recording and the sha256 of
its file. Knows how recordings are kept, not how they are made or what is asked of them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import kdtr
from ddtree.errors import UsageError
from ddtree.metrics import in_loop
from ddtree.shapes import is_conditional, table_for

SCHEMA = 1
KIND = "ddtree recordings"
INDEX = "index.jsonl"
ARRAYS = ("prompt_ids", "tokens", "token_ids", "log_probs")
CONDITIONAL = "conditional"  # one more, of a drafter with a branch head

Table = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Recording:
    """One prompt's continuation at one temperature, and the drafter's table at every root a round could start from.

    Root i is token i of the continuation: a round there finds `prompt_ids` and the tokens before it committed.
    `prompt_ids` i32[P], `tokens` i32[N]; `token_ids` i32[T, L, K] and `log_probs` f32[T, L, K] are the tables of roots
    0..T - 1, T = N unless the context ran out. `conditional` f32[T, L, C, C] is what the drafter's branch head says of
    the first C columns below each parent (`Engine.draft_branches`), None without one. `header` is the index's;
    `sha256` that of the file.
    """

    path: Path
    sha256: str
    prompt: str
    kind: str
    sequence: int
    temperature: float
    finish: str
    header: dict[str, Any]
    prompt_ids: np.ndarray
    tokens: np.ndarray
    token_ids: np.ndarray
    log_probs: np.ndarray
    conditional: np.ndarray | None = None

    def __reduce__(self) -> tuple:
        """Another process is told where the file is, and maps it itself, if it is the same file there."""
        return recording_at, (self.path.absolute(), self.sha256)

    @property
    def horizon(self) -> int:
        return self.token_ids.shape[1]

    @property
    def most_budget(self) -> int | None:
        """The largest budget whose trees these tables decide; None where they hold the whole vocabulary."""
        k = self.token_ids.shape[2]
        return None if k == self.header["vocab_size"] else k

    @property
    def wanted(self) -> int:
        """The most tokens that the recorded decode was allowed, the first included: the context's room among it."""
        return min(self.header["max_new_tokens"], self.header["max_context"] - len(self.prompt_ids) + 1)

    @cached_property
    def looping(self) -> np.ndarray:
        """bool[N]: whether each token stands inside a repetition (`metrics.in_loop`)."""
        return in_loop([*self.prompt_ids.tolist(), *self.tokens.tolist()])[len(self.prompt_ids) :]

    def table(self, root: int, k: int | None = None) -> Table:
        """The drafter's table at a root, of its first k columns: what a round of that budget sees."""
        return self.token_ids[root, :, :k], self.log_probs[root, :, :k]

    def table_for(self, build: Callable, root: int, budget: int) -> Table:
        """What a shape's build function takes at a root; UsageError for a branch head's where there is none."""
        conditional = None if self.conditional is None else self.conditional[root]
        return table_for(build, self.table(root, None if is_conditional(build) else budget), conditional)

    def max_depth(self, root: int) -> int:
        """The deepest node that the horizon and the tokens still wanted leave a round at this root."""
        left = self.wanted - (root + 1)
        return max(0, min(self.horizon, left - 1))


def open_recordings(directory: Path | str) -> list[Recording]:
    """All recordings of a folder in the index's order, their arrays mapped; every file's sha256 is checked.

    Raises UsageError for no index, a broken one, or a file that is not the one recorded; KdtrError for a broken file.
    """
    directory = Path(directory)
    _, lines = read_index(directory)
    if not lines:
        raise UsageError(f"{directory}: the index holds no recording yet; run study record to the end")
    return [open_recording(directory, line) for line in lines]


def open_recording(directory: Path, line: dict[str, Any]) -> Recording:
    """The recording of one line of the index; errors as in `open_recordings`."""
    path = directory / line["file"]
    if (found := sha256_of(path)) != line["sha256"]:
        state = "is missing" if found is None else "is not the file that was recorded"
        raise UsageError(f"{path}: {state}; run study record with the same settings to make it again")
    return read_recording(path, line["sha256"])


@lru_cache(maxsize=8)
def recording_at(path: Path, sha256: str) -> Recording:
    """The recording in a file that another process named, maybe on another machine; errors as in `open_recordings`."""
    if (found := sha256_of(path)) != sha256:
        state = "cannot be read" if found is None else "is another file"
        raise UsageError(f"{path} {state} here: each worker must see the recordings under this path")
    return read_recording(path, sha256)


def read_recording(path: Path, sha256: str) -> Recording:
    """The recording in a file whose sha256 is known; errors as in `open_recordings`."""
    file = kdtr.KdtrFile(path)
    arrays = [file[name] for name in ARRAYS]
    _, tokens, token_ids, log_probs = arrays
    if token_ids.ndim != 3 or token_ids.shape != log_probs.shape or len(token_ids) > len(tokens):
        raise UsageError(
            f"{path}: expected tables [T, L, K] of {len(tokens)} tokens, found {token_ids.shape}"
        )
    conditional = None
    if CONDITIONAL in file:
        conditional = file[CONDITIONAL]
        count = min(conditional.shape[-1:] + token_ids.shape[2:])
        if (
            conditional.shape != (*token_ids.shape[:2], count, count)
            or not count
            or conditional.dtype != np.float32
        ):
            raise UsageError(
                f"{path}: expected {CONDITIONAL} f32 [T, L, C, C] of tables {token_ids.shape}, found "
                f"{conditional.dtype} {conditional.shape}"
            )
    try:
        about, header = file.meta["recording"], file.meta["settings"]
        names = ("prompt", "kind", "sequence", "temperature", "finish")
        return Recording(path, sha256, *(about[name] for name in names), header, *arrays, conditional)
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path}: its meta is not a recording's: {error!r}") from None


def read_index(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the recordings' lines of a folder's index; UsageError names the first line that is wrong."""
    path = directory / INDEX
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{path}: cannot read the recordings' index: {reason}") from None
    records = [_parse(path, number, text) for number, text in enumerate(texts, 1)]
    if not records or (records[0].get("kind"), records[0].get("schema")) != (KIND, SCHEMA):
        raise UsageError(f"{path}: line 1: expected the header of {KIND!r}, schema {SCHEMA}")
    return records[0], records[1:]


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    """One line: the first says what the folder is, the others name a file."""
    wanted: dict[str, Any] = {"kind": str, "schema": int}
    if number > 1:
        wanted = dict.fromkeys(("file", "sha256", "prompt", "kind", "finish", "prompt_sha256"), str)
        wanted |= {"sequence": int, "temperature": (int, float)}
    try:
        record = json.loads(text)
        wrong = [name for name, kind in wanted.items() if not isinstance(record[name], kind)]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UsageError(f"{path}: line {number}: no line of an index: {error!r}") from None
    if wrong or Path(record.get("file", "")).name != record.get("file", ""):
        raise UsageError(f"{path}: line {number}: wrong value of {', '.join(wrong) or 'file'}")
    return record


def write_index(directory: Path, header: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """Replace the index by a whole one, its lines in order: a recording that is killed leaves the one before."""
    lines = sorted(lines, key=lambda line: (line["temperature"], line["sequence"]))
    temporary = directory / f".{INDEX}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            for record in (header, *lines):
                file.write(json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, directory / INDEX)
    except OSError as error:
        raise UsageError(f"{directory / INDEX}: cannot write the index: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path) -> str | None:
    """The sha256 of a file, None where there is none to read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
