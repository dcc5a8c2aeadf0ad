"""Fixed budget: the pages with the largest estimated mass, shared in each GQA group (after Quest, arXiv 2406.10774).

Quest ranks by a min-max box; here the 4-bit sketch ranks, which loses far less mass at the same number of pages.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skg_jax.pallas import dispatch, select
from skg_jax.pallas.dispatch import Implementation
from skg_jax.selectors.base import SelectContext, Selection, Selector, estimated_share, forced_pages, take


def topk(implementation: Implementation | None = None) -> Selector:
    """Budget below 1: fraction of the pages in use; from 1 up: number of pages; inf: all of them.

    Pages that must be read count towards the budget.

    Args:
      implementation: None takes the kernel on a GPU that has it. It differs from "xla" by the rounding of the shares.
    """

    def choose(ctx, state, budget):
        kernel = lambda: Selection(*select.topk(ctx.estimate, ctx.must_read, ctx.total_pages, budget))
        return dispatch.choose(implementation, kernel, lambda: largest(ctx, budget)), state

    return Selector("topk", lambda: (), choose)


def largest(ctx: SelectContext, budget: Float[Array, " B"]) -> Selection:
    """The pages of largest share, as many as the budget buys; ties go to the lower page id."""
    share = jnp.where(forced_pages(ctx)[:, None], jnp.inf, estimated_share(ctx))
    rank = jnp.argsort(jnp.argsort(-share, axis=-1, stable=True), axis=-1)
    return take(ctx, rank < page_count(ctx, budget)[:, None, None])


def page_count(ctx: SelectContext, budget: Float[Array, " B"]) -> Int[Array, " B"]:
    """Whole pages that a budget buys, clamped to the pages in use."""
    total = ctx.total_pages.astype(jnp.float32)
    asked = jnp.where(budget < 1, jnp.ceil(budget * total), budget)
    return jnp.clip(asked, 1, total).astype(jnp.int32)
