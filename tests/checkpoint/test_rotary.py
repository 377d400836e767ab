"""The permutation, against the rotation formulas themselves: scores must not notice which layout is stored."""

import numpy as np
import pytest
from checkpoint.makers import TARGET
from hypothesis import given
from hypothesis import strategies as st

from ddtree.checkpoint_rotary import to_halves, to_pairs
from ddtree.config import ModelConfig


def rotate_pairs(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Multiply the complex numbers x[2i] + j x[2i + 1] by exp(j angle_i); f64[.., d]."""
    z = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)
    return np.stack([z.real, z.imag], -1).reshape(x.shape)


def rotate_halves(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Multiply the complex numbers x[i] + j x[i + d / 2] by exp(j angle_i); f64[.., d]."""
    half = x.shape[-1] // 2
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@given(
    heads=st.integers(1, 4),
    nope=st.integers(1, 9),
    half=st.integers(1, 9),
    latent=st.integers(1, 9),
    has_q_lora=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_scores_are_those_of_the_interleaved_original(heads, nope, half, latent, has_q_lora, seed):
    rng, rope = np.random.default_rng(seed), 2 * half
    hf = TARGET | {"num_attention_heads": heads, "qk_nope_head_dim": nope, "qk_rope_head_dim": rope}
    config = ModelConfig.from_hf(hf | {"kv_lora_rank": latent, "q_lora_rank": 5 if has_q_lora else None})
    q_weight = rng.standard_normal((heads * (nope + rope), 5))
    k_weight = rng.standard_normal((latent + rope, 5))
    x, y = rng.standard_normal((3, 5)), rng.standard_normal((4, 5))
    angles = rng.uniform(-3, 3, half)

    def parts(q_weight, k_weight, rotate):
        """q_nope, rotated q_rope, latent, rotated key, as attention uses them."""
        q = (x @ q_weight.T).reshape(3, heads, nope + rope)
        k = y @ k_weight.T
        return q[..., :nope], rotate(q[..., nope:], 2 * angles), k[:, :latent], rotate(k[:, latent:], angles)

    wanted = parts(q_weight, k_weight, rotate_pairs)
    stored_q, stored_k = q_weight.copy(), k_weight.copy()
    name = "q_b_proj" if has_q_lora else "q_proj"
    to_halves(stored_q, f"model.layers.0.self_attn.{name}.weight", config)
    to_halves(stored_k, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", config)
    found = parts(stored_q, stored_k, rotate_halves)

    for index in (0, 2):
        np.testing.assert_array_equal(found[index], wanted[index])
    for index in (1, 3):  # the rotated parts: pair i is (i, i + half) now
        real, imaginary = wanted[index][..., 0::2], wanted[index][..., 1::2]
        np.testing.assert_allclose(found[index], np.concatenate([real, imaginary], -1), rtol=0, atol=1e-12)
    score = np.einsum("ihd,jd->ihj", wanted[1], wanted[3])
    np.testing.assert_allclose(np.einsum("ihd,jd->ihj", found[1], found[3]), score, rtol=0, atol=1e-10)

    to_pairs(stored_q, f"model.layers.0.self_attn.{name}.weight", config)
    to_pairs(stored_k, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", config)
    np.testing.assert_array_equal(stored_q, q_weight)
    np.testing.assert_array_equal(stored_k, k_weight)


@pytest.mark.parametrize("dim", [4, 8, 64])
def test_the_layouts_really_differ(dim):
    """Reading pairs as halves is the fault this guards against; it changes the result."""
    x = np.arange(1.0, dim + 1)
    assert np.abs(rotate_pairs(x, np.ones(dim // 2)) - rotate_halves(x, np.ones(dim // 2))).max() > 0.1
