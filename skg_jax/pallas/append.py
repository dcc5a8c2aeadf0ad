"""Append: the new token of every row, written into the pools in place. One launch for K, V and the key norms."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from skg_jax.pallas import dispatch
from skg_jax.pallas.smem import TILE
from skg_jax.types import BLOCK

_ROUND_UP = 1.0 + 1e-5  # more than float32 loses in a norm of 128 channels


def append(
    pool_k: Float[Array, "L P K 64 H"],
    pool_v: Float[Array, "L P K 64 H"],
    key_norm: Float[Array, "L P K"],
    page_table: Int[Array, "B Mb"],
    layer: Int[Array, ""],
    k: Float[Array, "B K H"],
    v: Float[Array, "B K H"],
    position: Int[Array, " B"],
    *,
    interpret: bool | None = None,
) -> tuple[Float[Array, "L P K 64 H"], Float[Array, "L P K 64 H"], Float[Array, "L P K"]]:
    """Write one token per row into one layer.

    The pools are aliased to the results: inside of a jit that owns them (donated, or the carry of a loop) nothing is
    copied. Rows own their open blocks, so that no two of them write to one place.

    Args:
      key_norm: upper bound on the norm of any key of a block, float32; starts anew with the block's first slot.
      layer: index into L. position: of the new token in its row.
      interpret: None compiles for a GPU and interprets elsewhere.

    Raises:
      NotImplementedError: for a dtype or head dim that the kernel does not know.
    """
    _check(pool_k, pool_v)
    where = page_table, position, jnp.asarray(layer, jnp.int32).reshape(1)
    return _append(pool_k, pool_v, key_norm, k, v, where, dispatch.interpret(interpret) is not None)


@functools.partial(jax.jit, static_argnums=6)
def _append(pool_k, pool_v, key_norm, k, v, where, interpreted: bool):
    layers, blocks, heads, _, dim = pool_k.shape
    refs = [
        jax.new_ref(pool_k.reshape(layers * blocks, heads, BLOCK, dim)),
        jax.new_ref(pool_v.reshape(layers * blocks, heads, BLOCK, dim)),
        jax.new_ref(key_norm.reshape(layers * blocks, heads)),
    ]
    tokens = (x.astype(pool_k.dtype) for x in (k, v))
    _launch(refs, tokens, where, blocks, dispatch.interpret(interpreted))
    return tuple(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, (pool_k, pool_v, key_norm), strict=True))


def _check(pool_k, pool_v) -> None:
    if pool_k.dtype not in (jnp.bfloat16, jnp.float16) or pool_v.dtype != pool_k.dtype:
        raise NotImplementedError(
            f"Append takes pools of one dtype, bfloat16 or float16, not {pool_k.dtype} and {pool_v.dtype}."
        )
    if pool_k.shape[-1] not in (64, 128):
        raise NotImplementedError(f"Append takes a head dim of 64 or 128, not {pool_k.shape[-1]}.")


def _launch(refs, tokens, where, blocks: int, interpret) -> None:
    k, v = tokens
    batch, heads, dim = k.shape
    columns = -(-heads // 8) * 8
    rows = plgpu.SMEM((columns, dim), k.dtype)
    scratch = rows, rows, plgpu.SMEM((columns,), jnp.float32), plgpu.Barrier(num_arrivals=2)
    mesh = plgpu.Mesh(grid=(batch,), grid_names=("row",), kernel_name="paged_append")

    def body(*gmem):
        pl.run_scoped(functools.partial(_kernel, *gmem, blocks=blocks, heads=heads), *scratch)

    launch: Any = pl.kernel(
        body, (), mesh=mesh, name="paged_append", interpret=interpret, compiler_params=plgpu.CompilerParams()
    )
    launch(*refs, k, v, *where)


def _kernel(
    k_pool,  # [L*P, K, 64, H]
    v_pool,  # [L*P, K, 64, H]
    norm_pool,  # [L*P, K]
    k_gmem,  # [B, K, H]
    v_gmem,  # [B, K, H]
    table_gmem,  # [B, Mb]
    position_gmem,  # [B]
    layer_gmem,  # [1]
    k_smem,  # [columns, H]; rows past K stay as they are, and their norms are not used
    v_smem,  # [columns, H]
    norm_smem,  # [columns]
    ready,
    *,
    blocks: int,
    heads: int,
):
    row = lax.axis_index("row")
    used = pl.ds(0, heads)
    plgpu.copy_gmem_to_smem(k_gmem.at[row], k_smem.at[used], ready)
    plgpu.copy_gmem_to_smem(v_gmem.at[row], v_smem.at[used], ready)
    position = position_gmem[row]
    slot = lax.rem(position, BLOCK)
    block = layer_gmem[0] * blocks + table_gmem[row, lax.div(position, BLOCK)]
    plgpu.barrier_wait(ready)
    plgpu.copy_smem_to_gmem(k_smem.at[used], k_pool.at[block, :, slot])
    plgpu.copy_smem_to_gmem(v_smem.at[used], v_pool.at[block, :, slot])
    keys = plgpu.load(k_smem.T, layout=TILE, optimized=False).astype(jnp.float32)
    norm_smem[...] = jnp.sqrt(jnp.sum(keys * keys, axis=0)) * _ROUND_UP
    plgpu.commit_smem()
    for head in range(heads):
        before = jnp.where(slot == 0, 0.0, norm_pool[block, head])
        norm_pool[block, head] = jnp.maximum(before, norm_smem[head])
    plgpu.wait_smem_to_gmem(0)
