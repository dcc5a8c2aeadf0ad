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
wgmma reads them, and the slot is released after that. (4) What `store_rows` writes to shared memory is read by other
lanes and by TMA after its `commit_smem`.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from skg_jax.pallas import dispatch
from skg_jax.pallas.decode_config import DEFAULT, PagedDecodeConfig, columns_of, pick_splits, shared_memory
from skg_jax.pallas.merge import LN2, merge_splits
from skg_jax.pallas.smem import (
    COLUMN,
    EMPTY,
    TILE,
    across,
    filled,
    first_column,
    operand,
    require,
    rows_scratch,
    store_rows,
)
from skg_jax.types import BLOCK, PAGE_SIZES

_TINY = 1e-37


def paged_decode(
    q: Float[Array, "B N H"],
    k: Float[Array, "L P K 64 H"],
    v: Float[Array, "L P K 64 H"],
    page_table: Int[Array, "B Mb"],
    page_ids: Int[Array, "B K M"] | None,
    num_pages: Int[Array, "B K"] | None,
    length: Int[Array, " B"],
    layer: Int[Array, ""],
    *,
    page_size: int,
    config: PagedDecodeConfig = DEFAULT,
    out_dtype=jnp.float32,
    interpret: bool | None = None,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention of one token per sequence over the listed pages, or over all of them.

    Lowered once per shape, however often it is called: once per layer is fine, inside or outside of a jit.

    Args:
      q, k, v: of one dtype, bfloat16 or float16. The pools are passed whole; only listed pages are read.
      page_table: pool block of each logical block of a row.
      page_ids: ascending logical pages of each list; entries past `num_pages` are meaningless. Only the last listed
        page may reach past `length`. None, with num_pages None: every page of the row.
      length: tokens of each row; what lies past it may hold anything, NaN included.
      layer: index into L.
      interpret: None compiles for a GPU and interprets elsewhere.

    Returns: output in `out_dtype` and log-sum-exp of the logits, float32. An empty list gives zeros and about -7e29.

    Raises:
      NotImplementedError: for a dtype, head dim, group or page size that the kernel does not know, or a configuration
        that exceeds the shared memory of a block.
    """
    _check(q, k, v, page_size, config, out_dtype)
    spec = _spec(q, k, page_table, page_ids, page_size, config)
    lists = () if page_ids is None else (page_ids.reshape(spec.pairs, -1), num_pages.reshape(spec.pairs))
    where = (page_table, length, jnp.asarray(layer, jnp.int32).reshape(1), *lists)
    return _decode(q, k, v, where, spec, out_dtype, dispatch.interpret(interpret) is not None)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _decode(q, k, v, where, spec: Spec, out_dtype, interpreted: bool):
    interpret = dispatch.interpret(interpreted)
    slabs = lambda pool: pool.reshape(-1, spec.page, spec.head_dim)
    launch = _launch(spec, q.dtype, out_dtype, interpret)
    out, lse = launch(_query_rows(q, spec), slabs(k), slabs(v), *where)
    if spec.splits > 1:
        out, lse = merge_splits(out, lse, spec.group, out_dtype, interpret)
    return out.reshape(q.shape), lse.reshape(q.shape[:2])


class Spec(NamedTuple):
    """Everything about one call that is static."""

    pairs: int  # B * K
    kv_heads: int
    blocks: int  # P
    max_pages: int  # of a row
    head_dim: int
    group: int
    columns: int
    page: int
    tile: int
    stages: int
    splits: int
    listed: bool

    @property
    def per_tile(self) -> int:
        return self.tile // self.page

    @property
    def parts(self) -> int:
        return BLOCK // self.page


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


def _check(q, k, v, page_size: int, config: PagedDecodeConfig, out_dtype) -> None:
    group = q.shape[1] // k.shape[2]
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise NotImplementedError(
            f"Paged decode takes q, k and v of one dtype, bfloat16 or float16, not {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if k.shape[-1] not in (64, 128):
        raise NotImplementedError(f"Paged decode takes a head dim of 64 or 128, not {k.shape[-1]}.")
    if not 1 <= group <= 16:
        raise NotImplementedError(f"Paged decode takes groups of 1 to 16 query heads, not {group}.")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"Paged decode takes pages of 16, 32 or 64 tokens, not {page_size}.")
    require(shared_memory(config, k.shape[-1], group, k.dtype, out_dtype), "take fewer stages or a smaller tile")


def _spec(q, k, page_table, page_ids, page_size: int, config: PagedDecodeConfig) -> Spec:
    batch, heads, dim = q.shape
    _, blocks, kv_heads = k.shape[:3]
    max_pages = page_table.shape[1] * (BLOCK // page_size)
    capacity = max_pages if page_ids is None else page_ids.shape[2]
    tokens = min(capacity, config.expected_pages or capacity) * page_size
    group = heads // kv_heads
    return Spec(
        pairs=batch * kv_heads, kv_heads=kv_heads, blocks=blocks, max_pages=max_pages, head_dim=dim, group=group,
        columns=columns_of(group), page=page_size, tile=config.tile, stages=config.stages,
        splits=pick_splits(batch, kv_heads, tokens, config), listed=page_ids is not None,
    )  # fmt: skip


def _query_rows(q: Float[Array, "B N H"], spec: Spec) -> Float[Array, "rows H"]:
    """All query heads; padded only where they are fewer than wgmma's columns."""
    rows = q.reshape(-1, spec.head_dim)
    return jnp.pad(rows, ((0, max(0, spec.columns - rows.shape[0])), (0, 0)))


def _launch(spec: Spec, dtype, out_dtype, interpret):
    """The kernel. Split results leave it as the accumulators lie; a whole list leaves it in its final form."""
    f32, ring = jnp.float32, (spec.stages, spec.tile, spec.head_dim)
    per_split, columns = (spec.pairs, spec.splits), spec.columns
    out = (
        jax.ShapeDtypeStruct((*per_split, spec.head_dim, columns), f32),
        jax.ShapeDtypeStruct((*per_split, columns), f32),
    )
    if spec.splits == 1:
        shape = (spec.pairs, spec.group)
        out = jax.ShapeDtypeStruct((*shape, spec.head_dim), out_dtype), jax.ShapeDtypeStruct(shape, f32)
    return plgpu.kernel(
        functools.partial(_kernel, spec=spec),
        out_type=out,
        scratch_types=(
            operand((columns, spec.tile), dtype),
            operand((columns, spec.head_dim), dtype),
            operand(ring, dtype),
            operand(ring, dtype),
            *[plgpu.Barrier(num_arrivals=spec.per_tile, num_barriers=spec.stages) for _ in "kv"],
            *[plgpu.Barrier(num_barriers=spec.stages) for _ in "kv"],
            *rows_scratch(columns, spec.head_dim, out_dtype),
        ),
        grid=(spec.pairs, spec.splits),
        grid_names=("pair", "split"),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
        kernel_name="paged_decode",
    )


def _kernel(q_gmem, k_gmem, v_gmem, *refs, spec: Spec):
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

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
