"""The population of a step's audit: one unit per layer, KV head and unread page, with bounds on its share of attention.

For a head with exact selected mass W_S, and bounds L <= w <= U on the masses of its unread pages, let

    a_j = W_S + sum of L over the other unread pages,     x_j = w_j / (a_j + w_j).

Then l_j = L_j/(a_j+L_j) <= x_j <= c_j = U_j/(a_j+U_j) and the dropped mass is at most X = sum_j x_j (docs/guarantee.md,
lemma 1). A unit is the weighted sum of x over the query heads of its group. Here masses are relative to W_S: `log`
values have the head's log-sum-exp subtracted.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.audit.config import AuditConfig
from skg_jax.kv import sketch
from skg_jax.kv.cache import PagedKVCache, current
from skg_jax.kv.sketch import PageScores
from skg_jax.selectors.base import Selection, mask_of
from skg_jax.types import BLOCK

UP = 1.0 + 1e-6  # outward rounding of float32 sums and products
_CANCEL = 1e-6  # of the total, lost when one lower bound is subtracted from it


class StepEvidence(NamedTuple):
    """What the audit needs of one layer; stacked over the layers, [L, ...], of one step."""

    q: Float[Array, "*L B N H"]
    log_selected: Float[Array, "*L B N"]  # log W_S, rounded down
    total: Float[Array, "*L B N"]  # (W_S + sum of L) / W_S
    out_norm: Float[Array, "*L B N"]  # |o| of the sparse output, the unit of the output residual
    lower: Float[Array, "*L B K M"]  # l of each unit, weights applied, 0 where there is nothing unread
    upper: Float[Array, "*L B K M"]  # c of each unit
    read: Bool[Array, "*L B K M"]  # pages that attention read
    unbounded: Int[Array, "*L B"]  # unread pages without valid bounds: the step cannot be certified


def layer_evidence(
    q: Float[Array, "B N H"],
    out: Float[Array, "B N H"],
    lse: Float[Array, "B N"],
    scores: PageScores,
    selection: Selection,
    cache: PagedKVCache,
    layer: Int[Array, ""],
    omega: Float[Array, " N"],
    length: Int[Array, " B"],
    config: AuditConfig,
) -> StepEvidence:
    """Bounds of all unread pages of one layer, reduced to units."""
    batch, kv_heads, pages = selection.page_ids.shape
    group = lambda x: x.reshape(batch, kv_heads, -1, *x.shape[2:])
    in_use = jnp.arange(pages) < -(-length // config.page_size)[:, None]
    read = mask_of(selection)
    unread = (in_use[:, None] & ~read)[:, :, None]
    log_selected = group(lse - _lse_slack(q, cache, layer, length))
    relative = lambda x: jnp.where(unread, x - log_selected[..., None], -jnp.inf)
    lower, upper = relative(scores.lower), relative(scores.upper)
    total = 1.0 + _mass(lower).sum(-1)
    out_norm = group(jnp.linalg.norm(out, axis=-1))
    weight = omega.reshape(1, kv_heads, -1, 1) * jnp.repeat(
        _stretch(cache.value_norm[layer, cache.page_table], out_norm, config), BLOCK // config.page_size, axis=-1
    )
    log_rest = log_denominator(lower, total[..., None])
    unit = lambda log_mass: (weight * jax.nn.sigmoid(log_mass - log_rest)).sum(2)
    flat = lambda x: x.reshape(batch, -1)
    known = jnp.repeat(current(cache), BLOCK // config.page_size, axis=1)
    return StepEvidence(
        q=q.astype(jnp.float32),
        log_selected=flat(log_selected),
        total=flat(total),
        out_norm=flat(out_norm),
        lower=unit(lower) / UP,
        upper=unit(upper) * UP,
        read=read,
        unbounded=(unread[:, :, 0] & ~known[:, None]).sum((1, 2), dtype=jnp.int32),
    )


def log_denominator(lower: Float[Array, "..."], total: Float[Array, "..."]) -> Float[Array, "..."]:
    """log of a_j / W_S, rounded down, from a unit's own lower log-mass and the head's total."""
    return jnp.log(jnp.maximum(1.0, total - _mass(lower) - _CANCEL * total))


def _mass(log_mass: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp, rounded down and kept finite: only ever used as a lower bound."""
    return jnp.exp(jnp.minimum(log_mass, 60.0)) / UP


def _stretch(
    value_norm: Float[Array, "B Mb K"], out_norm: Float[Array, "B K G"], config: AuditConfig
) -> Float[Array, "B K G Mb"]:
    """Factor from a share of mass to a bound on the attention output: (max |v| + |o|) / |o|, or one."""
    if config.residual == "mass":
        return jnp.ones((*out_norm.shape, value_norm.shape[1]))
    return output_factor(jnp.moveaxis(value_norm, 1, 2)[:, :, None], out_norm[..., None], config)


def output_factor(value_norm: Array, out_norm: Array, config: AuditConfig) -> Array:
    """nu of one unit and head; the output's norm is floored by a constant declared beforehand."""
    return (value_norm + out_norm) / jnp.maximum(out_norm, config.output_floor) * UP


def _lse_slack(q, cache: PagedKVCache, layer, length: Int[Array, " B"]) -> Float[Array, "B N"]:
    """Rounding of the selected mass, from the largest key norm of the row."""
    batch, heads, dim = q.shape
    used = jnp.arange(cache.max_blocks) < -(-length // BLOCK)[:, None]
    norm = jnp.where(used[..., None], cache.key_norm[layer, cache.page_table], 0.0).max(1)
    grouped = q.astype(jnp.float32).reshape(batch, norm.shape[1], -1, dim) * dim**-0.5
    return sketch.rounding_slack(grouped, norm[..., None]).reshape(batch, heads) + 1e-5
