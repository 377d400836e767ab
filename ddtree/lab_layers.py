"""The forward pass taken apart for the notebooks: every named step, the error that each operation adds, the routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch, chain_batch
from ddtree.bench_errors import relative_error
from ddtree.bench_errors import step_errors as relative_errors
from ddtree.bench_layers import num_parameters
from ddtree.bundle import Bundle
from ddtree.cache import LatentCache
from ddtree.config import ModelConfig
from ddtree.lab_bf16 import Bf16Ops, Rounded, rounded
from ddtree.model import Model
from ddtree.ops import NumpyOps

OPERATIONS = (
    *("embed", "rms_norm", "linear", "split_query", "append_latent", "head_linear", "attention", "add_norm"),
    *("gate", "experts", "swiglu", "add"),
)
Steps = dict[tuple[str, int], np.ndarray]
BYTES_BF16 = 2

__all__ = [
    "Session",
    "kv_bytes",
    "local_errors",
    "num_parameters",
    "prefilled",
    "relative_error",
    "relative_errors",
    "routing",
]


class Session:
    """A target alone, its empty cache and scratch full of NaN: forwards that commit rows, and can be looked into."""

    def __init__(self, bundle: Bundle, ops: Any, most_rows: int = 64, positions: int = 256):
        self.config, self.ops = bundle.config, ops
        weights = bundle.target_weights(positions, ops)
        self.model = Model(bundle.config, weights, most_rows, (), ops)
        self.cache = LatentCache(bundle.config, positions, ops)
        for array in (*self.cache.arrays, *vars(self.model.buffers).values()):
            array[...] = np.nan

    def forward(self, batch: ForwardBatch, commit: bool = True) -> np.ndarray:
        """A copy of the logits; the rows are committed in order when asked."""
        logits = self.model.forward(batch, self.cache)[0].copy()
        self.cache.context_len += batch.num_rows if commit else 0
        return logits

    def observed(self, batch: ForwardBatch) -> Steps:
        """A copy of each named step, by (step, layer), `logits` after the last; commits nothing."""
        seen: Steps = {}
        logits, _ = self.model.forward(
            batch, self.cache, lambda step, layer, array: seen.update({(step, layer): array.copy()})
        )
        return seen | {("logits", self.config.num_hidden_layers): logits.copy()}

    def committed(self) -> bytes:
        """The bits of all committed cache rows."""
        return b"".join(array[: self.cache.context_len].tobytes() for array in self.cache.arrays)


def prefilled(bundle: Bundle, ops: Any, token_ids: Sequence[int]) -> Session:
    """A session that has committed the tokens."""
    session = Session(bundle, ops)
    session.forward(chain_batch(np.asarray(token_ids, np.int32), 0))
    return session


class Matrix64(np.ndarray):
    """An f64 weight or cache: what bf16 mode rounds. Views of it are, too."""


class LocalErrors(NumpyOps):
    """The f64 backend, which repeats each operation on `twin` with the same inputs: what that one operation errs by.

    `errors` are pairs (operation, error of its output that errs most), in the order of the calls.
    """

    def __init__(self, twin: NumpyOps):
        super().__init__("f64")
        self.errors: list[tuple[str, float]] = []
        for name in OPERATIONS:
            setattr(self, name, partial(self._both, name, getattr(self, name), getattr(twin, name)))
        self.half = isinstance(twin, Bf16Ops)

    def empty_matrix(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape).view(Matrix64)

    empty_cache = empty_matrix

    def _both(
        self, name: str, golden: Callable[..., None], twin: Callable[..., None], *arguments: Any
    ) -> None:
        before = [argument.copy() if _is_float(argument) else argument for argument in arguments]
        twins: dict[int, Any] = {}  # an argument given twice, to work in place, is one array there too
        narrow = [twins.setdefault(id(argument), self._narrow(argument)) for argument in arguments]
        golden(*arguments)
        twin(*narrow)
        errors = []
        for got, old, want in zip(narrow, before, arguments, strict=True):
            if _is_float(want) and not np.array_equal(old, want, equal_nan=True):
                written = ~np.isnan(want)  # rows of a cache that nothing wrote yet are NaN
                errors.append(relative_error(got[written], want[written]))
        assert errors, f"{name} wrote nothing"
        self.errors.append((name, max(errors)))

    def _narrow(self, argument: Any) -> Any:
        if self.half and isinstance(argument, Matrix64):
            return rounded(argument).view(Rounded)
        with np.errstate(over="ignore"):  # an output's memory may hold anything before the call
            return np.array(argument, np.float32) if _is_float(argument) else argument


def _is_float(argument: Any) -> bool:
    return isinstance(argument, np.ndarray) and argument.dtype.kind == "f"


def local_errors(bundle: Bundle, batch: ForwardBatch, twin: NumpyOps) -> dict[str, list[float]]:
    """By operation, in the order of its calls: the error it adds on `twin` when its inputs are exact up to f32."""
    ops = LocalErrors(twin)
    Session(bundle, ops).forward(batch)
    found: dict[str, list[float]] = {}
    for name, error in ops.errors:
        found.setdefault(name, []).append(error)
    return found


def routing(steps: Steps, config: ModelConfig) -> np.ndarray:
    """Gates f[MoE layers, rows, experts] out of the steps of one forward."""
    layers = [layer for layer in range(config.num_hidden_layers) if config.is_moe(layer)]
    return np.stack([steps["gates", layer].T for layer in layers])


def kv_bytes(config: ModelConfig) -> dict[str, int]:
    """bf16 bytes of cache a token: latents and shared rotary keys, or keys and values of every head."""
    c = config
    latent = c.kv_lora_rank + c.qk_rope_head_dim
    heads = c.num_attention_heads * (c.q_head_dim + c.v_head_dim)
    layers = c.num_hidden_layers * BYTES_BF16
    return {"latent": layers * latent, "heads": layers * heads}
