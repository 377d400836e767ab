"""The MoE gate on the device: which experts a token goes to, and with which weight. One warp a token.

`noaux_tc`: scores = 1 / (1 + exp(-logits)), ranked by score + bias, groups by the sum of their two best. `greedy` and
`group_limited_greedy`: scores = softmax(logits), groups by their best; greedy knows no groups. The best groups keep
their experts, the others' rank falls to -inf; then the greatest is taken, `num_experts_per_tok` times. Weights are the
scores of the chosen, divided by their sum (in the order of choice) + 1e-20 when asked, times a scale. Lower index wins.

A NaN ranks as -inf, so a row of NaNs still chooses experts that exist; its weights are NaN.
"""

import numpy as np
from numba import cuda, float32, int32, types, uint32, uint64

from kernels_numba.checks import check, require
from kernels_numba.primitives import (
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
MAX_EXPERTS = 512
METHODS = ("noaux_tc", "greedy", "group_limited_greedy")


@device_function
def _softmax(scores, num_experts, lane, scratch):
    """scores = softmax(scores) over a shared row of num_experts; each lane keeps to its own elements."""
    most = float32(-np.inf)
    for expert in range(lane, num_experts, WARP):
        most = max(most, scores[expert])
    most = warp_max(most, scratch)
    total = float32(0)
    for expert in range(lane, num_experts, WARP):
        value = exp(scores[expert] - most)
        scores[expert] = value
        total += value
    total = warp_sum(total, scratch)
    for expert in range(lane, num_experts, WARP):
        scores[expert] = scores[expert] / total


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


@cuda.jit
def gate_kernel(
    logits, bias, gates, num_experts, num_chosen, num_groups, kept_groups, use_bias, sigmoid, norm, scale
):
    """Flat logits [M, E] and gates [E, M], bias [E] if `use_bias`; one block of one warp a row.

    `sigmoid` means noaux_tc's scores and two best of a group; `norm` that weights are divided by their sum.
    """
    after_previous()
    scratch = cuda.shared.array(THREADS, float32)
    key_scratch = cuda.shared.array(THREADS, uint64)
    scores = cuda.shared.array(MAX_EXPERTS, float32)
    keys = cuda.shared.array(MAX_EXPERTS, uint64)
    group_keys = cuda.shared.array(MAX_EXPERTS, uint64)
    lane, row, num_rows = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    for expert in range(lane, num_experts, WARP):
        scores[expert] = logits[row * num_experts + expert]
    if sigmoid:
        for expert in range(lane, num_experts, WARP):
            scores[expert] = float32(1) / (float32(1) + exp(-scores[expert]))
    else:
        _softmax(scores, num_experts, lane, scratch)
    for expert in range(lane, num_experts, WARP):
        ranked = scores[expert]
        if use_bias:
            ranked += bias[expert]
        keys[expert] = order_key(ranked, expert)
    cuda.syncthreads()  # all scores and keys are there
    if kept_groups < num_groups:
        size = int32(uint32(num_experts) // uint32(num_groups))
        _rank_groups(keys, num_groups, size, sigmoid, lane, group_keys)
        for _ in range(kept_groups):
            _take(group_keys, num_groups, lane, key_scratch)
        cuda.syncthreads()  # the keys of kept groups are 0
        for expert in range(lane, num_experts, WARP):
            if group_keys[uint32(expert) // uint32(size)] != uint64(0):
                keys[expert] = order_key(float32(-np.inf), expert)
    total = float32(0)
    for _ in range(num_chosen):
        total += scores[_take(keys, num_experts, lane, key_scratch)]
    total += float32(1e-20)
    for expert in range(lane, num_experts, WARP):
        weight = float32(0)
        if keys[expert] == uint64(0):
            weight = scores[expert]
            if norm:
                weight = weight / total
            weight = weight * scale
        gates[expert * num_rows + row] = weight


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
    gate_kernel[num_rows, THREADS, stream](
        flat,
        flat if bias is None else bias,
        gates.reshape(-1),
        *numbers,
        *flags,
        np.float32(rule.routed_scaling_factor),
    )


_FLAT = types.Array(types.float32, 1, "C")
SPECS = [KernelSpec("gate", gate_kernel, (_FLAT,) * 3 + (types.int32,) * 7 + (types.float32,), THREADS)]
