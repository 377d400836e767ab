"""The strict reading of a header's JSON: one object, no duplicate keys, finite numbers, sixteen levels.

Knows JSON. Does not know which keys a header has.
"""

import json
import re

import numpy as np

from ddtree.kdtr_errors import (
    DuplicateKeyError,
    HeaderDepthError,
    HeaderEncodingError,
    HeaderJsonError,
    NumberError,
    shorten,
)

MAX_HEADER_DEPTH = 16
MAX_LITERAL_LENGTH = 64

_DEPTH_STEP = np.zeros(256, np.int8)
_DEPTH_STEP[list(b"[{")] = 1
_DEPTH_STEP[list(b"]}")] = -1


def parse_json(path, header: bytes) -> dict:
    """The JSON object in `header`, refusing what parsers differ about: duplicates, NaN, depth, surrogates."""
    body = header.rstrip(b" ")
    if not (body.startswith(b"{") and body.endswith(b"}")):
        raise HeaderJsonError(
            path, f"a header from {body[:40]} to {body[-40:]}", "one JSON object, then spaces"
        )
    depth = _nesting_depth(body)
    if depth > MAX_HEADER_DEPTH:
        raise HeaderDepthError(path, f"a header {depth} levels deep", f"at most {MAX_HEADER_DEPTH}")
    try:
        text = body.decode("utf-8")
        tree = json.loads(text, **_strict_hooks(path))
        if re.search(r"\\u[dD]", text):
            json.dumps(tree, ensure_ascii=False).encode("utf-8")
    except UnicodeError as error:
        raise HeaderEncodingError(path, f"text in the header with {error.reason}", "UTF-8") from None
    except ValueError as error:
        raise HeaderJsonError(path, f"a header with {error}", "one JSON object, then spaces") from None
    return tree


def _nesting_depth(body: bytes) -> int:
    """Greatest number of open brackets outside strings, found without recursion before any parser runs."""
    codes = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = ~np.logical_xor.accumulate(codes == ord('"'))
    return int(np.cumsum(_DEPTH_STEP[codes] * is_outside, dtype=np.int32).max(initial=0))


def _strict_hooks(path) -> dict:
    """json.loads arguments that raise a KdtrError for what Python's json lets pass."""

    def refuse_number(literal):
        raise NumberError(
            path, f"the number {shorten(literal)} in the header", "a finite one of 64 characters"
        )

    def parse_integer(literal):
        if len(literal) > MAX_LITERAL_LENGTH:
            refuse_number(literal)
        return -0.0 if literal == "-0" else int(literal)  # a float, so that it is no plain integer

    def parse_float(literal):
        value = float(literal)
        if len(literal) > MAX_LITERAL_LENGTH or not np.isfinite(value):
            refuse_number(literal)
        return value

    def parse_object(pairs):
        result = dict(pairs)
        if len(result) != len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise DuplicateKeyError(path, f"the key {shorten(twice)} twice in one object", "once")
        return result

    return {
        "object_pairs_hook": parse_object,
        "parse_int": parse_integer,
        "parse_float": parse_float,
        "parse_constant": refuse_number,
    }
