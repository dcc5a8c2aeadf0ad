"""Which units an audit reads: the step's population as flat arrays, the law of a draw, and draws from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.units import StepEvidence
from skg_jax.stats import blocked, sampling
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats.blocked import BlockedLaw
from skg_jax.stats.sums import outward_sum


class Population(NamedTuple):
    """U units of each row, padding among them."""

    lower: Float[Array, "B U"]
    upper: Float[Array, "B U"]
    law: BlockedLaw | None  # of one draw; None under "wor"
    weights: Float[Array, "B U"] | None  # of the order without replacement, None but for "wor"
    count: Int[Array, " B"]  # units that are there
    cap: Float[Array, " B"]  # sum of the upper bounds, rounded up
    floor: Float[Array, " B"]  # sum of the lower bounds, rounded down
    eta: Float[Array, " B"]  # rounding guard of the process


def population(evidence: StepEvidence, config: AuditConfig) -> Population:
    """Units of the step, flattened over layers, KV heads and pages, with the law of the configured design."""
    flat = lambda x: jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    lower, upper = flat(evidence.lower), flat(evidence.upper)
    count, cap, floor = (flat(x) for x in (evidence.count, evidence.cap, evidence.floor))
    count, cap, floor = count.sum(-1), outward_sum(cap, 1), outward_sum(floor, -1)
    # An array of its own: XLA would otherwise add up all rows again for every unit.
    total = jax.lax.optimization_barrier(cap - floor)
    eta = jax.vmap(kw.rounding_guard)(cap, floor)
    law = weights = None
    if config.design == "wor":
        in_order = lambda low, up: sampling.pps_probs(up - low, ~(up <= 0), config.uniform_share)
        weights = jax.vmap(in_order)(lower, upper)
    else:
        law = jax.vmap(lambda low, up, t, n: _law(low, up, t, n, config))(lower, upper, total, count)
    return Population(lower, upper, law, weights, count, cap, floor, eta)


def _law(lower: Float[Array, " U"], upper: Float[Array, " U"], total, count, config: AuditConfig) -> BlockedLaw:
    """Draws in proportion to the gap between the bounds, with a uniform share; or uniform near the boundary."""
    gap, eps = upper - lower, config.uniform_share
    if config.design == "boundary":
        return blocked.integer_law(sampling.boundary_probs(gap, lower + upper, ~(upper <= 0)), 1.0)
    even = eps * total / jnp.maximum(count, 1)
    return blocked.integer_law(jnp.where(gap > 0, (1 - eps) * gap + even, 0), total)


def order_of(key: Key[Array, " B"], pop: Population, most: int) -> Int[Array, "B n"]:
    """The first units of each row in their order without replacement, at most `most`."""
    return jax.vmap(lambda k, p: sampling.draw_wor(k, p, min(most, p.shape[0])))(key, pop.weights)


def draw(
    key: Key[Array, " B"],
    pop: Population,
    order: Int[Array, "B n"] | None,
    part: Int[Array, ""],
    offset: Int[Array, " B"],
    size: int,
) -> tuple[Int[Array, "B {size}"], Float[Array, "B {size}"]]:
    """The next `size` units of each row and their probabilities, 0 where there is nothing to draw.

    Independent draws of this part, or what follows `offset` in a given order, with their weights in the whole of it.
    """
    if order is None:
        return jax.vmap(lambda k, law, upper: _independent(jax.random.fold_in(k, part), law, upper, size))(
            key, pop.law, pop.upper
        )
    at = offset[:, None] + jnp.arange(size)
    index = jnp.take_along_axis(order, jnp.minimum(at, order.shape[1] - 1), axis=1)
    return index, jnp.where(at < order.shape[1], weights_at(pop, index), 0.0)  # past its end there is nothing to draw


def weights_at(pop: Population, index: Int[Array, "B n"]) -> Float[Array, "B n"]:
    """Under "wor": weights of units in the order."""
    assert pop.weights is not None
    return jnp.take_along_axis(pop.weights, index, axis=1)


def _independent(key: Key[Array, ""], law: BlockedLaw, upper: Float[Array, " U"], size: int):
    index = blocked.draw(key, law, size)
    return index, blocked.probs(law, index, upper)
