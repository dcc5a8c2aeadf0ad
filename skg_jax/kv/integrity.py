"""Checksums of cached keys and values, and the scrub that compares them with the content.

The raw bits, taken as 32-bit words and shifted by the position of each word, go through a bijection of 32-bit words
(the finaliser of MurmurHash3, Appleby 2011) and are summed modulo 2**32. A word is one element of 4 bytes or two
neighbouring ones of 2 bytes, the even channel in the low half, as a 32-bit load gives them. So whatever changes within
one word, a single element above all, changes the sum for certain, and other changes collide with a probability of about
2**-32, regular ones included: with plain odd multipliers the sign bits of two words cancel, and a negated token of
float32, or its odd channels in bfloat16, go unseen. It guards against stale or overwritten memory, not against an
adversary. Versions catch honest bookkeeping; only checksums catch content that moved silently.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

QUARTER = 16  # tokens per checksum: the smallest page that an audit reads alone


def checksum(x: Float[Array, "... T H"]) -> UInt32[Array, "... quarters"]:
    """One 32-bit sum for every 16 tokens of the second-last axis."""
    *lead, tokens, head_dim = x.shape
    words = _words(x.reshape(*lead, tokens // QUARTER, QUARTER * head_dim))
    position = jnp.arange(words.shape[-1], dtype=jnp.uint32)
    return jnp.sum(_mix(words + position * jnp.uint32(0x9E3779B9)), axis=-1, dtype=jnp.uint32)


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


def _words(x: Float[Array, "... n"]) -> UInt32[Array, "... words"]:
    width = {2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(x, width).astype(jnp.uint32)
    return bits if width == jnp.uint32 else bits[..., 0::2] | bits[..., 1::2] << 16


def _mix(h: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
