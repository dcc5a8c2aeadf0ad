"""Page scores from less than the whole sketch, with bounds as sound as its own: what `scan_less` compares.

Old scores, moved to a new query. With dq = q' - q and any centre c of a block, q'.k = q.k + dq.c + dq.(k - c), so the
log-mass of a page moves by dq.c and by at most max |dq.(k - c)|:

    norm    c = 0, the last term by |dq| times the largest key norm of the block
    ball    c = low + 7.5 step, by |dq| times max |k - c|
    box     the same c; by the least of the ball, 7.5 sum |dq_d| step_d, and |dq o step| max |(k - c) / step|; and the
            limits low and low + 15 step for the new query itself

The first bits of every code. The b leading bits of a 4-bit code name one of 2^b cells of its channel; k^ is the middle
of the cell, and the bound is that of a group, |q o step| max |(k - k^) / step|, within half the width of the cells. Of
b = 0 the block's limits are left, and one number: a coarser first level.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from skg_jax.kv import sketch
from skg_jax.kv.cache import PagedKVCache, current
from skg_jax.kv.scoring import layer_scores
from skg_jax.kv.sketch import LEVELS, PageScores
from skg_jax.types import BLOCK

BITS = 4
_UP = 1.0 + 1e-5

type Move = Literal["norm", "ball", "box"]


def full_scores(q: Float[Array, "L B N H"], cache: PagedKVCache, length: Int[Array, " B"], page: int) -> PageScores:
    """The whole sketch with a bound for each token, [L, B, K, G, M]."""
    return _by_layer(lambda layer, q: layer_scores(q, cache, layer, length, page), q)


def bit_scores(
    q: Float[Array, "L B N H"], cache: PagedKVCache, length: Int[Array, " B"], page: int, bits: int
) -> PageScores:
    """The `bits` leading bits of every code, 0 to 4, [L, B, K, G, M]; of unknown blocks as `layer_scores`."""
    known = current(cache) & (jnp.arange(cache.max_blocks) * BLOCK < length[:, None])

    def layer(index, q):
        record, keys = _records(cache, index)
        found = _page_major(_bit_scores(_grouped(q, keys) * q.shape[-1] ** -0.5, record, keys, page, bits))
        there = jnp.repeat(known, BLOCK // page, axis=1)[:, None, None]
        unknown = PageScores(*jnp.array([-jnp.inf, -jnp.inf, jnp.inf]))
        return jax.tree.map(lambda x, other: jnp.where(there, x, other), found, unknown)

    return _by_layer(layer, q)


def moved(
    old: PageScores, old_q: Float[Array, "L B N H"], q: Float[Array, "L B N H"], cache: PagedKVCache, how: Move
) -> PageScores:
    """Scores of an earlier query as scores of this one, [L, B, K, G, M]."""
    parts = old.estimate.shape[-1] // cache.max_blocks

    def layer(index, old, old_q, q):
        record, keys = _records(cache, index)
        before, now = (_grouped(x, keys) * x.shape[-1] ** -0.5 for x in (old_q, q))
        shift, reach = _drift(now - before, record, keys, how)
        slack = sum(sketch.rounding_slack(x, record.norm[..., None]) for x in (before, now)) + 1e-5
        by_page = lambda x: jnp.moveaxis(jnp.repeat(x[..., None], parts, -1), 1, 3).reshape(old.estimate.shape)
        shift, reach = by_page(shift), by_page(reach * _UP + slack)
        found = PageScores(old.estimate + shift, old.lower + shift - reach, old.upper + shift + reach)
        if how == "box":
            limits = _page_major(_bit_scores(now, record, keys, BLOCK // parts, 0))
            lower, upper = jnp.maximum(found.lower, limits.lower), jnp.minimum(found.upper, limits.upper)
            found = PageScores(found.estimate, lower, upper)
        return jax.tree.map(lambda x, before: jnp.where(jnp.isfinite(old.upper), x, before), found, old)

    return _by_layer(layer, old, old_q, q)


def refined(
    coarse: PageScores,
    fine: PageScores,
    rank: Float[Array, "L B K G M"],
    share: float,
    length: Int[Array, " B"],
    page: int,
) -> PageScores:
    """Fine scores of a share of the blocks, those of largest mean softmax(rank) in the group; coarse ones elsewhere."""
    parts = BLOCK // page
    weight = jnp.nan_to_num(jax.nn.softmax(rank, axis=-1)).mean(-2)
    block = weight.reshape(*weight.shape[:-1], -1, parts).sum(-1)
    place = jnp.argsort(jnp.argsort(-block, axis=-1, stable=True), axis=-1)
    count = jnp.ceil(share * -(-length // BLOCK))[:, None, None]
    chosen = jnp.repeat(place < count, parts, axis=-1)[..., None, :]
    return jax.tree.map(lambda a, b: jnp.where(chosen, a, b), fine, coarse)


def shrunk(scores: PageScores, factor: float) -> PageScores:
    """Bounds drawn towards the estimate: unsound, for negative controls."""
    toward = lambda bound: jnp.where(jnp.isfinite(bound), scores.estimate + factor * (bound - scores.estimate), bound)
    return PageScores(scores.estimate, toward(scores.lower), toward(scores.upper))


def _bit_scores(
    q: Float[Array, "B Mb K G H"], record: sketch.Sketch, keys: Float[Array, "B Mb K 64 H"], page: int, bits: int
) -> PageScores:
    """Of a query that is already scaled."""
    low, step = (x.astype(jnp.float32)[..., None, :] for x in (record.low, record.step))
    width = 2.0 ** (BITS - bits)
    divisor = jnp.where(step > 0, step, 1.0)
    code = jnp.clip(jnp.round((keys - low) / divisor), 0, LEVELS)
    kept = width * jnp.floor(code / width) + (width - 1) / 2
    copy = low + step * kept
    rho = jnp.linalg.norm((keys - copy) / divisor, axis=-1).max(-1)[..., None, None]
    q_step = q * step
    reach = jnp.minimum(jnp.linalg.norm(q_step, axis=-1, keepdims=True) * rho, width / 2 * _sum(jnp.abs(q_step)))
    score = _dot("...gd,...td->...gt", q, copy)
    base = _sum(q * low)
    lower = jnp.maximum(score - reach * _UP, base + LEVELS * _sum(jnp.minimum(q_step, 0.0)))
    upper = jnp.minimum(score + reach * _UP, base + LEVELS * _sum(jnp.maximum(q_step, 0.0)))
    slack = 2 * sketch.rounding_slack(q, record.norm[..., None])[..., None]
    mass = lambda s: jax.nn.logsumexp(s.reshape(*s.shape[:-1], -1, page), axis=-1)
    return PageScores(mass(score), mass(lower - slack) - 1e-5, mass(upper + slack) + 1e-5)


def _drift(
    dq: Float[Array, "B Mb K G H"], record: sketch.Sketch, keys: Float[Array, "B Mb K 64 H"], how: Move
) -> tuple[Float[Array, "B Mb K G"], Float[Array, "B Mb K G"]]:
    """dq.c and the bound on |dq.(k - c)| of every block."""
    size = jnp.linalg.norm(dq, axis=-1)
    if how == "norm":
        return jnp.zeros_like(size), size * jnp.linalg.norm(keys, axis=-1).max(-1)[..., None]
    low, step = (x.astype(jnp.float32)[..., None, :] for x in (record.low, record.step))
    centre = low + LEVELS / 2 * step
    off = keys - centre
    shift = _dot("...gd,...td->...gt", dq, centre)[..., 0]
    ball = size * jnp.linalg.norm(off, axis=-1).max(-1)[..., None]
    if how == "ball":
        return shift, ball
    weighted = jnp.linalg.norm(off / jnp.where(step > 0, step, 1.0), axis=-1).max(-1)[..., None]
    by_step = jnp.linalg.norm(dq * step, axis=-1) * weighted
    return shift, jnp.minimum(jnp.minimum(ball, by_step), LEVELS / 2 * _sum(jnp.abs(dq * step))[..., 0])


def _records(cache: PagedKVCache, layer) -> tuple[sketch.Sketch, Float[Array, "B Mb K 64 H"]]:
    take = lambda pool: pool[layer, cache.page_table]
    return jax.tree.map(take, cache.sketch), take(cache.k).astype(jnp.float32)


def _grouped(q: Float[Array, "B N H"], keys: Float[Array, "B Mb K 64 H"]) -> Float[Array, "B Mb K G H"]:
    batch, blocks, heads = keys.shape[:3]
    grouped = q.astype(jnp.float32).reshape(batch, 1, heads, -1, q.shape[-1])
    return jnp.broadcast_to(grouped, (batch, blocks, *grouped.shape[2:]))


def _page_major(found: PageScores) -> PageScores:
    """[B, Mb, K, G, pages of a block] to [B, K, G, M]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3).reshape(x.shape[0], *x.shape[2:4], -1), found)


def _by_layer(of_layer, *arrays):
    """`of_layer(index, *slices)` of every layer, stacked."""
    count = jax.tree.leaves(arrays[0])[0].shape[0]
    return jax.lax.map(lambda args: of_layer(*args), (jnp.arange(count), *arrays))


def _sum(x: Array) -> Array:
    return x.sum(-1, keepdims=True)


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)
