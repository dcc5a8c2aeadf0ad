"""Few numbers of every row as one array: a switch on a GPU copies each of its results by itself, in a microsecond."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32


def pack(tree: Any) -> Int32[Array, "B numbers"]:
    """The leaves of a tree, [B] or [B, any], next to each other.

    Raises:
      TypeError: for a leaf that is none of bool, int32, float32.
    """
    return jnp.concatenate([_words(leaf) for leaf in jax.tree.leaves(tree)], axis=1)


def unpack(packed: Int32[Array, "B numbers"], like: Any) -> Any:
    """The tree that `pack` was given, bit by bit; `like` is one of the same shapes and dtypes."""
    leaves, structure = jax.tree.flatten(like)
    ends = list(itertools.accumulate(_width(leaf) for leaf in leaves))
    parts = jnp.split(packed, ends[:-1], axis=1)
    return structure.unflatten([_leaf(part, leaf) for part, leaf in zip(parts, leaves, strict=True)])


def _width(leaf: Array) -> int:
    return leaf.size // leaf.shape[0]


def _words(leaf: Array) -> Int32[Array, "B width"]:
    rows = leaf.reshape(leaf.shape[0], -1)
    if leaf.dtype == jnp.float32:
        return jax.lax.bitcast_convert_type(rows, jnp.int32)
    if leaf.dtype in (jnp.bool, jnp.int32):
        return rows.astype(jnp.int32)
    raise TypeError(f"A leaf has the dtype {leaf.dtype}; give it as bool, int32 or float32.")


def _leaf(words: Int32[Array, "B width"], like: Array) -> Array:
    numbers = jax.lax.bitcast_convert_type(words, like.dtype) if like.dtype == jnp.float32 else words.astype(like.dtype)
    return numbers.reshape(like.shape)
