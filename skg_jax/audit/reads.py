"""Reading units: the keys of drawn pages, their exact masses, and a check of everything the audit assumes of them."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.units import UP, StepEvidence, log_denominator, output_factor
from skg_jax.kv import integrity, sketch
from skg_jax.kv.cache import PagedKVCache, sealed
from skg_jax.pallas import dispatch
from skg_jax.pallas.audit_mass import audit_mass
from skg_jax.pallas.dispatch import Implementation


class ShareReads(NamedTuple):
    """Shares of single pages as they are, next to what was promised of them."""

    share: Float[Array, "B n G"]  # of the query heads of the group, rounded up
    violated: Bool[Array, "B n"]  # an exact mass lay outside its bounds, or was not a number
    corrupt: Bool[Array, "B n"]  # the keys do not match their checksum
    layer: Int[Array, "B n"]
    block: Int[Array, "B n"]  # pool block


class UnitReads(NamedTuple):
    """Units as they are: shares weighted and summed over the group, inside the unit's bounds."""

    x: Float[Array, "B n"]
    violated: Bool[Array, "B n"]
    corrupt: Bool[Array, "B n"]
    layer: Int[Array, "B n"]
    block: Int[Array, "B n"]


def read_units(
    index: Int[Array, "B n"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    omega: Float[Array, "L N"],
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> UnitReads:
    """Read units by their index in the flattened [L, K, M] population of each row."""
    layers, batch, kv_heads, pages = evidence.upper.shape
    layer, head, page = jnp.unravel_index(index, (layers, kv_heads, pages))
    row = jnp.broadcast_to(jnp.arange(batch)[:, None], index.shape)
    found = read_shares(row, layer, head, page, evidence, cache, config, implementation)
    weighted = omega.reshape(layers, kv_heads, -1)[layer, head] * found.share
    x = functools.reduce(jnp.add, _by_member(weighted)) * UP
    own = (layer, row, head, page)
    return UnitReads(jnp.clip(x, evidence.lower[own], evidence.upper[own]), *found[1:])


def read_shares(
    row: Int[Array, "B n"],
    layer: Int[Array, "B n"],
    head: Int[Array, "B n"],
    page: Int[Array, "B n"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> ShareReads:
    """Read pages of KV heads, and check their masses against the bounds and their keys against the checksums."""
    layers, batch, kv_heads, _ = evidence.upper.shape
    block = cache.page_table[row, page // config.parts]
    at = (layer, row, head, block, page % config.parts)
    by_group = lambda x: x.reshape(layers, batch, kv_heads, -1, *x.shape[3:])[layer, row, head]
    kernel = lambda: _masses_mosaic(evidence.q, cache, at, config.page_size)
    twin = lambda: _masses_xla(by_group(evidence.q), cache, at, config.page_size)
    log_mass, sums = dispatch.choose(implementation, kernel, twin)
    # Of all queries first: a GPU would add up the squares of each drawn one anew.
    slack = by_group(_slack(evidence.q)) * cache.key_norm[layer, block, head][..., None] + 1e-5
    lower, upper = (x[layer, row, head, :, page] for x in (evidence.log_lower, evidence.log_upper))
    known = sealed(cache)[block]  # nothing was promised of the others
    inside = functools.reduce(jnp.logical_and, _by_member((log_mass >= lower) & (log_mass <= upper)))
    base = by_group(evidence.log_selected)
    rest = log_denominator(lower - base, by_group(evidence.total))
    share = jax.nn.sigmoid(log_mass + slack - base - rest)
    if config.residual == "output":
        value_norm = cache.value_norm[layer, block, head][..., None]
        share = share * output_factor(value_norm, by_group(evidence.out_norm), config)
    promised = _page_of(cache, cache.k_sum[..., None], at, config.page_size)[..., 0]
    corrupt = known & functools.reduce(jnp.logical_or, _by_member(sums != promised))
    return ShareReads(share * UP, known & ~inside, corrupt, layer, block)


def first_corrupt(reads: ShareReads | UnitReads, valid: Bool[Array, "B n"]) -> Int[Array, "B 2"]:
    """(layer, pool block) of the first unit read whose keys failed their checksum, or -1."""
    bad = reads.corrupt & valid
    first = jnp.argmax(bad, axis=1)[:, None]
    place = jnp.concatenate([jnp.take_along_axis(x, first, axis=1) for x in (reads.layer, reads.block)], axis=1)
    return jnp.where(bad.any(1, keepdims=True), place, -1).astype(jnp.int32)


def _by_member(x: Array) -> list[Array]:
    """The slices of a short last axis: a GPU takes four times as long to reduce over it."""
    return [x[..., i] for i in range(x.shape[-1])]


def exact_log_mass(q: Float[Array, "... G H"], keys: Float[Array, "... C H"]) -> Float[Array, "... G"]:
    """Log-mass of one page per query head."""
    q = q.astype(jnp.float32) * q.shape[-1] ** -0.5
    logits = jnp.einsum("...gh,...ch->...gc", q, keys.astype(jnp.float32), precision="highest")
    top = logits.max(-1)
    return top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))


def _slack(q: Float[Array, "L B N H"]) -> Float[Array, "L B N"]:
    """Bound on the rounding of an exact log-mass, for each unit of the keys' norm: by XLA or by the kernel
    (pallas/audit_mass.py)."""
    return sketch.rounding_slack(q.astype(jnp.float32) * q.shape[-1] ** -0.5, jnp.float32(1))


def _masses_xla(q: Float[Array, "B n G H"], cache: PagedKVCache, at, page_size: int):
    keys = _page_of(cache, cache.k, at, page_size)
    return exact_log_mass(q, keys), integrity.checksum(keys)


def _masses_mosaic(q: Float[Array, "L B N H"], cache: PagedKVCache, at, page_size: int):
    shape = at[0].shape
    found = audit_mass(q, cache.k, *(x.ravel().astype(jnp.int32) for x in at), page_size=page_size)
    return tuple(x.reshape(*shape, -1) for x in found)


def _page_of(cache: PagedKVCache, pool: Array, at, page_size: int) -> Array:
    """What a pool [L, P, K, slots, ...] holds of single pages: one slab each, [B, n, slots of a page, ...]."""
    layer, _, head, block, part = at
    layers, blocks, heads, slots, *tail = pool.shape
    parts = cache.k.shape[3] // page_size
    slab = ((layer * blocks + block) * heads + head) * parts + part
    return pool.reshape(-1, slots // parts, *tail)[slab]
