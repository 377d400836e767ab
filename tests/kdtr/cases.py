"""KDTR files made by hand, wrong in one way each, and what the tests of both directions share."""

import json
import struct
import zlib
from pathlib import Path

import numpy as np

from ddtree.kdtr import dtype_name

DOCUMENT = Path(__file__).parents[2] / "docs" / "KDTR.md"
A = np.array([[1, -2, 3], [4, 5, 300]], np.int16)
B = np.array([True, False, True])
DATA = A.tobytes() + bytes(52) + B.tobytes()


def entry(array, offset):
    """The header's entry for an array at `offset`."""
    nbytes, crc32 = array.nbytes, zlib.crc32(array.tobytes())
    shape = list(array.shape)
    return dict(dtype=dtype_name(array.dtype), shape=shape, offset=offset, nbytes=nbytes, crc32=crc32)


def tree(**changes_of_b):
    """The header of the file most cases mutate: a at 0, b at 64."""
    return {"meta": {}, "arrays": {"a": entry(A, 0), "b": entry(B, 64) | changes_of_b}}


def pack(header, data=DATA, magic=b"KDTR", version=1, reserved=0, crc_error=0, length=None):
    """A file from a header (an object, or JSON bytes), with a right length and checksum unless told otherwise."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * (-(24 + len(text)) % 64)
    length = len(text) if length is None else length
    return (
        struct.pack("<4sIQII", magic, version, length, zlib.crc32(text) ^ crc_error, reserved) + text + data
    )


def with_b(old, new):
    """The file whose header text has `old` replaced by `new`; the old text must be there."""
    text = json.dumps(tree()).encode()
    assert text.count(old) == 1
    return pack(text.replace(old, new))


def with_meta(text):
    return pack(b'{"meta": {"x": %s}, "arrays": {}}' % text, b"")


def with_shape(shape, nbytes=0, data=b""):
    array = dict(dtype="u8", shape=shape, offset=0, nbytes=nbytes, crc32=0)
    return pack({"meta": {}, "arrays": {"a": array}}, data)


GOOD = pack(tree())
CASES = [
    ("empty file", "TruncatedError", b""),
    ("prefix cut", "TruncatedError", GOOD[:23]),
    ("header cut", "TruncatedError", GOOD[:100]),
    ("last array cut", "TruncatedError", GOOD[:-1]),
    ("padding cut", "TruncatedError", GOOD[:-40]),
    ("shape beyond the file", "TruncatedError", pack(tree(shape=[10**15], nbytes=10**15))),
    ("magic", "MagicError", pack(tree(), magic=b"KDTS")),
    ("version", "VersionError", pack(tree(), version=2)),
    ("big-endian version", "VersionError", pack(tree(), version=1 << 24)),
    ("reserved", "ReservedWordError", pack(tree(), reserved=1)),
    ("header of 2^64 - 1 bytes", "HeaderLengthError", pack(tree(), length=2**64 - 1)),
    ("header of 64 MiB + 40", "HeaderLengthError", pack(tree(), length=(64 << 20) + 40)),
    ("data section at 65", "MisalignedError", pack(tree(), length=41)),
    ("header crc", "HeaderChecksumError", pack(tree(), crc_error=1)),
    ("latin-1", "HeaderEncodingError", with_meta('"é"'.encode("latin-1"))),
    ("half a surrogate pair", "HeaderEncodingError", with_meta(rb'"\ud800"')),
    ("half a pair as key", "HeaderEncodingError", with_meta(rb'[{"\uDC00": 1}]')),
    ("no object", "HeaderJsonError", pack(b"[]", b"")),
    ("no header", "HeaderJsonError", pack(b" ", b"")),
    ("leading space", "HeaderJsonError", pack(b' {"meta": {}, "arrays": {}}', b"")),
    ("newline after", "HeaderJsonError", pack(b'{"meta": {}, "arrays": {}}\n', b"")),
    ("two objects", "HeaderJsonError", pack(b'{"meta": {}, "arrays": {}}{}', b"")),
    ("comma before brace", "HeaderJsonError", with_meta(b"1,")),
    ("control character", "HeaderJsonError", with_meta(b'"\x01"')),
    ("leading zero", "HeaderJsonError", with_meta(b"01")),
    ("17 levels", "HeaderDepthError", with_meta(b"[" * 15 + b"]" * 15)),
    ("a million levels", "HeaderDepthError", with_meta(b"[" * 10**6)),
    ("levels after escaped quotes", "HeaderDepthError", with_meta(rb'["\"\\",' + b"[" * 20 + b"]" * 21)),
    ("array twice", "DuplicateKeyError", with_b(b'"b": {', b'"a": {')),
    ("array twice, escaped", "DuplicateKeyError", with_b(b'"b": {', rb'"\u0061": {')),
    ("meta key twice", "DuplicateKeyError", with_meta(b'[{"y": 1, "y": 1}]')),
    ("no meta", "HeaderKeysError", pack({"arrays": {}}, b"")),
    ("unknown key", "HeaderKeysError", pack({"meta": {}, "arrays": {}, "more": 1}, b"")),
    ("key missing in entry", "HeaderKeysError", with_b(b'"offset": 64, ', b"")),
    ("key unknown in entry", "HeaderKeysError", pack(tree(strides=1))),
    ("meta a list", "HeaderTypeError", pack({"meta": [], "arrays": {}}, b"")),
    ("arrays a list", "HeaderTypeError", pack({"meta": {}, "arrays": []}, b"")),
    ("entry null", "HeaderTypeError", pack({"meta": {}, "arrays": {"a": None}}, b"")),
    ("shape a number", "HeaderTypeError", pack(tree(shape=3))),
    ("dtype a list", "HeaderTypeError", pack(tree(dtype=["u8"]))),
    ("empty name", "ArrayNameError", with_b(b'"b": {', b'"": {')),
    ("name with newline", "ArrayNameError", with_b(b'"b": {', rb'"b\n": {')),
    ("name with slash", "ArrayNameError", with_b(b'"b": {', rb'"../b": {')),
    ("name not ASCII", "ArrayNameError", with_b(b'"b": {', '"é": {'.encode())),
    ("dtype", "UnknownDtypeError", pack(tree(dtype="float32"))),
    ("dtype in capitals", "UnknownDtypeError", pack(tree(dtype="BOOL"))),
    ("true as number", "NumberError", pack(tree(shape=[True], nbytes=1))),
    ("false as offset", "NumberError", pack(tree(offset=False))),
    ("float offset", "NumberError", with_b(b'"offset": 64', b'"offset": 64.0')),
    ("exponent", "NumberError", with_b(b'"offset": 64', b'"offset": 64e0')),
    ("minus zero", "NumberError", with_b(b'"offset": 0', b'"offset": -0')),
    ("text as number", "NumberError", pack(tree(nbytes="3"))),
    ("null as crc32", "NumberError", pack(tree(crc32=None))),
    ("nested shape", "NumberError", pack(tree(shape=[[3]]))),
    ("NaN", "NumberError", with_meta(b"NaN")),
    ("-Infinity", "NumberError", with_meta(b"[-Infinity]")),
    ("1e999", "NumberError", with_meta(b"1e999")),
    ("number of 5000 digits", "NumberError", with_meta(b"1" * 5000)),
    ("offset of 5000 digits", "NumberError", with_b(b'"offset": 64', b'"offset": ' + b"6" * 5000)),
    ("negative dimension", "NegativeNumberError", pack(tree(shape=[-3]))),
    ("negative twice", "NegativeNumberError", pack(tree(shape=[-3, -1]))),
    ("negative offset", "NegativeNumberError", pack(tree(offset=-64))),
    ("negative nbytes", "NegativeNumberError", pack(tree(nbytes=-3))),
    ("dimension 2^63", "SizeOverflowError", with_shape([0, 2**63])),
    ("product 2^64", "SizeOverflowError", with_shape([2**32, 2**32])),
    ("product 2^64 beside zero", "SizeOverflowError", with_shape([2**32, 0, 2**32])),
    ("33 dimensions", "SizeOverflowError", with_shape([1] * 33, 1, b"\0")),
    ("offset 2^63", "SizeOverflowError", pack(tree(offset=2**63))),
    ("crc32 2^32", "SizeOverflowError", pack(tree(crc32=2**32))),
    ("nbytes", "NumBytesError", pack(tree(nbytes=4))),
    ("nbytes 0", "NumBytesError", pack(tree(nbytes=0))),
    ("nbytes of other dtype", "NumBytesError", pack(tree(dtype="u16"))),
    ("offset 63", "MisalignedError", pack(tree(offset=63))),
    ("offset 2^62", "OutOfBoundsError", pack(tree(offset=2**62))),
    ("ends past the file", "OutOfBoundsError", pack(tree(offset=128))),
    ("overlap", "OverlapError", pack(tree(offset=0))),
    ("gap", "GapError", pack(tree(offset=128), DATA + bytes(128))),
    ("trailing byte", "TrailingBytesError", GOOD + b"\0"),
    ("trailing bytes, no arrays", "TrailingBytesError", pack({"meta": {}, "arrays": {}}, bytes(64))),
    ("padding", "PaddingError", pack(tree(), DATA.replace(bytes(52), bytes(51) + b"\1"))),
    ("array bit", "ChecksumError", pack(tree(), b"\0" + DATA[1:])),
    ("array crc32", "ChecksumError", pack(tree(crc32=0))),
    ("bool 2", "BoolValueError", pack(tree(crc32=zlib.crc32(b"\1\2\0")), DATA[:-3] + b"\1\2\0")),
]


def assert_one_line(error, path):
    """The message names the file and what was expected, in one line a terminal can show."""
    assert str(path) in str(error) and "expected" in str(error)
    assert str(error).isprintable() and len(str(error)) < 700
