"""bf16 mode on the NumPy backend, emulated: f32 arithmetic that rounds where the kernels round.

Weights, caches and every input of a product with one are rounded to bf16, nearest even; the residual stream, norms,
softmax, router and sums stay f32. For studies of error: no engine offers it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np

from ddtree.ops import NumpyOps
from ddtree.ops.device_memory import DeviceMemory
from ddtree.ops.numpy_ops import upload
from ddtree.quantised import Fp8Matrix, Int4Matrix
from ddtree.reference import attention as attention_reference
from ddtree.reference import experts as experts_reference
from ddtree.reference import linear as products
from ddtree.reference import position


class Rounded(np.ndarray):
    """f32 whose values are bf16's: a weight or a cache. Views of it are, too."""


def rounded(values: np.ndarray) -> np.ndarray:
    """f32 rounded to bf16's values."""
    return np.asarray(values, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


class Bf16Ops(NumpyOps):
    """The target's operations in emulated bf16; `head` and hidden states come out in f32."""

    def __init__(self) -> None:
        super().__init__("f32")
        self.dtype_name = "bf16"

    def empty_matrix(self, shape: tuple[int, ...]) -> np.ndarray:
        return np.empty(shape, np.float32).view(Rounded)

    empty_cache = empty_matrix
    multiplies = staticmethod(DeviceMemory.multiplies)

    def put(self, array: np.ndarray) -> np.ndarray:
        return rounded(array).view(Rounded)

    def put_exact(self, array: np.ndarray) -> np.ndarray:
        return np.array(array, np.float32, order="C")

    @contextmanager
    def uploads(self) -> Iterator[Callable[[np.ndarray, int, np.ndarray], None]]:
        def put(array: np.ndarray, start: int, values: np.ndarray) -> None:
            upload(array, start, rounded(values) if isinstance(array, Rounded) else values)

        yield put

    def linear(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        quantised = isinstance(weight, Int4Matrix | Fp8Matrix)
        products.linear(_factor(x, weight), weight if quantised else np.asarray(weight), out)

    def head_linear(self, x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        products.head_linear(_factor(x, weight), np.asarray(weight), out)

    def append_latent(self, qkv: np.ndarray, *arguments: Any) -> None:
        """As the reference, with the cache rows it wrote rounded in place."""
        position.append_latent(qkv, *arguments)
        *_, context_len, _, latents, ropes = arguments
        new = slice(int(context_len), int(context_len) + len(qkv))
        for cache in (latents, ropes):
            cache[new] = rounded(cache[new])

    def attention(
        self, q_latent: np.ndarray, q_rope: np.ndarray, latents: np.ndarray, ropes: np.ndarray, *rest: Any
    ) -> None:
        queries = _factor(q_latent, latents), _factor(q_rope, ropes)
        attention_reference.attention(*queries, np.asarray(latents), np.asarray(ropes), *rest)

    def experts(self, *arguments: np.ndarray) -> None:
        """As the reference's, with both inputs of products rounded."""
        experts_reference.experts(*arguments, product=self.linear)


def _factor(x: np.ndarray, matrix: np.ndarray) -> np.ndarray:
    """What a product with `matrix` multiplies: x itself, or rounded where the matrix is, or is quantised."""
    return rounded(x) if isinstance(matrix, Rounded | Int4Matrix | Fp8Matrix) else x
