"""The CUDA backend: the kernels of `kernels_numba` under the names of `ddtree.reference`, on device memory.

In Numba's simulator the same kernels run on host memory. With gemm="cublas" cuBLAS makes the plain products.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree.errors import UsageError
from ddtree.ops.cublas import products
from ddtree.ops.cuda_memory import CudaMemory
from ddtree.ops.invariant import SCRATCH, InvariantProducts
from ddtree.ops.numpy_ops import NumpyOps, repeat
from ddtree.quantised import Fp8Matrix, Int4Matrix
from ddtree.reference.gate import gate_host
from kernels_numba import (
    accept,
    append_rows,
    argmax,
    attention,
    block_attention,
    branch_scores,
    compact,
    embed,
    experts,
    gate,
    norm,
    pointwise,
    position,
    round_state,
    sample,
    topk,
    tree_build,
    tree_build_branch,
)


class CudaOps(CudaMemory):
    """Memory and operations on a GPU, or in the simulator; every launch goes to `stream`."""

    def __init__(self, dtype: str = "f32", route: str = "device", gemm: str = "invariant"):
        super().__init__(dtype, route, gemm)
        self._products: Any = InvariantProducts(self) if gemm == "invariant" else products(self)

    def repeat(self, array: Any, count: int) -> None:
        """Make an array's elements those of its first `count` again and again, by copies on the device."""
        repeat(array.reshape(-1), count, lambda to, source: to.copy_to_device(source, stream=self.stream))

    # --- the forward -------------------------------------------------------------------------------------------------

    gate_rule = staticmethod(NumpyOps.gate_rule)
    sample_settings = staticmethod(sample.pack_settings)

    def embed(self, token_ids: Any, table: Any, out: Any) -> None:
        embed.embed(token_ids, table, out, self.stream)

    def linear(self, x: Any, weight: Any, out: Any) -> None:
        if isinstance(weight, Fp8Matrix):
            from kernels_numba.linear_fp8 import linear_fp8, linear_fp8_scratch

            count = linear_fp8_scratch(x.shape[0], *weight.shape)
            scratch = self.scratch(SCRATCH, count) if count else None
            linear_fp8(x, weight.values, weight.scales, out, scratch, self.stream)
            return
        self._products.linear(x, weight, out, self.stream)

    def head_linear(self, x: Any, weight: Any, out: Any) -> None:
        self._products.head_linear(x, weight, out, self.stream)

    wide_linear = linear  # another backend has wider sums

    def rms_norm(self, x: Any, weight: Any, eps: float, out: Any) -> None:
        norm.rms_norm(x, weight, eps, out, self.stream)

    def add_norm(self, residual: Any, branch: Any, weight: Any, eps: float, out: Any) -> None:
        norm.add_norm(residual, branch, weight, eps, out, self.stream)

    def swiglu(self, gate_values: Any, up: Any, out: Any) -> None:
        pointwise.swiglu(gate_values, up, out, self.stream)

    def add(self, x: Any, y: Any, out: Any) -> None:
        pointwise.add(x, y, out, self.stream)

    def copy_columns(self, x: Any, column: int, out: Any) -> None:
        embed.copy_columns(x, column, out, self.stream)

    def rope(self, x: Any, cos: Any, sin: Any, depths: Any, context_len: Any, out: Any) -> None:
        position.rope(x, cos, sin, depths, context_len, out, self.stream)

    def split_query(self, *arguments: Any) -> None:
        position.split_query(*arguments, self.stream)

    def append_latent(self, *arguments: Any) -> None:
        position.append_latent(*arguments, self.stream)

    def append_rows(self, rows: Any, context_len: Any, cache: Any) -> None:
        append_rows.append_rows(rows, context_len, cache, self.stream)

    def attention(
        self,
        q_latent: Any,
        q_rope: Any,
        latents: Any,
        ropes: Any,
        lineage: Any,
        depths: Any,
        context_len: Any,
        scale: float,
        out: Any,
    ) -> None:
        rows, heads, rank = q_latent.shape
        size = attention.attention_scratch(rows, heads, rank, latents.shape[0])
        scratch = self.scratch("attention", size)
        attention.attention(
            q_latent, q_rope, latents, ropes, lineage, depths, context_len, scale, out, scratch, self.stream
        )

    def block_attention(
        self,
        query: Any,
        keys: Any,
        values: Any,
        block_key: Any,
        block_value: Any,
        context_len: Any,
        window: int,
        scale: float,
        out: Any,
    ) -> None:
        block, heads, dim = query.shape
        size = block_attention.block_attention_scratch(
            block, heads, keys.shape[1], dim, keys.shape[0], window
        )
        scratch = self.scratch("block_attention", size)
        block_attention.block_attention(
            query, keys, values, block_key, block_value, context_len, window, scale, out, scratch, self.stream
        )

    def gate(self, logits: Any, bias: Any, rule: Any, gates: Any) -> None:
        if self.route == "device":
            gate.gate(logits, bias, rule, gates, self.stream)
            return
        if self.frozen:
            raise UsageError(
                "route host: a captured round cannot wait for the host; use route device or no graphs"
            )
        on_host = np.empty(gates.shape, np.float32)
        gate_host(self.read(logits), None if bias is None else self.read(bias), rule, on_host)
        self.write(gates, on_host)

    def experts(self, x: Any, gates: Any, w_gate: Any, w_up: Any, w_down: Any, hidden: Any, out: Any) -> None:
        rows, size = x.shape
        pairs = hidden.shape[0]
        chosen = pairs // rows
        pair_out = self.scratch("experts pair_out", pairs * size)[: pairs * size].reshape(pairs, size)
        plan = self.scratch("experts plan", experts.plan_size(rows, w_gate.shape[0], chosen), np.int32)
        launch, weights = experts.experts, (w_gate, w_up, w_down)
        if isinstance(w_gate, Int4Matrix):
            from kernels_numba.experts_int4 import experts_int4 as launch
        elif isinstance(w_gate, Fp8Matrix):
            from kernels_numba.experts_fp8 import experts_fp8 as launch
        if launch is not experts.experts:
            weights = tuple(weight.arrays for weight in weights)
        launch(x, gates, *weights, hidden, out, pair_out, plan, chosen, self.stream)

    # --- the round ---------------------------------------------------------------------------------------------------

    def topk_log_softmax(self, logits: Any, k: int, token_ids: Any, log_probs: Any) -> None:
        rows, groups = logits.shape[0], topk.num_groups(logits.shape[1])
        keys = self.scratch("topk keys", rows * groups, np.uint64)[: rows * groups].reshape(rows, groups)
        sums = self.scratch("topk sums", rows * groups)[: rows * groups].reshape(rows, groups)
        topk.topk_log_softmax(logits, k, token_ids, log_probs, keys, sums, self.stream)

    def build_tree(self, *arguments: Any) -> None:
        tree_build.build_tree(*arguments, self.stream)

    def branch_scores(self, *arguments: Any) -> None:
        branch_scores.branch_scores(*arguments, self.stream)

    def build_branch_tree(self, *arguments: Any) -> None:
        tree_build_branch.build_branch_tree(*arguments, self.stream)

    def argmax_and_bad(self, logits: Any, tokens: Any, bad: Any) -> None:
        rows = logits.shape[0]
        scratch = self.scratch("argmax", 2 * rows, np.uint64)[: 2 * rows].reshape(rows, 2)
        argmax.argmax_and_bad(logits, tokens, bad, scratch, self.stream)

    def row_is_bad(self, logits: Any, bad: Any) -> None:
        argmax.row_is_bad(logits, bad, self.stream)

    def sample(self, logits: Any, positions: Any, settings: Any, out: Any) -> None:
        sample.sample(logits, positions, settings, out, self.stream)

    def accept(self, *arguments: Any) -> None:
        accept.accept(*arguments, self.stream)

    def compact(self, cache: Any, context_len: Any, path: Any, result: Any) -> None:
        compact.compact(cache, context_len, path, result, self.stream)

    def next_positions(self, depths: Any, context_len: Any, out: Any) -> None:
        round_state.next_positions(depths, context_len, out, self.stream)

    def settle(self, *arguments: Any) -> None:
        round_state.settle(*arguments, self.stream)

    def finish_chunk(self, *arguments: Any) -> None:
        round_state.finish_chunk(*arguments, self.stream)

    def advance(self, *arguments: Any) -> None:
        round_state.advance(*arguments, self.stream)

    def stamp(self, times: Any, slot: int) -> None:
        round_state.stamp(times, slot, self.stream)
