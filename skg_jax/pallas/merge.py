"""Merge of split attention: partial results over disjoint keys, weighted by their mass. One launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from skg_jax.pallas.smem import COLUMN, EMPTY, TILE, across, filled, first_column, rows_scratch, store_rows

LN2 = 0.6931471805599453
_ROWS = 64  # channels of a block
_AT_ONCE = 8  # splits whose loads are in flight together


def merge_splits(
    out: Float[Array, "X S H columns"], mass: Float[Array, "X S columns"], group: int, dtype, interpret
) -> tuple[Float[Array, "X G H"], Float[Array, "X G"]]:
    """Combine the S partial outputs of each (sequence, KV head).

    Args:
      out: float32, normalised within its split, transposed; the query heads of the group from `first_column` on.
      mass: float32, log2 of each split's softmax mass; about -1e30 for a split without keys.

    Returns: output in `dtype`, and the natural log of the whole mass, float32.
    """
    pairs, splits, dim, columns = out.shape
    return plgpu.kernel(
        functools.partial(_kernel, splits=splits, group=group, pairs=pairs),
        out_type=(
            jax.ShapeDtypeStruct((pairs, group, dim), dtype),
            jax.ShapeDtypeStruct((pairs, group), jnp.float32),
        ),
        scratch_types=rows_scratch(columns, _ROWS, dtype),
        grid=(pairs, dim // _ROWS),
        grid_names=("pair", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="paged_decode_merge",
    )(out, mass)


def _kernel(
    out_gmem,  # [X, S, H, columns]
    mass_gmem,  # [X, S, columns]
    merged_gmem,  # [X, G, H]
    lse_gmem,  # [X, G]
    rows_smem,  # [columns, 64]
    numbers_smem,  # [columns]
    *,
    splits: int,
    group: int,
    pairs: int,
):
    pair, part = lax.axis_index("pair"), lax.axis_index("part")
    channels = pl.ds(part * _ROWS, _ROWS)
    width = min(splits, _AT_ONCE)

    def absorb(step, carry):
        top, total, acc = carry
        parts = [_load(out_gmem, mass_gmem, pair, step * width + j, channels, splits) for j in range(width)]
        new_top = functools.reduce(jnp.maximum, [mass for _, mass in parts], top)
        # In base 2 nothing is scaled before the subtraction: a product fused with it would leave the rounding error of
        # the product, about 2e22 where every split is empty, and o would be NaN.
        old, weights = jnp.exp2(top - new_top), [jnp.exp2(mass - new_top) for _, mass in parts]
        shares = [out * across(w, out.shape) for w, (out, _) in zip(weights, parts, strict=True)]
        total = functools.reduce(jnp.add, weights, total * old)
        return new_top, total, functools.reduce(jnp.add, shares, acc * across(old, acc.shape))

    columns = (rows_smem.shape[0],)
    start = filled(columns, EMPTY, COLUMN), filled(columns, 0.0, COLUMN), filled((_ROWS, *columns), 0.0, TILE)
    top, total, acc = lax.fori_loop(0, -(-splits // width), absorb, start)
    merged, lse = acc * across(1.0 / total, acc.shape), (top + jnp.log2(total)) * LN2
    rows, own = merged_gmem.at[pair, :, channels], first_column(pair, group, columns[0], pairs * group)

    # every block of a pair knows the same mass; one of them says it
    @pl.when(part == 0)
    def _():
        store_rows(merged, lse, rows, lse_gmem.at[pair], rows_smem, numbers_smem, own, group)

    @pl.when(part != 0)
    def _():
        store_rows(merged, lse, rows, None, rows_smem, numbers_smem, own, group)


def _load(out_gmem, mass_gmem, pair, split, channels, splits: int):
    """Output and mass of one split; past the last one a mass of nothing."""
    at = jnp.minimum(split, splits - 1)
    out = plgpu.load(out_gmem.at[pair, at, channels], layout=TILE, optimized=False)
    mass = plgpu.load(mass_gmem.at[pair, at], layout=COLUMN, optimized=False)
    return out, mass if splits <= _AT_ONCE else mass + jnp.where(split < splits, 0.0, EMPTY)
