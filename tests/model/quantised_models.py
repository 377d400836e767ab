"""Bundles of the tiny target, quantised, and of the plain weights that the quantised ones stand for; made once each."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
from checkpoint.makers import write_hf
from checkpoint.quantisers import linear, quantised, routed, tiny_source, with_config
from fixtures.seeded import checkpoint_dir

from ddtree.bundle import open_bundle
from ddtree.checkpoint import convert_to_kdtr
from ddtree.quantised import Fp8Matrix, Int4Matrix, dequantised
from ddtree.weights_pieces import stored_bits

KINDS = {"int4": ("int4", routed), "fp8": ("fp8", linear), "int4 everywhere": ("int4", linear)}


@functools.cache
def made(kind, name="dsv3"):
    """config.json and tensors of the tiny target, quantised; fp8 scales are bf16's, so that f32 holds every value."""
    hf, tensors = tiny_source(name)
    scheme, chosen = KINDS[kind]
    names = {
        n for n, weight in tensors.items() if chosen(n) and (scheme == "fp8" or weight.shape[1] % 32 == 0)
    }
    found = quantised(tensors, scheme, names.__contains__)
    for n in found:
        if n.endswith("_scale_inv"):
            found[n] = found[n].astype(ml_dtypes.bfloat16).astype(np.float32)
    return with_config(hf, scheme), found, names


@functools.cache
def quantised_tiny(kind, name="dsv3"):
    """The bundle, with the tiny drafter."""
    hf, tensors, _ = made(kind, name)
    return _bundle(hf, tensors, name)


@functools.cache
def dequantised_tiny(kind, name="dsv3"):
    """The same model with the values of the quantised weights in plain f32."""
    hf, tensors, names = made(kind, name)
    plain = {n: t for n, t in tensors.items() if n.partition(".weight")[0] + ".weight" not in names}
    for n in names:
        if f"{n}_packed" in tensors:
            matrix = Int4Matrix(tensors[f"{n}_packed"], stored_bits(tensors[f"{n}_scale"]))
        else:
            matrix = Fp8Matrix(stored_bits(tensors[n]), tensors[f"{n}_scale_inv"])
        plain[n] = dequantised(matrix).astype(np.float32)
        np.testing.assert_array_equal(plain[n], dequantised(matrix))
    return _bundle({key: value for key, value in hf.items() if key != "quantization_config"}, plain, name)


def _bundle(hf, tensors, name):
    directory = Path(tempfile.mkdtemp(prefix="ddtree-tests-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    write_hf(directory / "source", hf, tensors)
    convert_to_kdtr(directory / "source", directory / "target.kdtr", progress=False)
    convert_to_kdtr(checkpoint_dir(name, "draft"), directory / "drafter.kdtr", progress=False)
    return open_bundle(directory)
