"""Sealing through XLA: the twin of `skg_jax.pallas.seal`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.kv import integrity, sketch
from skg_jax.pallas.seal import Metadata


def seal_xla(
    k: Float[Array, "L P K 64 H"],
    v: Float[Array, "L P K 64 H"],
    metadata: Metadata,
    blocks: Int[Array, " n"],
    full: Bool[Array, " n"],
) -> tuple[Metadata, Bool[Array, "L n K"]]:
    """Metadata of the full blocks among `blocks`, and whether their keys fit; pools in any float dtype."""
    inside = full & (blocks >= 0) & (blocks < k.shape[1])
    at = jnp.where(inside, blocks, k.shape[1])  # a dropped scatter index leaves the pool untouched
    keys, values = k[:, blocks], v[:, blocks]
    record, fits = sketch.build(keys)
    key_norm, value_norm = (jnp.max(norm_up(x), axis=-1) for x in (keys, values))
    found = Metadata(*record, key_norm, value_norm, integrity.checksum(keys), integrity.checksum(values))
    put = lambda pool, new: pool.at[:, at].set(new.astype(pool.dtype), mode="drop")
    return jax.tree.map(put, metadata, found), fits & inside[:, None]


def norm_up(x: Float[Array, "... H"]) -> Float[Array, "..."]:
    """Euclidean norm over the last axis, rounded up."""
    return jnp.linalg.norm(x.astype(jnp.float32), axis=-1) * (1.0 + 1e-5)
