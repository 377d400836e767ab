"""Converting a checkpoint that is larger than the memory it may take, there and back, in a process of its own."""

import filecmp
import json
import shutil
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from checkpoint.makers import TARGET

from ddtree.checkpoint_names import expected_tensors
from ddtree.config import ModelConfig
from ddtree.safetensors_io import SafetensorsWriter

HF = TARGET | {
    "vocab_size": 65536,
    "hidden_size": 1024,
    "intermediate_size": 6144,
    "num_hidden_layers": 9,
    "first_k_dense_replace": 9,
    "num_attention_heads": 8,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "tie_word_embeddings": True,
}
LARGEST = 65536 * 1024 * 2
LIMIT = 2 * LARGEST + (200 << 20)
SCRIPT = """
import contextlib, sys
from ddtree.checkpoint import convert_to_hf, convert_to_kdtr
source, kdtr, back = sys.argv[1:]
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
convert_to_kdtr(source, kdtr, progress=False)
print(peak())
with contextlib.suppress(OSError):  # or the first peak counts for both
    open("/proc/self/clear_refs", "w").write("5")
convert_to_hf(kdtr, back, progress=False)
print(peak())
"""


@pytest.fixture
def big(tmp_path):
    """About 490 MB of bf16 in one file; removed after the test, for pytest keeps tmp_path."""
    source = tmp_path / "hf"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(HF))
    shapes = expected_tensors(ModelConfig.from_hf(HF))
    values = np.arange(LARGEST // 2, dtype=np.uint32).astype(np.uint16).view(ml_dtypes.bfloat16)
    with SafetensorsWriter(
        source / "model.safetensors", {n: ("BF16", s) for n, s in shapes.items()}
    ) as writer:
        for shift, (name, shape) in enumerate(shapes.items()):
            size = int(np.prod(shape))
            shift = shift if size + shift <= len(values) else 0
            writer.write(name, values[shift : shift + size].reshape(shape))
    yield source
    shutil.rmtree(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc/self/status")
def test_peak_memory_stays_below_twice_the_largest_tensor_and_200_mb(big, root):
    out = [str(big), str(big.parent / "m.kdtr"), str(big.parent / "back")]
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, *out], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    peaks = [int(line) for line in run.stdout.split()]
    print(f"peaks {[round(peak / 2**20) for peak in peaks]} MiB, limit {LIMIT >> 20}")
    assert (big / "model.safetensors").stat().st_size > 3.5 * LARGEST  # or holding it all would pass
    assert max(peaks) < LIMIT
    assert filecmp.cmp(big / "model.safetensors", big.parent / "back" / "model.safetensors", shallow=False)
