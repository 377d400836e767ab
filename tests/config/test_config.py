"""Configs: both spellings, nested ones, and every wrong field named in one line."""

import math

import pytest
from config.hf_configs import KIMI, NAMES, changed, read
from support import assert_one_line

from ddtree.config import DrafterConfig, ModelConfig
from ddtree.errors import ConfigError
from ddtree.rope import RopeConfig

# --- targets ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_are_one_config(name):
    assert ModelConfig.from_hf(read(name)) == ModelConfig.from_hf(read(name, "config_legacy.json"))


def test_fields_of_a_fixture():
    config = ModelConfig.from_hf(read("dsv3"))
    assert (config.hidden_size, config.q_lora_rank, config.kv_lora_rank, config.q_head_dim) == (
        128,
        48,
        32,
        24,
    )
    assert (config.n_group, config.topk_group, config.num_experts_per_tok) == (2, 1, 2)
    assert [config.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert config.rope == RopeConfig(10000.0) and config.rope_interleave and not config.tie_word_embeddings
    assert config.eos_token_ids == (1,) and config.shared_intermediate_size == 64


def test_kimi_nests_its_text_model():
    """K2.5 and K2.6 put the language model under text_config, beside a vision tower."""
    nested = {
        "model_type": "kimi_k25",
        "vision_config": {"hidden_size": 1152},
        "text_config": KIMI,
        "vocab_size": 1,
    }
    config = ModelConfig.from_hf(nested)
    assert config == ModelConfig.from_hf(KIMI)
    assert (config.vocab_size, config.rms_norm_eps, config.rope.theta) == (163840, 1e-5, 50000.0)
    assert config.eos_token_ids == (163586,) and config.shared_intermediate_size == 2048


def test_deepseek_v2_has_softmax_scores_no_normalisation_and_perhaps_no_query_lora():
    v2 = {
        key: value
        for key, value in KIMI.items()
        if key not in ("scoring_func", "norm_topk_prob", "q_lora_rank")
    }
    config = ModelConfig.from_hf(v2 | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3})
    assert (config.scoring_func, config.norm_topk_prob, config.q_lora_rank) == ("softmax", False, None)
    assert ModelConfig.from_hf(v2 | {"q_lora_rank": None}).q_lora_rank is None


def test_end_tokens_may_be_one_several_or_none():
    for value, want in ((7, (7,)), ([7, 9], (7, 9)), (None, ()), ([], ())):
        assert ModelConfig.from_hf(changed(read("dsv3"), "eos_token_id", value)).eos_token_ids == want


REQUIRED = [
    *(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "kv_lora_rank",
    ),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size", "n_routed_experts"),
    *("num_experts_per_tok", "rms_norm_eps", "max_position_embeddings"),
]


@pytest.mark.parametrize("field", [*REQUIRED, "rope_parameters.rope_theta"])
def test_a_missing_field_is_named(field):
    for value in (..., None):
        with pytest.raises(
            ConfigError, match=rf"there\.json.*: field {field.split('.')[-1]} is missing"
        ) as caught:
            ModelConfig.from_hf(changed(read("dsv3"), field, value), "there.json")
        assert_one_line(caught.value)


WRONG = [
    *(
        (field, value)
        for field in ("vocab_size", "kv_lora_rank")
        for value in (0, -1, 1.0, "8", True, [8], {})
    ),
    *(("q_lora_rank", value) for value in (0, "48")),
    *(("rms_norm_eps", value) for value in (0, -1e-6, "1e-6", True, [1e-6])),
    *(("norm_topk_prob", value) for value in (1, "true", 0.0)),
    *(("topk_method", value) for value in ("best", 3, ["greedy"])),
    *(("scoring_func", value) for value in ("tanh", None.__class__.__name__)),
    *(("eos_token_id", value) for value in ("1", [1.0], -1, [True], 512)),
    *(("first_k_dense_replace", value) for value in (-1, 4)),
    ("qk_rope_head_dim", 7),
    ("n_group", 3),
    ("topk_group", 3),
    ("num_experts_per_tok", 5),  # four experts to a group, one group chosen
    ("topk_method", "greedy"),
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("moe_layer_freq", 2),
    ("moe_layer_freq", [0, 1, 1]),
    ("rope_parameters.rope_type", "linear"),
    ("rope_parameters.rope_theta", -1.0),
    ("rope_parameters.rope_theta", 1.0),  # its logarithm divides
    ("rope_parameters.factor", "40"),
    ("rope_parameters.factor", 0),
    ("rope_parameters.original_max_position_embeddings", ...),
    ("rope_parameters.original_max_position_embeddings", 64.5),
    ("rope_parameters.beta_fast", 0),
    ("rope_parameters.attention_factor", -1),
    ("rope_parameters.mscale", "1"),
    ("rope_parameters", [1]),
    ("rope_parameters", "yarn"),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_a_wrong_value_is_named(field, value):
    hf = changed(read("dsv3_yarn") | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}, field, value)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(hf, "there.json")
    assert_one_line(caught.value)
    assert "there.json" in str(caught.value)
    named = {"rope_parameters": "rope", "rope_type": "rope type"}.get(
        field.split(".")[-1], field.split(".")[-1]
    )
    assert ("noaux_tc" if value == "greedy" else named) in str(caught.value)


@pytest.mark.parametrize("hf", [None, [], "text", 3, {}, {"text_config": {}}], ids=str)
def test_what_is_no_config(hf):
    for kind in (ModelConfig, DrafterConfig):
        with pytest.raises(ConfigError) as caught:
            kind.from_hf(hf)
        assert_one_line(caught.value)


def places(hf, prefix=""):
    """Dotted names of every field, nested ones too."""
    for key, value in hf.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from places(value, f"{prefix}{key}.")


ANYTHING = [
    *(None, True, False, 0, 1, -1, 3, 2**63, 10**400, 0.0, 0.5, -1e308, 1e308, 5e-324, math.inf, math.nan),
    *(
        "",
        "yarn",
        "\ud800",
        [],
        [0],
        [None],
        ["x", 1],
        [[]],
        {},
        {"a": 1},
        {"rope_type": []},
        {"rope_type": "yarn"},
    ),
]
TARGETS = [read("dsv3"), read("dsv3_yarn"), read("dsv3_yarn", "config_legacy.json")]
DRAFTER = read("dsv3", kind="draft") | {"rope_scaling": None}
PLACES = [(ModelConfig, hf, at) for hf in TARGETS for at in places(hf)]
PLACES += [(DrafterConfig, DRAFTER, at) for at in places(DRAFTER)]


@pytest.mark.parametrize("value", ANYTHING, ids=lambda value: repr(value)[:20])
def test_any_json_anywhere_is_a_config_or_a_config_error(value):
    for kind, hf, where in PLACES:
        try:
            kind.from_hf(changed(hf, where, value))
        except ConfigError as error:
            assert_one_line(error)
        except Exception as error:
            raise AssertionError(f"{kind.__name__}, {where}: {error!r}") from error


# --- drafters -----------------------------------------------------------------------------------------------------


def test_a_drafter():
    config = DrafterConfig.from_hf(read("dsv3", kind="draft"))
    assert (config.block_size, config.horizon, config.mask_token_id, config.target_layer_ids) == (
        16,
        15,
        511,
        (0, 1),
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert config.context_window is None and config.rope == RopeConfig(1e6)
    config.check_target(ModelConfig.from_hf(read("dsv3")))


def test_a_drafter_with_a_window_and_an_amplitude():
    hf = changed(read("dsv3", kind="draft"), "dflash_config.context_window", 256)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 64.0, "original_max_position_embeddings": 4096}
    config = DrafterConfig.from_hf(changed(hf, "rope_parameters", yarn))
    assert config.context_window == 256
    assert config.rope.amplitude == pytest.approx(1.4158883, rel=1e-7)  # 1 + 0.1 ln 64, on cos and sin
    assert config.rope.softmax_mscale == 1.0


WRONG_DRAFTER = [
    ("block_size", 1),
    ("block_size", ...),
    ("head_dim", 31),
    ("num_key_value_heads", 3),
    ("dflash_config", ...),
    ("dflash_config", [1]),
    ("dflash_config.mask_token_id", ...),
    ("dflash_config.mask_token_id", -1),
    ("dflash_config.target_layer_ids", []),
    ("dflash_config.target_layer_ids", ["0"]),
    ("dflash_config.target_layer_ids", [1, 1]),  # the second's features would never be written
    ("dflash_config.context_window", 0),
    ("dflash_config.context_window", "256"),
    ("layer_types", ["full_attention", "sliding_attention"]),
    ("layer_types", 3),
]


@pytest.mark.parametrize(("field", "value"), WRONG_DRAFTER, ids=str)
def test_a_wrong_drafter(field, value):
    with pytest.raises(ConfigError, match=field.split(".")[-1]) as caught:
        DrafterConfig.from_hf(changed(read("dsv3", kind="draft"), field, value), "there.json")
    assert_one_line(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("hidden_size", 64, "hidden_size: the target has 128, the drafter 64"),
        ("vocab_size", 511, "vocab_size: the target has 512, the drafter 511"),
        ("dflash_config.target_layer_ids", [0, 3], "target_layer_ids"),
        ("dflash_config.mask_token_id", 512, "mask_token_id"),
    ],
)
def test_a_drafter_that_does_not_fit_its_target(field, value, says):
    drafter = DrafterConfig.from_hf(changed(read("dsv3", kind="draft"), field, value))
    with pytest.raises(ConfigError, match=says) as caught:
        drafter.check_target(ModelConfig.from_hf(read("dsv3")))
    assert_one_line(caught.value)
