"""The C reader, written from docs/KDTR.md alone, agrees with the Python one on what is right and what is wrong."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from kdtr.cases import CASES, GOOD

from ddtree.kdtr import NUMPY_DTYPES, KdtrFile, save

SOURCE = Path(__file__).with_name("reader.c")
FLAGS = ["-std=c99", "-O2", "-Wall", "-Wextra", "-Werror", "-pedantic"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
# What its head says it does not look for.
NOT_LOOKED_FOR = {"HeaderEncodingError", "DuplicateKeyError"}
LOOSE_IN_META = {"1e999", "number of 5000 digits", "leading zero"}


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """Compile the reader, with the sanitizers where the compiler has them."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc, gcc or clang) on the path")
    program = tmp_path_factory.mktemp("reader") / "reader"
    command = [compiler, *FLAGS, "-o", str(program), str(SOURCE)]
    if subprocess.run([*command, *SANITIZERS], capture_output=True).returncode:
        subprocess.run(command, check=True)
    return program


def read(reader, path):
    """Run the reader: exit status, lines on stdout, text on stderr."""
    done = subprocess.run([reader, path], capture_output=True, text=True)
    return done.returncode, done.stdout.splitlines(), done.stderr


def assert_same(reader, path):
    """The C reader's lines are what the Python reader says."""
    status, lines, complaint = read(reader, path)
    assert (status, complaint) == (0, "")
    with KdtrFile(path) as file:
        file.verify_all()
        wanted = [
            f"{name} {info.dtype} [{','.join(map(str, info.shape))}] {info.nbytes} {info.crc32:08x} ok"
            for name, info in file.arrays.items()
        ]
    assert lines == wanted


def test_reader_is_short_and_of_the_c_library_alone():
    lines = SOURCE.read_text().splitlines()
    assert len(lines) < 150
    headers = {line.split("<")[1] for line in lines if line.startswith("#include")}
    assert headers == {"stdint.h>", "stdio.h>", "stdlib.h>", "string.h>"}


def test_every_dtype_and_shape(reader, tmp_path):
    random = np.random.default_rng(1)
    arrays = {"empty": np.empty((3, 0, 2), np.float32)}
    for name, dtype in NUMPY_DTYPES.items():
        for shape in [(), (1,), (31, 3), (0,), (2, 1, 33)]:
            raw = random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
            raw = raw & 1 if name == "bool" else raw
            arrays[f"{name}.{'x'.join(map(str, shape))}"] = raw.view(dtype).reshape(shape)
    arrays["big"] = random.standard_normal((300, 501))
    nested = {"x": [1, -2.5e-3, {"y": None}, '[[[\\"é'], "deep": [[[[[[[[[[[[[[]]]]]]]]]]]]]], "t": True}
    save(tmp_path / "file.kdtr", arrays, nested)
    assert_same(reader, tmp_path / "file.kdtr")


def test_no_arrays_and_good_file(reader, tmp_path):
    save(tmp_path / "empty.kdtr", {}, {})
    assert_same(reader, tmp_path / "empty.kdtr")
    (tmp_path / "good.kdtr").write_bytes(GOOD)
    assert_same(reader, tmp_path / "good.kdtr")


def test_wrong_files_are_refused(reader, tmp_path):
    accepted = []
    for label, error, content in CASES:
        path = tmp_path / "file.kdtr"
        path.write_bytes(content)
        status, _, complaint = read(reader, path)
        if status == 0:
            accepted.append((label, error))
        else:
            assert status == 1 and complaint.startswith("not a KDTR file: wanted "), label
    assert {label for label, error in accepted if error not in NOT_LOOKED_FOR} == LOOSE_IN_META
    assert read(reader, tmp_path / "missing")[0] == 1
