"""What a page selector is: two functions, and the list of pages that they produce.

A selector never claims anything: the audit bounds what any of them drops. It may carry state from layer to layer of a
step. The budget is a traced number per sequence, so that a larger tier does not recompile; `inf` means every page.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt8

from skg_jax.pallas.select import LOG_FLOOR


class Selection(NamedTuple):
    """Pages to read, per sequence and KV head: as a list and as a mask of the same pages."""

    page_ids: Int[Array, "B K M"]  # ascending; entries past `num_pages` are meaningless
    num_pages: Int[Array, "B K"]
    read: UInt8[Array, "B K M"]  # 1 or 0: as they come from a kernel, for whom a bool costs a launch


class SelectContext(NamedTuple):
    """What a selector may look at in one layer of one step."""

    estimate: Float[Array, "B K G M"]  # of the pages' log-masses, from the sketch
    must_read: Bool[Array, "B M"]  # pages without valid bounds, sinks, the recent window
    total_pages: Int[Array, " B"]  # pages in use by each sequence
    layer: Int[Array, ""]


class Selector(NamedTuple):
    """`init() -> state`; `select(ctx, state, budget [B]) -> (Selection, state)`."""

    name: str
    init: Callable[[], Any]
    select: Callable[[SelectContext, Any, Float[Array, " B"]], tuple[Selection, Any]]


def valid_pages(ctx: SelectContext) -> Bool[Array, "B M"]:
    """Pages in use."""
    return jnp.arange(ctx.must_read.shape[-1]) < ctx.total_pages[:, None]


def forced_pages(ctx: SelectContext) -> Bool[Array, "B M"]:
    """Pages in use that must be read."""
    return ctx.must_read & valid_pages(ctx)


def estimated_share(ctx: SelectContext) -> Float[Array, "B K M"]:
    """Estimated attention mass of each page, averaged over the query heads of the group.

    Sums to one over the pages, or to less where a head has no page with an estimate, or one that is not a number: it
    has no say then. A page below exp(LOG_FLOOR) of the head's best counts as nothing, so that no share is a denormal
    number, which machines treat differently.
    """
    estimate = jnp.where(valid_pages(ctx)[:, None, None], ctx.estimate, -jnp.inf)
    below_best = estimate - estimate.max(-1, keepdims=True)
    mass = jnp.where(below_best >= LOG_FLOOR, jnp.exp(below_best), 0.0)
    share = mass * (1.0 / jnp.maximum(mass.sum(-1, keepdims=True), 1.0))  # the best page alone is 1
    return share.sum(2) * (1.0 / estimate.shape[2])


def take(ctx: SelectContext, wanted: Bool[Array, "B K M"]) -> Selection:
    """The selection that reads the wanted pages, and those that must be read in any case.

    Ascending order keeps the one page that may be partly filled at the end of the list.
    """
    read = (wanted | ctx.must_read[:, None]) & valid_pages(ctx)[:, None]
    pages = jnp.arange(read.shape[-1], dtype=jnp.int32)
    order = jnp.sort(jnp.where(read, pages, read.shape[-1]), axis=-1)
    ids = jnp.minimum(order, read.shape[-1] - 1)
    return Selection(ids, read.sum(-1, dtype=jnp.int32), read.astype(jnp.uint8))
