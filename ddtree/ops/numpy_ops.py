"""The NumPy backend: the golden operations on host arrays, in f32 or f64. It runs anywhere."""

import numpy as np
from threadpoolctl import threadpool_limits

from ddtree.config import ModelConfig
from ddtree.errors import UsageError
from ddtree.reference.accept import accept, compact
from ddtree.reference.attention import attention
from ddtree.reference.block_attention import block_attention
from ddtree.reference.experts import experts
from ddtree.reference.gate import GateRule, gate_device, gate_host
from ddtree.reference.linear import embed, head_linear, linear
from ddtree.reference.pointwise import add, add_norm, copy_columns, rms_norm, swiglu
from ddtree.reference.position import append_latent, append_rows, rope, split_query
from ddtree.reference.sample import sample
from ddtree.reference.topk import argmax, row_is_bad, topk_log_softmax
from ddtree.reference.tree_build import build_tree

DTYPES = {"f32": np.float32, "f64": np.float64}
GATES = {"device": gate_device, "host": gate_host}


class NumpyOps:
    """Memory and operations of the NumPy backend; `name` and `device` are what traces record.

    Making one sets BLAS to a single thread, for the whole process: every product here is of one row, which threads do
    not speed up, and on a busy machine they wait for one another (measured: 7 times slower). Bits do not depend on
    the number of cores then, either.
    """

    name = "numpy"
    device = "cpu"

    embed = staticmethod(embed)
    linear = staticmethod(linear)
    head_linear = staticmethod(head_linear)
    rms_norm = staticmethod(rms_norm)
    add_norm = staticmethod(add_norm)
    add = staticmethod(add)
    swiglu = staticmethod(swiglu)
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
    build_tree = staticmethod(build_tree)
    accept = staticmethod(accept)
    compact = staticmethod(compact)

    def __init__(self, dtype: str = "f32", route: str = "device"):
        if dtype not in DTYPES:
            raise UsageError(
                f"dtype: expected one of {', '.join(DTYPES)} on the backend numpy, found {dtype!r}"
            )
        if route not in GATES:
            raise UsageError(f"route: expected one of {', '.join(GATES)}, found {route!r}")
        threadpool_limits(1, user_api="blas")
        self.dtype_name, self.route = dtype, route
        self.dtype = np.dtype(DTYPES[dtype])
        self.gate = GATES[route]

    def empty(self, shape: tuple[int, ...]) -> np.ndarray:
        """An uninitialised array of the backend's dtype."""
        return np.empty(shape, self.dtype)

    empty_cache = empty  # another backend may keep caches in its matmul format

    def put(self, array: np.ndarray) -> np.ndarray:
        """A contiguous copy of a weight in the backend's dtype."""
        return np.array(array, self.dtype, order="C")

    def put_exact(self, array: np.ndarray) -> np.ndarray:
        """The same for what is never rounded to a matmul's format: norms, router, bias, rotary tables."""
        return self.put(array)

    @staticmethod
    def integers(array: np.ndarray) -> np.ndarray:
        """A contiguous i32 copy: token ids, depths, lineage."""
        return np.array(array, np.int32, order="C")

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
