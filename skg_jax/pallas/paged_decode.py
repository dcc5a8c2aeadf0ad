"""Paged sparse decode attention for Hopper: one query token per sequence against listed pages, or against all."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from skg_jax.pallas import decode_kernel, dispatch
from skg_jax.pallas.decode_config import DEFAULT, PagedDecodeConfig, Spec, columns_of, pick_splits, shared_memory
from skg_jax.pallas.merge import merge_splits
from skg_jax.pallas.smem import operand, require, rows_scratch
from skg_jax.types import BLOCK, PAGE_SIZES


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
    where = (page_table, length, jnp.asarray(layer, jnp.int32).reshape(1))
    if page_ids is not None and num_pages is not None:
        where += page_ids.reshape(spec.pairs, -1), num_pages.reshape(spec.pairs)
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
        functools.partial(decode_kernel.kernel, spec=spec),
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
