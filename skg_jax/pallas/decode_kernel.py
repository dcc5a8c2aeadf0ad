"""Paged sparse decode attention for Hopper: one query token per sequence against listed pages.

    grid (B*K, splits), two warpgroups per block, a ring of `stages` tiles of `tile` tokens
    producer   one warp: page ids -> page table -> slabs; one TMA per page for K, one for V
    consumer   S^T = K q^T [tile, columns]; online softmax over the columns; O^T = V^T P [H, columns]

Scores are transposed: tokens are the 64 rows of a wgmma and the query heads of the group its 8 or 16 columns, so that
no query is padded to 64 rows and neither K nor V passes through registers. Each (sequence, KV head) is shared by
`splits` blocks; `merge_splits` combines them.

Why `unsafe_no_auto_barriers` is sound here. (1) A ring slot is refilled only after all 128 lanes of the consumer have
arrived on its `free` barrier, each after its own wait for the wgmma that read it. (2) `p_smem` is rewritten by the next
tile only after the max reduction of that tile, which holds warpgroup barriers, and every lane reaches it after its
wait for the wgmma that read P. Whoever removes that reduction must put a barrier in its place. (3) `_hide` reads and
writes V in one layout: each lane touches its own elements only, `commit_smem` (fence and barrier) follows before the
wgmma reads them, and the slot is released after that. (4) The queries, and what `store_rows` leaves, are written to
shared memory once, and read by wgmma, TMA and other lanes only after a `commit_smem`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from skg_jax.pallas.decode_config import Spec
from skg_jax.pallas.merge import LN2
from skg_jax.pallas.smem import COLUMN, EMPTY, TILE, across, filled, first_column, store_rows

_TINY = 1e-37


class Lists(NamedTuple):
    """Where the pages of a list are: refs in GMEM."""

    table: Any  # int32 [B, Mb]
    length: Any  # int32 [B]
    layer: Any  # int32 [1]
    ids: Any = None  # int32 [B*K, M]; None: page i of a list is page i of its row
    count: Any = None  # int32 [B*K]

    def pages(self, pair, spec: Spec):
        """Pages on the list of a (sequence, KV head)."""
        if spec.listed:
            return self.count[pair]
        return lax.div(self.length[lax.div(pair, spec.kv_heads)] + (spec.page - 1), spec.page)

    def page_id(self, pair, i, pages, spec: Spec):
        """Logical page of entry i; the last one past the end. Never outside of the table, whatever an id holds."""
        i = jnp.maximum(jnp.minimum(i, pages - 1), 0)
        page = self.ids[pair, i] if spec.listed else i
        return jnp.clip(page, 0, spec.max_pages - 1)

    def slab(self, pair, page, spec: Spec):
        """Index of a page of one head in the pool of slabs."""
        row, head = lax.div(pair, spec.kv_heads), lax.rem(pair, spec.kv_heads)
        block = self.layer[0] * spec.blocks + self.table[row, lax.div(page, spec.parts)]
        return (block * spec.kv_heads + head) * spec.parts + lax.rem(page, spec.parts)

    def tokens(self, pair, pages, spec: Spec):
        """Valid tokens of a list: all of its pages, less what the last one reaches past the length."""
        end = (self.page_id(pair, pages - 1, pages, spec) + 1) * spec.page
        over = end - self.length[lax.div(pair, spec.kv_heads)]
        return pages * spec.page - jnp.clip(over, 0, spec.page)


class Ring(NamedTuple):
    """What producer and consumer share: refs in SMEM, barriers."""

    k: Any  # [stages, tile, H]
    v: Any  # [stages, tile, H]
    k_ready: Any  # [stages]
    v_ready: Any
    k_free: Any
    v_free: Any


def kernel(q_gmem, k_gmem, v_gmem, *refs, spec: Spec):
    """q [rows, H]; k, v [slabs, page, H]; the refs of Lists; outputs; scratch."""
    lists, refs = Lists(*refs[: 5 if spec.listed else 3]), refs[5 if spec.listed else 3 :]
    out_gmem, lse_gmem, p_smem, q_smem, *refs, rows_smem, numbers_smem = refs
    ring = Ring(*refs)
    pair, split = lax.axis_index("pair"), lax.axis_index("split")
    pages = lists.pages(pair, spec)
    first, count = _tiles_of(pages, split, spec)

    @pl.when(lax.axis_index("role") == 1)
    def producer():
        _produce(k_gmem, v_gmem, lists, ring, pair, pages, first, count, spec)

    @pl.when(lax.axis_index("role") == 0)
    def consumer():
        own = first_column(pair, spec.group, spec.columns, q_gmem.shape[0])
        _load_query(q_gmem.at[pl.ds(pair * spec.group - own, spec.columns)], q_smem)
        valid = lists.tokens(pair, pages, spec)
        out, mass = _consume(ring, q_smem, p_smem, valid - first * spec.tile, count, spec)
        if spec.splits > 1:
            out_gmem.at[pair, split][...] = out
            lse_gmem.at[pair, split][...] = mass
        else:
            store_rows(out, mass * LN2, out_gmem.at[pair], lse_gmem.at[pair], rows_smem, numbers_smem, own, spec.group)


def _tiles_of(pages, split, spec: Spec):
    """First tile and number of tiles of a split; decided on the device, for lists of any length."""
    tiles = lax.div(pages + (spec.per_tile - 1), spec.per_tile)
    share = lax.div(tiles + (spec.splits - 1), spec.splits)
    first = split * share
    return first, jnp.maximum(jnp.minimum(first + share, tiles) - first, 0)


# --- producer -----------------------------------------------------------------------------------------------------


def _produce(k_gmem, v_gmem, lists: Lists, ring: Ring, pair, pages, first, count, spec: Spec):
    """One warp streams the listed pages into the ring.

    A slab needs two dependent loads, page id and page table. Both run ahead: while the copies of tile i are issued, the
    table entries of tile i+1 and the ids of tile i+2 are on their way. Missing pages of the last tile are the last page
    again (an L2 hit), masked by the consumer.
    """
    entries = range(spec.per_tile)
    ids_of = lambda tile: tuple(lists.page_id(pair, tile * spec.per_tile + j, pages, spec) for j in entries)
    slabs_of = lambda ids: tuple(lists.slab(pair, page, spec) for page in ids)

    @plgpu.warp_map
    def per_warp(warp):
        @pl.when(warp == 0)
        def _():
            def step(i, ahead):
                slabs, ids = ahead
                after = slabs_of(ids), ids_of(first + i + 2)
                _fill(k_gmem, ring.k, ring.k_ready, ring.k_free, i, slabs, spec)
                _fill(v_gmem, ring.v, ring.v_ready, ring.v_free, i, slabs, spec)
                return after

            lax.fori_loop(0, count, step, (slabs_of(ids_of(first)), ids_of(first + 1)))

            # Interpret mode insists that every completion is observed; on the GPU this costs nothing.
            @pl.loop(0, jnp.minimum(count, spec.stages))
            def _(slot):
                plgpu.barrier_wait(ring.k_free.at[slot])
                plgpu.barrier_wait(ring.v_free.at[slot])


def _fill(pool_gmem, smem, ready, free, i, slabs, spec: Spec):
    """Copy the pages of tile i into their slot, once the tile before it there has been read."""
    slot = lax.rem(i, spec.stages)

    @pl.when(i >= spec.stages)
    def _():
        plgpu.barrier_wait(free.at[slot])

    for j, slab in enumerate(slabs):
        plgpu.copy_gmem_to_smem(pool_gmem.at[slab], smem.at[slot, pl.ds(j * spec.page, spec.page)], ready.at[slot])


# --- consumer -----------------------------------------------------------------------------------------------------


def _load_query(q_gmem, q_smem) -> None:
    """Query heads of a group as wgmma's columns.

    A group that is smaller than the columns brings rows of its neighbours along: columns do not mix, and those of
    others are not stored. That saves the launch that would pad q.
    """
    q_smem.T[...] = plgpu.load(q_gmem.T, layout=plgpu.Layout.WGMMA_TRANSPOSED, optimized=False)
    plgpu.commit_smem()


def _consume(ring: Ring, q_smem, p_smem, valid, count, spec: Spec):
    """Online softmax over `count` tiles, whose first `valid` tokens count.

    Returns: output [H, columns], normalised, and log2 of the mass [columns].
    """
    shape, scale = (spec.tile, spec.columns), spec.head_dim**-0.5 * math.log2(math.e)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)

    def step(i, carry):
        top, mass, acc = carry
        slot, left = lax.rem(i, spec.stages), valid - i * spec.tile
        s = jnp.where(row < left, _scores(ring, q_smem, slot, spec) * scale, EMPTY)
        new_top = jnp.maximum(top, jnp.max(s, axis=0))  # holds the barriers that protect p_smem
        old = jnp.exp2(top - new_top)
        p = jnp.exp2(s - across(new_top, shape))
        mass = mass * across(old, shape) + p  # of each row alone; summed once, at the end
        return new_top, mass, acc * across(old, acc.shape) + _values(ring, p_smem, p, slot, left, spec)

    acc = filled((spec.head_dim, spec.columns), 0.0, TILE)
    start = filled(shape[1:], EMPTY, COLUMN), filled(shape, 0.0, TILE), acc
    top, mass, acc = lax.fori_loop(0, count, step, start)
    total = jnp.maximum(jnp.sum(mass, axis=0), _TINY)
    return acc * across(1.0 / total, acc.shape), top + jnp.log2(total)


def _scores(ring: Ring, q_smem, slot, spec: Spec):
    """S^T = K q^T, float32 [tile, columns]."""
    plgpu.barrier_wait(ring.k_ready.at[slot])
    scores = _wgmma(ring.k.at[slot], q_smem.T, (spec.tile, spec.columns))
    plgpu.barrier_arrive(ring.k_free.at[slot])
    return scores


def _values(ring: Ring, p_smem, p, slot, left, spec: Spec):
    """O^T = V^T P, float32 [H, columns]. P goes through SMEM in the dtype of V."""
    p_smem.T[...] = plgpu.layout_cast(p.astype(p_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    plgpu.commit_smem()
    plgpu.barrier_wait(ring.v_ready.at[slot])
    pl.when(left < spec.tile)(lambda: _hide(ring.v.at[slot], left))
    out = _wgmma(ring.v.at[slot].T, p_smem.T, (spec.head_dim, spec.columns))
    plgpu.barrier_arrive(ring.v_free.at[slot])
    return out


def _hide(v_smem, left):
    """Zero the values of masked tokens: their weight is zero, but they may be NaN. The last tile of a list only."""
    values = plgpu.load(v_smem, layout=TILE)
    row = plgpu.broadcasted_iota(jnp.int32, values.shape, 0, layout=TILE)
    v_smem[...] = jnp.where(row < left, values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _wgmma(a, b, shape: tuple[int, int]):
    def multiply(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
