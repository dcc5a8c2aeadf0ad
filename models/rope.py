"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split layout, angles in float32.

bfloat16 has eight bits of mantissa and turns position 257 into 256, so positions and angles never see it.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import Llama3Scaling, ModelConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """float32 `[H/2]`: radians per position of each pair of channels, after the model's scaling."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    match config.rope_scaling:
        case Llama3Scaling() as scaling:
            frequencies = _llama3(frequencies, scaling)
        case tuple() as divisors:
            frequencies = frequencies / np.asarray(divisors)
    return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelengths  # within the context of pre-training
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotation(config: ModelConfig, positions: Int[Array, "B T"]) -> tuple[Float[Array, "B T 1 h"], ...]:
    """(cos, sin), float32, of every position; the axis of one broadcasts over heads and h = H/2."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T 1 h"], sin: Float[Array, "B T 1 h"]
) -> Float[Array, "B T N H"]:
    """Rotates channel i against channel i + H/2; computed in float32, returned in the dtype of `x`."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
