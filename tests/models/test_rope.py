"""Rotary positions: frequencies against the published formulas, rotation against complex numbers."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from models import rope
from models.config import Llama3Scaling, ModelConfig

BASE = ModelConfig(
    architecture="llama",
    vocab_size=7,
    embed_dim=8,
    mlp_dim=8,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=128,
    rope_theta=500_000.0,
)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_keeps_short_waves_and_stretches_long_ones(factor):
    """Llama 3.1 (factor 8) and 3.2 (factor 32): bands end at wavelengths 8192/4 and 8192/1."""
    scaling = Llama3Scaling(factor=factor, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    found = rope.inverse_frequencies(dataclasses.replace(BASE, rope_scaling=scaling))
    expected, bands = [], set()
    for i in range(64):
        frequency = 500_000.0 ** (-2 * i / 128)
        wavelength = 2 * np.pi / frequency
        if wavelength < 2048:
            bands.add("kept")
        elif wavelength > 8192:
            bands.add("stretched")
            frequency /= factor
        else:
            bands.add("between")
            smooth = (8192 / wavelength - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / factor + smooth * frequency
        expected.append(frequency)
    assert bands == {"kept", "stretched", "between"}
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_divisors_divide():
    divisors = tuple(float(i) for i in range(1, 65))
    found = rope.inverse_frequencies(dataclasses.replace(BASE, rope_scaling=divisors))
    np.testing.assert_allclose(found * np.array(divisors), rope.inverse_frequencies(BASE), rtol=1e-6)


def test_rotation_is_that_of_complex_numbers_in_halves():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 3, 5, 128)).astype(np.float32)
    positions = np.array([[0, 1, 8191], [17, 257, 100_000]])
    angles = positions[..., None, None] * rope.inverse_frequencies(BASE).astype(np.float64)
    turned = (x[..., :64] + 1j * x[..., 64:]) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    found = rope.rotate(jnp.asarray(x), *rope.rotation(BASE, jnp.asarray(positions)))
    np.testing.assert_allclose(found, expected, atol=2e-2)  # float32 angles at position 100,000
    np.testing.assert_allclose(found[:, :2], expected[:, :2], atol=1e-4)


def test_neighbouring_positions_stay_apart_in_bfloat16():
    """bfloat16 cannot tell position 257 from 256; the rotation must."""
    x = jnp.ones((1, 2, 1, 128), jnp.bfloat16)
    found = rope.rotate(x, *rope.rotation(BASE, jnp.array([[256, 257]])))
    assert found.dtype == jnp.bfloat16
    assert np.abs(np.asarray(found[0, 0] - found[0, 1], np.float32)).max() > 0.5
