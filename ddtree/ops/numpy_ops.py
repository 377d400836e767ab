"""The NumPy backend: the golden operations on host arrays, in f32 or f64. It runs anywhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.quantised import MATRIX_TYPES, QuantisedMatrix, arrays_of
from ddtree.reference.accept import accept, compact
from ddtree.reference.attention import attention
from ddtree.reference.block_attention import block_attention
from ddtree.reference.branch_scores import branch_scores
from ddtree.reference.experts import experts
from ddtree.reference.gate import GateRule, gate_device, gate_host
from ddtree.reference.linear import embed, head_linear, linear
from ddtree.reference.pointwise import add, add_norm, copy_columns, rms_norm, swiglu
from ddtree.reference.position import append_latent, append_rows, rope, split_query
from ddtree.reference.sample import sample
from ddtree.reference.topk import argmax, row_is_bad, topk_log_softmax
from ddtree.reference.tree_build import build_branch_tree, build_tree
from ddtree.weights_pieces import convert

DTYPES = {"f32": np.float32, "f64": np.float64}
GATES = {"device": gate_device, "host": gate_host}


def wide_linear(x: np.ndarray, weight: np.ndarray | QuantisedMatrix, out: np.ndarray) -> None:
    """out f32 = x @ weight.T as `reference.linear` has it, with sums in f64 that are rounded once."""
    plain = isinstance(weight, np.ndarray)
    sums = np.empty(out.shape)
    linear(x.astype(np.float64), weight.astype(np.float64) if plain else weight, sums)
    np.copyto(out, sums, casting="same_kind")


class NumpyOps:
    """Memory and operations of the NumPy backend; `name` and `device` are what traces record.

    Making one sets BLAS to a single thread, for the whole process: every product here is of one row, which threads do
    not speed up, and on a busy machine they wait for one another (measured: 7 times slower). Bits do not depend on
    the number of cores then, either.
    """

    name = "numpy"
    device = "cpu"
    gemm = "invariant"
    chunk_bytes = 32 << 20  # of the pieces in which a file's arrays are converted
    on_upload: Callable[[int], None] | None = None  # told the bytes of each

    embed = staticmethod(embed)
    linear = staticmethod(linear)
    head_linear = staticmethod(head_linear)
    wide_linear = staticmethod(wide_linear)
    rms_norm = staticmethod(rms_norm)
    add_norm = staticmethod(add_norm)
    swiglu = staticmethod(swiglu)
    add = staticmethod(add)
    copy_columns = staticmethod(copy_columns)
    rope = staticmethod(rope)
    split_query = staticmethod(split_query)
    append_latent = staticmethod(append_latent)
    append_rows = staticmethod(append_rows)
    attention = staticmethod(attention)
    block_attention = staticmethod(block_attention)
    experts = staticmethod(experts)
    topk_log_softmax = staticmethod(topk_log_softmax)
    argmax = staticmethod(argmax)
    row_is_bad = staticmethod(row_is_bad)
    sample = staticmethod(sample)
    branch_scores = staticmethod(branch_scores)
    build_tree = staticmethod(build_tree)
    build_branch_tree = staticmethod(build_branch_tree)
    accept = staticmethod(accept)
    compact = staticmethod(compact)

    def __init__(self, dtype: str = "f32", route: str = "device", gemm: str = "invariant"):
        if dtype not in DTYPES:
            raise UsageError(
                f"dtype: expected one of {', '.join(DTYPES)} on the backend numpy, found {dtype!r}"
            )
        if route not in GATES:
            raise UsageError(f"route: expected one of {', '.join(GATES)}, found {route!r}")
        if gemm != "invariant":
            raise UsageError(f"gemm: expected invariant on the backend numpy, found {gemm!r}")
        threadpool_limits(1, user_api="blas")
        self.dtype_name, self.route = dtype, route
        self.dtype = np.dtype(DTYPES[dtype])
        self.gate = GATES[route]

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """An uninitialised array of the backend's dtype."""
        return np.empty(shape, self.dtype)

    empty_cache = empty_matrix = empty  # another backend keeps these in its matmul format

    @staticmethod
    def multiplies(stored: str, shape: tuple[int, ...]) -> bool:
        """Whether `linear` takes a matrix [N, K] stored as fp8 or int4; every backend's `experts` takes stacks."""
        return True

    @staticmethod
    def empty_quantised(shape: tuple[int, ...], stored: str) -> QuantisedMatrix:
        """An uninitialised fp8 or int4 matrix [.., N, K]."""
        return MATRIX_TYPES[stored](*(np.empty(size, dtype) for size, dtype in arrays_of(shape, stored)))

    @staticmethod
    def empty_f32(shape: tuple[int, ...]) -> np.ndarray:
        """An uninitialised f32 array, whatever the backend's dtype."""
        return np.empty(shape, np.float32)

    def put(self, array: np.ndarray) -> np.ndarray:
        """A contiguous copy of a weight in the backend's dtype."""
        return np.array(array, self.dtype, order="C")

    def put_exact(self, array: np.ndarray) -> np.ndarray:
        """The same for what is never rounded to a matmul's format: norms, router, bias, rotary tables."""
        return self.put(array)

    @contextmanager
    def uploads(self) -> Iterator[Callable[[np.ndarray, int, np.ndarray], None]]:
        """Gives upload(array, start, values): values of any dtype and strides to the elements start.. of an array."""
        yield upload

    @staticmethod
    def repeat(array: np.ndarray, count: int) -> None:
        """Make an array's elements, in row-major order, those of its first `count` again and again."""
        repeat(array.reshape(-1), count, np.copyto)

    @staticmethod
    def integers(array: np.ndarray) -> np.ndarray:
        """A contiguous i32 copy: token ids, depths, lineage."""
        return np.array(array, np.int32, order="C")

    @staticmethod
    def check_sizes(config: ModelConfig, drafter: object, *call: object) -> None:
        """Nothing is too large here; kernels have limits."""

    @staticmethod
    def gate_rule(config: ModelConfig) -> GateRule:
        """The gate's settings out of a model config."""
        return GateRule(
            config.num_experts_per_tok,
            config.n_group,
            config.topk_group,
            config.norm_topk_prob,
            config.routed_scaling_factor,
            config.topk_method,
        )


def repeat(flat: Any, count: int, copy: Callable[[Any, Any], None]) -> None:
    """Repeat the first `count` elements of a flat array of any backend; copy(to, source) is of equal sizes."""
    size, done = flat.shape[0], count
    while done < size:
        more = min(done, size - done)
        copy(flat[done : done + more], flat[:more])
        done += more


def upload(array: np.ndarray, start: int, values: np.ndarray) -> None:
    """Copy values, converted, to the elements start.. of a contiguous array."""
    convert(values, array.reshape(-1)[start : start + values.size].reshape(values.shape))
