"""Units of the audit: from bounds on the masses of pages to bounds on their weighted shares. One pass over the bounds.

XLA fuses the same arithmetic into two passes, with the shares of every head written down in between. The twin is
`skg_jax.audit.units`, where the formulas are explained.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from skg_jax.pallas import dispatch

_CHUNKS = (1024, 512)  # pages of a thread block
_MOST = 60.0  # of an exponent: a mass that is only ever a lower bound is cut there


def unit_bounds(
    bounds: Float[Array, "L B K 2 G M"],
    log_selected: Float[Array, "L B N"],
    total: Float[Array, "L B N"],
    weights: Float[Array, "L N"],
    *,
    cancel: float,
    up: float,
    interpret: bool | None = None,
) -> tuple[Float[Array, "L B K M"], Float[Array, "L B K M"]]:
    """Sums over the heads of a group of weight times l, and of weight times c; float32, not yet rounded outward.

    With masses in units of the head's selected one, w_l and w_u bounds of a page's own: a = max(1, (1 - cancel) total -
    w_l), l = w_l / (a + w_l), c = w_u / (a + w_u). NaN stays NaN.

    Args:
      bounds: lower and upper of the pages' log-masses.
      log_selected: log of the head's selected mass. total: (selected + lower bounds of all unread pages) / selected.
      cancel: part of the total that subtraction may lose. up: factor that masses are rounded down by.

    Raises:
      NotImplementedError: for a number of pages that blocks of 512 do not divide.
    """
    layers, batch, heads, _, group, pages = bounds.shape
    chunk = next((n for n in _CHUNKS if pages % n == 0), None)
    if chunk is None:
        raise NotImplementedError(f"The audit's unit kernel takes a multiple of {_CHUNKS[-1]} pages, not {pages}.")
    rows = layers * batch * heads
    by_row = lambda x: x.astype(jnp.float32).reshape(rows, group)
    result = jax.ShapeDtypeStruct((rows, pages), jnp.float32)
    lower, upper = plgpu.kernel(
        functools.partial(_kernel, chunk=chunk, cancel=cancel, up=up),
        out_type=[result, result],
        grid=(rows, pages // chunk),
        grid_names=("row", "chunk"),
        interpret=dispatch.interpret(interpret),
        kernel_name="audit_units",
    )(
        bounds.reshape(rows, 2, group, pages),
        by_row(log_selected),
        by_row(total),
        by_row(jnp.broadcast_to(weights[:, None], (layers, batch, heads * group))),
    )
    shape = layers, batch, heads, pages
    return lower.reshape(shape), upper.reshape(shape)


def _kernel(bounds_gmem, selected_gmem, total_gmem, weight_gmem, lower_gmem, upper_gmem, *, chunk, cancel, up):
    """bounds [R, 2, G, M]; numbers of heads [R, G]; lower and upper [R, M]."""
    row, own = lax.axis_index("row"), pl.ds(lax.axis_index("chunk") * chunk, chunk)
    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=4)
    load = lambda side, g: plgpu.load(bounds_gmem.at[row, side, g, own], layout=layout, optimized=False)
    lowers, uppers = [], []
    for g in range(bounds_gmem.shape[2]):
        selected, total, weight = (x[row, g] for x in (selected_gmem, total_gmem, weight_gmem))
        mass = jnp.exp(jnp.minimum(load(0, g) - selected, _MOST)) * (1 / up)
        rest = jnp.maximum((1 - cancel) * total - mass, 1.0)
        lowers.append(weight * (mass / (rest + mass)))
        uppers.append(weight * (1.0 / (rest * jnp.exp(selected - load(1, g)) + 1.0)))
    lower_gmem[row, own] = functools.reduce(jnp.add, lowers)
    upper_gmem[row, own] = functools.reduce(jnp.add, uppers)
