"""The taking of a best-first tree's nodes and the writing of its rows, in one block, whatever table they come from.

One warp takes the nodes. A node has one open candidate among its children, and candidates are slots: slot i holds the
next child of node i. Lane g keeps the best of slots g * GROUP .. in registers; a step is a warp maximum over the lanes,
the two sums, and a warp maximum over the slots of the group that lost its best. Weights compare as u64 of the same
order. Ties walk up the ranks. The rest of the block fills the outputs afterwards.
"""

from numba import cuda, float64, int32, uint32, uint64

from kernels_numba.primitives import SIMULATED, WARP, device_function
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

THREADS = 4 if SIMULATED else 512  # the first WARP take nodes
MAX_BUDGET = 128 if SIMULATED else 1024
GROUP = MAX_BUDGET // WARP  # slots a lane answers for
GROUP_MASK = 0xFFFFFFFF // GROUP * GROUP
SPAN = GROUP // WARP  # of which a lane reads so many; one on the GPU
MAX_ROWS = MAX_BUDGET + 1
MAX_DEPTHS = 32
SECTOR = 8  # f32 that come into the cache together

# A candidate or a node in 32 bits: its parent's row, what tells it from its siblings (rank first), its depth.
ROW, SIBLING_SHIFT, SIBLING, DEPTH_SHIFT = 1023, 10, 4095, 22
DEPTH_MASK = 0xFFFFFFFF >> DEPTH_SHIFT << DEPTH_SHIFT


@device_function
def _precedes(a, b, nodes):
    """Whether the ranks along a's path come before those along b's; neither is an ancestor of the other."""
    while a >> uint32(DEPTH_SHIFT) > b >> uint32(DEPTH_SHIFT):
        a = nodes[a & uint32(ROW)]
    while b >> uint32(DEPTH_SHIFT) > a >> uint32(DEPTH_SHIFT):
        b = nodes[b & uint32(ROW)]
    while (a ^ b) & uint32(ROW):  # until they are siblings
        a = nodes[a & uint32(ROW)]
        b = nodes[b & uint32(ROW)]
    return a & uint32(SIBLING << SIBLING_SHIFT) < b & uint32(SIBLING << SIBLING_SHIFT)


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


def make_tree(first, read, column_mask):
    """The device function that builds a whole tree, for the kernels that read its table through these two.

    first(table) -> the first candidate's log-probability and pack. read(table, pack, levels, width), of a candidate
    that is taken -> (its log-probability, its next sibling's, its first child's), (the sibling's pack, the child's but
    for the row), whether there is such a sibling; what there is not is read in range. The token of a node stands in
    column (pack >> SIBLING_SHIFT) & column_mask of its depth.
    """

    @device_function
    def take_best(table, levels, width, budget, slots, nodes, node_weights, scratch):
        """Take nodes until budget are taken or no candidate is left; returns their number. One warp.

        slots: keys u64, weights f64 and packs u32 [MAX_ROWS], all EMPTY but perhaps the root's; nodes u32 and
        node_weights f64 [MAX_ROWS] are written.
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
            slot = uint32(pack & uint32(ROW))
            depth = uint32(pack >> uint32(DEPTH_SHIFT))
            taken = uint32(taken + uint32(1))

            # Loaded in any case, in range, so that no branch stands in the way of the next load.
            first_place = uint32(uint32(slot & uint32(GROUP_MASK)) + lane)
            for i in range(SPAN):
                place = uint32(first_place + uint32(i * WARP))
                group_keys[i], group_packs[i] = keys[place], packs[place]
            weight = weights[slot]
            (own, following, top), (sibling_pack, child_pack), has_sibling = read(table, pack, levels, width)
            sibling = (weight - float64(own)) + float64(following)
            child = weight + float64(top)
            # Weights are finite, and f64 has room for any sum of f32: a sum is finite when what it adds is.
            sibling_key = sum_key(sibling) if has_sibling and is_finite(following) else uint64(EMPTY)
            child_key = sum_key(child) if depth < levels and is_finite(top) else uint64(EMPTY)
            child_pack = uint32(child_pack | taken)
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

            joins = lane == uint32(taken // uint32(GROUP))
            joins = joins and child_key >= best_key and child_key > uint64(EMPTY)
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

    @device_function
    def build(table, levels, width, warm, token_ids, outputs):
        """Build from the first `levels` depths. Every thread of the block calls; `warm`: what it read of the table."""
        out_token_ids, out_parents, out_depths, out_log_weights, out_lineage, out_num_nodes = outputs
        keys = cuda.shared.array(MAX_ROWS, uint64)
        weights = cuda.shared.array(MAX_ROWS, float64)
        packs = cuda.shared.array(MAX_ROWS, uint32)
        nodes = cuda.shared.array(MAX_ROWS, uint32)
        node_weights = cuda.shared.array(MAX_ROWS, float64)
        scratch = cuda.shared.array(WARP, uint64)
        total = cuda.shared.array(1, int32)
        thread = int32(cuda.threadIdx.x)
        budget = int32(out_parents.shape[0] - 1)
        for place in range(thread, int32(MAX_ROWS), int32(THREADS)):
            keys[place] = uint64(EMPTY)
            packs[place] = uint32(0)
        # The slots are empty, the table is in the L1 cache: no more than that is meant by `warm`.
        cuda.syncthreads_or(warm)
        if thread == int32(0) and levels > int32(0) and width > int32(0):
            log_prob, pack = first(table)
            if is_finite(log_prob):
                weights[0] = float64(log_prob)
                keys[0] = sum_key(weights[0])
                packs[0] = pack
        cuda.syncthreads()  # the first candidate stands in the root's slot
        # The first warp alone: as the compiler sees, alike in all its lanes.
        if warp_pick(uint32(thread // int32(WARP)), 0, scratch) == uint32(0):
            slots = keys, weights, packs
            taken = take_best(
                table, uint32(levels), uint32(width), uint32(budget), slots, nodes, node_weights, scratch
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
            which = uint32((pack >> uint32(SIBLING_SHIFT)) & uint32(column_mask))
            depth = int32(pack >> uint32(DEPTH_SHIFT))
            out_parents[row] = int32(pack & uint32(ROW)) if used else int32(-1)
            out_depths[row] = depth
            if row > int32(0):
                out_token_ids[row] = token_ids[depth - int32(1), which] if used else int32(0)
            out_log_weights[row] = node_weights[row] if used else float64(0)
            for column in range(depth + int32(1) if row <= num_nodes else int32(0), num_columns):
                out_lineage[row, column] = int32(-1)
            ancestor = row
            for column in range(depth, int32(0), int32(-1)):
                out_lineage[row, column] = ancestor
                ancestor = int32(nodes[ancestor] & uint32(ROW))
            if row <= num_nodes:
                out_lineage[row, 0] = int32(0)

    return build


@device_function
def levels_used(log_probs, max_depth):
    """How many depths of a table a tree may use, i32."""
    return int32(max(int32(0), min(int32(log_probs.shape[0]), max_depth[0])))
