"""Selection contexts made of given estimates, and plain-python readings of a selection."""

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.selectors import SelectContext, Selection


def context(estimate, total, must=None) -> SelectContext:
    """estimate [B,K,G,M]; pages from `total` [B] on hold whatever the estimate says there."""
    estimate, total = jnp.asarray(estimate, jnp.float32), jnp.asarray(total, jnp.int32)
    pages = (estimate.shape[0], estimate.shape[-1])
    must = np.zeros(pages, bool) if must is None else must
    return SelectContext(estimate, jnp.asarray(must), total, jnp.int32(0))


def share_of(ctx: SelectContext) -> np.ndarray:
    """Estimated share of pages in float64, [B,K,M]: mean over the group of the heads' softmax over pages in use."""
    estimate = np.asarray(ctx.estimate).astype(np.float64)
    used = np.arange(estimate.shape[-1]) < np.asarray(ctx.total_pages)[:, None, None, None]
    estimate = np.where(used, estimate, -np.inf)
    mass = np.exp(estimate - estimate.max(-1, keepdims=True))
    return (mass / mass.sum(-1, keepdims=True)).mean(2)


def listed(selection: Selection) -> list[list[list[int]]]:
    """Page ids of each row and head; checks that they are distinct, in range, ascending, and the mask's."""
    ids, counts, read = (np.asarray(x) for x in selection)
    rows = [[ids[b, k, : counts[b, k]].tolist() for k in range(ids.shape[1])] for b in range(ids.shape[0])]
    for b, row in enumerate(rows):
        for k, pages in enumerate(row):
            assert pages == np.flatnonzero(read[b, k]).tolist()
    return rows


def jitted(selector):
    """`select` without state: (ctx, budget [B]) -> Selection."""
    return jax.jit(lambda ctx, budget: selector.select(ctx, selector.init(), budget)[0])
