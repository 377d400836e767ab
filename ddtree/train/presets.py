"""What is trained: shapes of a target and its drafter in Hugging Face's field names, and how long and how fast.

A preset is data: nothing here imports PyTorch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

END_OF_TEXT, MASK, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<|endoftext|>", "<|mask|>", "<|pad|>", "<|reserved|>")
BLOCK_SIZE, CONTEXT_WINDOW = 16, 256
TOKEN_IDS = {
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": END_OF_TEXT,
    "pad_token_id": PAD,
    "torch_dtype": "float16",
    "dtype": "float16",
}


@dataclass(frozen=True)
class TargetRun:
    """AdamW with a cosine; `batch` windows of `window` tokens a step; bias_step is the routing bias's update."""

    steps: int
    batch: int
    window: int
    lr: float
    warmup: int
    dropout: float
    weight_decay: float = 0.1
    bias_step: float = 1e-3


@dataclass(frozen=True)
class Segment:
    """Tokens of one kind in a bank's sequence: `real` ones, or the target's own at a temperature (0 is greedy)."""

    kind: str
    length: int
    temperature: float = 0.0


@dataclass(frozen=True)
class BankRun:
    """`tokens` in all, shared evenly among `plans`; every plan has the same length. `batch` sequences go at once,
    fewer where memory has no room for them: what is drawn then differs."""

    tokens: int
    plans: tuple[tuple[Segment, ...], ...]
    batch: int

    @property
    def length(self) -> int:
        return sum(segment.length for segment in self.plans[0])


@dataclass(frozen=True)
class DrafterRun:
    """Muon for matrices and AdamW for norms, with a cosine; `batch` sequences x `anchors` blocks a step.

    A block at distance k weighs exp(-(k - 1) / decay); a root inside a loop weighs loop_weight and is drawn that much
    more rarely. soft is the share of the target's own distribution in the labels of greedy tokens.
    """

    steps: int
    batch: int
    anchors: int
    lr: float
    warmup: int
    decay: float = 7.0
    loop_weight: float = 0.15
    soft: float = 0.3
    weight_decay: float = 0.01


@dataclass(frozen=True)
class BranchRun:
    """AdamW with a cosine over rows of a frozen drafter: `anchors` blocks of each sequence of a bank.

    A row at depth d is kept with probability exp(-(d - 1) / decay), a block in a loop is drawn loop_weight times as
    often. The trained scores are multiplied by `scale`: see docs/branch_log.md.
    """

    bank: BankRun
    anchors: int
    epochs: float
    batch: int
    warmup: int
    lr: float = 4e-3
    decay: float = 7.0
    loop_weight: float = 0.15
    scale: float = 0.6


@dataclass(frozen=True)
class Preset:
    """A tokenizer's vocabulary, the two models' shapes, the four runs, and how much evaluation there is."""

    name: str
    vocab_size: int
    target_shape: dict[str, int]
    drafter_shape: dict[str, Any]
    branch_rank: int
    target: TargetRun
    bank: BankRun
    drafter: DrafterRun
    branch: BranchRun
    eval_prompts: int
    eval_tokens: int

    def target_hf(self) -> dict[str, Any]:
        """config.json of the target, as DeepSeek-V3's."""
        fixed = {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "moe_layer_freq": 1,
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "rope_interleave": True,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0,
            "initializer_range": 0.02,
            "num_key_value_heads": self.target_shape["num_attention_heads"],
        }
        return {"vocab_size": self.vocab_size} | self.target_shape | fixed | TOKEN_IDS | {"use_cache": True}

    def drafter_hf(self, target_hf: dict[str, Any]) -> dict[str, Any]:
        """config.json of a DFlash drafter for a target with that config.json."""
        layers = self.drafter_shape["num_hidden_layers"]
        shape = {name: value for name, value in self.drafter_shape.items() if name != "target_layer_ids"}
        fixed = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "block_size": BLOCK_SIZE,
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": self.drafter_shape["target_layer_ids"],
                "context_window": CONTEXT_WINDOW,
            },
            "layer_types": ["full_attention"] * layers,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": layers,
            "tie_word_embeddings": False,
            "num_target_layers": target_hf["num_hidden_layers"],
        }
        same = {name: target_hf[name] for name in ("vocab_size", "hidden_size", "max_position_embeddings")}
        return same | shape | fixed | TOKEN_IDS

    def settings(self) -> dict[str, Any]:
        """All of it as plain JSON values: what a resumed run must agree with."""
        return dataclasses.asdict(self)


def real(length: int) -> Segment:
    """Tokens of the corpus."""
    return Segment("real", length)


def own(length: int, temperature: float = 0.0) -> Segment:
    """The target's own continuation."""
    return Segment("own", length, temperature)


def burst(length: int) -> Segment:
    """The target's own at temperature 1, drawn to vary what follows: no drafter learns to foretell them."""
    return Segment("burst", length, 1.0)


# A greedy continuation of a small model soon repeats itself, so a few sampled tokens break it off before the next.
PLANS = (
    (real(96), own(88), burst(16), own(88)),
    (real(48), burst(64), own(80), burst(16), own(80)),
    (real(96), own(192, 0.6)),
)
BRANCH_PLANS = (
    (real(128), own(96)),
    (real(64), burst(16), own(64), burst(16), own(64)),
    (real(96), own(128, 0.6)),
)
SMALL_TARGET = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "moe_intermediate_size": 96,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
}
SMALL_DRAFTER = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "target_layer_ids": [1, 4, 6],
}
SMALL = Preset(
    name="small",
    vocab_size=2048,
    target_shape=SMALL_TARGET,
    drafter_shape=SMALL_DRAFTER,
    branch_rank=128,
    target=TargetRun(steps=4600, batch=32, window=1024, lr=2.5e-3, warmup=200, dropout=0.1),
    bank=BankRun(tokens=30_000_000, plans=PLANS, batch=40_000),
    drafter=DrafterRun(steps=30_000, batch=128, anchors=32, lr=2e-3, warmup=200),
    branch=BranchRun(BankRun(3072 * 224, BRANCH_PLANS, 1024), anchors=32, epochs=4, batch=1024, warmup=50),
    eval_prompts=256,
    eval_tokens=64,
)
# 128 x 12 is as wide as 16 x 96. Eight of 128 are fewer active parameters than four of 16; shared experts make up half.
WIDE = dataclasses.replace(
    SMALL,
    name="wide",
    target_shape=SMALL_TARGET
    | {
        "moe_intermediate_size": 12,
        "n_routed_experts": 128,
        "n_shared_experts": 24,
        "num_experts_per_tok": 8,
    },
    drafter=dataclasses.replace(SMALL.drafter, steps=19_000),
)
TINY_PLANS = ((real(16), own(32)), (real(16), burst(8), own(24)), (real(16), own(32, 0.6)))
TINY = Preset(
    name="tiny",
    vocab_size=512,
    target_shape={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
    },
    drafter_shape={
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "target_layer_ids": [0, 1],
    },
    branch_rank=16,
    target=TargetRun(steps=120, batch=8, window=64, lr=5e-3, warmup=10, dropout=0.0),
    bank=BankRun(
        tokens=12_000,
        plans=TINY_PLANS,
        batch=128,
    ),
    drafter=DrafterRun(steps=120, batch=8, anchors=8, lr=4e-3, warmup=10),
    branch=BranchRun(BankRun(64 * 48, TINY_PLANS, 128), anchors=12, epochs=4, batch=64, warmup=10),
    eval_prompts=4,
    eval_tokens=24,
)
PRESETS = {preset.name: preset for preset in (TINY, SMALL, WIDE)}
