"""The MoE gate on the device: which experts a token goes to, and with which weight. One warp a token.

`noaux_tc`: scores = 1 / (1 + exp(-logits)), ranked by score + bias, groups by the sum of their two best. `greedy` and
`group_limited_greedy`: scores = softmax(logits), groups by their best; greedy knows no groups. The best groups keep
their experts, the others' rank falls to -inf; then the greatest is taken, `num_experts_per_tok` times. Weights are the
scores of the chosen, divided by their sum (in the order of choice) + 1e-20 when asked, times a scale. Lower index wins.

A NaN ranks as -inf, so a row of NaNs still chooses experts that exist; its weights are NaN.
"""

import functools

import numpy as np
from numba import cuda, float32, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.primitives import (
    SIMULATED,
    WARP,
    after_previous,
    device_function,
    exp,
    index_of_key,
    order_key,
    warp_max,
    warp_sum,
)
from kernels_numba.primitives_select import value_of_key, warp_greatest
from kernels_numba.registry import KernelSpec

THREADS = WARP
EACH = (4, 128) if SIMULATED else (2, 4, 8, 16)  # experts a lane
MAX_EXPERTS = EACH[-1] * WARP
METHODS = ("noaux_tc", "greedy", "group_limited_greedy")


@device_function
def _take(keys, count, lane, scratch):
    """The index of the greatest of `count` shared keys, whose key becomes 0; only its own lane touches a key."""
    best = uint64(0)
    for i in range(lane, count, WARP):
        best = max(best, keys[i])
    index = index_of_key(warp_greatest(best, scratch))
    if index % WARP == lane:
        keys[index] = uint64(0)
    return index


@device_function
def _rank_groups(keys, num_groups, size, two_best, lane, group_keys):
    """group_keys[g] = the order key of group g's strength: its best, or the sum of its two best."""
    for group in range(lane, num_groups, WARP):
        first, second = uint64(0), uint64(0)
        for i in range(group * size, (group + 1) * size):
            key = keys[i]
            if key > first:
                first, second = key, first
            elif key > second:
                second = key
        strength = value_of_key(first)
        if two_best:
            strength += value_of_key(second)
        group_keys[group] = order_key(strength, group)


@functools.cache
def make_gate(each):
    """The kernel for up to `each` x WARP experts: a lane holds every WARP-th in registers, loaded all at once."""
    room = each * WARP

    @device_function
    def softmax(own, num_experts, lane, scratch):
        """own = softmax over the row's num_experts values."""
        most = float32(-np.inf)
        for j in range(each):
            if lane + j * WARP < num_experts:
                most = max(most, own[j])
        most = warp_max(most, scratch)
        total = float32(0)
        for j in range(each):
            if lane + j * WARP < num_experts:
                own[j] = exp(own[j] - most)
                total += own[j]
        total = warp_sum(total, scratch)
        for j in range(each):
            own[j] = own[j] / total

    @cuda.jit
    def gate_kernel(
        logits,
        weight,
        gates,
        num_experts,
        num_chosen,
        num_groups,
        kept_groups,
        use_bias,
        sigmoid,
        norm,
        scale,
    ):
        """Flat logits [M, E] and gates [E, M], the bias `weight` [E] if `use_bias`; one block of one warp a row.

        `sigmoid` means noaux_tc's scores and two best of a group; `norm` that weights are divided by their sum. The
        bias is on its way before the launch ahead has ended.
        """
        scratch = cuda.shared.array(THREADS, float32)
        key_scratch = cuda.shared.array(THREADS, uint64)
        scores = cuda.shared.array(room, float32)
        keys = cuda.shared.array(room, uint64)
        group_keys = cuda.shared.array(room, uint64)
        own, biases = cuda.local.array(each, float32), cuda.local.array(each, float32)
        left = cuda.local.array(each, uint64)
        lane, row, num_rows = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        last = int32(num_experts - 1)
        if use_bias:
            for j in range(each):
                biases[j] = weight[min(int32(lane + j * WARP), last)]
        after_previous()
        for j in range(each):
            own[j] = logits[row * num_experts + min(int32(lane + j * WARP), last)]
        if sigmoid:
            for j in range(each):
                own[j] = float32(1) / (float32(1) + exp(-own[j]))
        else:
            softmax(own, num_experts, lane, scratch)
        for j in range(each):
            expert = int32(lane + j * WARP)
            ranked = own[j]
            if use_bias:
                ranked += biases[j]
            if expert < num_experts:
                scores[expert], keys[expert] = own[j], order_key(ranked, expert)
        cuda.syncthreads()  # all scores and keys are there
        size = int32(uint32(num_experts) // uint32(num_groups))
        if kept_groups < num_groups:
            _rank_groups(keys, num_groups, size, sigmoid, lane, group_keys)
            for _ in range(kept_groups):
                _take(group_keys, num_groups, lane, key_scratch)
            cuda.syncthreads()  # the keys of kept groups are 0
        for j in range(each):
            expert = int32(lane + j * WARP)
            left[j] = uint64(0)
            if expert < num_experts:
                left[j] = keys[expert]
                if kept_groups < num_groups and group_keys[uint32(expert) // uint32(size)] != uint64(0):
                    left[j] = order_key(float32(-np.inf), expert)
        total = float32(0)
        for _ in range(num_chosen):
            best = uint64(0)
            for j in range(each):
                best = max(best, left[j])
            index = index_of_key(warp_greatest(best, key_scratch))
            for j in range(each):
                if lane + j * WARP == index:
                    left[j] = uint64(0)
            total += scores[index]
        total += float32(1e-20)
        for j in range(each):
            expert = int32(lane + j * WARP)
            value = float32(0)
            if left[j] == uint64(0):
                value = own[j]
                if norm:
                    value = value / total
                value = value * scale
            if expert < num_experts:
                gates[expert * num_rows + row] = value

    return gate_kernel


def gate(logits, bias, rule, gates, stream=0):
    """Gates of every row: logits f32[M, E], bias f32[E] or None, gates f32[E, M], zero where not chosen.

    `rule` has num_experts_per_tok, n_group, topk_group, norm_topk_prob, routed_scaling_factor and topk_method.
    Raises LaunchError.
    """
    check("gate: logits", logits, "float32", (None, None))
    num_rows, num_experts = logits.shape
    check("gate: gates", gates, "float32", (num_experts, num_rows))
    if bias is not None:
        check("gate: bias", bias, "float32", (num_experts,))
    method, chosen = rule.topk_method, rule.num_experts_per_tok
    require(method in METHODS, f"gate: topk_method: expected one of {', '.join(METHODS)}, found {method!r}")
    require(num_experts <= MAX_EXPERTS, f"gate: expected at most {MAX_EXPERTS} experts, found {num_experts}")
    require(
        1 <= chosen <= num_experts, f"gate: expected to choose 1 to {num_experts} experts, found {chosen}"
    )
    groups, kept = (1, 1) if method == "greedy" else (rule.n_group, rule.topk_group)
    least = 2 if method == "noaux_tc" and kept < groups else 1  # experts a group
    require(
        1 <= kept <= groups and num_experts % groups == 0 and num_experts >= groups * least,
        f"gate: cannot keep {kept} of {groups} groups of {num_experts} experts",
    )
    if not num_rows:
        return
    numbers = [np.int32(n) for n in (num_experts, chosen, groups, kept)]
    flags = [np.int32(f) for f in (bias is not None, method == "noaux_tc", bool(rule.norm_topk_prob))]
    flat = logits.reshape(-1)
    kernel = make_gate(next(each for each in EACH if each * WARP >= num_experts))
    kernel[num_rows, THREADS, stream](
        flat,
        flat if bias is None else bias,
        gates.reshape(-1),
        *numbers,
        *flags,
        np.float32(rule.routed_scaling_factor),
    )


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [
    KernelSpec(f"gate_{each}", make_gate(each), (_FLAT,) * 3 + (types.int32,) * 7 + (types.float32,), THREADS)
    for each in EACH
]
