"""Random weights at real sizes: what decoding costs does not depend on their values, only attention does."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from models import decoder
from models.config import ModelConfig
from skg_jax.types import Params


def random_params(config: ModelConfig, key: PRNGKeyArray, dtype=jnp.bfloat16) -> Params:
    """Normal(0, 0.02) kernels, unit norms, zero biases; leaf by leaf: one draw of all would take twice the room."""
    leaves, tree = jax.tree.flatten_with_path(decoder.abstract(config, dtype))
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(
        tree, [_leaf(path[-1].key, leaf, k) for (path, leaf), k in zip(leaves, keys, strict=True)]
    )


def _leaf(name: str, leaf: jax.ShapeDtypeStruct, key: PRNGKeyArray):
    constants = {"scale": jnp.ones, "bias": jnp.zeros}
    return constants[name](leaf.shape, leaf.dtype) if name in constants else _normal(key, leaf.shape, leaf.dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    return 0.02 * jax.random.normal(key, shape, dtype)
