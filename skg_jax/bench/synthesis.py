"""A cache and queries whose attention looks like a real model's, at sizes for which there are no weights.

With random weights attention is flat: no selector could keep nine tenths of it, and no step would ever be accepted. So
each KV head gets a direction u, keys k_t = SIGNAL a_t u + noise, and a query bias s u; the logits then have standard
deviation sigma, and sigma is chosen per head so that the mass dropped at the profile's page budget follows the
quantiles recorded from a real model (`eval/studies/attention_profile.py`). RoPE is switched off by its frequencies,
which changes no shape. Only what the step costs is taken from here, never how good it is.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib import resources
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from models.config import ModelConfig
from skg_jax.bench.weights import random_params
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.types import BLOCK, Params

SIGNAL = 2.5  # of the keys along u, in units of their noise: bounds are then 2.9 times the residual, as recorded
_TOGETHER = 0.7  # share of the variance of a_t that the 16 tokens of a page have in common
_QUIET = 0.1  # factor on the random projections of queries and keys
_NO_ROTATION = 1e12


class Profile(NamedTuple):
    """Recorded from real text: at `pages` of the pages, quantiles over heads of the dropped attention mass."""

    model: str
    pages: float
    dropped_mass: np.ndarray
    residual: float
    bound_alone: float


def profile(name: str) -> Profile:
    """A recorded profile by its model's name; raises ValueError with the names there are."""
    folder = resources.files("skg_jax.bench").joinpath("profiles")
    known = sorted(path.name.removesuffix(".json") for path in folder.iterdir() if path.name.endswith(".json"))
    if name not in known:
        raise ValueError(f"there is no profile {name!r}; choose one of {', '.join(known)}.")
    found = json.loads(folder.joinpath(f"{name}.json").read_text())
    return Profile(
        found["model"], found["pages"], np.array(found["dropped_mass"]), found["residual"], found["bound_alone"]
    )


def logit_spread(dropped: np.ndarray, pages: float, count: int = 4096, sets: int = 8) -> np.ndarray:
    """Standard deviation of a head's logits at which the best `pages` of `count` pages leave out `dropped` of the mass.

    A mean over `sets` of pages: with a wide spread one page can hold nearly everything.
    """
    grid = np.linspace(0.0, 8.0, 41)
    left = np.array([dropped_mass(sigma, pages, count, sets) for sigma in grid])
    return np.interp(dropped, left[::-1], grid[::-1])


def dropped_mass(sigma: float, pages: float, count: int, sets: int, seed: int = 0) -> float:
    """Mean mass outside of the best `pages` of the pages, when logits have standard deviation `sigma`."""
    rng = np.random.default_rng(seed)
    shared, own = rng.normal(size=(sets, count, 1)), rng.normal(size=(sets, count, 16))
    logit = sigma * (np.sqrt(_TOGETHER) * shared + np.sqrt(1 - _TOGETHER) * own)
    mass = np.sort(np.exp(logit).sum(-1))[:, ::-1]
    return float((mass[:, int(np.ceil(pages * count)) :].sum(1) / mass.sum(1)).mean())


def head_spreads(found: Profile, config: ModelConfig, seed: int = 0) -> np.ndarray:
    """One spread for each (layer, KV head), [L, K]: draws from the recorded quantiles, spread evenly and shuffled."""
    count = config.num_layers * config.num_kv_heads
    levels = np.linspace(0, 1, len(found.dropped_mass))
    dropped = np.interp((np.arange(count) + 0.5) / count, levels, found.dropped_mass)
    np.random.default_rng(seed).shuffle(dropped)
    return logit_spread(dropped, found.pages).reshape(config.num_layers, config.num_kv_heads)


def synthetic_config(config: ModelConfig) -> ModelConfig:
    """The configuration with query biases and without rotation: the same shapes and bytes."""
    return dataclasses.replace(config, qkv_bias=True, rope_scaling=(_NO_ROTATION,) * (config.head_dim // 2))


def synthetic_params(config: ModelConfig, spreads: np.ndarray, directions: Float[Array, "L K H"], key) -> Params:
    """Random weights of a `synthetic_config`, whose query bias makes logits of the given spread, [L, K]."""
    params = random_params(config, key)
    attn = params["layers"]["attn"]
    quiet: dict[str, Any] = {name: {**attn[name], "kernel": attn[name]["kernel"] * _QUIET} for name in ("q", "k")}
    size = jnp.asarray(spreads, jnp.float32) * config.head_dim**0.5 / (SIGNAL**2 + 1) ** 0.5
    bias = jnp.repeat(size[..., None] * directions, config.num_heads // config.num_kv_heads, axis=1)
    quiet["q"]["bias"] = bias.astype(attn["q"]["bias"].dtype)
    attn.update(quiet)
    return params


def directions(config: ModelConfig, key) -> Float[Array, "L K H"]:
    """A unit vector for each KV head, flat over the channels."""
    shape = (config.num_layers, config.num_kv_heads, config.head_dim)
    return jax.random.rademacher(key, shape, jnp.float32) / config.head_dim**0.5


def synthetic_cache(
    config: ModelConfig, directions: Float[Array, "L K H"], batch: int, context: int, filled: int, key
) -> PagedKVCache:
    """A cache of `context` tokens a row in random page order, of which the first `filled` (whole blocks) are sealed."""
    cache = kv.init(config.num_layers, config.num_kv_heads, config.head_dim, batch, context, jnp.bfloat16)
    order = jax.random.permutation(key, cache.page_table.size).astype(jnp.int32)
    cache = cache._replace(page_table=order.reshape(cache.page_table.shape))
    for layer in range(config.num_layers):
        cache = _fill_layer(cache, jnp.int32(layer), directions[layer], jax.random.fold_in(key, layer))
    blocks = cache.page_table[:, : filled // BLOCK].ravel()
    cache = cache._replace(written=cache.written.at[blocks].set(1))
    width = 64  # blocks of all layers at a time
    blocks = jnp.pad(blocks, (0, -blocks.size % width), mode="edge")
    for i in range(0, blocks.size, width):
        cache = _seal(cache, blocks[i : i + width])
    return cache


@functools.partial(jax.jit, donate_argnums=0)
def _fill_layer(cache: PagedKVCache, layer: Int[Array, ""], direction: Float[Array, "K H"], key) -> PagedKVCache:
    """Keys and values of one layer, block by block in a loop: a temporary of the layer's size is not needed."""
    _, blocks, heads, width, dim = cache.k.shape
    step = next(n for n in (64, 32, 16, 8, 4, 2, 1) if blocks % n == 0)

    def fill(i, cache):
        keys = jax.random.split(jax.random.fold_in(key, i), 4)
        normal = lambda k, *shape: jax.random.normal(k, (step, heads, *shape), jnp.float32)
        page = jnp.repeat(normal(keys[0], width // 16), 16, axis=-1)
        along = jnp.sqrt(_TOGETHER) * page + jnp.sqrt(1 - _TOGETHER) * normal(keys[1], width)
        k = SIGNAL * along[..., None] * direction[:, None] + normal(keys[2], width, dim)
        put = lambda pool, x: jax.lax.dynamic_update_slice(pool, x.astype(pool.dtype)[None], (layer, i * step, 0, 0, 0))
        return cache._replace(k=put(cache.k, k), v=put(cache.v, normal(keys[3], width, dim)))

    return jax.lax.fori_loop(0, blocks // step, fill, cache)


@functools.partial(jax.jit, donate_argnums=0)
def _seal(cache: PagedKVCache, blocks: Int[Array, " n"]) -> PagedKVCache:
    return kv.seal(cache, blocks, jnp.ones(blocks.shape, bool))
