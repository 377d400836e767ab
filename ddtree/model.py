"""The target's forward pass: one body for prefill, decode and verify, with no branch on which it is.

It calls operations of a backend (`ddtree.ops`) on buffers allocated once, and knows no arithmetic of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from ddtree.batch import ForwardBatch
from ddtree.cache import LatentCache
from ddtree.config import ModelConfig
from ddtree.errors import CapacityError
from ddtree.weights import LayerWeights, MlpWeights, MoeWeights, TargetWeights

LORA_NORM_EPS = 1e-6  # q_a and kv_a norms use it whatever rms_norm_eps says

Observer = Callable[[str, int, Any], None]


@dataclass
class ModelBuffers:
    """Scratch for up to `max_rows` rows, every array [max_rows, ...]; gates are [n_routed, rows] in their memory."""

    residual: Any
    normed: Any
    qkv: Any
    q_lora: Any
    query: Any
    q_nope: Any
    q_rope: Any
    q_latent: Any
    o_latent: Any
    heads: Any
    branch: Any
    dense_gate: Any
    dense_up: Any
    router: Any
    gates: Any
    pairs: Any
    shared_gate: Any
    shared_up: Any
    shared: Any
    logits: Any
    features: Any

    @classmethod
    def allocate(
        cls, config: ModelConfig, max_rows: int, feature_layers: tuple[int, ...], shared_apart: bool, ops: Any
    ) -> ModelBuffers:
        """Allocate for at most `max_rows` rows a call; features [max_rows, len(feature_layers) x hidden].

        `shared_apart` says whether shared experts run beside the routed ones, as an MLP of their own.
        """
        c, heads = config, config.num_attention_heads
        shared = c.shared_intermediate_size * shared_apart
        widths = {
            "residual": (c.hidden_size,),
            "normed": (c.hidden_size,),
            "qkv": ((c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_rope_head_dim,),
            "q_lora": (c.q_lora_rank or 0,),
            "query": (heads, c.q_head_dim),
            "q_nope": (heads, c.qk_nope_head_dim),
            "q_rope": (heads, c.qk_rope_head_dim),
            "q_latent": (heads, c.kv_lora_rank),
            "o_latent": (heads, c.kv_lora_rank),
            "heads": (heads, c.v_head_dim),
            "branch": (c.hidden_size,),
            "dense_gate": (c.intermediate_size,),
            "dense_up": (c.intermediate_size,),
            "router": (c.n_routed_experts,),
            "gates": (c.n_routed_experts,),
            "pairs": (c.experts_a_row, c.moe_intermediate_size),
            "shared_gate": (shared,),
            "shared_up": (shared,),
            "shared": (c.hidden_size * shared_apart,),
            "logits": (c.vocab_size,),
            "features": (len(feature_layers) * c.hidden_size,),
        }
        return cls(**{name: ops.empty((max_rows, *width)) for name, width in widths.items()})

    @property
    def max_rows(self) -> int:
        return self.residual.shape[0]

    def rows(self, count: int) -> ModelBuffers:
        """Views of the first `count` rows; CapacityError when there are not so many."""
        if count > self.max_rows:
            raise CapacityError(
                f"forward: {count} rows, the scratch holds {self.max_rows}; open the engine for a larger budget"
            )
        return ModelBuffers(**{field.name: getattr(self, field.name)[:count] for field in fields(self)})


class Model:
    """A target: config, weights, scratch, and the layers whose outputs the drafter wants as features."""

    def __init__(
        self,
        config: ModelConfig,
        weights: TargetWeights,
        max_rows: int,
        feature_layers: tuple[int, ...],
        ops: Any,
    ):
        self.config, self.weights, self.ops = config, weights, ops
        self.feature_layers = feature_layers
        mlps = [layer.mlp for layer in weights.layers]
        apart = any(isinstance(mlp, MoeWeights) and mlp.shared is not None for mlp in mlps)
        self.buffers = ModelBuffers.allocate(config, max_rows, feature_layers, apart, ops)
        self.gate_rule = ops.gate_rule(config)

    def forward(
        self, batch: ForwardBatch, cache: LatentCache, observe: Observer | None = None
    ) -> tuple[Any, Any]:
        """Run the rows of `batch` on top of `cache`; returns views (logits [M, V], features [M, F x H]).

        Writes rows context_len .. context_len + M - 1 of every layer's caches and commits nothing. `observe` is
        called as observe(name, layer, array) after each named step; arrays are reused, copy what you keep.
        Raises CapacityError before it writes anything.
        """
        ops, weights, config = self.ops, self.weights, self.config
        b = self.buffers.rows(batch.num_rows)
        cache.check_room(batch.num_rows)
        see = observe or _ignore
        ops.embed(batch.token_ids, weights.embedding, b.residual)
        see("embedding", 0, b.residual)
        eps, norms = config.rms_norm_eps, [layer.input_norm for layer in weights.layers] + [weights.norm]
        ops.rms_norm(b.residual, norms[0], eps, b.normed)
        for index, layer in enumerate(weights.layers):
            see("input_norm", index, b.normed)
            self._attention(layer, batch, cache, index, b)
            see("attention", index, b.branch)
            ops.add_norm(b.residual, b.branch, layer.post_norm, eps, b.normed)
            see("post_norm", index, b.normed)
            if isinstance(layer.mlp, MoeWeights):
                self._moe(layer, index, b, see)
            else:
                self._mlp(layer.mlp, b.normed, b.dense_gate, b.dense_up, b.branch)
            see("mlp", index, b.branch)
            ops.add_norm(
                b.residual, b.branch, norms[index + 1], eps, b.normed
            )  # the next layer's input, or the end
            see("layer", index, b.residual)
            if index in self.feature_layers:
                column = self.feature_layers.index(index) * config.hidden_size
                ops.copy_columns(b.residual, column, b.features)
        see("norm", config.num_hidden_layers, b.normed)
        ops.linear(b.normed, weights.head, b.logits)
        return b.logits, b.features

    def _attention(
        self, layer: LayerWeights, batch: ForwardBatch, cache: LatentCache, index: int, b: ModelBuffers
    ) -> None:
        """Absorbed MLA: query heads meet the latents themselves, values come back out through w_vc."""
        ops, weights, rows = self.ops, self.weights, batch.num_rows
        latents, ropes = cache.latents[index], cache.ropes[index]
        at = (weights.cos, weights.sin, batch.depths, batch.context_len)
        ops.linear(b.normed, layer.qkv_a, b.qkv)
        ops.append_latent(b.qkv, layer.qkv_a_norm, LORA_NORM_EPS, *at, b.q_lora, latents, ropes)
        source = b.normed if self.config.q_lora_rank is None else b.q_lora
        ops.linear(source, layer.q_b, b.query.reshape(rows, -1))
        ops.split_query(b.query, *at, b.q_nope, b.q_rope)
        ops.head_linear(b.q_nope, layer.w_kc, b.q_latent)
        tree = (batch.lineage, batch.depths, batch.context_len)
        ops.attention(b.q_latent, b.q_rope, latents, ropes, *tree, self.config.softmax_scale, b.o_latent)
        ops.head_linear(b.o_latent, layer.w_vc, b.heads)
        ops.linear(b.heads.reshape(rows, -1), layer.o, b.branch)

    def _mlp(self, mlp: MlpWeights, x: Any, gate: Any, up: Any, out: Any) -> None:
        ops = self.ops
        ops.linear(x, mlp.gate, gate)
        ops.linear(x, mlp.up, up)
        ops.swiglu(gate, up, gate)
        ops.linear(gate, mlp.down, out)

    def _moe(self, layer: LayerWeights, index: int, b: ModelBuffers, see: Observer) -> None:
        """Routed experts are summed first, in their order; the shared experts' outputs are added to that.

        Shared experts of another format than the routed ones' are one dense MLP: its output is added as a whole.
        """
        ops, moe, rows = self.ops, layer.mlp, b.router.shape[0]
        gates, pairs = b.gates.reshape(-1, rows), b.pairs.reshape(-1, b.pairs.shape[2])
        ops.linear(b.normed, moe.router, b.router)
        see("router", index, b.router)
        ops.gate(b.router, moe.bias, self.gate_rule, gates)
        see("gates", index, gates)
        if moe.shared is not None:
            pairs = pairs[: rows * self.config.num_experts_per_tok]
        ops.experts(b.normed, gates, moe.experts.gate, moe.experts.up, moe.experts.down, pairs, b.branch)
        if moe.shared is not None:
            self._mlp(moe.shared, b.normed, b.shared_gate, b.shared_up, b.shared)
            ops.add(b.branch, b.shared, b.branch)


def _ignore(name: str, layer: int, array: Any) -> None:
    """The observer of a call that asked for none."""
