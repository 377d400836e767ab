"""Descriptions, tables and whole-file checks of KDTR files."""

import json

import ml_dtypes
import numpy as np
import pytest

from ddtree.inspect import describe, format_table, verify
from ddtree.kdtr import ChecksumError, MagicError, save

ARRAYS = {
    "layers.0.weight": np.zeros((300, 7), ml_dtypes.bfloat16),
    "scale": np.ones((), np.float32),
    "none": np.empty((0, 4), np.int8),
}
META = {"model": "tiny", "config": {"layers": 2}, "notes": "x" * 500, "two\nlines": "a\nb", "flag": True}


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "model.kdtr", ARRAYS, META)
    return tmp_path / "model.kdtr"


def test_describe(path):
    description = describe(path)
    assert json.loads(json.dumps(description, allow_nan=False)) == description
    assert description["path"] == str(path) and description["file_bytes"] == path.stat().st_size
    assert description["meta"] == META
    assert description["arrays"][0] == {
        "name": "layers.0.weight",
        "dtype": "bf16",
        "shape": [300, 7],
        "nbytes": 4200,
        "parameters": 2100,
    }
    assert [array["parameters"] for array in description["arrays"]] == [2100, 1, 0]
    assert (description["num_arrays"], description["parameters"], description["nbytes"]) == (3, 2101, 4204)
    assert (24 + description["header_bytes"]) % 64 == 0


def test_bytes_and_integers_are_no_parameters(tmp_path):
    path = tmp_path / "mixed.kdtr"
    save(
        path,
        {"text": np.zeros(9, np.uint8), "ids": np.zeros(3, np.int32), "w": np.zeros((2, 2), np.float16)},
        {},
    )
    assert describe(path)["parameters"] == 4


def test_format_table(path):
    lines = format_table(describe(path)).splitlines()
    assert lines == [
        str(path),
        "",
        "name             dtype  shape     bytes  parameters",
        "layers.0.weight  bf16   [300, 7]  4,200       2,100",
        "scale            f32    []            4           1",
        "none             i8     [0, 4]        0           0",
        "",
        f"3 arrays, 2,101 parameters, 4,204 bytes of arrays in a file of {path.stat().st_size:,}",
        "meta:",
        "  model: tiny",
        '  config: {"layers": 2}',
        f"  notes: {'x' * 77}... (500 characters)",
        '  "two\\nlines": "a\\nb"',
        "  flag: true",
    ]


def test_format_table_of_nothing(tmp_path):
    save(tmp_path / "empty.kdtr", {}, {})
    lines = format_table(describe(tmp_path / "empty.kdtr")).splitlines()
    assert lines[2:] == [
        "name  dtype  shape  bytes  parameters",
        "",
        "0 arrays, 0 parameters, 0 bytes of arrays in a file of 64",
        "meta:",
        "  (empty)",
    ]


def test_verify_reads_every_array(path):
    seen = []
    assert verify(path, lambda info: seen.append(info.name)) == 3
    assert seen == list(ARRAYS)


def test_damage_is_found_by_verify_alone(path):
    content = bytearray(path.read_bytes())
    content[-64 - 4200 // 2] ^= 1  # in the first array
    path.write_bytes(content)
    assert describe(path)["num_arrays"] == 3
    with pytest.raises(ChecksumError, match=r"layers\.0\.weight"):
        verify(path)


def test_other_files_are_refused(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 100)
    for function in (describe, verify):
        with pytest.raises(MagicError):
            function(tmp_path / "other")
