"""Sketch scores of all pages of a layer: the selector's signal and the audit's bounds, from one read of the sketch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.kv import sketch
from skg_jax.kv.cache import PagedKVCache, current
from skg_jax.kv.sketch import BoundKind, PageScores
from skg_jax.pallas import dispatch
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.sketch_score import sketch_score
from skg_jax.types import BLOCK

_CHUNK_BLOCKS = 16


def score_pages(
    q: Float[Array, "B N H"],
    cache: PagedKVCache,
    layer: Int[Array, ""],
    length: Int[Array, " B"],
    page_size: int,
    kind: BoundKind = "sketch",
    implementation: Implementation | None = None,
) -> PageScores:
    """Estimate and bounds of the log-mass of every page, [B, K, G, M], float32.

    Of pages in blocks without current metadata, or past the length, nothing is known: estimate and lower bound are
    -inf, the upper +inf.

    Args:
      q: of the token being decoded, in any float dtype.
      kind: see `sketch.page_scores`; the kernel knows "sketch" and "group".
      implementation: None takes the kernel where the machine and the case allow it. Its bounds are wider by the rounding
        of its float16 operands, 1 to 3 percent.

    Raises:
      NotImplementedError: if "mosaic_gpu" was asked for and cannot do the case.
    """
    grouped = q.reshape(q.shape[0], cache.k.shape[2], -1, q.shape[-1])
    found = dispatch.choose(
        implementation,
        lambda: _kernel(grouped, cache, layer, length, page_size, kind),
        lambda: _xla(grouped.astype(jnp.float32), cache, layer, length, page_size, kind),
    )
    known = current(cache) & (jnp.arange(cache.max_blocks) * BLOCK < length[:, None])
    known = jnp.repeat(known, BLOCK // page_size, axis=1)[:, None, None]
    unknown = PageScores(*jnp.array([-jnp.inf, -jnp.inf, jnp.inf]))
    return jax.tree.map(lambda x, other: jnp.where(known, x, other), found, unknown)


def _kernel(q, cache: PagedKVCache, layer, length, page_size: int, kind: BoundKind) -> PageScores:
    if kind == "box":
        raise NotImplementedError("The kernel has no box bounds, which are for comparison.")
    bound = "token" if kind == "sketch" else "group"
    table = cache.page_table, length, layer
    return PageScores(*sketch_score(q, *cache.sketch, *table, page_size=page_size, bound=bound))


def _xla(q: Float[Array, "B K G H"], cache: PagedKVCache, layer, length, page_size: int, kind: BoundKind) -> PageScores:
    """A chunk of blocks at a time, so that what is unpacked stays in a cache."""
    batch, parts = q.shape[0], BLOCK // page_size
    grouped = q[:, None]
    padded = -(-cache.max_blocks // _CHUNK_BLOCKS) * _CHUNK_BLOCKS
    table = jnp.pad(cache.page_table, ((0, 0), (0, padded - cache.max_blocks)))
    blank = jnp.zeros((batch, padded, *grouped.shape[2:4], parts))

    def body(i, out):
        ids = jax.lax.dynamic_slice_in_dim(table, i * _CHUNK_BLOCKS, _CHUNK_BLOCKS, axis=1)
        record = jax.tree.map(lambda pool: pool[layer, ids], cache.sketch)
        found = sketch.page_scores(grouped, record, page_size, kind)
        put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i * _CHUNK_BLOCKS, axis=1)
        return jax.tree.map(put, out, found)

    trips = jnp.minimum(-(-length.max() // (_CHUNK_BLOCKS * BLOCK)), padded // _CHUNK_BLOCKS)
    found = jax.lax.fori_loop(0, trips, body, PageScores(blank, blank, blank))
    shape = (*q.shape[:3], cache.max_blocks * parts)
    return jax.tree.map(lambda x: jnp.moveaxis(x[:, : cache.max_blocks], 1, 3).reshape(shape), found)


def forced_pages(
    cache: PagedKVCache, length: Int[Array, " B"], page_size: int, sink_pages: int, recent_pages: int
) -> Bool[Array, "B M"]:
    """Pages that attention must read whatever the selector says.

    The first pages (attention sinks), the recent window, and every page of a block without current metadata.
    """
    parts = BLOCK // page_size
    page = jnp.arange(cache.max_blocks * parts)
    last = -(-length // page_size)[:, None]
    unknown = jnp.repeat(~current(cache), parts, axis=1)
    return (unknown | (page < sink_pages) | (page >= last - recent_pages)) & (page < last)
