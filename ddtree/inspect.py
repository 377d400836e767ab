"""What is in a KDTR file, as data, as a table, and checked.

Knows the container. Of names it knows how those of quantised weights end, so that their parameters count and their
scales do not; nor does it know the command line that calls it.
"""

import json
import math
from collections.abc import Callable

from ddtree.kdtr import ArrayInfo, KdtrFile
from ddtree.quantised import NIBBLES

META_WIDTH = 80

PARAMETER_DTYPES = ("f16", "bf16", "f32", "f64", "f8_e4m3")  # integers and bytes are no weights


def describe(path) -> dict:
    """A file's header and sizes in bytes as a JSON-able dict; the arrays' own bytes are not read.

    Keys: path, file_bytes, header_bytes, meta, arrays (each with name, dtype, shape, nbytes, parameters),
    num_arrays, parameters, nbytes. Any KdtrError that opening the file raises.
    """
    with KdtrFile(path, verify=False) as file:
        arrays = [_describe_array(info) for info in file.arrays.values()]
        return {
            "path": str(file.path),
            "file_bytes": file.file_bytes,
            "header_bytes": file.header_bytes,
            "meta": file.meta,
            "arrays": arrays,
            "num_arrays": len(arrays),
            "parameters": sum(array["parameters"] for array in arrays),
            "nbytes": sum(array["nbytes"] for array in arrays),
        }


def format_table(description: dict) -> str:
    """A description as plain text: one line an array, the totals, then meta with long values cut short."""
    rows = [("name", "dtype", "shape", "bytes", "parameters")]
    rows += [
        (
            array["name"],
            array["dtype"],
            str(array["shape"]),
            f"{array['nbytes']:,}",
            f"{array['parameters']:,}",
        )
        for array in description["arrays"]
    ]
    totals = (
        f"{description['num_arrays']:,} arrays, {description['parameters']:,} parameters, "
        f"{description['nbytes']:,} bytes of arrays in a file of {description['file_bytes']:,}"
    )
    meta = [f"  {_one_line(key)}: {_one_line(value)}" for key, value in description["meta"].items()]
    return "\n".join(
        [description["path"], "", *_in_columns(rows), "", totals, "meta:", *(meta or ["  (empty)"])]
    )


def verify(path, progress: Callable[[ArrayInfo], None] | None = None) -> int:
    """Read every byte and check every checksum; returns the arrays checked, or raises the KdtrError found first."""
    with KdtrFile(path) as file:
        return file.verify_all(progress)


def _describe_array(info: ArrayInfo) -> dict:
    """One array's row of a description."""
    return {
        "name": info.name,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "nbytes": info.nbytes,
        "parameters": _parameters(info),
    }


def _parameters(info: ArrayInfo) -> int:
    """Weights in an array: a word of INT4 holds eight, a scale is none."""
    if info.dtype == "i32" and info.name.endswith(".weight_packed"):
        return math.prod(info.shape) * NIBBLES
    if info.name.endswith((".weight_scale", ".weight_scale_inv")):
        return 0
    return math.prod(info.shape) if info.dtype in PARAMETER_DTYPES else 0


def _in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines of aligned columns: words to the left, the last two, which are counts, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words, counts = widths[:-2], widths[-2:]
    return [
        "  ".join(
            [cell.ljust(width) for cell, width in zip(row[:-2], words, strict=True)]
            + [cell.rjust(width) for cell, width in zip(row[-2:], counts, strict=True)]
        )
        for row in rows
    ]


def _one_line(value) -> str:
    """A meta key or value on one line of at most META_WIDTH characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = text if text.isprintable() else json.dumps(text)
    return text if len(text) <= META_WIDTH else f"{text[: META_WIDTH - 3]}... ({len(text):,} characters)"
