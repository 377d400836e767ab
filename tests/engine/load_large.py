"""Make a large target of cheap random bytes, open an engine on it, and say how fast and in how much host memory.

`python tests/engine/load_large.py --bytes 9.6e9` needs an NVIDIA GPU; `--backend numpy` shows what a backend takes that
keeps the weights on the host. `make_target` serves the tests as well.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from ddtree.bundle import open_bundle
from ddtree.checkpoint_names import BIAS, expected_tensors
from ddtree.config import ModelConfig
from ddtree.engine import Engine
from ddtree.kdtr import KdtrWriter
from ddtree.weights_pieces import convert

# 4.8 billion weights, a twelfth of them in the embedding, the head and the dense layer.
LARGE = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
MOST_ANONYMOUS = 1e9  # bytes, whatever the model's size
BLOCK = 1 << 22  # random numbers that are made; arrays are windows of them


def config_of(num_bytes: float) -> dict:
    """LARGE with as many MoE layers as come closest to that many bytes of bf16 (one at least)."""

    def size(layers: int) -> int:
        shapes = expected_tensors(ModelConfig.from_hf(LARGE | {"num_hidden_layers": layers}))
        return 2 * sum(int(np.prod(shape)) for shape in shapes.values())

    layers = 1 + max(1, round((num_bytes - size(1)) / (size(2) - size(1))))
    return LARGE | {"num_hidden_layers": layers}


def make_target(path: Path, hf: dict, dtype: str = "bf16", seed: int = 0) -> int:
    """Write a target of that config: norms of ones, f32 biases, else windows of one random block. Returns its bytes."""
    shapes = expected_tensors(ModelConfig.from_hf(hf))
    specs = {name: ("f32" if name.endswith(BIAS) else dtype, shape) for name, shape in shapes.items()}
    rng = np.random.default_rng(seed)
    block = rng.standard_normal(BLOCK, np.float32).astype(
        ml_dtypes.bfloat16 if dtype == "bf16" else np.float32
    )
    with KdtrWriter(path, specs, {"kind": "target", "config": hf, "rope_layout": "halves"}) as writer:
        for name, (kind, shape) in specs.items():
            count = int(np.prod(shape))
            if "norm" in name:
                values = np.ones(count, block.dtype)
            elif kind != dtype:
                values = rng.standard_normal(count, np.float32) * np.float32(0.1)
            else:
                scaled = (block.astype(np.float32) * np.float32(1.5 * shape[-1] ** -0.5)).astype(block.dtype)
                values = np.resize(np.roll(scaled, int(rng.integers(BLOCK))), count)
            writer.write(name, values.reshape(shape))
    return path.stat().st_size


def anonymous_bytes() -> int:
    """RssAnon: memory of this process that no file backs."""
    line = next(
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")
    )
    return int(line.split()[1]) << 10


class Peak:
    """The greatest RssAnon while the block runs, looked up every few milliseconds: `before`, `after`, in bytes."""

    def __enter__(self) -> Peak:
        self.before = self.peak = anonymous_bytes()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.done.wait(0.005):
            self.peak = max(self.peak, anonymous_bytes())

    def __exit__(self, *exception: object) -> None:
        self.done.set()
        self.thread.join()


def check_arrays(engine: Engine) -> list[str]:
    """Compare some arrays on the device with the file's, bit for bit; returns their names."""
    weights, file, ops = engine.model.weights, engine.bundle.target, engine.ops
    last = engine.config.num_hidden_layers - 1
    prefix, experts = f"model.layers.{last}", weights.layers[last].mlp.experts
    heads, nope = engine.config.num_attention_heads, engine.config.qk_nope_head_dim
    kv_b = file[f"{prefix}.self_attn.kv_b_proj.weight"].reshape(heads, -1, engine.config.kv_lora_rank)
    into = [f"model.layers.0.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]
    pairs = {
        "embedding": (weights.embedding, file["model.embed_tokens.weight"]),
        "head": (weights.head, file["lm_head.weight"]),
        "qkv_a": (weights.layers[0].qkv_a, np.concatenate([file[name] for name in into])),
        "w_kc": (weights.layers[last].w_kc, kv_b[:, :nope].transpose(0, 2, 1)),
        "w_vc": (weights.layers[last].w_vc, kv_b[:, nope:]),
    }
    for number in (0, 5, engine.config.n_routed_experts - 1):
        for part in ("gate", "up", "down"):
            name = f"{prefix}.mlp.experts.{number}.{part}_proj.weight"
            pairs[f"expert {number} {part}"] = (getattr(experts, part)[number], file[name])
    for name, (array, values) in pairs.items():
        found = array if ops.name == "numpy" else ops.read(array)
        wanted = np.empty(found.shape, found.dtype)
        convert(values, wanted)
        assert np.array_equal(found.view(np.uint8), wanted.view(np.uint8)), name
    return list(pairs)


def load(path: Path, backend: str, dtype: str) -> None:
    """Open an engine on the file, and print what it took."""
    bundle = open_bundle(path)
    with Peak() as memory:
        started = time.perf_counter()
        engine = Engine(bundle, backend=backend, dtype=dtype, max_budget=64)
        seconds = time.perf_counter() - started
    size = bundle.weight_bytes
    print(f"{size / 1e9:.2f} GB in {seconds:.1f} s: {size / 1e9 / seconds:.2f} GB/s, {backend}, {dtype}")
    print(f"RssAnon: {memory.before / 1e6:.0f} MB before, {memory.peak / 1e6:.0f} MB at its peak")
    print(f"equal to the file, bit for bit: {', '.join(check_arrays(engine))}")
    assert backend == "numpy" or memory.peak < MOST_ANONYMOUS, "the host holds too much of the weights"
    print(f"on the device: {sum(sum(area.values()) for area in engine.memory().values()):,} bytes")


def main() -> None:
    """Parse, make the file where it is missing, load it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=float, default=9.6e9, help="of bf16 weights, about")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument(
        "--file", type=Path, help="where the target lies or is made; default: a temporary file"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "target.kdtr"
        if not path.exists():
            started = time.perf_counter()
            size = make_target(path, config_of(options.bytes))
            print(f"made {size:,} bytes in {time.perf_counter() - started:.0f} s")
        load(path, options.backend, options.dtype)


if __name__ == "__main__":
    main()
