"""Writing KDTR files: exact bytes, round trips, wrong requests, and writes that are cut off."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kdtr.cases import DOCUMENT, GOOD, A, B, assert_one_line

from ddtree import kdtr
from ddtree.kdtr import NUMPY_DTYPES, KdtrFile, KdtrWriter, dtype_name, save


@pytest.fixture
def path(tmp_path):
    return tmp_path / "file.kdtr"


def test_bytes_are_those_of_the_document(path):
    save(path, {"a": np.array([[1, -2, 300]], np.int16), "b": np.array(True)}, {"note": "hi"})
    lines = re.findall(r"^[0-9a-f]{8}: ((?:[0-9a-f]{2} ?)+)", DOCUMENT.read_text(), re.MULTILINE)
    assert path.read_bytes() == bytes.fromhex("".join(lines)) and path.stat().st_size == 321


def arrays_of_any_dtype():
    """(dtype name, array) with any bits, 0 to 4 dimensions of 0 to 3, C-ordered or not."""

    def make(drawn):
        name, shape, seed, order = drawn
        dtype = NUMPY_DTYPES[name]
        count = int(np.prod(shape))
        raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
        array = (raw & 1 if name == "bool" else raw).view(dtype).reshape(shape)
        return {
            "C": array,
            "T": array.T,
            "reversed": array[..., ::-1] if shape else array,
            "F": np.asfortranarray(array),
        }[order]

    shapes = st.lists(st.integers(0, 3), max_size=4)
    orders = st.sampled_from(["C", "T", "reversed", "F"])
    return st.tuples(st.sampled_from(list(NUMPY_DTYPES)), shapes, st.integers(0, 99), orders).map(make)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[A-Za-z0-9_.-]{1,40}", fullmatch=True), arrays_of_any_dtype(), max_size=5
    ),
    st.dictionaries(st.text(), JSON_VALUES, max_size=3),
)
def test_round_trip(tmp_path_factory, arrays, meta):
    path = tmp_path_factory.getbasetemp() / "round-trip.kdtr"
    save(path, arrays, meta)
    with KdtrFile(path) as file:
        assert file.meta == meta and list(file) == list(arrays)
        for name, array in arrays.items():
            assert file[name].dtype == array.dtype and file[name].shape == array.shape
            assert file[name].tobytes() == array.tobytes()


def test_all_dtypes_have_names():
    assert {name: dtype_name(dtype) for name, dtype in NUMPY_DTYPES.items()} == {
        name: name for name in NUMPY_DTYPES
    }
    assert dtype_name(ml_dtypes.bfloat16) == "bf16" and len(NUMPY_DTYPES) == 14
    for dtype in (">f4", "c8", "U3", "O", "V4", ml_dtypes.float8_e5m2):
        with pytest.raises(kdtr.UnknownDtypeError):
            dtype_name(np.dtype(dtype))


SPECS = {"a": ("i16", (2, 3)), "b": ("bool", (3,))}
BAD_WRITES = [
    (kdtr.WriteOrderError, [("b", B)]),
    (kdtr.WriteOrderError, [("a", A), ("a", A)]),
    (kdtr.WriteOrderError, [("a", A), ("b", B), ("c", B)]),
    (kdtr.WriteDtypeError, [("a", A.astype(np.int32))]),
    (kdtr.WriteDtypeError, [("a", A.astype(">i2"))]),
    (kdtr.WriteShapeError, [("a", A.T)]),
    (kdtr.WriteShapeError, [("a", A[None])]),
    (kdtr.BoolValueError, [("a", A), ("b", np.array([0, 1, 2], np.uint8).view(bool))]),
    (kdtr.MissingArrayError, [("a", A)]),
    (kdtr.MissingArrayError, []),
]


def assert_old_file_alone(path):
    assert path.read_bytes() == GOOD and os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(("error", "writes"), BAD_WRITES)
def test_a_wrong_write_leaves_the_old_file(path, error, writes):
    path.write_bytes(GOOD)
    with pytest.raises(error) as raised, KdtrWriter(path, SPECS, {}) as writer:
        for name, array in writes:
            writer.write(name, array)
    assert_one_line(raised.value, path)
    assert_old_file_alone(path)


def test_writing_outside_the_block(path):
    writer = KdtrWriter(path, SPECS, {})
    with pytest.raises(kdtr.WriteOrderError):
        writer.write("a", A)
    assert not os.listdir(path.parent)


BAD_SPECS = [
    (kdtr.ArrayNameError, {"a b": ("u8", (1,))}, {}),
    (kdtr.ArrayNameError, {1: ("u8", (1,))}, {}),
    (kdtr.UnknownDtypeError, {"a": ("float32", (1,))}, {}),
    (kdtr.NegativeNumberError, {"a": ("u8", (-1,))}, {}),
    (kdtr.NumberError, {"a": ("u8", (1.0,))}, {}),
    (kdtr.SizeOverflowError, {"a": ("u8", (0, 2**64))}, {}),
    (kdtr.SizeOverflowError, {"a": ("f64", (2**62,))}, {}),
    (kdtr.MetaError, {}, {"x": float("nan")}),
    (kdtr.MetaError, {}, {"x": np.int64(1)}),
    (kdtr.MetaError, {}, {1: 2}),
    (kdtr.MetaError, {}, {"x": [({None: 1},)]}),
    (kdtr.MetaError, {}, {"x": "\ud800"}),
    (kdtr.MetaError, {}, [1]),
    (kdtr.NumberError, {}, {"x": 10**64}),
    (kdtr.MetaError, {}, {"x": 10**6000}),
    (kdtr.HeaderDepthError, {}, {"x": json.loads("[" * 15 + "]" * 15)}),
    (kdtr.HeaderDepthError, {}, {"x": json.loads("[" * 300 + "]" * 300)}),
    (kdtr.MetaError, {}, {"x": json.loads("[" * 900 + "]" * 900)}),
    (kdtr.HeaderLengthError, {}, {"x": "x" * (64 << 20)}),
]


@pytest.mark.parametrize(("error", "specs", "meta"), BAD_SPECS)
def test_what_no_reader_would_take_is_not_begun(path, error, specs, meta):
    with pytest.raises(error) as raised:
        KdtrWriter(path, specs, meta)
    assert_one_line(raised.value, path)


def test_meta_at_the_limits_is_written_and_read(path):
    meta = {"x": json.loads("[" * 14 + "]" * 14), "n": 10**64 - 1, "t": (1, 2), "é": '\0"\\'}
    save(path, {}, meta)
    assert KdtrFile(path).meta == meta | {"t": [1, 2]}


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_system_leaves_the_old_file(path, monkeypatch, call, error):
    path.write_bytes(GOOD)
    monkeypatch.setattr(os, call, lambda *_: (_ for _ in ()).throw(error))
    expected = kdtr.NotWritableError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        save(path, {"a": A}, {})
    assert_old_file_alone(path)


def test_the_file_is_durable_before_the_rename_and_the_rename_before_the_end(path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace

    def note_sync(descriptor):
        calls.append("sync directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "sync file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("rename") or replace(*paths))
    save(path, {"a": A}, {})
    assert calls == ["sync file", "rename", "sync directory"]


def test_a_killed_write_leaves_the_old_file(path):
    path.write_bytes(GOOD)
    script = f"""
import os, signal, numpy
from ddtree.kdtr import KdtrWriter
with KdtrWriter({str(path)!r}, {{"a": ("u8", (1 << 20,)), "b": ("u8", (1,))}}, {{}}) as writer:
    writer.write("a", numpy.zeros(1 << 20, numpy.uint8))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=DOCUMENT.parents[1])
    assert killed.returncode == -signal.SIGKILL and path.read_bytes() == GOOD
    assert len(list(path.parent.glob(".*.kdtr-tmp"))) == 1
    save(path, {"a": A}, {})
    np.testing.assert_array_equal(KdtrFile(path)["a"], A)


@pytest.mark.parametrize("target", [".", "no/such/directory/file.kdtr", "fifo", "nul\0"])
def test_what_cannot_be_written(tmp_path, target):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(kdtr.NotWritableError):
        save(tmp_path / target, {"a": A}, {})
    assert os.listdir(tmp_path) == ["fifo"]


def test_a_link_stays_a_link(tmp_path):
    link = tmp_path / "link.kdtr"
    link.symlink_to("file.kdtr")
    save(link, {"a": A}, {})
    assert link.is_symlink() and not (tmp_path / "file.kdtr").is_symlink()
    np.testing.assert_array_equal(KdtrFile(link)["a"], A)


def test_writing_over_a_mapped_file_leaves_its_views(path):
    save(path, {"a": A}, {})
    view = KdtrFile(path)["a"]
    save(path, {"a": A + 1}, {})
    np.testing.assert_array_equal(view, A)
    np.testing.assert_array_equal(KdtrFile(path)["a"], A + 1)


def test_writing_copies_no_contiguous_array(path):
    array = np.ones((4 << 20, 2), np.float32)
    tracemalloc.start()
    with KdtrWriter(path, {"a": ("f32", array.shape)}, {}) as writer:
        writer.write("a", array)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
    assert KdtrFile(path)["a"].sum() == array.size
