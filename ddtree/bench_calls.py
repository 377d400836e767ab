"""The operations that one forward calls, recorded as they happen, and what each must move and compute at least.

A `Recorder` stands before a backend's operations while the model's own body runs; what it wrote down can be launched
again, alone. Bytes are those of each argument once; of a table, a cache and the routed experts, those really used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import numpy as np

from ddtree.batch import ForwardBatch
from ddtree.engine import Engine
from ddtree.quantised import Fp8Matrix, Int4Matrix


@dataclass
class Call:
    """One operation of a forward. `step` and `layer` are those of the step it led to; see Model.forward's `observe`.

    `routed` is (experts touched, pairs of row and expert) of an `experts` call, and None for any other.
    """

    name: str
    arguments: tuple
    step: str = ""
    layer: int = -1
    routed: tuple[int, int] | None = None


@dataclass(frozen=True)
class Cost:
    """Bytes of weights, of committed and new cache rows, and of all else; and floating-point operations."""

    weights: int
    cache: int
    activations: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weights + self.cache + self.activations


class Recorder:
    """A backend whose operations are noted in `calls` after they ran."""

    def __init__(self, engine: Engine):
        self._engine, self.calls = engine, []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._engine.ops, name)

        def run(*arguments: Any) -> Any:
            result = operation(*arguments)
            self.calls.append(Call(name, arguments, routed=self._routed(name, arguments)))
            return result

        return run if callable(operation) else operation

    def _routed(self, name: str, arguments: tuple) -> tuple[int, int] | None:
        """How many experts the gates of an `experts` call touch, by how many rows."""
        if name != "experts":
            return None
        gates = arguments[1]
        chosen = (self._engine.ops.read(gates) if self._engine.runner else gates) != 0
        return int(chosen.any(axis=1).sum()), int(chosen.sum())

    def observe(self, step: str, layer: int, array: Any) -> None:
        """Name the calls since the last step."""
        for call in reversed(self.calls):
            if call.step:
                return
            call.step, call.layer = step, layer


def record_forward(engine: Engine, batch: ForwardBatch) -> list[Call]:
    """The calls of one eager forward of `batch` (in the backend's memory); the head's product has the step `head`."""
    recorder, model = Recorder(engine), engine.model
    model.ops = recorder
    try:
        model.forward(batch, engine.cache, recorder.observe)
    finally:
        model.ops = engine.ops
    recorder.observe("head", engine.config.num_hidden_layers, None)
    return recorder.calls


def weight_names(weights: Any) -> dict[int, str]:
    """The field of every weight array, by the array's id: `qkv_a`, `mlp.experts.gate`; layers share names."""
    found: dict[int, str] = {}

    def walk(value: Any, name: str) -> None:
        if isinstance(value, list):
            for item in value:
                walk(item, "")
        elif is_dataclass(value) and not isinstance(value, Int4Matrix | Fp8Matrix):
            for field in fields(value):
                walk(getattr(value, field.name), f"{name}.{field.name}" if name else field.name)
        elif value is not None and name not in ("cos", "sin"):
            found.setdefault(id(value), name)

    walk(weights, "")
    return found


def arrays_of(arguments: Any) -> Iterator[Any]:
    """Every array and quantised matrix among arguments, also inside tuples and lists."""
    for argument in arguments:
        if isinstance(argument, (tuple, list)):
            yield from arrays_of(argument)
        elif hasattr(argument, "shape") and (hasattr(argument, "dtype") or hasattr(argument, "dtype_name")):
            yield argument


def size_of(array: Any) -> int:
    """Bytes of an array, or of a quantised matrix with its scales."""
    if isinstance(array, Int4Matrix | Fp8Matrix):
        return sum(map(size_of, array.arrays))
    return elements_of(array) * array.dtype.itemsize


def elements_of(array: Any) -> int:
    """Elements of an array, or values of a quantised matrix."""
    return int(np.prod(tuple(array.shape), dtype=np.int64))


def label_of(call: Call, names: dict[int, str]) -> str:
    """An operation and the weights it takes: `linear qkv_a`."""
    used = [names[id(array)] for array in arrays_of(call.arguments) if id(array) in names]
    return " ".join([call.name, "+".join(dict.fromkeys(used))]).strip()


def cost_of(call: Call, names: dict[int, str], context_len: int, depths: np.ndarray) -> Cost:
    """The least that a call moves and computes; depths i32[M] are the rows' own."""
    special = {"embed": _embed, "experts": _experts, "copy_columns": _copy_columns}
    if call.name in special:
        return special[call.name](call)
    if call.name == "attention":
        return _attention(call, context_len, depths)
    rows, weights, rest, flops = len(depths), 0, 0, 0
    for array in {id(array): array for array in arrays_of(call.arguments)}.values():
        if id(array) in names:
            weights += size_of(array)
            flops += 2 * rows * elements_of(array) * (len(array.shape) > 1)
        elif len(array.shape) and array.shape[0] > rows and call.name in ("append_latent", "split_query"):
            rest += rows * size_of(array) // array.shape[0]  # of a rotary table or a cache, the rows' own
        else:
            rest += size_of(array)
    return Cost(weights, 0, rest, flops)


def _embed(call: Call) -> Cost:
    token_ids, table, out = call.arguments
    rows = token_ids.shape[0]
    return Cost(rows * size_of(table) // table.shape[0], 0, size_of(token_ids) + size_of(out), 0)


def _copy_columns(call: Call) -> Cost:
    return Cost(0, 0, 2 * size_of(call.arguments[0]), 0)


def _experts(call: Call) -> Cost:
    """Of the experts, those touched, once each, the shared among them: called with x, gates, three weights, .., out."""
    x, gates, *weights = call.arguments[:5]
    shared = weights[0].shape[0] - gates.shape[0]
    touched, pairs = call.routed[0] + shared, call.routed[1] + shared * x.shape[0]
    one = [size_of(weight) // weight.shape[0] for weight in weights]
    flops = sum(2 * pairs * elements_of(weight) // weight.shape[0] for weight in weights)
    return Cost(touched * sum(one), 0, size_of(x) + size_of(gates) + size_of(call.arguments[-1]), flops)


def _attention(call: Call, context_len: int, depths: np.ndarray) -> Cost:
    """The committed rows and the new ones once; each row's head meets every position it sees, twice the latents."""
    q_latent, q_rope, latents = call.arguments[:3]
    (rows, heads, rank), dim = q_latent.shape, q_rope.shape[2]
    cache = (context_len + rows) * (rank + dim) * latents.dtype.itemsize
    rest = 2 * size_of(q_latent) + size_of(q_rope)
    seen = int((context_len + 1 + depths.astype(np.int64)).sum())
    return Cost(0, cache, rest, 2 * seen * heads * (2 * rank + dim))
