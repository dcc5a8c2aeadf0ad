"""Choosing the next token: greedy, or a draw from the distribution cut by top-k, top-p and min-p."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

GREEDY_BELOW = 1e-5  # temperature; dividing by less would only choose among ties at random, or divide by zero


class SamplingParams(NamedTuple):
    """Per row; a temperature below 1e-5, a top-k of 1 and a vanishing top-p are all greedy."""

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"]  # 0: off
    top_p: Float[Array, " B"]  # 1: off
    min_p: Float[Array, " B"]  # 0: off


def greedy(logits: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The most likely token; among equals the lowest id."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def sample(key: Key[Array, " B"], logits: Float[Array, "B V"], params: SamplingParams) -> Int[Array, " B"]:
    """One token per row. A row depends on its own key and logits alone, wherever it stands in the batch.

    Filters apply in the usual order: temperature, top-k, top-p, min-p, each to what the one before left over; the most
    likely token always stays.
    """
    hot = params.temperature >= GREEDY_BELOW
    scaled = (logits - logits.max(-1, keepdims=True)) / jnp.where(hot, params.temperature, 1.0)[:, None]
    order = jnp.argsort(-logits, axis=-1, stable=True)  # not of `scaled`: division may make equals of unequals
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    kept = rank < jnp.where(params.top_k > 0, params.top_k, rank.size)[:, None]
    prob = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    top_p = jnp.where(params.top_p < 1, params.top_p, jnp.inf)[:, None]  # off: rounded sums of the tail may pass 1
    kept &= jnp.cumsum(prob, -1) - prob < top_p
    kept &= prob >= params.min_p[:, None] * prob[:, :1]
    kept = (kept | (rank == 0)) & (hot[:, None] | (rank == 0))
    noise = jax.vmap(lambda k: jax.random.gumbel(k, ranked.shape[1:]))(key)
    choice = jnp.argmax(jnp.where(kept, ranked + noise, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0].astype(jnp.int32)
