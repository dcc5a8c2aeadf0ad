"""Paged caches for the kernel tests: what must not be read is NaN, and lists are ragged."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.selectors import Selection
from skg_jax.types import BLOCK

LAYERS, KV_HEADS, BLOCKS = 2, 2, 3
LAYER = jnp.int32(1)
LENGTHS = np.array([BLOCKS * BLOCK - 27, 77], np.int32)  # each ends inside of a page, whatever its size


class Case(NamedTuple):
    """Arguments of one call of `attention.sparse`."""

    q: jax.Array
    cache: PagedKVCache
    selection: Selection
    length: jax.Array


def make(
    page_size: int, dim: int, group: int, dtype=jnp.bfloat16, lengths: np.ndarray = LENGTHS, chosen=None, seed: int = 0
) -> Case:
    """A random case; `chosen` bool [B, K, M] defaults to `ragged_pages`."""
    rng = np.random.default_rng(seed)
    chosen = ragged_pages(page_size, lengths) if chosen is None else chosen
    q = jnp.asarray(2 * rng.normal(size=(len(lengths), KV_HEADS * group, dim)), dtype)
    allowed = chosen.repeat(page_size, axis=-1) & (np.arange(BLOCKS * BLOCK) < lengths[:, None])[:, None]
    return Case(q, _paged(rng, allowed, dim, dtype), _as_selection(rng, chosen), jnp.asarray(lengths))


def ragged_pages(page_size: int, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Lists that are full, sparse with the partial page, of the partial page alone, and empty."""
    pages = np.arange(BLOCKS * BLOCK // page_size)
    used = pages < -(-lengths[:, None] // page_size)
    last = pages == -(-lengths[:, None] // page_size) - 1
    rows = [used[0], used[0] & (pages % 3 == 1) | last[0], last[1], used[1] & False]
    return np.stack(rows).reshape(2, KV_HEADS, -1)


def every_page(lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Every block of each row, as pages of 64."""
    used = np.arange(BLOCKS) < -(-lengths // BLOCK)[:, None]
    return np.broadcast_to(used[:, None], (len(lengths), KV_HEADS, BLOCKS))


def _paged(rng, allowed: np.ndarray, dim: int, dtype) -> PagedKVCache:
    """Blocks scattered over a pool that is NaN but for the allowed tokens of one layer."""
    batch = allowed.shape[0]
    table = rng.permutation(batch * BLOCKS + 3)[: batch * BLOCKS].reshape(batch, BLOCKS)

    def pool():
        x = np.where(allowed[..., None], rng.normal(size=(*allowed.shape, dim)), np.nan)
        whole = np.full((LAYERS, batch * BLOCKS + 3, KV_HEADS, BLOCK, dim), np.nan)
        whole[LAYER, table] = x.reshape(batch, KV_HEADS, BLOCKS, BLOCK, dim).swapaxes(1, 2)
        return jnp.asarray(whole, dtype)

    cache = kv.init(LAYERS, KV_HEADS, dim, 1, BLOCK, dtype)
    return cache._replace(k=pool(), v=pool(), page_table=jnp.asarray(table, jnp.int32))


def _as_selection(rng, chosen: np.ndarray) -> Selection:
    """Ascending lists; entries past the count are arbitrary numbers."""
    ids = rng.integers(-(10**9), 10**9, size=chosen.shape).astype(np.int32)
    for at in np.ndindex(*chosen.shape[:2]):
        pages = np.flatnonzero(chosen[at])
        ids[at][: pages.size] = pages
    return selection(jnp.asarray(ids), jnp.asarray(chosen.sum(-1), jnp.int32), jnp.asarray(chosen))


def selection(page_ids: jax.Array, num_pages: jax.Array, read: jax.Array) -> Selection:
    """A Selection, with the boolean form of the lists where it has one."""
    fields = {"page_ids": page_ids, "num_pages": num_pages, "read": read}
    return Selection(**{name: fields[name] for name in Selection._fields})


def races_found() -> bool:
    """The verdict on the last interpreted kernel. jax 0.11 has no public name for it."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found
