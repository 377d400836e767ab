"""What no kernel takes is refused in one line when an engine is opened, or its memory is foretold."""

from dataclasses import replace

import pytest
from engine.micro import DRAFTER, NANO_DRAFTER, NANO_TARGET, TARGET, write_micro_bundle

from ddtree.bundle import open_bundle
from ddtree.config import DrafterConfig, ModelConfig
from ddtree.engine import Engine
from ddtree.errors import UsageError
from ddtree.ops.plan_ops import PlanOps

CONFIG, DRAFT = ModelConfig.from_hf(TARGET), DrafterConfig.from_hf(DRAFTER)
CALL = {"max_budget": 5, "prefill_chunk": 64, "dtype": "f32", "gemm": "invariant"}
LATENT, HEAD = "kv_lora_rank \\+ qk_rope_head_dim", "the drafter's head_dim"
WEIGHT = "elements of a weight: .* at most 2147483647, found 2147483648"
NO_ROOM = "is more than the backend cuda has shared memory for with dtype"


def check(target=None, drafter=None, **call):
    PlanOps.check_sizes(replace(CONFIG, **target or {}), replace(DRAFT, **drafter or {}), **CALL | call)


@pytest.mark.parametrize(
    ("change", "call", "message"),
    [
        ({"target": {"kv_lora_rank": 768}}, {}, f"{LATENT}: 776 {NO_ROOM} f32"),
        ({"target": {"kv_lora_rank": 1536}}, {"dtype": "bf16"}, f"{LATENT}: 1544 {NO_ROOM} bf16"),
        ({"drafter": {"head_dim": 384}}, {}, f"{HEAD}: 384 {NO_ROOM} f32"),
        ({"drafter": {"head_dim": 768}}, {"dtype": "bf16"}, f"{HEAD}: 768 {NO_ROOM} bf16"),
        ({"target": {"intermediate_size": 2**26}}, {}, WEIGHT),
        ({"target": {"moe_intermediate_size": 2**26}}, {"gemm": "cublas"}, WEIGHT),
        (
            {"target": {"intermediate_size": 2**17}},
            {"prefill_chunk": 2**14},
            "elements of the input of a product, with 16384 rows: .* 2147483647, found 2147483648",
        ),
        ({}, {"prefill_chunk": 2**16}, "prefill_chunk: .* at most 65535, found 65536"),
    ],
)
def test_what_kernels_cannot_take_is_refused(change, call, message):
    with pytest.raises(UsageError, match=f"^{message}$"):
        check(**change, **call)


@pytest.mark.parametrize(
    ("change", "call"),
    [
        ({"target": {"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "drafter": {"head_dim": 128}}, {}),
        ({"target": {"kv_lora_rank": 768}, "drafter": {"head_dim": 384}}, {"dtype": "bf16"}),
        ({"target": {"intermediate_size": 2**26 - 1}}, {"prefill_chunk": 1}),
        ({"target": {"intermediate_size": 2**26}}, {"gemm": "cublas"}),
        ({}, {"prefill_chunk": 2**16 - 1}),
    ],
)
def test_what_they_can_is_not(change, call):
    check(**change, **call)


@pytest.mark.simulator
def test_an_engine_whose_attention_cannot_run_does_not_open(tmp_path):
    bundle = open_bundle(write_micro_bundle(tmp_path, 0, NANO_TARGET | {"kv_lora_rank": 768}, NANO_DRAFTER))
    with pytest.raises(UsageError, match=f"^{LATENT}: 776 {NO_ROOM} f32$"):
        Engine(bundle, backend="cuda", max_budget=2, max_context=8)
