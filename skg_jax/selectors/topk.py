"""Fixed budget: the pages with the largest estimated mass, shared in each GQA group (after Quest, arXiv 2406.10774).

Quest ranks by a min-max box; here the 4-bit sketch ranks, which loses far less mass at the same number of pages.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skg_jax.selectors.base import SelectContext, Selector, estimated_share, take


def topk() -> Selector:
    """Budget below 1: fraction of the pages in use; from 1 up: number of pages; inf: all of them.

    Pages that must be read count towards the budget.
    """

    def select(ctx, state, budget):
        share = jnp.where(ctx.must_read[:, None], jnp.inf, estimated_share(ctx))
        # rank of each page by descending share; ties go to the lower page id, so exactly n pages are taken
        rank = jnp.argsort(jnp.argsort(-share, axis=-1, stable=True), axis=-1)
        return take(ctx, rank < page_count(ctx, budget)[:, None, None]), state

    return Selector("topk", lambda: (), select)


def page_count(ctx: SelectContext, budget: Float[Array, " B"]) -> Int[Array, " B"]:
    """Whole pages that a budget buys, clamped to the pages in use."""
    total = ctx.total_pages.astype(jnp.float32)
    asked = jnp.where(budget < 1, jnp.ceil(budget * total), budget)
    return jnp.clip(asked, 1, total).astype(jnp.int32)
