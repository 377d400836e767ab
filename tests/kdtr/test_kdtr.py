"""Reading KDTR files: each named error, what must be read, the mapping, and checksums at first use."""

import gc
import json
import os
import re
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from kdtr.cases import (
    CASES,
    DOCUMENT,
    GOOD,
    A,
    B,
    assert_one_line,
    entry,
    pack,
    tree,
    with_meta,
    with_shape,
)

from ddtree import kdtr
from ddtree.kdtr import KdtrError, KdtrFile, KdtrWriter


def case_ids():
    return [label.replace(" ", "-") for label, _, _ in CASES]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.kdtr"


@pytest.mark.parametrize(("label", "name", "content"), CASES, ids=case_ids())
def test_wrong_file_has_its_named_error(path, label, name, content):
    path.write_bytes(content)
    with pytest.raises(getattr(kdtr, name)) as raised, KdtrFile(path) as file:
        file.verify_all()
    assert type(raised.value).__name__ == name
    assert_one_line(raised.value, path)


def test_every_error_is_documented_and_tested():
    names = {error.__name__ for error in KdtrError.__subclasses__()}
    assert names == set(re.findall(r"`(\w+Error)`", DOCUMENT.read_text())) - {"KdtrError"}
    assert names == set(kdtr.__all__) & {name for name in dir(kdtr) if name.endswith("Error")} - {"KdtrError"}
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_kdtr*.py"))
    assert names == {name for _, name, _ in CASES} | set(re.findall(r"kdtr\.(\w+Error)", tests))


def test_good_file_reads(path):
    path.write_bytes(GOOD)
    with KdtrFile(str(path)) as file:
        assert list(file) == ["a", "b"] and len(file) == 2 and "a" in file and "c" not in file
        np.testing.assert_array_equal(file["a"], A)
        np.testing.assert_array_equal(file["b"], B)
        assert file.arrays["b"] == ("b", "bool", (3,), 64, 3, zlib.crc32(B.tobytes()))
        assert file.path == path and file.meta == {} and file.file_bytes == len(GOOD)
        with pytest.raises(kdtr.UnknownArrayError) as raised:
            file["c"]
    assert_one_line(raised.value, path)
    with pytest.raises(kdtr.ClosedError):
        file["a"]


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 14 + b"]" * 14,
        b'"[[[[[[[[[[[[[[[[[[[[["',
        rb'"\"[[[[[[[[[[[[[[[[[[[[\\"',
        b"-0",
        b"1.5e-400",
        b"1" * 64,
        rb'"\ud83d\ude00 \u0000"',
        '"é"'.encode(),
        b'[true, null, {"": {}}]',
    ],
)
def test_meta_may_hold_any_other_json(text):
    assert KdtrFile._from_bytes(with_meta(text)).meta == {"x": json.loads(text)}


@pytest.mark.parametrize("shape", [[0], [0, 5], [2**60, 0], [0, 2**63 - 1], [1] * 32, [1] * 31 + [0]])
def test_odd_shapes_read(shape):
    nbytes = int(0 not in shape)
    text = with_shape(shape, nbytes, bytes(nbytes)).replace(
        b'"crc32": 0', b'"crc32": %d' % zlib.crc32(bytes(nbytes))
    )
    header = text[24:].split(b"}}}")[0] + b"}}}"
    file = KdtrFile._from_bytes(pack(header, bytes(nbytes)))
    assert file["a"].shape == tuple(shape) and file["a"].size == nbytes


def test_keys_in_any_order_and_any_padding():
    header = {"arrays": {"a": dict(reversed(entry(A, 0).items()))}, "meta": {}}
    for spaces in (0, 64, 6400):
        file = KdtrFile._from_bytes(pack(json.dumps(header, indent=1).encode() + b" " * spaces, A.tobytes()))
        np.testing.assert_array_equal(file["a"], A)


@pytest.mark.parametrize("target", ["missing", "", "nul\0", "loop", "fifo"])
def test_what_cannot_be_opened(tmp_path, target):
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(kdtr.NotReadableError) as raised:
        KdtrFile(tmp_path / target)
    assert "expected" in str(raised.value) and str(raised.value).isprintable()


def test_big_endian_host_is_refused(path, monkeypatch):
    path.write_bytes(GOOD)
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(kdtr.ByteOrderError):
        KdtrFile(path)
    with pytest.raises(kdtr.ByteOrderError):
        KdtrWriter(path, {}, {})


def test_crc_is_checked_at_first_use_and_once(path, monkeypatch):
    path.write_bytes(pack(tree(crc32=0)))
    counted = []
    monkeypatch.setattr(
        kdtr.zlib, "crc32", lambda content, crc32=zlib.crc32: counted.append(1) or crc32(content)
    )
    with KdtrFile(path) as file:
        assert len(counted) == 1  # the header's
        assert [file["a"].sum() for _ in range(3)] == [A.sum()] * 3 and len(counted) == 2
        for _ in range(2):
            with pytest.raises(kdtr.ChecksumError):
                file["b"]
    with KdtrFile(path, verify=False) as file:
        np.testing.assert_array_equal(file["b"], B)
        with pytest.raises(kdtr.ChecksumError):
            file.verify_all()


def test_verify_all_reports_each_array(path):
    path.write_bytes(GOOD)
    seen = []
    with KdtrFile(path) as file:
        assert file.verify_all(seen.append) == 2
        assert seen == list(file.arrays.values())


def test_views_are_the_map_read_only_and_outlive_it(path):
    path.write_bytes(GOOD)
    with KdtrFile(path) as file:
        a, b = file["a"], file["b"]
        assert np.shares_memory(a, file["a"]) and b.ctypes.data - a.ctypes.data == 64
        assert a.ctypes.data % 64 == 0 and not a.flags.owndata
        with pytest.raises(ValueError, match="WRITEABLE"):
            a.setflags(write=True)
        if sys.platform == "linux":
            assert [line for line in mapped_at(a.ctypes.data) if line.endswith(str(path))]
    path.unlink()
    del file
    gc.collect()
    np.testing.assert_array_equal(a, A)
    np.testing.assert_array_equal(b, B)
    address = a.ctypes.data
    del a, b
    gc.collect()
    if sys.platform == "linux":
        assert not [line for line in mapped_at(address) if "file.kdtr" in line]


def mapped_at(address):
    """Lines of the process's map that hold an address."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    ranges = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in lines]
    return [line for line, (start, end) in zip(lines, ranges, strict=True) if start <= address < end]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_a_big_file_is_not_loaded(path):
    nbytes = 8 << 30
    header = pack(
        {
            "meta": {},
            "arrays": {"a": dict(dtype="f32", shape=[nbytes // 4], offset=0, nbytes=nbytes, crc32=0)},
        },
        b"",
    )
    with open(path, "wb") as file:
        file.write(header)
        file.truncate(len(header) + nbytes)

    def resident_bytes():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    with KdtrFile(path, verify=False) as file:
        assert file["a"].shape == (nbytes // 4,) and file["a"][-1] == 0
        assert resident_bytes() - before < 8 << 20
