"""Checksums of cached keys and values, and the scrub that compares them with the content.

A multilinear hash over the raw bits (Carter and Wegman 1979): every element is multiplied by its own odd
constant modulo 2**32, so any single changed element changes the sum for certain and an unrelated
content collides with probability about 2**-32. It guards against stale or overwritten memory, not
against an adversary. Versions catch honest bookkeeping; only checksums catch content that moved silently.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

QUARTER = 16  # tokens per checksum: the smallest page that an audit reads alone


def checksum(x: Float[Array, "... T H"]) -> UInt32[Array, "... T/16"]:
    """One 32-bit sum for every 16 tokens of the second-last axis."""
    *lead, tokens, head_dim = x.shape
    bits = _bits(x).reshape(*lead, tokens // QUARTER, QUARTER * head_dim)
    return jnp.sum(bits * _weights(QUARTER * head_dim), axis=-1, dtype=jnp.uint32)


class Mismatch(NamedTuple):
    """One block whose content no longer matches its checksum."""

    layer: int
    block: int
    kind: str  # "keys" or "values"

    def __str__(self) -> str:
        return f"the {self.kind} of block {self.block} in layer {self.layer} do not match their checksum"


def scrub(cache) -> list[Mismatch]:
    """Re-check every sealed block of a cache, keys and values, in all layers."""
    bad = jax.device_get(_scrub(cache.k, cache.v, cache.k_sum, cache.v_sum, cache.sealed == cache.written))
    return [
        Mismatch(int(layer), int(block), kind)
        for kind, flags in zip(("keys", "values"), bad, strict=True)
        for layer, block in np.argwhere(flags)
    ]


@jax.jit
def _scrub(k, v, k_sum, v_sum, sealed: Bool[Array, " P"]) -> tuple[Bool[Array, "L P"], Bool[Array, "L P"]]:
    def layer(args):
        return tuple(jnp.any(checksum(x) != sums, axis=(1, 2)) & sealed for x, sums in (args[:2], args[2:]))

    return jax.lax.map(layer, (k, k_sum, v, v_sum))


def _bits(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    width = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)


def _weights(n: int) -> UInt32[Array, " n"]:
    """Odd constants: Weyl sequence of the golden ratio, low bit set."""
    return (jnp.arange(1, n + 1, dtype=jnp.uint32) * jnp.uint32(0x9E3779B9)) | jnp.uint32(1)
