"""KDTR arrays -> the typed layer weights that the model and the drafter compute with.

Names are those of DeepSeek's checkpoints; rotary rows are already in halves order (`ddtree.checkpoint` permutes them).
A matrix that is stored quantised and that a backend multiplies so is an Int4Matrix or Fp8Matrix. Dequantised to plain
arrays when loaded are kv_b, whose parts w_kc and w_vc are another matrix each, the router, and what a backend has no
kernel for: on the GPU, INT4 outside the routed experts' stack.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddtree.checkpoint_names import BRANCH_MAPS
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.kdtr import KdtrFile
from ddtree.quantised import BLOCK, GROUP
from ddtree.rope import rotary_tables
from ddtree.weights_reader import WeightReader

PROJECTIONS = ("gate", "up", "down")
SPLITS_AT = {"plain": 1, "fp8": BLOCK, "int4": GROUP}  # rows and columns at which a matrix may be cut


@dataclass(frozen=True)
class MlpWeights:
    """SwiGLU projections: gate and up [I, H], down [H, I]; with a leading [E] for routed experts."""

    gate: Any
    up: Any
    down: Any


@dataclass(frozen=True)
class MoeWeights:
    """router [E, H], bias f32[E] or None, and the experts, stacked: E routed ones, then the shared ones.

    Shared experts that are stored in another format than the routed ones, or whose parts share scales, are no part of
    the stack but one MLP, `shared`, as wide as all of them.
    """

    router: Any
    bias: Any | None
    experts: MlpWeights
    shared: MlpWeights | None = None


@dataclass(frozen=True)
class LayerWeights:
    """One target layer. w_kc [H, R, nope], w_vc [H, v, R].

    qkv_a [Q + R + P, H] has q_a's rows and behind them kv_a's: both take the same input. So has qkv_a_norm [Q + R] the
    two norms. Without q_lora_rank Q is 0.
    """

    input_norm: Any
    qkv_a: Any
    qkv_a_norm: Any
    q_b: Any
    w_kc: Any
    w_vc: Any
    o: Any
    post_norm: Any
    mlp: MlpWeights | MoeWeights


@dataclass(frozen=True)
class TargetWeights:
    """The target: embedding and head [V, H], layers, final norm, rotary tables [positions, rope / 2]."""

    embedding: Any
    layers: list[LayerWeights]
    norm: Any
    head: Any
    cos: Any
    sin: Any


@dataclass(frozen=True)
class DrafterLayerWeights:
    """One Qwen3 layer: q [Hq D, H], k and v [G D, H], per-head norms [D], o [H, Hq D], SwiGLU."""

    input_norm: Any
    q: Any
    k: Any
    v: Any
    q_norm: Any
    k_norm: Any
    o: Any
    post_norm: Any
    mlp: MlpWeights


@dataclass(frozen=True)
class BranchWeights:
    """A branch head: maps parent, gate, child [R, H], and f32 [V, R] in every mode what a token is worth to it.

    `parent_table` = embedding @ parent.T and `child_table` = head @ child.T; `Drafter.fill_branch_tables` makes them.
    """

    parent: Any
    gate: Any
    child: Any
    parent_table: Any
    child_table: Any


@dataclass(frozen=True)
class DrafterWeights:
    """The drafter: fc [H, features x H], its norms, layers, rotary tables. Embedding and head are the target's.

    `branch` is None without a branch head.
    """

    fc: Any
    hidden_norm: Any
    layers: list[DrafterLayerWeights]
    norm: Any
    cos: Any
    sin: Any
    branch: BranchWeights | None = None


def load_target(
    file: KdtrFile,
    config: ModelConfig,
    num_positions: int,
    ops: Any,
    reader: Callable[..., WeightReader] = WeightReader,
) -> TargetWeights:
    """Read a target's arrays into `ops` memory, with rotary tables for `num_positions` positions.

    `reader` makes what the arrays come through, of (file, ops, upload): weights need not come from a file. Raises
    KdtrError for an array that is not what its checksum says, DeviceMemoryError where there is no room.
    """
    tables = [
        ops.put_exact(table) for table in rotary_tables(config.rope, config.qk_rope_head_dim, num_positions)
    ]
    with ops.uploads() as upload:
        read = reader(file, ops, upload)
        embedding = read.matrix("model.embed_tokens.weight")
        layers = [_target_layer(read, config, layer) for layer in range(config.num_hidden_layers)]
        head = embedding if config.tie_word_embeddings else read.matrix("lm_head.weight")
        return TargetWeights(embedding, layers, read.exact("model.norm.weight"), head, *tables)


def _target_layer(read: WeightReader, config: ModelConfig, layer: int) -> LayerWeights:
    prefix = f"model.layers.{layer}"
    attention, has_q_lora = f"{prefix}.self_attn", config.q_lora_rank is not None
    w_kc, w_vc = _absorbed(read, config, f"{attention}.kv_b_proj.weight")
    into = ("q_a_proj", "kv_a_proj_with_mqa") if has_q_lora else ("kv_a_proj_with_mqa",)
    norms = ("q_a_layernorm", "kv_a_layernorm") if has_q_lora else ("kv_a_layernorm",)
    return LayerWeights(
        input_norm=read.exact(f"{prefix}.input_layernorm.weight"),
        qkv_a=read.matrix(*(f"{attention}.{name}.weight" for name in into)),
        qkv_a_norm=read.exact(*(f"{attention}.{name}.weight" for name in norms)),
        q_b=read.matrix(f"{attention}.{'q_b_proj' if has_q_lora else 'q_proj'}.weight"),
        w_kc=w_kc,
        w_vc=w_vc,
        o=read.matrix(f"{attention}.o_proj.weight"),
        post_norm=read.exact(f"{prefix}.post_attention_layernorm.weight"),
        mlp=_moe(read, config, f"{prefix}.mlp") if config.is_moe(layer) else _mlp(read, f"{prefix}.mlp"),
    )


def _absorbed(read: WeightReader, config: ModelConfig, name: str) -> tuple[Any, Any]:
    """w_kc [H, R, nope] and w_vc [H, v, R], the two parts of kv_b [H x (nope + v), R]."""
    heads, nope, rank = config.num_attention_heads, config.qk_nope_head_dim, config.kv_lora_rank

    def by_head(kv_b: np.ndarray) -> np.ndarray:
        return kv_b.reshape(heads, nope + config.v_head_dim, rank)

    w_kc = read.ops.empty_matrix((heads, rank, nope))
    w_vc = read.ops.empty_matrix((heads, config.v_head_dim, rank))
    read.fill(w_kc, name, part=lambda kv_b: by_head(kv_b)[:, :nope].transpose(0, 2, 1))
    read.fill(w_vc, name, part=lambda kv_b: by_head(kv_b)[:, nope:])
    return w_kc, w_vc


def _mlp(read: WeightReader, prefix: str) -> MlpWeights:
    return MlpWeights(*(read.matrix(f"{prefix}.{name}_proj.weight") for name in PROJECTIONS))


def _moe(read: WeightReader, config: ModelConfig, prefix: str) -> MoeWeights:
    routed, apart = f"{prefix}.experts", f"{prefix}.shared_experts"
    stored = read.format(f"{routed}.0.gate_proj.weight")
    stacked = 0  # shared experts behind the routed ones
    if config.n_shared_experts and all(
        read.format(f"{apart}.{name}_proj.weight") == stored for name in PROJECTIONS
    ):
        whole = config.n_shared_experts == 1 or config.moe_intermediate_size % SPLITS_AT[stored] == 0
        stacked = config.n_shared_experts if whole else 0
    has_bias = config.topk_method == "noaux_tc"
    return MoeWeights(
        router=read.exact(f"{prefix}.gate.weight"),
        bias=read.exact(f"{prefix}.gate.e_score_correction_bias") if has_bias else None,
        experts=MlpWeights(*(_stack(read, config, prefix, name, stacked) for name in PROJECTIONS)),
        shared=_mlp(read, apart) if config.n_shared_experts and not stacked else None,
    )


def _stack(read: WeightReader, config: ModelConfig, prefix: str, name: str, shared: int) -> Any:
    """One projection of all routed experts and, behind them, of that many shared ones: [E + S, N, K]."""
    routed, names = config.n_routed_experts, f"{prefix}.experts.{{}}.{name}_proj.weight"
    stored, shape = read.format(names.format(0)), read.shape(names.format(0))
    size = (routed + shared, *shape)
    if stored == "plain":
        out, width = read.ops.empty_matrix(size), math.prod(shape)
        put = functools.partial(read.fill, out)
    else:
        out, width = read.ops.empty_quantised(size, stored), 1
        put = functools.partial(read.place, out)
    for expert in range(routed):
        put(names.format(expert), expert * width)
    if shared:  # one MLP as wide as all of them: gate and up by rows, down by columns
        of_expert = _down_by_expert(shared) if name == "down" else None
        put(f"{prefix}.shared_experts.{name}_proj.weight", routed * width, of_expert)
    return out


def _down_by_expert(shared: int) -> Callable[[np.ndarray], np.ndarray]:
    """What turns the shared down projection [H, S x I] into [S, H, I]."""
    return lambda down: down.reshape(len(down), shared, -1).transpose(1, 0, 2)


def load_drafter(
    file: KdtrFile,
    config: DrafterConfig,
    num_positions: int,
    ops: Any,
    reader: Callable[..., WeightReader] = WeightReader,
) -> DrafterWeights:
    """Read a drafter's arrays into `ops` memory, with rotary tables for `num_positions` positions; raises likewise."""
    tables = [ops.put_exact(table) for table in rotary_tables(config.rope, config.head_dim, num_positions)]
    with ops.uploads() as upload:
        read = reader(file, ops, upload)
        layers = [_drafter_layer(read, index) for index in range(config.num_hidden_layers)]
        norms = read.exact("hidden_norm.weight"), read.exact("norm.weight")
        branch = _branch(read, config) if config.branch else None
        return DrafterWeights(read.matrix("fc.weight"), norms[0], layers, norms[1], *tables, branch)


def _branch(read: WeightReader, config: DrafterConfig) -> BranchWeights:
    """The branch head's maps, and room for its tables."""
    shape = config.vocab_size, config.branch.rank
    maps = (read.matrix(f"branch.{name}.weight") for name in BRANCH_MAPS)
    return BranchWeights(*maps, read.ops.empty_f32(shape), read.ops.empty_f32(shape))


def _drafter_layer(read: WeightReader, index: int) -> DrafterLayerWeights:
    prefix, attention = f"layers.{index}", f"layers.{index}.self_attn"
    return DrafterLayerWeights(
        read.exact(f"{prefix}.input_layernorm.weight"),
        *(read.matrix(f"{attention}.{name}_proj.weight") for name in ("q", "k", "v")),
        read.exact(f"{attention}.q_norm.weight"),
        read.exact(f"{attention}.k_norm.weight"),
        read.matrix(f"{attention}.o_proj.weight"),
        read.exact(f"{prefix}.post_attention_layernorm.weight"),
        _mlp(read, f"{prefix}.mlp"),
    )
