"""The population of a step's audit: one unit per layer, KV head and unread page, with bounds on its share of attention.

For a head with exact selected mass W_S, and bounds L <= w <= U on the masses of its unread pages, let

    a_j = W_S + sum of L over the other unread pages,     x_j = w_j / (a_j + w_j).

Then l_j = L_j/(a_j+L_j) <= x_j <= c_j = U_j/(a_j+U_j) and the dropped mass is at most X = sum_j x_j (docs/guarantee.md,
lemma 1). A unit is the weighted sum of x over the query heads of its group. Here masses are relative to W_S: `log`
values have the head's log-sum-exp subtracted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from skg_jax.audit.config import AuditConfig
from skg_jax.kv import sketch
from skg_jax.kv.cache import PagedKVCache, current
from skg_jax.pallas import dispatch
from skg_jax.pallas.audit_units import Units, audit_units
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.sketch_score import Bounds
from skg_jax.selectors.base import Selection
from skg_jax.stats.sums import outward_sum
from skg_jax.types import BLOCK

# Outward rounding of what is made of float32: a difference of logarithms below 88 is wrong by up to 5.3e-6, and a fast
# exponential of it by as much again; the rest are roundings of sums, products and quotients.
UP = 1.0 + 2e-5
_CANCEL = 2e-5  # of the total, lost when one lower bound, of another exponential, is subtracted from it


class LayerEvidence(NamedTuple):
    """What one layer leaves for the audit; stacked over the layers, [L, ...]."""

    q: Float[Array, "*L B N H"]
    lse: Float[Array, "*L B N"]  # log of the mass that attention read
    out_norm: Float[Array, "*L B N"]  # |o| of the sparse output, the unit of the output residual
    read: UInt32[Array, "*L B K words"]  # pages that attention read, by `pack_flags`


class HeadBounds(NamedTuple):
    """What is known of every query head without reading."""

    log_selected: Float[Array, "L B N"]  # log W_S, rounded down
    total: Float[Array, "L B N"]  # (W_S + sum of L) / W_S, rounded down
    out_norm: Float[Array, "L B N"]
    log_lower: Float[Array, "L B K G M"]  # of all pages' log-masses
    log_upper: Float[Array, "L B K G M"]
    unread: Bool[Array, "L B K M"]


class StepEvidence(NamedTuple):
    """The population of a step, and what reading its units needs. Made from all layers at once: on a GPU a launch costs
    more than the bounds of a layer."""

    q: Float[Array, "L B N H"]
    log_selected: Float[Array, "L B N"]  # these six: see HeadBounds
    total: Float[Array, "L B N"]
    out_norm: Float[Array, "L B N"]
    log_lower: Float[Array, "L B K G M"]
    log_upper: Float[Array, "L B K G M"]
    unread: Bool[Array, "L B K M"]
    lower: Float[Array, "L B K M"]  # these five: see Units. l of each unit, weights applied, 0 where nothing is unread
    upper: Float[Array, "L B K M"]  # c of each unit
    count: Int[Array, "L B K"]
    floor: Float[Array, "L B K"]
    cap: Float[Array, "L B K"]
    unbounded: Int[Array, "L B"]  # unread pages without valid bounds: the step cannot be certified


def layer_evidence(
    q: Float[Array, "B N H"],
    out: Float[Array, "B N H"],
    lse: Float[Array, "B N"],
    selection: Selection,
) -> LayerEvidence:
    """What the audit will ask of one layer."""
    norm = jnp.linalg.norm(out.astype(jnp.float32), axis=-1)
    return LayerEvidence(q, lse, norm, pack_flags(selection.read))


def step_evidence(
    layers: LayerEvidence,
    bounds: Bounds,
    cache: PagedKVCache,
    omega: Float[Array, "L N"],
    length: Int[Array, " B"],
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> StepEvidence:
    """Reduce the bounds of all unread pages to units.

    Args:
      layers: stacked. bounds: of all pages. cache: the version that the step used. length: tokens in it, this step's
        included.
    """
    log_selected = layers.lse - _lse_slack(layers.q, cache, length)
    used, pages = -(-length // config.page_size), bounds.shape[-1]
    in_use = jnp.arange(pages) < used[:, None]
    words = jax.lax.optimization_barrier(layers.read)  # stacked once: XLA would do so anew in each pass over them
    unread = in_use[:, None] & ~unpack_flags(words, pages)
    heads = lambda total, unread, bounds: HeadBounds(
        log_selected, total, layers.out_norm, bounds[:, :, :, 0], bounds[:, :, :, 1], unread
    )
    kernel = lambda: _units_mosaic(bounds, log_selected, words, used, omega, config)
    twin = lambda: _units_xla(bounds, log_selected, unread, heads, omega, cache, config)
    units = dispatch.choose(implementation, kernel, twin)
    known = jnp.repeat(current(cache), config.parts, axis=1)
    return StepEvidence(layers.q, *heads(units.total, unread, bounds), *units[1:], _missing(words, in_use & ~known))


def _units_xla(bounds: Bounds, log_selected, unread, heads, omega, cache: PagedKVCache, config: AuditConfig) -> Units:
    # A barrier ends a pass over the population. Without them XLA keeps what two passes have in common, which takes
    # longer than to compute it again, and joins sums to what is no sum.
    made = jax.lax.optimization_barrier
    mass = _mass(bounds[:, :, :, 0] - log_selected.reshape(*unread.shape[:3], -1, 1))
    total = 1.0 + outward_sum(jnp.where(unread[..., None, :], mass, 0.0), -1)
    bounds, unread, total = made((bounds, unread, total.reshape(log_selected.shape)))
    weight = omega.reshape(len(omega), 1, unread.shape[2], -1, 1)
    add = lambda shares: functools.reduce(jnp.add, [weight[..., g, :] * share for g, share in enumerate(shares)])
    lower, upper = zip(*_shares(heads(total, unread, bounds), cache, config), strict=True)
    lower, upper = made((add(lower) / UP, add(upper) * UP))
    count = (~(upper <= 0)).sum(-1, dtype=jnp.int32)  # a NaN is a unit of unknown size, not one that is absent
    return Units(total, lower, upper, count, outward_sum(lower, -1), outward_sum(upper, 1))


def _units_mosaic(bounds: Bounds, log_selected, words, used, omega, config: AuditConfig) -> Units:
    if config.residual != "mass":
        raise NotImplementedError("The audit's unit kernel knows the mass residual alone.")
    return audit_units(bounds, log_selected, _flags(words, bounds.shape[-1]), used, omega, cancel=_CANCEL, up=UP)


def _missing(words: UInt32[Array, "L B K words"], unknown: Bool[Array, "B M"]) -> Int[Array, "L B"]:
    """Pages without valid bounds that were not read, four at a time."""
    unread = pack_flags(unknown.astype(jnp.uint8))[:, None] & ~words
    return jax.lax.population_count(unread).sum((2, 3), dtype=jnp.int32)


def pack_flags(x: UInt8[Array, "*any M"]) -> UInt32[Array, "*any words"]:
    """Four flags, 0 or 1, to a word: stacking many arrays costs a GPU time for each element, not for each byte."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 4)])
    return jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)


def unpack_flags(words: UInt32[Array, "*any words"], size: int) -> Bool[Array, "*any {size}"]:
    """The first `size` of them."""
    return _flags(words, size) != 0


def _flags(words: UInt32[Array, "*any words"], size: int) -> UInt8[Array, "*any {size}"]:
    flags = jax.lax.bitcast_convert_type(words, jnp.uint8)
    return flags.reshape(*words.shape[:-1], -1)[..., :size]


def head_shares(
    evidence: StepEvidence, cache: PagedKVCache, config: AuditConfig
) -> tuple[Float[Array, "L B N M"], Float[Array, "L B N M"]]:
    """Bounds l and c of every unread page for every query head, 0 for the others; outward."""
    heads = HeadBounds(*(getattr(evidence, name) for name in HeadBounds._fields))
    lower, upper = zip(*_shares(heads, cache, config), strict=True)
    flat = lambda x: jnp.stack(x, axis=3).reshape(*evidence.q.shape[:3], -1)
    return flat(lower) / UP, flat(upper) * UP


def _shares(bounds: HeadBounds, cache: PagedKVCache, config: AuditConfig) -> list[tuple[Array, Array]]:
    """Bounds of x_j, [L, B, K, M], not yet rounded, for every head of the groups; 0 where there is nothing unread.

    Head by head: what is made of arrays with a group axis a GPU computes once for each head and writes down between.
    """
    grouped = lambda x: x.reshape(*bounds.log_lower.shape[:4])

    def member(g: int):
        of_head = lambda x: grouped(x)[..., g, None]
        lower, upper = (x[:, :, :, g] - of_head(bounds.log_selected) for x in (bounds.log_lower, bounds.log_upper))
        mass, rest = _mass(lower), _denominator(lower, of_head(bounds.total))
        nu = factor(of_head(bounds.out_norm))
        show = lambda share: jnp.where(bounds.unread, nu * share, 0.0)
        return show(mass / (rest + mass)), show(1.0 / (1.0 + rest * jnp.exp(-upper)))  # x / (a + x) for x of any size

    def factor(out_norm):
        if config.residual == "mass":
            return 1.0
        value_norm = jnp.moveaxis(cache.value_norm[:, cache.page_table], 3, 2)
        return jnp.repeat(output_factor(value_norm, out_norm, config), config.parts, axis=-1)

    return [member(g) for g in range(bounds.log_lower.shape[3])]


def log_denominator(lower: Float[Array, "..."], total: Float[Array, "..."]) -> Float[Array, "..."]:
    """log of a_j / W_S, rounded down, from a unit's own lower log-mass and the head's total."""
    return jnp.log(_denominator(lower, total))


def _denominator(lower: Float[Array, "..."], total: Float[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(1.0, total - _mass(lower) - _CANCEL * total)


def _mass(log_mass: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp, rounded down and kept finite: only ever used as a lower bound."""
    return jnp.exp(jnp.minimum(log_mass, 60.0)) / UP


def output_factor(value_norm: Array, out_norm: Array, config: AuditConfig) -> Array:
    """nu of one unit and head; the output's norm is floored by a constant declared beforehand."""
    return (value_norm + out_norm) / jnp.maximum(out_norm, config.output_floor) * UP


def _lse_slack(q: Float[Array, "L B N H"], cache: PagedKVCache, length: Int[Array, " B"]) -> Float[Array, "L B N"]:
    """Rounding of the selected mass, from the largest key norm of the row."""
    *lead, _, dim = q.shape
    used = jnp.arange(cache.max_blocks) < -(-length // BLOCK)[:, None]
    norm = jnp.where(used[..., None], cache.key_norm[:, cache.page_table], 0.0).max(2)  # [L, B, K]
    grouped = q.astype(jnp.float32).reshape(*norm.shape, -1, dim) * dim**-0.5
    return sketch.rounding_slack(grouped, norm[..., None]).reshape(*lead, -1) + 1e-5
