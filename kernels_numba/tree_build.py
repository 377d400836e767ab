"""The best-first tree (DDTree, arXiv 2604.12989) from per-depth candidates, exact, on the GPU with no host step.

    child = w + p[d + 1, 0],   sibling = (w - p[d, r]) + p[d, r + 1]   in f64, of a node of weight w, depth d, rank r

Take the greatest weight, equal ones by the lexicographically smaller tuple of ranks; then its sibling and its first
child become candidates: `primitives_tree` does that, for this table and for that of `tree_build_branch`.

f64 is part of the rule: the published sums are f64, and f32 would choose other nodes. Knows tables of tokens and
log-probabilities, not the drafter that filled them.
"""

from numba import cuda, int32, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.primitives import after_previous, device_function
from kernels_numba.primitives_select import is_finite
from kernels_numba.primitives_tree import (
    DEPTH_MASK,
    DEPTH_SHIFT,
    MAX_BUDGET,
    MAX_DEPTHS,
    SECTOR,
    SIBLING,
    SIBLING_SHIFT,
    THREADS,
    levels_used,
    make_tree,
)
from kernels_numba.registry import KernelSpec


@device_function
def _first(log_probs):
    """As `make_tree` wants it: the rank alone tells siblings apart."""
    return log_probs[0, 0], uint32(1 << DEPTH_SHIFT)


@device_function
def _read(log_probs, pack, levels, width):
    """As `make_tree` wants it."""
    depth = uint32(pack >> uint32(DEPTH_SHIFT))
    level = uint32(depth - uint32(1))
    rank = uint32((pack >> uint32(SIBLING_SHIFT)) & uint32(SIBLING))
    next_rank = uint32(rank + uint32(1))
    own = log_probs[level, rank]
    following = log_probs[level, min(next_rank, uint32(width - uint32(1)))]
    top = log_probs[min(depth, uint32(levels - uint32(1))), uint32(0)]
    sibling_pack = uint32(pack + uint32(1 << SIBLING_SHIFT))
    child_pack = uint32(uint32(pack & uint32(DEPTH_MASK)) + uint32(1 << DEPTH_SHIFT))
    return (own, following, top), (sibling_pack, child_pack), next_rank < width


_tree = make_tree(_first, _read, SIBLING)


@cuda.jit
def build_tree_kernel(
    token_ids,
    log_probs,
    max_depth,
    out_token_ids,
    out_parents,
    out_depths,
    out_log_weights,
    out_lineage,
    out_num_nodes,
):
    """The whole tree in one block; see the launcher."""
    after_previous()
    levels = levels_used(log_probs, max_depth)
    columns = int32(log_probs.shape[1])
    width = int32(min(columns, out_parents.shape[0] - 1))
    warm = int32(0)
    for place in range(
        int32(cuda.threadIdx.x) * int32(SECTOR), int32(levels * columns), int32(THREADS * SECTOR)
    ):
        level = uint32(uint32(place) // uint32(columns))
        rank = uint32(uint32(place) % uint32(columns))
        warm |= int32(is_finite(log_probs[level, rank]))
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage, out_num_nodes
    _tree(log_probs, levels, width, warm, token_ids, outputs)


def check_tree(name, token_ids, budget, max_depth, outputs):
    """Raise LaunchError unless a tree of `budget` nodes from token_ids i32 [L, K] fits its outputs, and a block."""
    check(f"{name}: token_ids", token_ids, "int32", (None, None))
    depths = len(token_ids)
    require(depths <= MAX_DEPTHS, f"{name}: {depths} depths, at most {MAX_DEPTHS} fit")
    require(0 <= budget <= MAX_BUDGET, f"{name}: budget {budget}, wanted 0..{MAX_BUDGET}")
    check(f"{name}: max_depth", max_depth, "int32", (1,))
    rows = (budget + 1,)
    forms = {"token_ids": ("int32", rows), "parents": ("int32", rows), "depths": ("int32", rows)}
    forms |= {"log_weights": ("float64", rows), "lineage": ("int32", (budget + 1, depths + 1))}
    forms |= {"num_nodes": ("int32", (1,))}
    for (what, form), array in zip(forms.items(), outputs, strict=True):
        check(f"{name}: out_{what}", array, *form)


def build_tree(
    token_ids,
    log_probs,
    budget,
    max_depth,
    out_token_ids,
    out_parents,
    out_depths,
    out_log_weights,
    out_lineage,
    out_num_nodes,
    stream=0,
):
    """Take the best candidate until `budget` nodes are taken or none is left; their number goes to out_num_nodes.

    token_ids i32 and log_probs f32 [L, K] (natural log, descending along K), max_depth i32[1]; budget at most
    MAX_BUDGET, L at most MAX_DEPTHS. Outputs: token_ids, parents and depths i32 [budget + 1], log_weights f64
    [budget + 1], lineage i32 [budget + 1, L + 1] (row i's ancestor at each depth, itself last, -1 beyond), num_nodes
    i32[1], the root not counted. Row 0 is the root; its token is left to the caller. Unused rows get token 0, parent
    -1, depth 0, weight 0.0, lineage -1. What is not finite is never a candidate, nor what lies deeper than max_depth.
    Raises LaunchError.
    """
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage, out_num_nodes
    check_tree("build_tree", token_ids, budget, max_depth, outputs)
    check("build_tree: log_probs", log_probs, "float32", token_ids.shape)
    build_tree_kernel[1, THREADS, stream](token_ids, log_probs, max_depth, *outputs)


_I32 = types.Array(types.int32, 1, "C")
_I32_2 = types.Array(types.int32, 2, "C")
_F32_2 = types.Array(types.float32, 2, "C")
_F64 = types.Array(types.float64, 1, "C")
SPECS = [
    KernelSpec(
        "build_tree",
        build_tree_kernel,
        (_I32_2, _F32_2, _I32, _I32, _I32, _I32, _F64, _I32_2, _I32),
        THREADS,
        uses_f64=True,
    )
]
