"""The key sketch: a 4-bit copy of every sealed block of keys, tight enough to bound unread pages.

Per block and KV head one grid per channel, `low` and `step` in float16, nearest codes in 0..15, and norms of what the
codes miss. For a query q and a key k with decoded copy k^ = low + code * step,

    |q.k - q.k^| <= min(|q| |k - k^|, sum_d |q_d| step_d / 2) + slack      (a norm for each token)
    |q.k - q.k^| <= |q o step| rho + slack,  rho = max_t |(k_t - k^_t) / step|     (one number for the block)

by Cauchy-Schwarz and by rounding to nearest. `slack` covers the float32 rounding of both dot products and of the
exponentials; it scales with |q| times the norm of the key (a fixed one fails for keys large enough). All stored
bounds are rounded outward. A block whose keys overflow float16 does not fit and gets no sketch.

Codes lie as the operands of a matrix instruction of the GPU (mma.m16n8k16): word j of the 16-byte chunk t of a token
holds channels 32 j + 8 t + e, that of e = 2 i + odd at bit 4 i + 16 odd. Head dims that 32 does not divide are padded
with code 0. XLA shifts the words as they are and permutes the channels of the query instead.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from skg_jax.types import BLOCK

LEVELS = 15
WORD = 8  # codes in 32 bits
_LANES = 32  # channels of a chunk
_NORMS = 4  # rho, norm and two zeros: a copy to shared memory has at least 16 bytes
_UP = 1.0 + 1e-5
_EPS = 2.0**-24  # unit roundoff of float32

type BoundKind = Literal["sketch", "group", "box"]


class Sketch(NamedTuple):
    """One record per block and KV head; in a cache the leading axes are [L, P, K]."""

    codes: UInt32[Array, "... tokens words"]
    low: Float[Array, "... H"]  # float16, at or below the smallest key of the channel
    step: Float[Array, "... H"]  # float16, low + 15 step at or above the largest
    residual: Float[Array, "... 64"]  # float16, at or above |k - k^| of each key
    norms: Float[Array, "... 4"]  # float32: rho, norm, 0, 0

    @property
    def rho(self) -> Float[Array, "..."]:
        """At or above |(k - k^) / step| of every key; channels of step 0 miss nothing and do not count."""
        return self.norms[..., 0]

    @property
    def norm(self) -> Float[Array, "..."]:
        """Bound on the norm of every key *and* on every intermediate of the decoded dot product."""
        return self.norms[..., 1]


class PageScores(NamedTuple):
    """Log attention mass of pages, before normalisation: an estimate and two bounds."""

    estimate: Float[Array, "..."]
    lower: Float[Array, "..."]
    upper: Float[Array, "..."]


def empty(lead: tuple[int, ...], head_dim: int) -> Sketch:
    """A pool of zero records."""
    half = lambda *shape: jnp.zeros((*lead, *shape), jnp.float16)
    words = -(-head_dim // _LANES) * _LANES // WORD
    codes = jnp.zeros((*lead, BLOCK, words), jnp.uint32)
    norms = jnp.zeros((*lead, _NORMS), jnp.float32)
    return Sketch(codes, half(head_dim), half(head_dim), half(BLOCK), norms)


def build(k: Float[Array, "... 64 H"]) -> tuple[Sketch, Bool[Array, "..."]]:
    """Sketch whole blocks.

    Returns:
      the records; whether the block fits the number format (if not its record is all zero and must not be used).
    """
    k = k.astype(jnp.float32)
    low = _round16(k.min(-2), -jnp.inf)
    step = _round16((k.max(-2) - low.astype(jnp.float32)) / LEVELS * _UP, jnp.inf)
    lo32, st32 = low.astype(jnp.float32)[..., None, :], step.astype(jnp.float32)[..., None, :]
    divisor = jnp.where(st32 > 0, st32, 1.0)  # a channel of step 0 is constant: code 0 is exact
    code = jnp.clip(jnp.round((k - lo32) / divisor), 0, LEVELS)
    missed = k - (lo32 + code * st32)
    residual = _round16(jnp.linalg.norm(missed, axis=-1) * _UP, jnp.inf)
    rho = jnp.linalg.norm(missed / divisor, axis=-1).max(-1) * _UP
    norm = jnp.linalg.norm(jnp.abs(lo32) + LEVELS * st32, axis=-1)[..., 0] * _UP
    fits = jnp.isfinite(norm) & jnp.all(jnp.isfinite(residual), axis=-1)
    norms = jnp.stack([rho, norm, *[jnp.zeros_like(rho)] * (_NORMS - 2)], axis=-1)
    record = Sketch(pack(code.astype(jnp.uint32)), low, step, residual, norms)
    keep = lambda x: jnp.where(fits.reshape(fits.shape + (1,) * (x.ndim - fits.ndim)), x, jnp.zeros_like(x))
    return jax.tree.map(keep, record), fits


def page_scores(q: Float[Array, "... G H"], record: Sketch, page_size: int, kind: BoundKind = "sketch") -> PageScores:
    """Log-mass of every page of sealed blocks: sum over its tokens of exp(q.k / sqrt(H)).

    Args:
      q: queries of one GQA group per record, float32.
      record: codes [... T words] for any multiple T of the page size, one grid.
      kind: where the bounds come from: the codes with a norm for each token, "sketch", or with one number for the
        block, "group"; "box" drops the codes from the *bounds* and keeps channel minima and maxima alone, a comparison
        that shows why a sketch is needed.

    Returns: arrays [... G T/C], float32; `lower` and `upper` hold for the exact real-valued mass.
    """
    q = q * q.shape[-1] ** -0.5
    low, step = record.low.astype(jnp.float32), record.step.astype(jnp.float32)
    q_step = q * step[..., None, :]
    base = _dot("...gd,...d->...g", q, low)[..., None]
    in_order = _code_order(q) * _code_order(step)[..., None, :]  # cheaper than to permute their product
    score = base + _dot("...gd,...td->...gt", in_order, unpack(record.codes))
    slack = rounding_slack(q, record.norm[..., None])[..., None]
    lower = base + LEVELS * jnp.minimum(q_step, 0.0).sum(-1)[..., None]
    upper = base + LEVELS * jnp.maximum(q_step, 0.0).sum(-1)[..., None]
    if kind == "box":
        lower, upper = jnp.broadcast_to(lower, score.shape), jnp.broadcast_to(upper, score.shape)
    else:
        reach = _reach(q, q_step, record, kind)
        lower, upper = jnp.maximum(score - reach, lower), jnp.minimum(score + reach, upper)
    mass = lambda s: _log_sum(s.reshape(*s.shape[:-1], -1, page_size))
    return PageScores(mass(score), mass(lower - slack) - 1e-5, mass(upper + slack) + 1e-5)


def _reach(
    q: Float[Array, "... G H"], q_step: Float[Array, "... G H"], record: Sketch, kind: BoundKind
) -> Float[Array, "... G _"]:
    """Bound on the error of a decoded logit: for each token, or one for all."""
    if kind == "group":
        return (jnp.linalg.norm(q_step, axis=-1) * record.rho[..., None] * _UP)[..., None]
    norm = jnp.linalg.norm(q, axis=-1)[..., None] * _UP
    by_step = 0.5 * _UP * jnp.abs(q_step).sum(-1)[..., None]
    return jnp.minimum(norm * record.residual.astype(jnp.float32)[..., None, :], by_step)


def rounding_slack(q: Float[Array, "... G H"], key_norm: Float[Array, "..."]) -> Float[Array, "... G"]:
    """Bound on the float32 error of one logit: two dot products of length H, and a log-sum-exp of their results.

    `q` is already scaled by 1/sqrt(H). A sum of H products in any order errs by at most H u |q| |k| (Higham 2002,
    section 3.1).
    """
    length = q.shape[-1]
    return 2 * (length + 16) * _EPS * jnp.linalg.norm(q, axis=-1) * key_norm


def pack(code: UInt32[Array, "... H"]) -> UInt32[Array, "... words"]:
    """Codes of a token to words."""
    x = _chunks(code)  # j t i odd
    bit = 4 * jnp.arange(4, dtype=jnp.uint32)[:, None] + jnp.array([0, 16], jnp.uint32)
    words = (x << bit).sum((-2, -1), dtype=jnp.uint32)
    return jnp.swapaxes(words, -1, -2).reshape(*code.shape[:-1], -1)


def unpack(words: UInt32[Array, "... words"]) -> Float[Array, "... channels"]:
    """Codes of all channels in the order of `_code_order`, float32."""
    codes = (words[..., None] >> 4 * jnp.arange(WORD, dtype=jnp.uint32)) & 15
    return codes.astype(jnp.int32).astype(jnp.float32).reshape(*words.shape[:-1], -1)  # signed: twice as fast on a CPU


def _code_order(x: Float[Array, "... H"]) -> Float[Array, "... channels"]:
    """Channels as `unpack` lists them: word by word, and by the bits of each."""
    x = _chunks(x)
    lead = x.ndim - 4
    j, t, i, odd = range(lead, x.ndim)
    return x.transpose(*range(lead), t, j, odd, i).reshape(*x.shape[:lead], -1)


def _chunks(x: Array) -> Array:
    """Padded channels, split into [j, t, i, odd]."""
    *lead, dim = x.shape
    x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, -dim % _LANES)])
    return x.reshape(*lead, -1, 4, 4, 2)


def _log_sum(s: Float[Array, "... C"]) -> Float[Array, "..."]:
    top = s.max(-1)
    return top + jnp.log(jnp.exp(s - top[..., None]).sum(-1))


def _dot(spec: str, a: Array, b: Array) -> Array:
    return jnp.einsum(spec, a, b, precision=jax.lax.Precision.HIGHEST)


def _round16(x: Float[Array, "..."], towards: float) -> Float[Array, "..."]:
    """float16 neighbour of x in the given direction (never nearer to the other side)."""
    # the barrier keeps a compiler from cancelling the two conversions, which would undo the rounding
    near = jax.lax.optimization_barrier(x.astype(jnp.float16))
    wrong = near.astype(jnp.float32) < x if towards > 0 else near.astype(jnp.float32) > x
    return jnp.where(wrong, jnp.nextafter(near, jnp.float16(towards)), near)
