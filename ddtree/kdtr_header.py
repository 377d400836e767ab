"""What a KDTR header says: the fixed prefix, its table of arrays, and the dtypes.

Knows a header's bytes and the length of the file around it. Knows neither how files are opened nor any model.
"""

import json
import math
import re
import struct
from typing import NamedTuple

import ml_dtypes
import numpy as np

from ddtree.kdtr_errors import (
    ArrayNameError,
    GapError,
    HeaderKeysError,
    HeaderLengthError,
    HeaderTypeError,
    MagicError,
    MisalignedError,
    NegativeNumberError,
    NumberError,
    NumBytesError,
    OutOfBoundsError,
    OverlapError,
    ReservedWordError,
    SizeOverflowError,
    TrailingBytesError,
    TruncatedError,
    UnknownDtypeError,
    VersionError,
    shorten,
)
from ddtree.kdtr_json import parse_json

MAGIC = b"KDTR"
VERSION = 1
PREFIX = struct.Struct("<4sIQII")  # magic, version, header length, crc32 of the header, zero
ALIGNMENT = 64
MAX_HEADER_BYTES = 64 << 20
MAX_DIMENSIONS = 32
MAX_BYTES = 2**63 - 1
MAX_CRC32 = 2**32 - 1
ARRAY_KEYS = ("dtype", "shape", "offset", "nbytes", "crc32")

NUMPY_DTYPES = {
    "bool": np.dtype(np.bool_),
    "u8": np.dtype(np.uint8),
    "i8": np.dtype(np.int8),
    "u16": np.dtype(np.uint16),
    "i16": np.dtype(np.int16),
    "u32": np.dtype(np.uint32),
    "i32": np.dtype(np.int32),
    "u64": np.dtype(np.uint64),
    "i64": np.dtype(np.int64),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "f8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}
_DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}
_NAME = re.compile("[A-Za-z0-9_.-]+")


class ArrayInfo(NamedTuple):
    """One array of a file: `offset` and `nbytes` are bytes, the offset relative to the data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


class Prefix(NamedTuple):
    """The two fields of the fixed prefix that vary."""

    header_bytes: int
    crc32: int


def dtype_name(dtype) -> str:
    """The KDTR name of a NumPy dtype; UnknownDtypeError for one that has none, big-endian ones among them."""
    try:
        return _DTYPE_NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise UnknownDtypeError("NumPy array", f"dtype {dtype}", f"one of {' '.join(NUMPY_DTYPES)}") from None


def align(position: int) -> int:
    """The first 64-byte boundary at or after `position`, in bytes."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def read_prefix(path, file: np.ndarray) -> Prefix:
    """Check the 24 bytes every file begins with against the length of `file` (u8[bytes of the file])."""
    if len(file) < PREFIX.size:
        raise TruncatedError(
            path, f"a file of {len(file)} bytes", f"at least the {PREFIX.size} of the prefix"
        )
    magic, version, header_bytes, crc32, reserved = PREFIX.unpack(file[: PREFIX.size].tobytes())
    if magic != MAGIC:
        raise MagicError(path, f"magic {magic!r}", f"{MAGIC!r}")
    if version != VERSION:
        raise VersionError(path, f"version {version}", f"{VERSION}")
    if reserved != 0:
        raise ReservedWordError(path, f"reserved word {reserved:#x} in the prefix", "zero")
    if header_bytes > MAX_HEADER_BYTES:
        raise HeaderLengthError(path, f"a header of {header_bytes} bytes", f"at most {MAX_HEADER_BYTES}")
    if (PREFIX.size + header_bytes) % ALIGNMENT:
        found = f"a data section at byte {PREFIX.size + header_bytes}"
        raise MisalignedError(path, found, f"a multiple of {ALIGNMENT}")
    if PREFIX.size + header_bytes > len(file):
        raise TruncatedError(
            path, f"a file of {len(file)} bytes", f"{PREFIX.size + header_bytes} for the header"
        )
    return Prefix(header_bytes, crc32)


def parse_table(path, header: bytes, data_bytes: int) -> tuple[dict, dict[str, ArrayInfo]]:
    """Meta and the arrays of a header, each array in its one lawful place in `data_bytes` of data."""
    tree = parse_json(path, header)
    _check_keys(path, "the header", tree, ("meta", "arrays"))
    meta = _typed(path, "meta", tree["meta"], dict, "an object")
    arrays, end = {}, 0
    for name, entry in _typed(path, "arrays", tree["arrays"], dict, "an object").items():
        arrays[name] = array = _parse_array(path, name, entry)
        _check_place(path, array, end, data_bytes)
        end = array.offset + array.nbytes
    if end > data_bytes:
        raise TruncatedError(path, f"{data_bytes} bytes of data", f"{end}, where the last array ends")
    if end < data_bytes:
        raise TrailingBytesError(path, f"{data_bytes} bytes of data", f"{end}, where the last array ends")
    return meta, arrays


def format_table(meta: dict, arrays: list[ArrayInfo]) -> bytes:
    """The JSON bytes of a header without padding; ValueError or TypeError where JSON cannot hold `meta`."""
    entries = {
        array.name: {
            "dtype": array.dtype,
            "shape": array.shape,
            "offset": array.offset,
            "nbytes": array.nbytes,
            "crc32": array.crc32,
        }
        for array in arrays
    }
    tree = {"meta": meta, "arrays": entries}
    return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8")


def count_bytes(path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array. Dimensions of zero do not hide overflow: the others must fit without them."""
    if len(shape) > MAX_DIMENSIONS:
        raise SizeOverflowError(path, f"{len(shape)} dimensions in array {name}", f"at most {MAX_DIMENSIONS}")
    itemsize = NUMPY_DTYPES[dtype].itemsize
    if math.prod(size for size in shape if size) * itemsize > MAX_BYTES:
        raise SizeOverflowError(path, f"shape {shorten(shape)} of array {name}", f"at most {MAX_BYTES} bytes")
    return math.prod(shape) * itemsize


def check_name(path, name: str) -> None:
    """Refuse an array name that is not text of the permitted characters."""
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ArrayNameError(path, f"the array name {shorten(name)}", f"a match of {_NAME.pattern}")


def _parse_array(path, name: str, entry) -> ArrayInfo:
    """One entry of the table, its values of the right kind and its nbytes that of its dtype and shape."""
    check_name(path, name)
    where = f"array {shorten(name)}"
    _check_keys(path, where, _typed(path, where, entry, dict, "an object"), ARRAY_KEYS)
    dtype = _typed(path, f"dtype of {where}", entry["dtype"], str, "a string")
    if dtype not in NUMPY_DTYPES:
        raise UnknownDtypeError(
            path, f"dtype {shorten(dtype)} of {where}", f"one of {' '.join(NUMPY_DTYPES)}"
        )
    sizes = _typed(path, f"shape of {where}", entry["shape"], list, "a list")
    shape = tuple(_natural(path, f"shape of {where}", size, MAX_BYTES) for size in sizes)
    offset = _natural(path, f"offset of {where}", entry["offset"], MAX_BYTES)
    nbytes = _natural(path, f"nbytes of {where}", entry["nbytes"], MAX_BYTES)
    crc32 = _natural(path, f"crc32 of {where}", entry["crc32"], MAX_CRC32)
    wanted = count_bytes(path, name, dtype, shape)
    if nbytes != wanted:
        raise NumBytesError(path, f"nbytes {nbytes} of {where}", f"{wanted} for {dtype} {shorten(shape)}")
    return ArrayInfo(name, dtype, shape, offset, nbytes, crc32)


def _check_place(path, array: ArrayInfo, previous_end: int, data_bytes: int) -> None:
    """Refuse an array that does not start on the first boundary after the one before it."""
    wanted = align(previous_end)
    if array.offset == wanted:
        return
    found = f"array {shorten(array.name)} at offset {array.offset}"
    if array.offset % ALIGNMENT:
        raise MisalignedError(path, found, f"{wanted}, a multiple of {ALIGNMENT}")
    if array.offset + array.nbytes > data_bytes:
        raise OutOfBoundsError(path, f"{found} in {data_bytes} bytes of data", f"{wanted}")
    if array.offset < wanted:
        raise OverlapError(path, found, f"{wanted}, after the array before it")
    raise GapError(path, found, f"{wanted}, right after the array before it")


def _check_keys(path, where: str, tree: dict, keys: tuple[str, ...]) -> None:
    """Refuse an object whose keys are not exactly `keys`, in any order."""
    if set(tree) != set(keys):
        raise HeaderKeysError(path, f"keys {shorten(list(tree))} in {where}", f"exactly {' '.join(keys)}")


def _typed(path, where: str, value, kind: type, wanted: str):
    """`value`, refused unless it is of the Python type that a JSON value of the wanted kind becomes."""
    if not isinstance(value, kind):
        raise HeaderTypeError(path, f"{where} is {shorten(value)}", wanted)
    return value


def _natural(path, where: str, value, limit: int) -> int:
    """`value`, refused unless it is a plain integer from 0 to `limit`; a bool is none."""
    if type(value) is not int:
        raise NumberError(path, f"{where} holds {shorten(value)}", "a plain integer")
    if value < 0:
        raise NegativeNumberError(path, f"{where} holds {value}", "zero or more")
    if value > limit:
        raise SizeOverflowError(path, f"{where} holds {value}", f"at most {limit}")
    return value
