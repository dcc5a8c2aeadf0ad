"""Reading units: the keys of drawn pages, their exact masses, and a check of everything the audit assumes of them."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.units import UP, StepEvidence, log_denominator, output_factor
from skg_jax.kv import integrity, sketch
from skg_jax.kv.cache import PagedKVCache, sealed
from skg_jax.kv.sketch import Sketch


class UnitReads(NamedTuple):
    """Units as they are, next to what was promised of them."""

    x: Float[Array, "B n"]  # value, rounded up and inside the unit's bounds
    violated: Bool[Array, "B n"]  # an exact mass lay outside its bounds, or was not a number
    corrupt: Bool[Array, "B n"]  # the keys do not match their checksum
    layer: Int[Array, "B n"]
    block: Int[Array, "B n"]  # pool block


def read_units(
    index: Int[Array, "B n"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    omega: Float[Array, "L N"],
    config: AuditConfig,
) -> UnitReads:
    """Read units by their index in the flattened [L, K, M] population of each row."""
    layers, batch, kv_heads, pages = evidence.upper.shape
    layer, head, page = jnp.unravel_index(index, (layers, kv_heads, pages))
    row = jnp.arange(batch)[:, None]
    block = cache.page_table[row, page // config.parts]
    by_group = lambda x: x.reshape(layers, batch, kv_heads, -1, *x.shape[3:])[layer, row, head]
    q = by_group(evidence.q)
    keys, sums, record = _gather(cache, layer, block, head, page % config.parts, config.page_size)
    key_norm = cache.key_norm[layer, block, head]
    bounds = sketch.page_scores(q, record, key_norm, config.page_size, config.bounds)
    log_mass, slack = exact_log_mass(q, keys, key_norm)
    lower, upper = bounds.lower[..., 0], bounds.upper[..., 0]
    known = sealed(cache)[block]  # nothing was promised of the others
    violated = known & ~((log_mass >= lower) & (log_mass <= upper)).all(-1)
    base = by_group(evidence.log_selected)
    # The lower bound is computed a second time here and may differ by rounding from the one inside the total.
    rest = log_denominator(lower + slack - base, by_group(evidence.total))
    weight = omega.reshape(layers, kv_heads, -1)[layer, head]
    if config.residual == "output":
        value_norm = cache.value_norm[layer, block, head][..., None]
        weight = weight * output_factor(value_norm, by_group(evidence.out_norm), config)
    x = (weight * jax.nn.sigmoid(log_mass + slack - base - rest)).sum(-1) * UP
    own = (layer, row, head, page)
    corrupt = known & jnp.any(integrity.checksum(keys) != sums, axis=-1)
    return UnitReads(jnp.clip(x, evidence.lower[own], evidence.upper[own]), violated, corrupt, layer, block)


def exact_log_mass(
    q: Float[Array, "... G H"], keys: Float[Array, "... C H"], key_norm: Float[Array, "..."]
) -> tuple[Float[Array, "... G"], Float[Array, "... G"]]:
    """Log-mass of one page per query head, and a bound on its rounding."""
    q = q * q.shape[-1] ** -0.5
    logits = jnp.einsum("...gh,...ch->...gc", q, keys.astype(jnp.float32), precision="highest")
    top = logits.max(-1)
    log_mass = top + jnp.log(jnp.exp(logits - top[..., None]).sum(-1))
    return log_mass, sketch.rounding_slack(q, key_norm[..., None]) + 1e-5


def _gather(cache: PagedKVCache, layer, block, head, part, page_size: int):
    """Keys, checksums and sketch records of single pages: contiguous slabs of the pools."""
    layers, blocks, heads, width, _ = cache.k.shape
    parts = width // page_size
    record_at = (layer * blocks + block) * heads + head
    slab = record_at * parts + part
    pages = lambda pool, *tail: pool.reshape(-1, *tail)[slab]
    records = lambda pool: pool.reshape(-1, pool.shape[-1])[record_at]
    keys = pages(cache.k, page_size, cache.k.shape[-1])
    sums = pages(cache.k_sum, cache.k_sum.shape[-1] // parts)
    codes = pages(cache.sketch.codes, page_size, cache.sketch.codes.shape[-1])
    residual = pages(cache.sketch.residual, page_size)
    return keys, sums, Sketch(codes, records(cache.sketch.low), records(cache.sketch.step), residual)
