"""The dense baseline: cuDNN's attention over a contiguous cache, in the same model and the same kind of loop.

Where two caches do not fit beside the weights, several layers share one: the bytes that a step reads stay the same.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import decoder
from models.config import ModelConfig
from skg_jax.pallas import clock
from skg_jax.types import Params

type DenseCache = tuple[tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]], ...]


class DenseRows(NamedTuple):
    """Where the rows are."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]


def init(config: ModelConfig, batch: int, context: int, layers: int, key) -> DenseCache:
    """Random keys and values; `layers` caches are shared by all layers in turn."""
    shape = (batch, context, config.num_kv_heads, config.head_dim)
    return tuple(tuple(_normal(k, shape) for k in jax.random.split(one)) for one in jax.random.split(key, layers))


@functools.partial(jax.jit, static_argnums=1)
def _normal(key, shape):
    """bfloat16 noise made row by row, so that no float32 copy of it is ever held."""
    row = lambda k: jax.random.normal(k, shape[1:], jnp.bfloat16)
    return jax.lax.map(row, jax.random.split(key, shape[0]))


@functools.partial(jax.jit, static_argnames=("config", "steps", "implementation"), donate_argnames="cache")
def loop(
    params: Params,
    cache: DenseCache,
    position: Int[Array, " B"],
    config: ModelConfig,
    steps: int,
    implementation: str = "cudnn",
) -> tuple[DenseCache, Int[Array, "stamps 2"]]:
    """Greedy decoding; returns the cache, and a clock stamp before and after every step."""
    rows = DenseRows(jnp.zeros_like(position), position)

    def step(state, _):
        cache, rows = state
        attend = functools.partial(_attend, rows.position, implementation)
        token, position = rows.token[:, None], rows.position[:, None]
        x, cache, _ = decoder.hidden_states(params, config, token, position, attend, cache, unroll=True)
        token = jnp.argmax(decoder.unembed(params, config, x[:, 0]), axis=-1).astype(jnp.int32)
        return (cache, DenseRows(token, rows.position + 1)), clock.stamp(token)

    began = clock.stamp(rows.position)
    rows, began = jax.lax.optimization_barrier((rows, began))  # the stamp comes before the first step
    (cache, rows), stamps = jax.lax.scan(step, (cache, rows), None, steps)
    return cache, jnp.concatenate([began[None], stamps])


def _attend(position, implementation, layer, q, k, v, caches: DenseCache):
    slot = layer % len(caches)
    row = jnp.arange(q.shape[0])
    keys, values = (pool.at[row, position].set(new[:, 0]) for pool, new in zip(caches[slot], (k, v), strict=True))
    out = jax.nn.dot_product_attention(
        q, keys, values, key_value_seq_lengths=position + 1, implementation=implementation
    )
    return out, (*caches[:slot], (keys, values), *caches[slot + 1 :]), None
