"""The streaming writer against the safetensors library: the same bytes, read back by it."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save

from ddtree.errors import CheckpointError
from ddtree.safetensors_io import SafetensorsWriter, encode_header, read_header, read_tensor, strict_json

TENSORS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3),
    "ä": np.zeros((0, 4), np.float32),
    "a": np.array(1.5, ml_dtypes.bfloat16),
    "c": np.full((3,), -0.0, np.float16),
}
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
SPECS = {name: (DTYPES[str(tensor.dtype)], tensor.shape) for name, tensor in TENSORS.items()}


def write(path, metadata=None):
    with SafetensorsWriter(path, SPECS, metadata) as writer:
        for name, tensor in TENSORS.items():
            writer.write(name, tensor)


def test_exact_header():
    header = b'{"a":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]}}       '
    assert encode_header({"a": ("F16", (2, 3))}) == b"\x40\0\0\0\0\0\0\0" + header


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_library_reads_what_is_written(tmp_path, metadata):
    write(tmp_path / "x.safetensors", metadata)
    found = load_file(tmp_path / "x.safetensors")
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].tobytes() == tensor.tobytes()


def test_bytes_are_those_of_the_library(tmp_path):
    ordered = {"a": TENSORS["b"], "b": TENSORS["c"]}
    with SafetensorsWriter(tmp_path / "x", {"a": SPECS["b"], "b": SPECS["c"]}, {"format": "pt"}) as writer:
        for name, tensor in ordered.items():
            writer.write(name, tensor)
    assert (tmp_path / "x").read_bytes() == save(ordered, {"format": "pt"})


def test_reading_gives_order_metadata_and_tensors(tmp_path):
    write(tmp_path / "x.safetensors", {"format": "pt"})
    tensors, metadata = read_header(tmp_path / "x.safetensors")
    assert metadata == {"format": "pt"} and set(tensors) == set(TENSORS)
    starts = [info.start for info in tensors.values()]
    assert starts == sorted(starts)
    for name, info in tensors.items():
        found = read_tensor(info)
        assert found.dtype == TENSORS[name].dtype and found.shape == TENSORS[name].shape
        assert found.tobytes() == TENSORS[name].tobytes()


def test_a_file_that_shrinks_after_it_was_opened(tmp_path):
    write(tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")[0]["c"]
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="became shorter"):
        read_tensor(info)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[NaN]", b"-Infinity", b'{"a":1,"b":2,"a":1}', b"[" * 100000]
)
def test_strict_json_refuses(text):
    with pytest.raises(CheckpointError, match=r"^here: expected JSON: .+") as caught:
        strict_json(text, "here")
    assert "\n" not in str(caught.value)
