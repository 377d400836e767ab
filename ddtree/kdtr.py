"""KDTR, the container for arrays: reading by memory map, and the names that other rooms import.

Knows files, arrays and JSON meta (docs/KDTR.md). Knows no model: names and meta mean nothing here.
"""

import mmap
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from ddtree import kdtr_errors
from ddtree.kdtr_errors import *  # noqa: F403
from ddtree.kdtr_errors import (
    BoolValueError,
    ByteOrderError,
    ChecksumError,
    ClosedError,
    HeaderChecksumError,
    NotReadableError,
    PaddingError,
    UnknownArrayError,
    shorten,
)
from ddtree.kdtr_header import NUMPY_DTYPES, PREFIX, ArrayInfo, dtype_name, parse_table, read_prefix
from ddtree.kdtr_writer import KdtrWriter

__all__ = ["NUMPY_DTYPES", "ArrayInfo", "KdtrFile", "KdtrWriter", "dtype_name", "save", *kdtr_errors.__all__]


class KdtrFile:
    """An open file: a mapping from array names, in header order, to read-only views of the mapped bytes.

    Opening reads the header and the padding and refuses a file that is wrong in either. An array's bytes
    are read when it is first asked for: its crc32 is then checked once, and a bool array's values;
    `verify=False` skips both. Views stay valid after `close()`: the map goes when the last of them does.
    A file must not be shortened in place while it is mapped; the writer never does that.
    """

    def __init__(self, path, verify: bool = True):
        self._attach(Path(path), _map_file(path), verify)

    @classmethod
    def _from_bytes(cls, content: bytes, verify: bool = True) -> "KdtrFile":
        """The same reader over bytes in memory, for tests."""
        kdtr_file = cls.__new__(cls)
        kdtr_file._attach(Path("memory"), np.frombuffer(content or bytearray(), np.uint8), verify)
        return kdtr_file

    def _attach(self, path: Path, content: np.ndarray, verify: bool) -> None:
        """Parse `content`, u8[bytes of the file]. Order of checks: docs/KDTR.md."""
        if sys.byteorder != "little":
            raise ByteOrderError(path, f"a {sys.byteorder}-endian host", "a little-endian one")
        self.path = path
        prefix = read_prefix(path, content)
        data_start = PREFIX.size + prefix.header_bytes
        header = content[PREFIX.size : data_start].tobytes()
        _check_header_crc(path, header, prefix.crc32)
        self.meta, self.arrays = parse_table(path, header, len(content) - data_start)
        self.header_bytes, self.file_bytes = prefix.header_bytes, len(content)
        self._data = content[data_start:]
        self._unverified = set(self.arrays) if verify else set()
        self._check_padding()

    def __getitem__(self, name: str) -> np.ndarray:
        """The array `name` as a view of the map: no copy, not writable."""
        info = self.info(name)
        if name in self._unverified:
            self._verify(info)
        return self._bytes_of(info).view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)

    def __enter__(self) -> "KdtrFile":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def info(self, name: str) -> ArrayInfo:
        """What the header says of `name`; UnknownArrayError if it says nothing."""
        if name not in self.arrays:
            known = f"one of {len(self.arrays)}, {shorten(list(self.arrays))}"
            raise UnknownArrayError(self.path, f"no array {shorten(name)}", known)
        return self.arrays[name]

    def close(self) -> None:
        """Let go of the map. Asking for an array afterwards raises ClosedError; views made before live on."""
        self._data = None

    def verify_all(self, progress: Callable[[ArrayInfo], None] | None = None) -> int:
        """Check every array's bytes, even with `verify=False`; `progress` hears of each. Returns how many."""
        for info in self.arrays.values():
            self._verify(info)
            if progress is not None:
                progress(info)
        return len(self.arrays)

    def _bytes_of(self, info: ArrayInfo) -> np.ndarray:
        """An array's bytes as u8[nbytes], a view of the map."""
        if self._data is None:
            raise ClosedError(self.path, f"array {info.name} asked of a closed file", "an open one")
        return self._data[info.offset : info.offset + info.nbytes]

    def _verify(self, info: ArrayInfo) -> None:
        """Check one array's crc32 and, if it is bool, that its bytes are 0 and 1."""
        content = self._bytes_of(info)
        crc32 = zlib.crc32(content)
        if crc32 != info.crc32:
            found = f"crc32 {crc32} of the bytes of array {info.name}"
            raise ChecksumError(self.path, found, f"{info.crc32}, which the header gives")
        if info.dtype == "bool" and content.max(initial=0) > 1:
            raise BoolValueError(self.path, f"byte {content.max()} in bool array {info.name}", "0 or 1")
        self._unverified.discard(info.name)

    def _check_padding(self) -> None:
        """Refuse a byte other than zero between two arrays."""
        end = 0
        for info in self.arrays.values():
            padding = self._data[end : info.offset]
            if padding.any():
                where = end + int(padding.argmax())
                found = f"byte {self._data[where]} at offset {where}, before array {info.name}"
                raise PaddingError(self.path, found, "zero")
            end = info.offset + info.nbytes


def save(path, arrays: Mapping[str, np.ndarray], meta: dict) -> None:
    """Write `arrays` in their order, and `meta`, to a new file that replaces `path` once it is complete."""
    specs = {name: (dtype_name(array.dtype), array.shape) for name, array in arrays.items()}
    with KdtrWriter(path, specs, meta) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def _map_file(path) -> np.ndarray:
    """Map a regular file as read-only u8[bytes]. The map lives as long as the array and its views."""
    try:
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise NotReadableError(path, "something that is not a regular file", "a KDTR file")
        with open(path, "rb") as file:
            if not file.seek(0, 2):
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise NotReadableError(path, f"{reason} (on opening)", "a KDTR file") from None


def _check_header_crc(path, header: bytes, wanted: int) -> None:
    """Refuse a header that is not the one its crc32 was made of."""
    crc32 = zlib.crc32(header)
    if crc32 != wanted:
        raise HeaderChecksumError(path, f"crc32 {crc32} of the header", f"{wanted}, which the prefix gives")
