"""The best-first tree (DDTree, arXiv 2604.12989) from per-depth candidates, exact, on the GPU with no host step.

    child = w + p[d + 1, 0],   sibling = (w - p[d, r]) + p[d, r + 1]   in f64, of a node of weight w, depth d, rank r

Take the greatest weight, equal ones by the lexicographically smaller tuple of ranks; then its sibling and its first
child become candidates. So each node has one open candidate among its children, and candidates are slots: slot i holds
the next child of node i. One warp takes the nodes. Lane g keeps the best of slots g * GROUP .. in registers; a step is
a warp maximum over the lanes, the two sums, and a warp maximum over the slots of the group that lost its best. Weights
compare as u64 of the same order. Ties walk up the ranks. The rest of the block fills the outputs afterwards.

f64 is part of the rule: the published sums are f64, and f32 would choose other nodes. Knows tables of tokens and
log-probabilities, not the drafter that filled them.
"""

from numba import cuda, float64, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.primitives import SIMULATED, WARP, after_previous, device_function
from kernels_numba.primitives_select import (
    EMPTY,
    EMPTY_HIGH,
    is_finite,
    lowest_lane,
    sum_key,
    warp_barrier,
    warp_first,
    warp_key,
    warp_lanes,
    warp_pick,
)
from kernels_numba.registry import KernelSpec

THREADS = 4 if SIMULATED else 512  # the first WARP take nodes
MAX_BUDGET = 128 if SIMULATED else 1024
GROUP = MAX_BUDGET // WARP  # slots a lane answers for
GROUP_MASK = 0xFFFFFFFF // GROUP * GROUP
SPAN = GROUP // WARP  # of which a lane reads so many; one on the GPU
MAX_ROWS = MAX_BUDGET + 1
MAX_DEPTHS = 32
SECTOR = 8  # f32 that come into the cache together

# A candidate or a node in 32 bits: its parent's row, its rank among siblings, its depth.
RANK_SHIFT, DEPTH_SHIFT, FIELD = 10, 20, 1023
DEPTH_MASK = 0xFFFFFFFF >> DEPTH_SHIFT << DEPTH_SHIFT


@device_function
def _precedes(a, b, nodes):
    """Whether the ranks along a's path come before those along b's; neither is an ancestor of the other."""
    while a >> uint32(DEPTH_SHIFT) > b >> uint32(DEPTH_SHIFT):
        a = nodes[a & uint32(FIELD)]
    while b >> uint32(DEPTH_SHIFT) > a >> uint32(DEPTH_SHIFT):
        b = nodes[b & uint32(FIELD)]
    while (a ^ b) & uint32(FIELD):  # until they are siblings
        a = nodes[a & uint32(FIELD)]
        b = nodes[b & uint32(FIELD)]
    return a & uint32(FIELD << RANK_SHIFT) < b & uint32(FIELD << RANK_SHIFT)


@device_function
def _first_of(mask, pack, nodes, scratch):
    """Of the candidates `pack` that the lanes in `mask` hold, the first by rank."""
    best = warp_pick(pack, lowest_lane(mask), scratch)
    mask = uint32(mask & uint32(mask - uint32(1)))
    while mask != uint32(0):
        other = warp_pick(pack, lowest_lane(mask), scratch)
        mask = uint32(mask & uint32(mask - uint32(1)))
        if _precedes(other, best, nodes):
            best = other
    return best


@device_function
def _take_best(log_probs, levels, width, budget, slots, nodes, node_weights, scratch):
    """Take nodes until budget are taken or no candidate is left; returns their number. One warp.

    slots: keys u64, weights f64 and packs u32 [MAX_ROWS], all EMPTY but perhaps the root's; nodes u32 and node_weights
    f64 [MAX_ROWS] are written.
    """
    keys, weights, packs = slots
    group_keys = cuda.local.array(SPAN, uint64)
    group_packs = cuda.local.array(SPAN, uint32)
    lane = uint32(uint32(cuda.threadIdx.x) % uint32(WARP))
    best_key, best_pack = uint64(EMPTY), uint32(0)
    if lane == uint32(0):
        best_key, best_pack = keys[uint32(0)], packs[uint32(0)]
    taken = uint32(0)
    while taken < budget:
        high, mask, pack = warp_first(best_key, best_pack, scratch)
        if mask & uint32(mask - uint32(1)):
            if high <= uint32(EMPTY_HIGH):
                break
            mask = warp_lanes(best_key == warp_key(best_key, high, scratch), scratch)
            pack = _first_of(mask, best_pack, nodes, scratch)
        slot = uint32(pack & uint32(FIELD))
        rank = uint32((pack >> uint32(RANK_SHIFT)) & uint32(FIELD))
        depth = uint32(pack >> uint32(DEPTH_SHIFT))
        level = uint32(depth - uint32(1))
        taken = uint32(taken + uint32(1))

        # Loaded in any case, in range, so that no branch stands in the way of the next load.
        first_place = uint32(uint32(slot & uint32(GROUP_MASK)) + lane)
        for i in range(SPAN):
            place = uint32(first_place + uint32(i * WARP))
            group_keys[i], group_packs[i] = keys[place], packs[place]
        weight = weights[slot]
        next_rank = uint32(rank + uint32(1))
        own = log_probs[level, rank]
        following = log_probs[level, min(next_rank, uint32(width - uint32(1)))]
        top = log_probs[min(depth, uint32(levels - uint32(1))), uint32(0)]
        sibling = (weight - float64(own)) + float64(following)
        child = weight + float64(top)
        # Weights are finite, and f64 has room for any sum of f32: a sum is finite when what it adds is.
        sibling_key = sum_key(sibling) if next_rank < width and is_finite(following) else uint64(EMPTY)
        child_key = sum_key(child) if depth < levels and is_finite(top) else uint64(EMPTY)
        sibling_pack = uint32(pack + uint32(1 << RANK_SHIFT))
        child_pack = uint32(uint32(uint32(pack & uint32(DEPTH_MASK)) + uint32(1 << DEPTH_SHIFT)) | taken)
        # The best of the group again, with the slot's next candidate; the new node's slot may lie in it too.
        if lane == uint32(0):
            nodes[taken] = pack
            node_weights[taken] = weight
        warp_barrier()  # the node stands; the group's old candidates are read
        key, found = uint64(EMPTY), uint32(0)
        for i in range(SPAN):
            place = uint32(first_place + uint32(i * WARP))
            place_key = sibling_key if place == slot else group_keys[i]
            place_pack = sibling_pack if place == slot else group_packs[i]
            place_key = child_key if place == taken else place_key
            place_pack = child_pack if place == taken else place_pack
            if place_key > key or (
                place_key == key and key > uint64(EMPTY) and _precedes(place_pack, found, nodes)
            ):
                key, found = place_key, place_pack
        high, mask, group_pack = warp_first(key, found, scratch)
        group_key = warp_key(key, high, scratch)
        if mask & uint32(mask - uint32(1)) and high > uint32(EMPTY_HIGH):
            mask = warp_lanes(key == group_key, scratch)
            group_pack = _first_of(mask, found, nodes, scratch)

        joins = lane == uint32(taken // uint32(GROUP)) and child_key >= best_key and child_key > uint64(EMPTY)
        if joins and child_key == best_key:
            joins = _precedes(child_pack, best_pack, nodes)
        best_key = child_key if joins else best_key
        best_pack = child_pack if joins else best_pack
        lost = lane == uint32(slot // uint32(GROUP))
        best_key = group_key if lost else best_key
        best_pack = group_pack if lost else best_pack
        if lane == uint32(0):
            keys[slot], weights[slot], packs[slot] = sibling_key, sibling, sibling_pack
            keys[taken], weights[taken], packs[taken] = child_key, child, child_pack
        warp_barrier()  # both candidates stand
    return taken


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
    keys = cuda.shared.array(MAX_ROWS, uint64)
    weights = cuda.shared.array(MAX_ROWS, float64)
    packs = cuda.shared.array(MAX_ROWS, uint32)
    nodes = cuda.shared.array(MAX_ROWS, uint32)
    node_weights = cuda.shared.array(MAX_ROWS, float64)
    scratch = cuda.shared.array(WARP, uint64)
    total = cuda.shared.array(1, int32)
    thread = int32(cuda.threadIdx.x)
    budget = int32(out_parents.shape[0]) - int32(1)
    levels = max(int32(0), min(int32(log_probs.shape[0]), max_depth[0]))
    columns = int32(log_probs.shape[1])
    width = min(columns, budget)
    warm = int32(0)
    for place in range(thread * int32(SECTOR), levels * columns, int32(THREADS * SECTOR)):
        level = uint32(uint32(place) // uint32(columns))
        rank = uint32(uint32(place) % uint32(columns))
        warm |= int32(is_finite(log_probs[level, rank]))
    for place in range(thread, int32(MAX_ROWS), int32(THREADS)):
        keys[place] = uint64(EMPTY)
        packs[place] = uint32(0)
    cuda.syncthreads_or(
        warm
    )  # the slots are empty, the table is in the L1 cache: no more than that is meant by `warm`
    if thread == int32(0) and levels > int32(0) and width > int32(0) and is_finite(log_probs[0, 0]):
        weights[0] = float64(log_probs[0, 0])
        keys[0] = sum_key(weights[0])
        packs[0] = uint32(1 << DEPTH_SHIFT)
    cuda.syncthreads()  # the first candidate stands in the root's slot
    if warp_pick(uint32(thread // int32(WARP)), 0, scratch) == uint32(
        0
    ):  # as the compiler sees, alike in all lanes
        taken = _take_best(
            log_probs,
            uint32(levels),
            uint32(width),
            uint32(budget),
            (keys, weights, packs),
            nodes,
            node_weights,
            scratch,
        )
        if thread == int32(0):
            total[0] = int32(taken)
            out_num_nodes[0] = int32(taken)
    cuda.syncthreads()  # the nodes are taken

    num_nodes = total[0]
    num_columns = int32(out_lineage.shape[1])
    for row in range(thread, budget + int32(1), int32(THREADS)):
        used = row > int32(0) and row <= num_nodes
        pack = nodes[row] if used else uint32(0)
        rank = (pack >> uint32(RANK_SHIFT)) & uint32(FIELD)
        depth = int32(pack >> uint32(DEPTH_SHIFT))
        out_parents[row] = int32(pack & uint32(FIELD)) if used else int32(-1)
        out_depths[row] = depth
        if row > int32(0):
            out_token_ids[row] = token_ids[depth - int32(1), rank] if used else int32(0)
        out_log_weights[row] = node_weights[row] if used else float64(0)
        for column in range(depth + int32(1) if row <= num_nodes else int32(0), num_columns):
            out_lineage[row, column] = int32(-1)
        ancestor = row
        for column in range(depth, int32(0), int32(-1)):
            out_lineage[row, column] = ancestor
            ancestor = int32(nodes[ancestor] & uint32(FIELD))
        if row <= num_nodes:
            out_lineage[row, 0] = int32(0)


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
    check("build_tree: token_ids", token_ids, "int32", (None, None))
    depths, width = token_ids.shape
    check("build_tree: log_probs", log_probs, "float32", (depths, width))
    require(depths <= MAX_DEPTHS, f"build_tree: {depths} depths, at most {MAX_DEPTHS} fit")
    require(0 <= budget <= MAX_BUDGET, f"build_tree: budget {budget}, wanted 0..{MAX_BUDGET}")
    check("build_tree: max_depth", max_depth, "int32", (1,))
    for name, array in (("token_ids", out_token_ids), ("parents", out_parents), ("depths", out_depths)):
        check(f"build_tree: out_{name}", array, "int32", (budget + 1,))
    check("build_tree: out_log_weights", out_log_weights, "float64", (budget + 1,))
    check("build_tree: out_lineage", out_lineage, "int32", (budget + 1, depths + 1))
    check("build_tree: out_num_nodes", out_num_nodes, "int32", (1,))
    build_tree_kernel[1, THREADS, stream](
        token_ids,
        log_probs,
        max_depth,
        out_token_ids,
        out_parents,
        out_depths,
        out_log_weights,
        out_lineage,
        out_num_nodes,
    )


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
