"""Units of the audit: from bounds on the masses of pages to bounds on their weighted shares, in one launch.

One block per layer, sequence and KV head passes twice over its pages: first it adds up the lower bounds of the unread
ones, then it makes shares of the total. The second pass begins where the first ended, with what the L2 cache still
holds, so that every bound comes from memory once. The twin is `skg_jax.audit.units`, where the formulas are explained.

Sums round outward by _SUM. The longest chain of additions that a term goes through: one for every chunk of its lane,
one for every page of a chunk that the lane holds, 5 between the lanes of a warp, 2 between the warps, and the selected
mass. All terms are >= 0, so n additions are wrong by at most n u / (1 - n u) of the sum, u = 2**-24 (Higham, section
4.2). A total that is too small makes shares too large, which is the safe side of the upper bound; the lower bound, the
value of a unit that is read and the upper bound stay in order, since all three use the same total.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt8

from skg_jax.pallas import dispatch
from skg_jax.pallas.lane_code import WARPGROUP

_CHUNKS = (1024, 512, 256, 128)  # pages that a block holds at once
_HELD = 4096  # of a chunk, times the query heads: 32 registers of a lane
_MOST = 60.0  # of an exponent: a mass that is only ever a lower bound is cut there
_LONGEST = 90  # additions in a chain, at most
_SUM = 6e-6  # of a sum: more than 90 * 2**-24, and the product that moves it


class Units(NamedTuple):
    """Units of a step, and sums over the pages of each row; float32, rounded outward. NaN stays NaN."""

    total: Float[Array, "L B N"]  # (selected mass + lower bounds of all unread pages) / selected mass, rounded down
    lower: Float[Array, "L B K M"]  # sum over a group of weight times l; 0 where there is nothing unread
    upper: Float[Array, "L B K M"]  # of weight times c
    count: Int[Array, "L B K"]  # units that are there: all but those with upper <= 0
    floor: Float[Array, "L B K"]  # sum of `lower`, rounded down
    cap: Float[Array, "L B K"]  # sum of `upper`, rounded up


def audit_units(
    bounds: Float[Array, "L B K 2 G M"],
    log_selected: Float[Array, "L B N"],
    read: UInt8[Array, "L B K M"],
    used: Int[Array, " B"],
    weights: Float[Array, "L N"],
    *,
    cancel: float,
    up: float,
    interpret: bool | None = None,
) -> Units:
    """Units of all layers.

    With masses in units of the head's selected one, w_l and w_u bounds of a page's own: a = max(1, (1 - cancel) total -
    w_l), l = w_l / (a + w_l), c = w_u / (a + w_u).

    Args:
      bounds: lower and upper of the pages' log-masses, float32. log_selected: log of the head's selected mass.
      read: pages that attention read are not 0. used: pages in use; nothing is read of the others.
      cancel: part of the total that subtraction may lose. up: factor that masses and units are rounded by.
        Both have to cover exponentials that are wrong by up to 1.1e-5, the difference under them included.

    Raises:
      NotImplementedError: for a number of pages that 128 does not divide, or whose sums are longer than _SUM allows.
    """
    *lead, _, group, pages = bounds.shape
    chunk = _chunk(group, pages)
    row = lambda dtype, *size: jax.ShapeDtypeStruct((*lead, *size), dtype)
    real, count = jnp.float32, jnp.int32
    body = functools.partial(_kernel, chunk=chunk, cancel=cancel, up=up)
    return Units(
        *plgpu.kernel(
            body,
            out_type=[
                jax.ShapeDtypeStruct(log_selected.shape, real), row(real, pages), row(real, pages),
                row(count), row(real), row(real),
            ],
            grid=tuple(lead),
            grid_names=("layer", "row", "head"),
            interpret=dispatch.interpret(interpret),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="audit_units",
        )(bounds, log_selected.astype(real), read, used.astype(count), weights.astype(real))
    )  # fmt: skip


def _chunk(group: int, pages: int) -> int:
    fitting = [n for n in _CHUNKS if pages % n == 0 and (n * group <= _HELD or n == _CHUNKS[-1])]
    if not fitting:
        raise NotImplementedError(f"The audit's unit kernel takes a multiple of {_CHUNKS[-1]} pages, not {pages}.")
    if (chain := longest_chain(pages, fitting[0])) > _LONGEST:
        raise NotImplementedError(
            f"The audit's unit kernel would add {chain} numbers in a row for {pages} pages; it rounds for {_LONGEST}."
        )
    return fitting[0]


def longest_chain(pages: int, chunk: int) -> int:
    """Additions that a term of a sum goes through: the module's first lines."""
    return pages // chunk + chunk // WARPGROUP + 5 + 2 + 1


def _inverse(x):
    """1 / x to 3e-7 of it, for x >= 1: a division takes ten instructions."""
    return lax.square(lax.rsqrt(x))


def _kernel(
    bounds_gmem,  # [L, B, K, 2, G, M]
    selected_gmem,  # [L, B, N]
    read_gmem,  # [L, B, K, M]
    used_gmem,  # [B]
    weight_gmem,  # [L, N]
    total_gmem,  # [L, B, N]
    lower_gmem,  # [L, B, K, M]
    upper_gmem,
    count_gmem,  # [L, B, K]
    floor_gmem,
    cap_gmem,
    *,
    chunk: int,
    cancel: float,
    up: float,
):
    layer, row, head = own = tuple(lax.axis_index(name) for name in ("layer", "row", "head"))
    group, pages = bounds_gmem.shape[4:]
    members = [head * group + g for g in range(group)]
    selected = [selected_gmem[layer, row, n] for n in members]
    used, chunks = used_gmem[row], pages // chunk
    filled = jnp.minimum(lax.div(used + (chunk - 1), chunk), chunks)

    layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=min(4, chunk // WARPGROUP))
    load = lambda ref, *at: plgpu.load(ref.at[(*own, *at)], layout=layout, optimized=False)
    blank = lambda dtype: plgpu.layout_cast(jnp.zeros((chunk,), dtype), layout)
    pages_of = lambda i: pl.ds(i * chunk, chunk)

    def unread_of(i):
        page = plgpu.broadcasted_iota(jnp.int32, (chunk,), 0, layout=layout) + i * chunk
        return (page < used) & (load(read_gmem, pages_of(i)) == 0)

    def mass_of(i, g):
        return jnp.exp(jnp.minimum(load(bounds_gmem, 0, g, pages_of(i)) - selected[g], _MOST)) * (1 / up)

    def add(i, sums):
        unread = unread_of(i)
        return tuple(x + jnp.where(unread, mass_of(i, g), 0.0) for g, x in enumerate(sums))

    sums = lax.fori_loop(0, filled, add, (blank(jnp.float32),) * group)
    # At least 1, exactly: what is above it has been rounded down.
    totals = [jnp.maximum((jnp.sum(x) + 1.0) * (1 - _SUM), 1.0) for x in sums]

    def share(j, sums):
        i = filled - 1 - j  # from the chunk that was read last
        unread, lowers, uppers = unread_of(i), [], []
        for g, n in enumerate(members):
            mass, weight = mass_of(i, g), weight_gmem[layer, n]
            rest = jnp.maximum((1 - cancel) * totals[g] - mass, 1.0)
            opposite = rest * jnp.exp(selected[g] - load(bounds_gmem, 1, g, pages_of(i)))
            lowers.append(weight * (mass * _inverse(rest + mass)))
            uppers.append(weight * _inverse(opposite + 1.0))
        lower = jnp.where(unread, functools.reduce(jnp.add, lowers) * (1 / up), 0.0)
        upper = jnp.where(unread, functools.reduce(jnp.add, uppers) * up, 0.0)
        lower_gmem[(*own, pages_of(i))], upper_gmem[(*own, pages_of(i))] = lower, upper
        count, floor, cap = sums
        return count + jnp.where(upper <= 0, 0, 1), floor + lower, cap + upper

    start = blank(jnp.int32), blank(jnp.float32), blank(jnp.float32)
    count, floor, cap = lax.fori_loop(0, filled, share, start)

    @pl.loop(filled, chunks)
    def _(i):
        lower_gmem[(*own, pages_of(i))] = upper_gmem[(*own, pages_of(i))] = blank(jnp.float32)

    for n, total in zip(members, totals, strict=True):
        total_gmem[layer, row, n] = total
    count_gmem[own] = jnp.sum(count)
    floor_gmem[own] = jnp.sum(floor) * (1 - _SUM)
    cap_gmem[own] = jnp.sum(cap) * (1 + _SUM)
