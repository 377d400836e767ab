"""Writing KDTR files: one array in memory at a time, and the old file intact until the new one is complete.

Knows the layout and the file system. Knows no model.
"""

import json
import operator
import os
import secrets
import sys
import zlib
from collections.abc import Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from ddtree.kdtr_errors import (
    BoolValueError,
    ByteOrderError,
    HeaderLengthError,
    MetaError,
    MissingArrayError,
    NegativeNumberError,
    NotWritableError,
    NumberError,
    UnknownDtypeError,
    WriteDtypeError,
    WriteOrderError,
    WriteShapeError,
    shorten,
)
from ddtree.kdtr_header import (
    MAGIC,
    MAX_CRC32,
    MAX_HEADER_BYTES,
    NUMPY_DTYPES,
    PREFIX,
    VERSION,
    ArrayInfo,
    align,
    check_name,
    count_bytes,
    format_table,
    parse_table,
)


class KdtrWriter:
    """Writes one file: `with KdtrWriter(path, specs, meta) as writer:`, then `writer.write(name, array)` in turn.

    `specs` maps each name to its (KDTR dtype name, shape); `meta` is any JSON object. Bytes go to a temporary
    file beside `path`, which takes its place when the block ends without an exception and every array is
    there. Otherwise the temporary file is removed and `path` is as it was. The checksums are known
    only after the data, so the header's place is reserved at its greatest length and padded with spaces.
    """

    def __init__(self, path, specs: Mapping[str, tuple[str, tuple[int, ...]]], meta: dict):
        if sys.byteorder != "little":
            raise ByteOrderError(path, f"a {sys.byteorder}-endian host", "a little-endian one")
        self.path = Path(path)
        with self._system_errors():
            self._target = Path(os.path.realpath(path))  # a link stays a link to the new file
        self._meta = json.loads(_meta_text(path, meta))  # a copy: later changes to the caller's do not count
        self._arrays = _lay_out(path, specs)
        self._data_start = align(PREFIX.size + len(self._check_header()))
        self._temporary = None

    def __enter__(self) -> "KdtrWriter":
        self._num_written = 0
        with self._system_errors():
            if self._target.exists() and not self._target.is_file():
                raise NotWritableError(
                    self.path, "something that is not a regular file", "a file or nothing yet"
                )
            temporary = self._target.parent / f".{secrets.token_hex(8)}.kdtr-tmp"
            self._file = open(temporary, "xb")
        self._temporary = temporary
        return self

    def __exit__(self, kind, *exception) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            with suppress(OSError):  # what could not be flushed belongs to a file about to go
                self._file.close()
            self._temporary.unlink(missing_ok=True)
            self._temporary = None

    def write(self, name: str, array: np.ndarray) -> None:
        """Write the next array, of the name, dtype and shape announced; copied only if it is not C-ordered."""
        info = self._next_array(name)
        array = np.asarray(array)
        self._check_array(info, array)
        content = array.ravel().view(np.uint8)
        if info.dtype == "bool" and content.max(initial=0) > 1:
            raise BoolValueError(self.path, f"byte {content.max()} in bool array {name}", "0 or 1")
        with self._system_errors():
            self._file.seek(self._data_start + info.offset)  # what seek skips reads as zeros
            self._file.write(content)
        self._arrays[self._num_written] = info._replace(crc32=zlib.crc32(content))
        self._num_written += 1

    def _next_array(self, name: str) -> ArrayInfo:
        """The array whose turn it is, refused unless it is `name`."""
        if self._temporary is None:
            raise WriteOrderError(
                self.path, f"array {shorten(name)} written", "a writer inside its with block"
            )
        if self._num_written == len(self._arrays):
            raise WriteOrderError(self.path, f"array {shorten(name)} written", "no array after the last")
        info = self._arrays[self._num_written]
        if name != info.name:
            raise WriteOrderError(self.path, f"array {shorten(name)} written", f"{info.name}, which is next")
        return info

    def _check_array(self, info: ArrayInfo, array: np.ndarray) -> None:
        """Refuse an array of another dtype or shape than announced."""
        if array.dtype != NUMPY_DTYPES[info.dtype]:
            raise WriteDtypeError(self.path, f"array {info.name} of dtype {array.dtype}", info.dtype)
        if array.shape != info.shape:
            raise WriteShapeError(self.path, f"array {info.name} of shape {array.shape}", f"{info.shape}")

    def _check_header(self) -> bytes:
        """The header at its greatest length, refused before any data is written if a reader would refuse it."""
        try:
            header = format_table(self._meta, self._arrays)
        except UnicodeEncodeError as error:
            raise MetaError(self.path, f"text in meta with {error.reason}", "Unicode") from None
        if align(PREFIX.size + len(header)) - PREFIX.size > MAX_HEADER_BYTES:
            raise HeaderLengthError(
                self.path, f"a header of {len(header)} bytes", f"at most {MAX_HEADER_BYTES}"
            )
        parse_table(self.path, header, self._data_bytes)
        return header

    @property
    def _data_bytes(self) -> int:
        return self._arrays[-1].offset + self._arrays[-1].nbytes if self._arrays else 0

    def _commit(self) -> None:
        """Write the header, make the file durable and put it in the place of `path`."""
        missing = [info.name for info in self._arrays[self._num_written :]]
        if missing:
            raise MissingArrayError(
                self.path, f"{len(missing)} arrays not written, {shorten(missing)}", "none"
            )
        header = format_table(self._meta, self._arrays).ljust(self._data_start - PREFIX.size)
        with self._system_errors():
            self._file.truncate(self._data_start + self._data_bytes)
            self._file.seek(0)
            self._file.write(PREFIX.pack(MAGIC, VERSION, len(header), zlib.crc32(header), 0) + header)
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self._target)
            _sync_directory(self._target.parent)

    @contextmanager
    def _system_errors(self):
        """Turn the system's refusals into NotWritableError."""
        try:
            yield
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise NotWritableError(self.path, f"{reason} (on writing)", "a writable file") from error


def _sync_directory(path: Path) -> None:
    """Make the rename in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lay_out(path, specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[ArrayInfo]:
    """Each array on the first 64-byte boundary after the one before it, with a crc32 of the most digits."""
    arrays, end = [], 0
    for name, (dtype, shape) in specs.items():
        check_name(path, name)
        if dtype not in NUMPY_DTYPES:
            found = f"dtype {shorten(dtype)} of array {name}"
            raise UnknownDtypeError(path, found, f"one of {' '.join(NUMPY_DTYPES)}")
        shape = tuple(_dimension(path, name, size) for size in shape)
        nbytes = count_bytes(path, name, dtype, shape)
        arrays.append(ArrayInfo(name, dtype, shape, align(end), nbytes, MAX_CRC32))
        end = align(end) + nbytes
    return arrays


def _dimension(path, name: str, size) -> int:
    """One announced dimension as a plain integer; NumPy's integers are welcome, bools and floats are not."""
    try:
        plain = operator.index(size)
    except TypeError:
        raise NumberError(path, f"dimension {shorten(size)} of array {name}", "an integer") from None
    if plain < 0:
        raise NegativeNumberError(path, f"dimension {plain} of array {name}", "zero or more")
    return plain


def _meta_text(path, meta: dict) -> str:
    """`meta` as JSON; MetaError if it is no object, has keys that are not text, or values that JSON lacks."""
    try:
        text = json.dumps(meta, allow_nan=False)
        is_object = isinstance(meta, dict) and _has_text_keys(meta)
    except (TypeError, ValueError, RecursionError) as error:
        raise MetaError(path, f"meta that JSON cannot hold, {error}", "a JSON object") from None
    if not is_object:
        raise MetaError(path, f"meta {shorten(meta)}", "a dict whose keys, at every level, are text")
    return text


def _has_text_keys(value) -> bool:
    """Whether every dict in a JSON-like value has text keys alone."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(item) for key, item in value.items())
    return not isinstance(value, list | tuple) or all(map(_has_text_keys, value))
