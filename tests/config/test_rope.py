"""Rotary settings: YaRN's frequencies, amplitude and softmax scale against the fixtures and by hand."""

import math

import numpy as np
import pytest
from compare_arrays import assert_close
from config.hf_configs import KIMI, KIMI_YARN, NAMES, read
from support import arrays_of

from ddtree.config import ModelConfig
from ddtree.rope import RopeConfig, inverse_frequencies, rotary_tables


@pytest.mark.parametrize("file", ["config.json", "config_legacy.json"])
@pytest.mark.parametrize("name", NAMES)
def test_constants_of_the_fixtures(name, file):
    z, config = arrays_of(f"{name}_f64.npz"), ModelConfig.from_hf(read(name, file))
    got = inverse_frequencies(config.rope, config.qk_rope_head_dim)
    assert_close(got, z["inv_freq64"], 1e-15, "inv_freq", elementwise=True)
    assert_close(config.rope.amplitude, z["rope_factor"], 1e-15, "amplitude")
    assert_close(config.softmax_scale, z["softmax_scale"], 1e-15, "softmax scale")


def literal_frequencies(theta, dim, factor, original, beta_fast, beta_slow):
    """YaRN's ramp with its corner cases, in plain Python: floor, ceil, clip, and equal ends pulled apart."""

    def correction(rotations):
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction(beta_fast)), 0), min(math.ceil(correction(beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    frequencies = []
    for i in range(dim // 2):
        plain = 1 / theta ** (2 * i / dim)
        share = min(max((i - low) / (high - low), 0), 1)
        frequencies.append(plain / factor * share + plain * (1 - share))
    return np.array(frequencies)


@pytest.mark.parametrize(
    "case",
    [
        (50000.0, 64, 64.0, 4096, 32.0, 1.0),  # Kimi K2.6
        (50000.0, 64, 32.0, 4096, 1.0, 1.0),  # Kimi K2: both ends from one rotation
        (10000.0, 64, 40.0, 4096, 32.0, 1.0),  # DeepSeek-V3
        (10000.0, 8, 40.0, 64, 32.0, 1.0),
        (10000.0, 8, 4.0, 6, 1.0, 1.0),  # equal ends at 0
        (10.0, 8, 4.0, 10**6, 1.0, 1.0),  # clipped at dim - 1
    ],
    ids=str,
)
def test_yarn_frequencies(case):
    theta, dim, factor, original, fast, slow = case
    rope = RopeConfig(theta, factor, original, fast, slow)
    want = literal_frequencies(*case)
    assert_close(inverse_frequencies(rope, dim), want, 1e-14, str(case), elementwise=True)
    assert inverse_frequencies(RopeConfig(theta), dim)[-1] == pytest.approx(theta ** (2 / dim - 1), rel=1e-14)


def test_kimi_k26_scale_by_hand():
    """factor 64, mscale 1 and 1: amplitude 1, softmax scale 192^-0.5 x (0.1 ln 64 + 1)^2 = 0.144683.."""
    config = ModelConfig.from_hf(KIMI)
    assert config.rope.amplitude == 1.0
    assert config.softmax_scale == pytest.approx(
        (0.1 * 4.1588830833596715 + 1) ** 2 / math.sqrt(192), rel=1e-14
    )
    assert config.softmax_scale == pytest.approx(0.144680, abs=5e-6)


def test_deepseek_v3_scale_by_hand():
    scaling = KIMI_YARN | {"factor": 40}
    config = ModelConfig.from_hf(KIMI | {"rope_scaling": scaling, "rope_theta": 10000})
    assert config.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113937**2, rel=1e-14)


AMPLITUDES = [
    ({}, 0.1 * math.log(64) + 1, 1.0),  # neither: the DFlash drafter of Kimi
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, (0.1 * math.log(64) + 1) ** 2),
    (
        {"mscale": 0.5, "mscale_all_dim": 1.0},
        (0.05 * math.log(64) + 1) / (0.1 * math.log(64) + 1),
        (0.1 * math.log(64) + 1) ** 2,
    ),
    ({"mscale": 1.0}, 0.1 * math.log(64) + 1, 1.0),
    ({"mscale": 1.0, "mscale_all_dim": 0.0}, 0.1 * math.log(64) + 1, 1.0),
    ({"mscale": 0, "mscale_all_dim": 2.0}, 0.1 * math.log(64) + 1, (0.2 * math.log(64) + 1) ** 2),
    ({"attention_factor": 1.25}, 1.25, 1.0),
    ({"attention_factor": 1.25, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.25, (0.1 * math.log(64) + 1) ** 2),
    ({"factor": 1.0}, 1.0, 1.0),
    ({"factor": 0.5, "mscale": 3.0, "mscale_all_dim": 1.0}, 1.0, 1.0),
]


@pytest.mark.parametrize(("more", "amplitude", "mscale"), AMPLITUDES, ids=str)
def test_amplitude_and_softmax_mscale(more, amplitude, mscale):
    scaling = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096} | more
    rope = RopeConfig.from_hf({"rope_theta": 50000.0, "rope_scaling": scaling}, "there.json")
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-14)
    assert rope.softmax_mscale == pytest.approx(mscale, rel=1e-14)
    cos, sin = rotary_tables(rope, 8, 5)
    assert cos[0] == pytest.approx(np.full(4, amplitude), rel=1e-14) and (sin[0] == 0).all()
    assert cos**2 + sin**2 == pytest.approx(np.full((5, 4), amplitude**2), rel=1e-13)


def test_theta_at_the_top_or_inside():
    inside = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e4}}
    assert RopeConfig.from_hf({"rope_theta": 5e4}, "w") == RopeConfig.from_hf(inside, "w") == RopeConfig(5e4)
    assert RopeConfig.from_hf({"rope_theta": 5e4, "rope_scaling": None}, "w") == RopeConfig(5e4)
    both = {"rope_theta": 1e4, **inside}
    assert RopeConfig.from_hf(both, "w").theta == 5e4  # what transformers 5 writes wins over a leftover
