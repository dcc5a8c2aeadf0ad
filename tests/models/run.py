"""Runs a decoder in tests: whole texts, or greedily against the simplest cache there is."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder
from models.config import ModelConfig


@functools.partial(jax.jit, static_argnames="config")
def logits(params, config: ModelConfig, tokens) -> jax.Array:
    """float32 `[B, T, V]` of whole texts."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x, _, _ = decoder.hidden_states(params, config, tokens, positions, decoder.attend_dense, None)
    return decoder.unembed(params, config, x)


def empty_cache(config: ModelConfig, B: int, S: int, dtype=jnp.float32) -> tuple[jax.Array, jax.Array]:
    """K and V `[L, B, S, K, H]`, full of NaN: what was not written must not be read."""
    shape = (config.num_layers, B, S, config.num_kv_heads, config.head_dim)
    return jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype)


def attend_contiguous(positions: jax.Array):
    """Attention over a contiguous cache, row by position; `positions [B, T]`, the carry is that of `empty_cache`."""

    def attend(layer, q, k, v, carry: Any):
        rows = jnp.arange(q.shape[0])[:, None]
        keys, values = (pool.at[layer, rows, positions].set(new) for pool, new in zip(carry, (k, v), strict=True))
        seen = jnp.arange(keys.shape[2]) <= positions[..., None]  # [B, T, S]
        B, T, N, H = q.shape
        grouped = q.reshape(B, T, k.shape[2], -1, H)
        scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, keys[layer]) / H**0.5
        probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
        written = jnp.nan_to_num(values[layer])  # zero times NaN is NaN
        return jnp.einsum("BKGTS,BSKH->BTKGH", probabilities, written).reshape(q.shape), (keys, values), None

    return attend


@functools.partial(jax.jit, static_argnames="config", donate_argnames="cache")
def step(params, config: ModelConfig, tokens, positions, cache):
    """(final hidden states `[B, T, D]`, cache) of tokens appended at `positions [B, T]`."""
    x, cache, _ = decoder.hidden_states(params, config, tokens, positions, attend_contiguous(positions), cache)
    return x, cache


_unembed = jax.jit(decoder.unembed, static_argnums=1)


def greedy(params, config: ModelConfig, prompts: list[list[int]], steps: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens `[B, steps]`, logits after the prompts `[B, V]`); prompts of any lengths, padded on the right."""
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    # A padded position is written, then overwritten by the token that belongs there before anything reads it.
    positions = np.broadcast_to(np.arange(padded.shape[1]), padded.shape)
    cache = empty_cache(config, len(prompts), padded.shape[1] + steps)
    x, cache = step(params, config, padded, positions, cache)
    first = latest = _unembed(params, config, x[np.arange(len(prompts)), lengths - 1])
    found = []
    for i in range(steps):
        found.append(np.asarray(jnp.argmax(latest, axis=-1)))
        if i + 1 < steps:
            x, cache = step(params, config, found[-1][:, None], (lengths + i)[:, None], cache)
            latest = _unembed(params, config, x[:, 0])
    return np.stack(found, axis=1), np.asarray(first)
