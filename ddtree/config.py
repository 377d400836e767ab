"""Frozen, checked settings of a target, a drafter and a decode call, under DeepSeek's field names.

Reads what `config.json` of DeepSeek-V2/V3, Kimi K2 and DFlash checkpoints say, in both spellings of the rotary
settings. It knows no arrays and no files; `ddtree.checkpoint` checks tensors against `ModelConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from ddtree.errors import ConfigError
from ddtree.fields import FieldReader
from ddtree.rope import RopeConfig

METHODS = ("ar", "chain", "tree")
MAX_BUDGET = 65_536  # nodes of a tree


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V3/Kimi-K2-style target: MLA attention, dense layers first, then MoE with a shared expert."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    n_group: int
    topk_group: int
    first_k_dense_replace: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    scoring_func: str
    topk_method: str
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_interleave: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @property
    def q_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        return self.q_head_dim**-0.5 * self.rope.softmax_mscale

    @property
    def shared_intermediate_size(self) -> int:
        return self.n_shared_experts * self.moe_intermediate_size

    @property
    def experts_a_row(self) -> int:
        """Experts that a row goes to: those it chooses and the shared ones."""
        return self.num_experts_per_tok + self.n_shared_experts

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a DeepSeek-V2/V3 or Kimi config; Kimi K2.5/K2.6 nest it under `text_config`."""
        if isinstance(hf, dict) and isinstance(hf.get("text_config"), dict):
            hf = hf["text_config"]
        read = FieldReader(hf, where)
        read.choice("hidden_act", ("silu",), "silu")
        if read.flag("attention_bias", False):
            raise ConfigError(f"{where}: attention_bias: expected false, found true")
        if read.integer("moe_layer_freq", 1) != 1:
            raise ConfigError(f"{where}: moe_layer_freq: expected 1, found {hf['moe_layer_freq']}")
        layers = read.integer("num_hidden_layers")
        method = read.choice("topk_method", ("noaux_tc", "greedy", "group_limited_greedy"), "noaux_tc")
        config = cls(
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=read.integer("num_attention_heads"),
            q_lora_rank=read.integer("q_lora_rank", None),
            kv_lora_rank=read.integer("kv_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=read.integer("qk_rope_head_dim", minimum=2),
            v_head_dim=read.integer("v_head_dim"),
            moe_intermediate_size=read.integer("moe_intermediate_size"),
            n_routed_experts=read.integer("n_routed_experts"),
            n_shared_experts=read.integer("n_shared_experts", 0, minimum=0),
            num_experts_per_tok=read.integer("num_experts_per_tok"),
            n_group=read.integer("n_group", 1),
            topk_group=read.integer("topk_group", 1),
            first_k_dense_replace=read.integer("first_k_dense_replace", 0, minimum=0),
            norm_topk_prob=read.flag("norm_topk_prob", method == "noaux_tc"),
            routed_scaling_factor=read.number("routed_scaling_factor", 1.0),
            scoring_func=read.choice(
                "scoring_func", ("sigmoid", "softmax"), "sigmoid" if method == "noaux_tc" else "softmax"
            ),
            topk_method=method,
            rms_norm_eps=read.number("rms_norm_eps"),
            max_position_embeddings=read.integer("max_position_embeddings"),
            tie_word_embeddings=read.flag("tie_word_embeddings", False),
            rope_interleave=read.flag("rope_interleave", True),
            rope=RopeConfig.from_hf(hf, where),
            eos_token_ids=read.integers("eos_token_id", ()),
        )
        config._check(where)
        return config

    def _check(self, where: str) -> None:
        rules = {
            "qk_rope_head_dim must be even": self.qk_rope_head_dim % 2 == 0,
            "n_group must divide n_routed_experts": self.n_routed_experts % self.n_group == 0,
            "topk_group must not exceed n_group": self.topk_group <= self.n_group,
            "num_experts_per_tok must fit into the chosen groups": self.num_experts_per_tok
            <= self.topk_group * (self.n_routed_experts // self.n_group),
            "first_k_dense_replace must not exceed num_hidden_layers": self.first_k_dense_replace
            <= self.num_hidden_layers,
            "groups of noaux_tc need two experts each": self.topk_method != "noaux_tc"
            or self.n_group == 1
            or self.n_routed_experts // self.n_group >= 2,
            "noaux_tc needs sigmoid scores, the greedy methods softmax": (self.topk_method == "noaux_tc")
            == (self.scoring_func == "sigmoid"),
            "eos_token_id must lie in the vocabulary": all(e < self.vocab_size for e in self.eos_token_ids),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ConfigError(f"{where}: {rule}")


@dataclass(frozen=True)
class BranchConfig:
    """A drafter's branch head: three maps of `rank` rows that score a depth's `candidates` best below each parent."""

    rank: int
    candidates: int


@dataclass(frozen=True)
class DrafterConfig:
    """A DFlash block-diffusion drafter (arXiv 2602.06036): Qwen3 layers over target features and a block.

    `branch` is None without a branch head.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    context_window: int | None
    rope: RopeConfig
    branch: BranchConfig | None = None

    @property
    def horizon(self) -> int:
        """The deepest node the drafter can propose."""
        return self.block_size - 1

    @property
    def candidates(self) -> int:
        """Candidates of each depth that the branch head scores; 0 without one."""
        return min(self.branch.candidates, self.vocab_size) if self.branch else 0

    @classmethod
    def from_hf(cls, hf: dict[str, Any], where: str = "drafter config.json") -> DrafterConfig:
        """Read a DFlash config; `dflash_config` holds mask id, target layers, context window and branch head."""
        read = FieldReader(hf, where)
        dflash = FieldReader(read.get("dflash_config"), f"{where}: dflash_config")
        read.choice("hidden_act", ("silu",), "silu")
        for name in ("attention_bias", "use_sliding_window"):
            if read.flag(name, False):
                raise ConfigError(f"{where}: {name}: expected false, found true")
        if set(read.names("layer_types", ())) - {"full_attention"}:
            raise ConfigError(
                f"{where}: layer_types: expected full_attention only, found {hf['layer_types']}"
            )
        config = cls(
            hidden_size=read.integer("hidden_size"),
            intermediate_size=read.integer("intermediate_size"),
            num_hidden_layers=read.integer("num_hidden_layers"),
            num_attention_heads=read.integer("num_attention_heads"),
            num_key_value_heads=read.integer("num_key_value_heads"),
            head_dim=read.integer("head_dim", minimum=2),
            rms_norm_eps=read.number("rms_norm_eps"),
            vocab_size=read.integer("vocab_size"),
            block_size=read.integer("block_size", minimum=2),
            mask_token_id=dflash.integer("mask_token_id", minimum=0),
            target_layer_ids=dflash.integers("target_layer_ids"),
            context_window=dflash.integer("context_window", None),
            rope=RopeConfig.from_hf(hf, where, with_mscale=False),
            branch=_branch(dflash),
        )
        if config.num_attention_heads % config.num_key_value_heads or config.head_dim % 2:
            raise ConfigError(f"{where}: num_key_value_heads must divide the heads and head_dim must be even")
        if not config.target_layer_ids or len(set(config.target_layer_ids)) < len(config.target_layer_ids):
            raise ConfigError(
                f"{where}: dflash_config: target_layer_ids: expected distinct layers, at least one"
            )
        return config

    def check_target(self, target: ModelConfig) -> None:
        """Raise ConfigError unless this drafter fits `target`: same width and vocabulary, layers that exist."""
        wanted = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise ConfigError(
                    f"drafter: {name}: the target has {value}, the drafter {getattr(self, name)}"
                )
        if max(self.target_layer_ids) >= target.num_hidden_layers or self.mask_token_id >= target.vocab_size:
            raise ConfigError("drafter: target_layer_ids or mask_token_id lie outside the target")


def _branch(dflash: FieldReader) -> BranchConfig | None:
    """The branch head that `dflash_config.branch` describes, or None."""
    described = dflash.get("branch", None)
    if described is None:
        return None
    read = FieldReader(described, f"{dflash.where}: branch")
    return BranchConfig(read.integer("rank"), read.integer("candidates"))


@dataclass(frozen=True)
class SamplingConfig:
    """How a token is chosen from logits: temperature 0 is greedy; top_k 0 and top_p 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, Real, lambda v: 0 <= v < math.inf, "a finite number >= 0")
        _check("top_k", self.top_k, Integral, lambda v: v >= 0, "an integer >= 0 (0 is off)")
        _check("top_p", self.top_p, Real, lambda v: 0 < v <= 1, "a number above 0 and at most 1 (1 is off)")
        _check("seed", self.seed, Integral, lambda v: 0 <= v < 2**64, "an integer from 0 to 2^64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class DecodeConfig:
    """One decode call: method, most nodes of a tree (root not counted), tokens wanted, and how to choose them."""

    method: str = "tree"
    budget: int = 32
    max_new_tokens: int = 64
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop_token_ids: tuple[int, ...] = ()
    shape: str = "best_first"

    def __post_init__(self) -> None:
        _check("method", self.method, str, METHODS.__contains__, f"one of {', '.join(METHODS)}")
        wanted = f"an integer from 0 to {MAX_BUDGET}"
        _check("budget", self.budget, Integral, lambda v: 0 <= v <= MAX_BUDGET, wanted)
        _check("max_new_tokens", self.max_new_tokens, Integral, lambda v: v >= 1, "an integer >= 1")


def _check(name: str, value: Any, kind: type, holds: Callable[[Any], bool], wanted: str) -> None:
    """Raise ConfigError unless `value` is of `kind` (bool is no number) and `holds`."""
    if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
        raise ConfigError(f"{name}: expected {wanted}, found {value!r}")
