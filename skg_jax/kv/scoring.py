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
from skg_jax.pallas.sketch_score import Bound, Bounds, sketch_score
from skg_jax.types import BLOCK

_CHUNK_BLOCKS = 16
_BOUNDS: dict[BoundKind | None, Bound] = {"sketch": "token", "group": "group", None: "none"}  # of the kernel


def score_pages(
    q: Float[Array, "B N H"],
    cache: PagedKVCache,
    layer: Int[Array, ""],
    length: Int[Array, " B"],
    page_size: int,
    kind: BoundKind | None = "sketch",
    bounds: Bounds | None = None,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B K G M"], Bounds | None]:
    """Estimate of the log-mass of every page, float32, and the bounds of all layers, those of this one among them.

    Of pages in blocks without current metadata, or past the length, nothing is known: estimate and lower bound are
    -inf, the upper +inf.

    Args:
      q: of the token being decoded, in any float dtype.
      kind: see `sketch.page_scores`; the kernel knows "sketch" and "group". None: no bounds.
      bounds: where those of this layer are written, in place; see `room_for_bounds`. Not needed without bounds.
      implementation: None takes the kernel where the machine and the case allow it. Its bounds are wider by 1 to 3
        percent, the rounding of float16 operands.

    Raises:
      NotImplementedError: if "mosaic_gpu" was asked for and cannot do the case.
    """
    grouped = q.reshape(q.shape[0], cache.k.shape[2], -1, q.shape[-1])
    args = cache, layer, length, page_size, kind, bounds
    twin = lambda: _put(_xla(grouped.astype(jnp.float32), *args[:4], kind or "sketch"), layer, bounds)
    return dispatch.choose(implementation, lambda: _kernel(grouped, *args), twin)


def layer_scores(
    q: Float[Array, "B N H"],
    cache: PagedKVCache,
    layer: Int[Array, ""],
    length: Int[Array, " B"],
    page_size: int,
    kind: BoundKind = "sketch",
    implementation: Implementation | None = None,
) -> PageScores:
    """`score_pages` for one layer alone: estimate and bounds, [B, K, G, M] each."""
    room = room_for_bounds(cache, q.shape[1], page_size)
    estimate, bounds = score_pages(q, cache, layer, length, page_size, kind, room, implementation)
    assert bounds is not None
    return PageScores(estimate, bounds[layer, :, :, 0], bounds[layer, :, :, 1])


def room_for_bounds(cache: PagedKVCache, num_heads: int, page_size: int) -> Bounds:
    """An array of any content for the bounds of all layers."""
    layers, _, heads = cache.k.shape[:3]
    of_layer = len(cache.page_table), heads, 2, num_heads // heads, cache.max_blocks * (BLOCK // page_size)
    return jax.lax.empty((layers, *of_layer), jnp.float32)


def _put(found: PageScores, layer, bounds: Bounds | None):
    if bounds is None:
        return found.estimate, None
    both = jnp.stack([found.lower, found.upper], axis=2)
    return found.estimate, jax.lax.dynamic_update_index_in_dim(bounds, both, layer, 0)


def _kernel(q, cache: PagedKVCache, layer, length, page_size: int, kind: BoundKind | None, bounds: Bounds | None):
    if kind == "box":
        raise NotImplementedError("The kernel has no box bounds, which are for comparison.")
    where = cache.page_table, current(cache), length, layer
    return sketch_score(q, *cache.sketch, *where, bounds, page_size=page_size, bound=_BOUNDS[kind])


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
    known = current(cache) & (jnp.arange(cache.max_blocks) * BLOCK < length[:, None])
    shape = (*q.shape[:3], cache.max_blocks * parts)
    by_head = lambda x: jnp.moveaxis(x, 1, 3).reshape(shape)
    unknown = PageScores(*jnp.array([-jnp.inf, -jnp.inf, jnp.inf]))
    known = known[:, :, None, None, None]
    return jax.tree.map(lambda x, other: by_head(jnp.where(known, x[:, : cache.max_blocks], other)), found, unknown)


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
