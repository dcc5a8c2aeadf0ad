"""Adaptive budget: the smallest set of pages whose estimated mass reaches p (after Twilight, arXiv 2502.02770).

Twilight prunes tokens of a base selection; here pages compete over the whole context, by the mass that the sketch
estimates.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from skg_jax.pallas import dispatch, select
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.select import WHOLE
from skg_jax.selectors.base import SelectContext, Selection, Selector, estimated_share, forced_pages, take


def topp(implementation: Implementation | None = None) -> Selector:
    """Budget: p in (0, 1), the share of estimated mass to keep; 1 or more: every page.

    Args:
      implementation: None takes the kernel on a GPU that has it. It differs from "xla" by the rounding of the shares.
    """

    def choose(ctx, state, budget):
        kernel = lambda: Selection(*select.topp(ctx.estimate, ctx.must_read, ctx.total_pages, budget))
        return dispatch.choose(implementation, kernel, lambda: smallest(ctx, budget)), state

    return Selector("topp", lambda: (), choose)


def smallest(ctx: SelectContext, p: Float[Array, " B"]) -> Selection:
    """The fewest pages, by descending share, that hold a share p; ties go to the lower page id."""
    share = estimated_share(ctx)
    order = jnp.argsort(-jnp.where(forced_pages(ctx)[:, None], jnp.inf, share), axis=-1, stable=True)
    ordered = jnp.take_along_axis((share * WHOLE + 0.5).astype(jnp.int32), order, axis=-1)
    ahead = jnp.cumsum(ordered, axis=-1) - ordered  # mass kept before this page is added
    rank = jnp.argsort(order, axis=-1)
    limit = jnp.ceil(jnp.minimum(p, 1.0) * WHOLE)[:, None, None].astype(jnp.int32)
    return take(ctx, (jnp.take_along_axis(ahead, rank, axis=-1) < limit) | (p >= 1)[:, None, None])
