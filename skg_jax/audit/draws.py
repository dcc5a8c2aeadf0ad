"""Which units an audit reads: the step's population as flat arrays, the law of a draw, and draws from it."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.units import UP, StepEvidence
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from skg_jax.stats.sums import tree_sum


class Population(NamedTuple):
    """U units of each row, padding among them."""

    lower: Float[Array, "B U"]
    upper: Float[Array, "B U"]
    law: Float[Array, "B U"]  # probability of each unit in one draw
    cum: UInt32[Array, "B U"]  # the law as cumulative integer weights
    count: Int[Array, " B"]  # units that are there
    cap: Float[Array, " B"]  # sum of the upper bounds, rounded up
    floor: Float[Array, " B"]  # sum of the lower bounds, rounded down
    eta: Float[Array, " B"]  # rounding guard of the process


def population(evidence: StepEvidence, config: AuditConfig) -> Population:
    """Units of the step, flattened over layers, KV heads and pages, with the law of the configured design."""
    flat = lambda x: jnp.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    lower, upper = flat(evidence.lower), flat(evidence.upper)
    gap = upper - lower
    valid = ~(upper <= 0)  # a NaN is a unit of unknown size, not one that is absent
    if config.design == "boundary":
        law = jax.vmap(sampling.boundary_probs)(gap, lower + upper, valid)
    else:
        law = jax.vmap(lambda g, v: sampling.pps_probs(g, v, config.uniform_share))(gap, valid)
    cum, exact = jax.vmap(sampling.integer_law)(law)
    cap, floor = tree_sum(upper) * UP, tree_sum(lower) / UP
    eta = jax.vmap(kw.rounding_guard)(cap, floor)
    law = law if config.design == "wor" else exact
    return Population(lower, upper, law, cum, valid.sum(-1, dtype=jnp.int32), cap, floor, eta)


def order_of(key: Key[Array, " B"], pop: Population, most: int) -> Int[Array, "B n"]:
    """The first units of each row in their order without replacement, at most `most`."""
    return jax.vmap(lambda k, p: sampling.draw_wor(k, p, min(most, p.shape[0])))(key, pop.law)


def draw(
    key: Key[Array, " B"],
    pop: Population,
    order: Int[Array, "B n"] | None,
    part: Int[Array, ""],
    offset: Int[Array, " B"],
    size: int,
) -> Int[Array, "B {size}"]:
    """The next `size` units of each row: independent draws of this part, or what follows `offset` in a given order."""
    if order is None:
        fresh = lambda k, c: sampling.draw_iid(jax.random.fold_in(k, part), c, size)
        return jax.vmap(fresh)(key, pop.cum)
    at = jnp.minimum(offset[:, None] + jnp.arange(size), order.shape[1] - 1)
    return jnp.take_along_axis(order, at, axis=1)
