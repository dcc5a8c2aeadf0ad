"""Adaptive budget: the smallest set of pages whose estimated mass reaches p (after Twilight, arXiv 2502.02770).

Twilight prunes tokens of a base selection; here pages compete over the whole context, by the mass that the sketch
estimates.
"""

from __future__ import annotations

import jax.numpy as jnp

from skg_jax.selectors.base import Selector, estimated_share, take


def topp() -> Selector:
    """Budget: p in (0, 1), the share of estimated mass to keep; 1 or more: every page."""

    def select(ctx, state, budget):
        share = estimated_share(ctx)
        order = jnp.argsort(-jnp.where(ctx.must_read[:, None], jnp.inf, share), axis=-1, stable=True)
        ordered = jnp.take_along_axis(share, order, axis=-1)
        before = jnp.cumsum(ordered, axis=-1) - ordered  # mass kept before this page is added
        rank = jnp.argsort(order, axis=-1)
        p = budget[:, None, None]
        return take(ctx, (jnp.take_along_axis(before, rank, axis=-1) < p) | (p >= 1)), state

    return Selector("topp", lambda: (), select)
