"""The best-first tree of `tree_build` where a candidate's log-probability is read below its parent, on the GPU.

    child = w + p[d + 1, c, 0],   sibling = (w - p[d, b, r]) + p[d, b, r + 1]   in f64

of a node of weight w, depth d, rank r along row b, the candidate that its parent is, and itself candidate
c = places[d, b, r]. With rows that are alike for every parent it is the tree of `tree_build`, in every bit.
"""

from numba import cuda, int32, types, uint32

from kernels_numba.checks import check, require
from kernels_numba.primitives import after_previous, device_function
from kernels_numba.primitives_select import is_finite
from kernels_numba.primitives_tree import (
    DEPTH_MASK,
    DEPTH_SHIFT,
    SECTOR,
    SIBLING_SHIFT,
    THREADS,
    levels_used,
    make_tree,
)
from kernels_numba.registry import KernelSpec
from kernels_numba.tree_build import check_tree

# What tells siblings apart, from the lowest bit: the candidate itself, its parent's (alike in all), its rank.
MAX_CANDIDATES = 16
CANDIDATE, BITS = MAX_CANDIDATES - 1, (MAX_CANDIDATES - 1).bit_length()
PARENT_SHIFT, RANK_SHIFT = SIBLING_SHIFT + BITS, SIBLING_SHIFT + 2 * BITS
assert RANK_SHIFT + BITS <= DEPTH_SHIFT
BUT_CANDIDATE = 0xFFFFFFFF - (CANDIDATE << SIBLING_SHIFT)


@device_function
def _first(table):
    """As `make_tree` wants it; the root counts as candidate 0."""
    places, log_probs = table
    candidate = uint32(uint32(places[0, 0, 0]) << uint32(SIBLING_SHIFT))
    return log_probs[0, 0, 0], uint32(uint32(1 << DEPTH_SHIFT) | candidate)


@device_function
def _read(table, pack, levels, width):
    """As `make_tree` wants it. What is read hangs on the pack alone, so all of it is in flight at once."""
    places, log_probs = table
    depth = uint32(pack >> uint32(DEPTH_SHIFT))
    level = uint32(depth - uint32(1))
    rank = uint32((pack >> uint32(RANK_SHIFT)) & uint32(CANDIDATE))
    parent = uint32((pack >> uint32(PARENT_SHIFT)) & uint32(CANDIDATE))
    candidate = uint32((pack >> uint32(SIBLING_SHIFT)) & uint32(CANDIDATE))
    next_rank = uint32(rank + uint32(1))
    beside = min(next_rank, uint32(width - uint32(1)))
    below = min(depth, uint32(levels - uint32(1)))
    own = log_probs[level, parent, rank]
    following = log_probs[level, parent, beside]
    top = log_probs[below, candidate, uint32(0)]
    sibling = uint32(uint32(places[level, parent, beside]) << uint32(SIBLING_SHIFT))
    child = uint32(uint32(places[below, candidate, uint32(0)]) << uint32(SIBLING_SHIFT))
    sibling_pack = uint32(uint32(uint32(pack & uint32(BUT_CANDIDATE)) + uint32(1 << RANK_SHIFT)) | sibling)
    child_pack = uint32(uint32(pack & uint32(DEPTH_MASK)) + uint32(1 << DEPTH_SHIFT))
    child_pack = uint32(child_pack | uint32(child | uint32(candidate << uint32(PARENT_SHIFT))))
    return (own, following, top), (sibling_pack, child_pack), next_rank < width


_tree = make_tree(_first, _read, CANDIDATE)


@cuda.jit
def build_branch_tree_kernel(
    token_ids,
    places,
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
    width = int32(log_probs.shape[1])
    warm, entries = int32(0), int32(levels * width * width)
    for entry in range(int32(cuda.threadIdx.x) * int32(SECTOR), entries, int32(THREADS * SECTOR)):
        row = uint32(uint32(entry) // uint32(width))
        level, parent, rank = row // uint32(width), row % uint32(width), uint32(entry) % uint32(width)
        warm |= int32(is_finite(log_probs[level, parent, rank])) | places[level, parent, rank]
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage, out_num_nodes
    _tree((places, log_probs), levels, width, warm, token_ids, outputs)


def build_branch_tree(
    token_ids,
    places,
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

    token_ids i32 [L, P]; places i32 and log_probs f32 [L, P, P] as `branch_scores` writes them: row i of depth d
    follows candidate i of depth d - 1, row 0 of depth 0 the root, descending, places in 0..P - 1. P is at most
    MAX_CANDIDATES. The rest is as in `tree_build.build_tree`. Raises LaunchError.
    """
    outputs = out_token_ids, out_parents, out_depths, out_log_weights, out_lineage, out_num_nodes
    check_tree("build_branch_tree", token_ids, budget, max_depth, outputs)
    depths, width = token_ids.shape
    require(width <= MAX_CANDIDATES, f"build_branch_tree: {width} candidates, at most {MAX_CANDIDATES} fit")
    check("build_branch_tree: places", places, "int32", (depths, width, width))
    check("build_branch_tree: log_probs", log_probs, "float32", (depths, width, width))
    build_branch_tree_kernel[1, THREADS, stream](token_ids, places, log_probs, max_depth, *outputs)


_I32, _I32_2, _I32_3 = (types.Array(types.int32, dims, "C") for dims in (1, 2, 3))
_F32_3, _F64 = types.Array(types.float32, 3, "C"), types.Array(types.float64, 1, "C")
SPECS = [
    KernelSpec(
        "build_branch_tree",
        build_branch_tree_kernel,
        (_I32_2, _I32_3, _F32_3, _I32, _I32, _I32, _I32, _F64, _I32_2, _I32),
        THREADS,
        uses_f64=True,
    )
]
