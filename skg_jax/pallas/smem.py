"""Shared memory and register layouts of the attention kernels: allocations, their size, and rows on their way out.

The kernels compute transposed: tokens or channels are the 64 rows of a wgmma, the query heads of a group its columns.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

LIMIT = 232448  # bytes that one block may ask for on Hopper (227 KiB)
ALIGNMENT = 1024  # Pallas starts every allocation at a multiple of this
REDUCTION = 2048  # scratch of cross-warp reductions (plgpu.CompilerParams.reduction_scratch_bytes)
BARRIER = 8

EMPTY = -1e30  # a finite minus infinity: what has no keys gives no NaN

TILE = plgpu.Layout.WGMMA  # [64 i, 8 j] accumulators and whatever meets them
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # one number per column of a TILE


def operand(shape: tuple[int, ...], dtype) -> Any:
    """An allocation that TMA fills and wgmma reads: rows of 128 bytes, swizzled."""
    elements = 128 // jnp.dtype(dtype).itemsize
    tiling, swizzle = plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def nbytes(shape: tuple[int, ...], dtype) -> int:
    """What an allocation takes, its padding included."""
    return -(-math.prod(shape) * jnp.dtype(dtype).itemsize // ALIGNMENT) * ALIGNMENT


def require(items: dict[str, int], advice: str) -> None:
    """Raise NotImplementedError unless the allocations fit into a block's shared memory."""
    if (total := sum(items.values())) > LIMIT:
        listed = ", ".join(f"{name} {size}" for name, size in items.items())
        raise NotImplementedError(f"The kernel needs {total} of {LIMIT} bytes of shared memory ({listed}): {advice}.")


def across(column, shape: tuple[int, ...]):
    """Repeat one number per column over the rows of a tile."""
    return lax.broadcast_in_dim(column, shape, [1])


def filled(shape: tuple[int, ...], value: float, layout):
    """A float32 register array, as a loop needs it to start with."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def first_column(pair, group: int, columns: int, rows: int):
    """Where the query heads of a (sequence, KV head) stand among the columns of its block.

    Columns hold consecutive rows of the queries [rows, H], from the group's first on; the last blocks begin a little
    earlier, so that they end with the array.
    """
    start = pair * group
    return start - jnp.minimum(start, max(rows, columns) - columns)


def rows_scratch(columns: int, width: int, dtype) -> tuple[Any, Any]:
    """The two allocations of `store_rows`."""
    return plgpu.SMEM((columns, width), dtype), plgpu.SMEM((columns,), jnp.float32)


def store_rows(tile, column, rows_gmem, numbers_gmem, rows_smem, numbers_smem, first, count: int) -> None:
    """Write `count` columns of a tile as rows, and of a column vector as numbers, both from column `first` on.

    Args:
      tile: float32 [width, columns] in layout TILE. column: float32 [columns] in layout COLUMN.
      rows_gmem: [count, width]. numbers_gmem: float32 [count], or None.
      rows_smem, numbers_smem: from `rows_scratch`.
    """
    rows_smem.T[...] = plgpu.layout_cast(tile.astype(rows_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
    if numbers_gmem is not None:
        numbers_smem[...] = column
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(rows_smem.at[pl.ds(first, count)], rows_gmem)
    if numbers_gmem is not None:
        for i in range(count):
            numbers_gmem[i] = numbers_smem[first + i]
    plgpu.wait_smem_to_gmem(0)
