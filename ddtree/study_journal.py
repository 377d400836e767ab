"""The journal of a sweep: rows are kept as they come, so that one that was interrupted goes on where it stopped.

Beside `rows.jsonl` stands `rows.jsonl.part`, which only grows; once all rows are there the file is written whole, in
the sweep's order, and the part goes. What the rows are of is a `RowKind`'s to say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ddtree.errors import UsageError
from ddtree.study_rows import KEY, key_of, line_of, row_in, write_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class RowKind:
    """Rows of one command, `writer`: the row in a line of bytes or None, what a row is told by, why it is another's."""

    writer: str
    row_in: Callable[[bytes], Row | None]
    key_of: Callable[[Row], tuple]
    difference: Callable[[tuple, Collection[tuple]], str]


class Journal:
    """Rows of the file `path` and its part. `say`, if given, hears how many were there already; `kind` is the rows'.

    Used as a context manager around the sweep. UsageError for a file that cannot be written, or that holds anything
    but rows of this very sweep: nothing is mixed, nothing overwritten.
    """

    def __init__(
        self, path: Path | str, say: Callable[[str], None] | None = None, kind: RowKind | None = None
    ):
        self.path, self.say, self.kind = Path(path), say, kind or REPLAYED
        self.part = self.path.with_name(f"{self.path.name}.part") if self.path.name else self.path
        self.found: dict[tuple, Row] = {}
        self.added = 0
        self.file: BinaryIO | None = None

    def begin(self, keys: Sequence[tuple]) -> dict[tuple, Row]:
        """The rows that are there already, by key, of a sweep of these keys; from here on rows can be added."""
        if self.path.exists() and not self.path.is_file():
            raise UsageError(f"{self.path}: cannot write the rows: it is no regular file")
        wanted = set(keys)
        self._read(self.path, wanted)
        whole = self._read(self.part, wanted, torn=True)
        try:
            self.file = open(self.part, "ab")  # noqa: SIM115  closed by __exit__
            self.file.truncate(whole)
        except OSError as error:
            raise UsageError(f"{self.path}: cannot write the rows: {error.strerror}") from None
        if self.found and self.say:
            self.say(f"{len(self.found)} of {len(wanted)} rows are there already: {self.path}")
        return self.found

    def _read(self, path: Path, wanted: set[tuple], torn: bool = False) -> int:
        """Take the rows of a file, if there is one, and return its length without a last line cut short by a kill."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise UsageError(f"{path}: cannot read the rows: {error.strerror}") from None
        whole = content.rfind(b"\n") + 1 if torn else len(content)
        for number, line in enumerate(content[:whole].splitlines(), 1):
            row = self.kind.row_in(line)
            key = self.kind.key_of(row) if row else None
            if key not in wanted:
                why = f"no row of {self.kind.writer}" if row is None else self.kind.difference(key, wanted)
                raise UsageError(f"{path}: line {number}: {why}; name another --out, or move this file away")
            self.found[key] = row
        return whole

    def add(self, rows: Iterable[Row]) -> None:
        """Append finished rows: once it returns, they outlive this process."""
        lines = [line_of(row) for row in rows]
        try:
            self.file.write("".join(lines).encode())
            self.file.flush()
        except OSError as error:
            raise UsageError(f"{self.part}: cannot write the rows: {error.strerror}") from None
        self.added += len(lines)

    def finish(self, rows: Iterable[Row]) -> None:
        """Write all rows to the file, and drop the part."""
        write_rows(self.path, rows)
        self.part.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        """Close the part, which goes if it holds nothing; an error of the sweep says that rows are kept."""
        if self.file is None:
            return
        with suppress(OSError):  # what could not be written was told
            self.file.close()
        if self.part.exists() and not self.part.stat().st_size:
            self.part.unlink()
        if self.part.exists() and isinstance(error, UsageError):
            raise UsageError(f"{error}; finished rows are kept: the same command goes on from them") from None


def _difference(key: tuple, wanted: Collection[tuple]) -> str:
    """Why a row of that key is none of a sweep's."""
    row = dict(zip(KEY, key, strict=True))
    for other in wanted:
        if other[:4] == key[:4]:
            mine = dict(zip(KEY, other, strict=True))
            if row["version"] != mine["version"]:
                return f"made by ddtree {row['version']}, this is {mine['version']}"
            return f"the code of shape {row['shape']}, or its file, was another"
    if all(row["trace_sha256"] != other[0] for other in wanted):
        return "a row of another recording"
    return f"this sweep has no shape {row['shape']} of budget {row['budget']} and depth {row['depth']}"


REPLAYED = RowKind("study replay", row_in, key_of, _difference)
