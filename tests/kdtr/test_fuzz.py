"""Twenty thousand seeded mutants of good files: each is read as what it says, or refused with a KdtrError.

More than half of them get past the header's checksum, which is made after the mutation.
"""

import collections
import json
import random
import tracemalloc
import zlib

import ml_dtypes
import numpy as np
import pytest
from kdtr.cases import assert_one_line
from kdtr.mutants import mutant, split

from ddtree.kdtr import NUMPY_DTYPES, KdtrError, KdtrFile, save

NUM_SEEDS, NUM_MUTANTS = 4, 5000


def good_files(folder):
    """Files of no, one, several, empty, scalar and many arrays, as bytes."""
    rng = np.random.default_rng(0)
    several = {
        "a": np.arange(6, dtype=np.int16).reshape(2, 3),
        "w.0": rng.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
        "mask": np.array([True, False, True]),
        "x": np.float32(1.5),
        "empty": np.empty((0, 3), np.float64),
        "q": rng.integers(0, 256, 64, np.uint8).view(ml_dtypes.float8_e4m3fn),
    }
    files = [
        ({}, {}),
        ({"a": several["a"]}, {"note": "hi"}),
        (several, {"x": [1, 2.5, {"deep": [[[None, True]]]}], "é": '"\\', "big": 10**30}),
        ({"e": several["empty"], "x": several["x"], "e2": several["empty"]}, {}),
        ({f"n{i}": rng.integers(0, 9, i, np.uint64) for i in range(12)}, {"n": "x" * 50}),
    ]
    for arrays, meta in files:
        save(folder / "file.kdtr", arrays, meta)
        yield (folder / "file.kdtr").read_bytes()


def assert_read_as_it_says(content, file):
    """What was read is what plain json and slicing find in the bytes, laid out by the rules of the format."""
    text, data = split(content)
    header = json.loads(text)
    assert set(header) == {"meta", "arrays"}
    assert file.meta == header["meta"] and list(file) == list(header["arrays"])
    end = 0
    for name, entry in header["arrays"].items():
        array = file[name]
        start = (end + 63) // 64 * 64
        raw = data[start : start + array.nbytes]
        sizes = dict(offset=start, nbytes=len(raw), crc32=zlib.crc32(raw))
        wanted = dict(dtype=entry["dtype"], shape=list(array.shape), **sizes)
        # As text, so that true and 1.0 are not taken for 1.
        assert json.dumps(entry, sort_keys=True) == json.dumps(wanted, sort_keys=True)
        assert array.dtype == NUMPY_DTYPES[entry["dtype"]] and array.tobytes() == raw
        assert not any(data[end:start])
        end = start + len(raw)
    assert end == len(data)


def open_all(content):
    """Open a file from memory and check all of it."""
    file = KdtrFile._from_bytes(content)
    file.verify_all()
    return file


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    files = list(good_files(tmp_path_factory.mktemp("fuzz")))
    for content in files:
        assert_read_as_it_says(content, open_all(content))
    return files


@pytest.fixture
def peak_of():
    """A function that runs another and returns its result, or its KdtrError, and the bytes it held at most."""

    def run(function, *arguments):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            result = function(*arguments)
        except KdtrError as error:
            result = error
        return result, tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    yield run
    tracemalloc.stop()


@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_mutants_are_read_as_they_say_or_refused(originals, peak_of, seed):
    rng = random.Random(seed)
    outcomes = collections.Counter()
    for number in range(NUM_MUTANTS):
        original = rng.choice(originals)
        content, has_old_checksums = mutant(original, rng)
        try:
            result, peak = peak_of(open_all, content)
            assert peak < (64 << 10) + 40 * len(content)
            if isinstance(result, KdtrError):
                assert content != original
                assert_one_line(result, "memory")
            else:
                assert content == original or not has_old_checksums
                assert_read_as_it_says(content, result)
        except Exception as error:
            raise AssertionError(f"mutant {number} of seed {seed}, {content[:600]!r}") from error
        outcomes[type(result).__name__] += 1
    # The mutants are no use if they all fail at one gate: most errors are met, and enough files are read.
    assert outcomes["KdtrFile"] > NUM_MUTANTS // 50
    assert len(outcomes) > 24, outcomes
