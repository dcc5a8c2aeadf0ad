"""The paged KV cache: 64-token blocks in one pool, a page table per sequence, metadata per block.

The cache is a pytree of plain arrays that never moves: it is the carry of the layer scan and of the
decode loop, and donated at the jit boundary. A block goes through three states:

    open     being written; its `written` version runs ahead of its `sealed` version
    sealed   full, with sketch, norms and checksums of the same version
    stale    sealed once, written since (or never sketched: a key overflowed the sketch's format)

Only a sealed block has bounds. Everything else must be read by attention itself.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.kv import sketch
from skg_jax.kv.sealing import norm_up, seal_xla
from skg_jax.kv.sketch import Sketch
from skg_jax.pallas import dispatch
from skg_jax.pallas.append import append as paged_append
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.seal import Metadata
from skg_jax.pallas.seal import seal as seal_blocks
from skg_jax.types import BLOCK

NEVER = -1


class PagedKVCache(NamedTuple):
    """Keys and values of all layers, and what is known about every block of them."""

    k: Float[Array, "L P K 64 H"]
    v: Float[Array, "L P K 64 H"]
    page_table: Int[Array, "B Mb"]  # pool block of each logical block of a sequence
    sketch: Sketch
    key_norm: Float[Array, "L P K"]  # upper bound on the norm of any key of the block
    value_norm: Float[Array, "L P K"]  # upper bound on the norm of any value of the block
    written: Int[Array, " P"]  # content version: grows with every write
    sealed: Int[Array, " P"]  # content version that the metadata describes, NEVER if none
    k_sum: Int[Array, "L P K 4"]  # checksums of each 16-token quarter
    v_sum: Int[Array, "L P K 4"]

    @property
    def max_blocks(self) -> int:
        return self.page_table.shape[1]


def init(
    num_layers: int, num_kv_heads: int, head_dim: int, batch: int, max_tokens: int, dtype=jnp.float32
) -> PagedKVCache:
    """An empty cache whose rows own consecutive blocks.

    Args:
      batch: B, number of sequences. max_tokens: capacity of each, rounded up to whole blocks.

    Raises:
      ValueError: if a size is not positive or head_dim is odd (codes are packed in pairs).
    """
    if min(num_layers, num_kv_heads, head_dim, batch, max_tokens) < 1 or head_dim % 2:
        raise ValueError("cache sizes must be positive and head_dim even; check the model's config.")
    per_row = -(-max_tokens // BLOCK)
    pool = batch * per_row
    shape = (num_layers, pool, num_kv_heads)
    sums = jnp.zeros((*shape, 4), jnp.uint32)
    return PagedKVCache(
        k=jnp.zeros((*shape, BLOCK, head_dim), dtype),
        v=jnp.zeros((*shape, BLOCK, head_dim), dtype),
        page_table=jnp.arange(pool, dtype=jnp.int32).reshape(batch, per_row),
        sketch=sketch.empty(shape, head_dim),
        key_norm=jnp.zeros(shape, jnp.float32),
        value_norm=jnp.zeros(shape, jnp.float32),
        written=jnp.zeros(pool, jnp.int32),
        sealed=jnp.full(pool, NEVER, jnp.int32),
        k_sum=sums,
        v_sum=sums.copy(),
    )


def touch(cache: PagedKVCache, position: Int[Array, " B"]) -> PagedKVCache:
    """Advance the content version of the block that each row is about to write."""
    return cache._replace(written=cache.written.at[_block_of(cache, position)].add(1))


def append(
    cache: PagedKVCache,
    layer: Int[Array, ""],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    position: Int[Array, " B"],
    implementation: Implementation | None = None,
) -> PagedKVCache:
    """Write one token per row into one layer. The caller has `touch`ed the blocks of this step."""
    where = cache.page_table, layer, k, v, position
    kernel = lambda: paged_append(cache.k, cache.v, cache.key_norm, *where)
    pools = dispatch.choose(implementation, kernel, lambda: _append_xla(cache, layer, k, v, position))
    return cache._replace(**dict(zip(("k", "v", "key_norm"), pools, strict=True)))


def _append_xla(cache: PagedKVCache, layer, k, v, position):
    block, slot = _block_of(cache, position), position % BLOCK
    k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
    before = jnp.where((slot == 0)[:, None], 0.0, cache.key_norm[layer, block])
    return (
        cache.k.at[layer, block, :, slot].set(k),
        cache.v.at[layer, block, :, slot].set(v),
        cache.key_norm.at[layer, block].set(jnp.maximum(before, norm_up(k))),
    )


def write_blocks(
    cache: PagedKVCache,
    layer: Int[Array, ""],
    blocks: Int[Array, " n"],
    k: Float[Array, "n K 64 H"],
    v: Float[Array, "n K 64 H"],
    filled: Int[Array, " n"],
) -> PagedKVCache:
    """Write whole blocks of one layer at prefill; only the first `filled` tokens of each count."""
    inside = (jnp.arange(BLOCK) < filled[:, None])[:, None, :]
    k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
    norm = jnp.max(jnp.where(inside, norm_up(k), 0.0), axis=-1)
    return cache._replace(
        k=cache.k.at[layer, blocks].set(k),
        v=cache.v.at[layer, blocks].set(v),
        key_norm=cache.key_norm.at[layer, blocks].set(norm),
    )


def seal(
    cache: PagedKVCache,
    blocks: Int[Array, " n"],
    full: Bool[Array, " n"],
    implementation: Implementation | None = None,
) -> PagedKVCache:
    """Sketch, bound and checksum the full blocks among `blocks` in all layers.

    A block whose keys do not fit the sketch's number format stays without metadata (`sealed` = NEVER):
    it has no bound and will always be read.

    Raises:
      NotImplementedError: if "mosaic_gpu" was asked for and cannot do the case.
    """
    args = cache.k, cache.v, metadata(cache), blocks, full
    found, fits = dispatch.choose(implementation, lambda: seal_blocks(*args), lambda: seal_xla(*args))
    version = jnp.where(jnp.all(fits, axis=(0, 2)), cache.written[blocks], NEVER)
    # a dropped scatter index leaves the pool untouched for blocks that are not full
    at = jnp.where(full, blocks, cache.written.shape[0])
    return cache._replace(
        sketch=Sketch(*found[: len(cache.sketch)]),
        key_norm=found.key_norm,
        value_norm=found.value_norm,
        sealed=cache.sealed.at[at].set(version, mode="drop"),
        k_sum=found.k_sum,
        v_sum=found.v_sum,
    )


def metadata(cache: PagedKVCache) -> Metadata:
    """What sealing writes, but for the version."""
    return Metadata(*cache.sketch, cache.key_norm, cache.value_norm, cache.k_sum, cache.v_sum)


def current(cache: PagedKVCache) -> Bool[Array, "B Mb"]:
    """Which logical blocks have metadata that describes their present content."""
    return sealed(cache)[cache.page_table]


def sealed(cache: PagedKVCache) -> Bool[Array, " P"]:
    """The same of the pool's blocks."""
    return (cache.sealed == cache.written) & (cache.sealed != NEVER)


def _block_of(cache: PagedKVCache, position: Int[Array, " B"]) -> Int[Array, " B"]:
    return jnp.take_along_axis(cache.page_table, (position // BLOCK)[:, None], axis=1)[:, 0]
