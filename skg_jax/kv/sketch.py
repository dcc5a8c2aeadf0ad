"""The key sketch: a 4-bit copy of every sealed block of keys, tight enough to bound unread pages.

Per block and KV head one grid per channel, `low` and `step` in float16, nearest codes in 0..15, and for each
key the norm of what the code misses. For a query q and a key k with decoded copy k^,

    |q.k - q.k^| <= min(|q| |k - k^|, sum_d |q_d| step_d / 2) + slack

by Cauchy-Schwarz and by rounding to nearest. `slack` covers the float32 rounding of both dot products and of the
exponentials; it scales with |q| times the norm of the key (a fixed one fails for keys large enough). All stored
bounds are rounded outward. A block whose keys overflow float16 does not fit and gets no sketch.

Codes of channels d and d + H/2 share a byte, so that unpacking is one concatenation.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt8

from skg_jax.types import BLOCK

LEVELS = 15
_UP = 1.0 + 1e-5
_EPS = 2.0**-24  # unit roundoff of float32

type BoundKind = Literal["sketch", "box"]


class Sketch(NamedTuple):
    """One record per block and KV head; in a cache the leading axes are [L, P, K]."""

    codes: UInt8[Array, "... tokens half"]
    low: Float[Array, "... H"]  # float16, at or below the smallest key of the channel
    step: Float[Array, "... H"]  # float16, low + 15 step at or above the largest
    residual: Float[Array, "... 64"]  # float16, at or above |k - k^| of each key


class PageScores(NamedTuple):
    """Log attention mass of pages, before normalisation: an estimate and two bounds."""

    estimate: Float[Array, "..."]
    lower: Float[Array, "..."]
    upper: Float[Array, "..."]


def empty(lead: tuple[int, ...], head_dim: int) -> Sketch:
    """A pool of zero records."""
    half = lambda *shape: jnp.zeros((*lead, *shape), jnp.float16)
    return Sketch(jnp.zeros((*lead, BLOCK, head_dim // 2), jnp.uint8), half(head_dim), half(head_dim), half(BLOCK))


def build(k: Float[Array, "... 64 H"]) -> tuple[Sketch, Float[Array, "..."], Bool[Array, "..."]]:
    """Sketch whole blocks.

    Returns:
      the records; an upper bound on every key norm *and* on every intermediate of the decoded dot product (float32);
      whether the block fits the number format (if not its record is all zero and must not be used).
    """
    k = k.astype(jnp.float32)
    low = _round16(k.min(-2), -jnp.inf)
    step = _round16((k.max(-2) - low.astype(jnp.float32)) / LEVELS * _UP, jnp.inf)
    lo32, st32 = low.astype(jnp.float32)[..., None, :], step.astype(jnp.float32)[..., None, :]
    code = jnp.clip(jnp.round((k - lo32) / jnp.where(st32 > 0, st32, 1.0)), 0, LEVELS)
    residual = _round16(jnp.linalg.norm(k - (lo32 + code * st32), axis=-1) * _UP, jnp.inf)
    key_norm = jnp.linalg.norm(jnp.abs(lo32) + LEVELS * st32, axis=-1)[..., 0] * _UP
    fits = jnp.isfinite(key_norm) & jnp.all(jnp.isfinite(residual), axis=-1)
    record = Sketch(_pack(code.astype(jnp.uint8)), low, step, residual)
    keep = lambda x: jnp.where(fits.reshape(fits.shape + (1,) * (x.ndim - fits.ndim)), x, jnp.zeros_like(x))
    return jax.tree.map(keep, record), keep(key_norm), fits


def page_scores(
    q: Float[Array, "... G H"],
    record: Sketch,
    key_norm: Float[Array, "..."],
    page_size: int,
    kind: BoundKind = "sketch",
) -> PageScores:
    """Log-mass of every page of sealed blocks: sum over its tokens of exp(q.k / sqrt(H)).

    Args:
      q: queries of one GQA group per record, float32.
      record: codes [... T H/2] for any multiple T of the page size, one grid.
      key_norm: bound of `build` for each record.
      kind: "box" drops the codes from the *bounds* and keeps channel minima and maxima alone; a comparison that shows
        why a sketch is needed.

    Returns: arrays [... G T/C], float32; `lower` and `upper` hold for the exact real-valued mass.
    """
    scale = q.shape[-1] ** -0.5
    q = q * scale
    low, step = record.low.astype(jnp.float32), record.step.astype(jnp.float32)
    q_step = q * step[..., None, :]
    base = _dot("...gd,...d->...g", q, low)[..., None]
    score = base + _dot("...gd,...td->...gt", q_step, _unpack(record.codes))
    norm = jnp.linalg.norm(q, axis=-1)[..., None] * _UP
    reach = jnp.minimum(
        norm * record.residual.astype(jnp.float32)[..., None, :], 0.5 * _UP * jnp.abs(q_step).sum(-1)[..., None]
    )
    slack = rounding_slack(q, key_norm[..., None])[..., None]
    box_low = base + LEVELS * jnp.minimum(q_step, 0.0).sum(-1)[..., None]
    box_high = base + LEVELS * jnp.maximum(q_step, 0.0).sum(-1)[..., None]
    if kind == "box":
        lower, upper = jnp.broadcast_to(box_low, score.shape), jnp.broadcast_to(box_high, score.shape)
    else:
        lower, upper = jnp.maximum(score - reach, box_low), jnp.minimum(score + reach, box_high)
    mass = lambda s: _log_sum(s.reshape(*s.shape[:-1], -1, page_size))
    return PageScores(mass(score), mass(lower - slack) - 1e-5, mass(upper + slack) + 1e-5)


def rounding_slack(q: Float[Array, "... G H"], key_norm: Float[Array, "..."]) -> Float[Array, "... G"]:
    """Bound on the float32 error of one logit: two dot products of length H, and a log-sum-exp of their results.

    `q` is already scaled by 1/sqrt(H). A sum of H products in any order errs by at most H u |q| |k| (Higham 2002,
    section 3.1).
    """
    length = q.shape[-1]
    return 2 * (length + 16) * _EPS * jnp.linalg.norm(q, axis=-1) * key_norm


def _log_sum(s: Float[Array, "... C"]) -> Float[Array, "..."]:
    top = s.max(-1)
    return top + jnp.log(jnp.exp(s - top[..., None]).sum(-1))


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


def _pack(code: UInt8[Array, "... H"]) -> UInt8[Array, "... half"]:
    first, second = jnp.split(code, 2, axis=-1)
    return first | (second << 4)


def _unpack(codes: UInt8[Array, "... half"]) -> Float[Array, "... H"]:
    return jnp.concatenate([codes & 15, codes >> 4], axis=-1).astype(jnp.float32)


def _round16(x: Float[Array, "..."], towards: float) -> Float[Array, "..."]:
    """float16 neighbour of x in the given direction (never nearer to the other side)."""
    # the barrier keeps a compiler from cancelling the two conversions, which would undo the rounding
    near = jax.lax.optimization_barrier(x.astype(jnp.float16))
    wrong = near.astype(jnp.float32) < x if towards > 0 else near.astype(jnp.float32) > x
    return jnp.where(wrong, jnp.nextafter(near, jnp.float16(towards)), near)
