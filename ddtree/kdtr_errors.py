"""The ways a KDTR file, or a request to read or write one, can be wrong: one named error each.

Knows wording alone; who raises what, and in which order, is in docs/KDTR.md.
"""

import reprlib

from ddtree.errors import DdtreeError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


class KdtrError(DdtreeError):
    """A KDTR file is wrong or is used wrongly. Says in one line where, what was found, what was expected."""

    def __init__(self, path, found: str, expected: str):
        super().__init__(path, found, expected)
        self.path, self.found, self.expected = path, found, expected

    def __str__(self) -> str:
        line = f"{self.path}: {self.found}; expected {self.expected}"
        return line if line.isprintable() else line.encode("unicode_escape").decode("ascii")


class NotReadableError(KdtrError):
    """There is no such file, it is not a regular file, or the system refuses to open it."""


class TruncatedError(KdtrError):
    """The file ends before its prefix, its header or its arrays do."""


class MagicError(KdtrError):
    """The file does not begin with the four bytes KDTR."""


class VersionError(KdtrError):
    """The file has a version this reader does not know."""


class ReservedWordError(KdtrError):
    """The reserved word of the prefix is not zero."""


class HeaderLengthError(KdtrError):
    """The header is longer than 64 MiB."""


class HeaderChecksumError(KdtrError):
    """The header's bytes do not have the crc32 the prefix gives."""


class HeaderEncodingError(KdtrError):
    """The header is not UTF-8, or escapes half a surrogate pair."""


class HeaderJsonError(KdtrError):
    """The header is not one JSON object followed by spaces."""


class HeaderDepthError(KdtrError):
    """The header nests more than 16 levels deep."""


class HeaderKeysError(KdtrError):
    """An object of the header lacks a key or has one that version 1 does not know."""


class HeaderTypeError(KdtrError):
    """A value of the header is of the wrong JSON type."""


class DuplicateKeyError(KdtrError):
    """An object of the header has a key, or the file an array name, twice."""


class ArrayNameError(KdtrError):
    """An array's name is not made of A-Z a-z 0-9 _ . - alone."""


class UnknownDtypeError(KdtrError):
    """A dtype is none of the fourteen."""


class NumberError(KdtrError):
    """A number is NaN, infinite, longer than 64 characters or, outside meta, not a plain integer."""


class NegativeNumberError(KdtrError):
    """A dimension, offset, size or checksum is below zero."""


class SizeOverflowError(KdtrError):
    """A number passes its range, a shape has more than 32 dimensions or an array more than 2^63 - 1 bytes."""


class NumBytesError(KdtrError):
    """An array's nbytes is not what its dtype and shape need."""


class MisalignedError(KdtrError):
    """The data section or an array does not start on a 64-byte boundary."""


class OutOfBoundsError(KdtrError):
    """An array that is out of place ends beyond the file."""


class OverlapError(KdtrError):
    """An array starts before the one that the header names before it ends."""


class GapError(KdtrError):
    """An array starts later than the first boundary after the one before it."""


class TrailingBytesError(KdtrError):
    """The file goes on after its last array."""


class PaddingError(KdtrError):
    """A byte between two arrays is not zero."""


class ChecksumError(KdtrError):
    """An array's bytes do not have the crc32 the header gives."""


class BoolValueError(KdtrError):
    """A bool array holds a byte other than 0 and 1."""


class UnknownArrayError(KdtrError):
    """An array was asked for that the file does not hold."""


class ClosedError(KdtrError):
    """An array was asked for after the file was closed."""


class ByteOrderError(KdtrError):
    """The host is big-endian; this implementation maps little-endian arrays as they are."""


class MetaError(KdtrError):
    """A writer was given meta that JSON cannot hold, or that a reader would refuse."""


class WriteOrderError(KdtrError):
    """An array was written out of turn, twice, or outside the writer's `with` block."""


class WriteDtypeError(KdtrError):
    """An array to write does not have the dtype that was announced for it."""


class WriteShapeError(KdtrError):
    """An array to write does not have the shape that was announced for it."""


class MissingArrayError(KdtrError):
    """The writer's `with` block ended before every announced array was written."""


class NotWritableError(KdtrError):
    """The system refuses to create, fill or rename the file."""


def shorten(value) -> str:
    """A value as text short enough for one line of an error."""
    return _SHORT.repr(value)


__all__ = [error.__name__ for error in (KdtrError, *KdtrError.__subclasses__())]
