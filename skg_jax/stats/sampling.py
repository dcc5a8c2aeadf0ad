"""Draws with known, unequal probabilities.

Two laws (`pps_probs`, `boundary_probs`) and two samplers: independent draws by inverse CDF on exact integers, and draws
without replacement as the first items of a Plackett-Luce order (Gumbel top-k). Whatever is claimed of a draw rests on
its probability being the one that was used, so the integer law returns the probabilities *of the sampler*, not of the
wish. What cannot be (a negative or infinite gap, a share above 1) raises ValueError outside of jit; inside the
probabilities are NaN, which voids every process that observes one.

References:
    Shekhar, Xu, Lipton, Liang, Ramdas (2023), arXiv:2305.06884, sampling proportional to size, section 3.
    Kool, van Hoof, Welling (2019), arXiv:1903.06059, Gumbel top-k.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from skg_jax.stats._types import RealLike, refuse
from skg_jax.stats.sums import tree_sum

TICKETS = 2.0**30  # aim for the total of the integer law; rounding and the floor of 1 add at most 1.5 a unit
MAX_UNITS = 2**28  # so the total stays below 2**30 + 1.5 * 2**28 < 2**31
TINY = 1e-37
NEVER = -1e30


def pps_probs(gap: Float[Array, "U"], valid: Bool[Array, "U"], eps: RealLike = 0.02) -> Float[Array, "U"]:
    """Probability proportional to the gap, mixed with a uniform share.

    Args:
        gap: width of the known bounds of a unit, finite and >= 0 where valid.
        valid: units that exist; the others may hold anything.
        eps: uniform share in [0, 1]. It bounds max p / min p and lets reads expose bounds that are wrong.

    Returns:
        p, summing to 1 over the valid units with gap > 0, and 0 elsewhere: a unit without a gap has nothing to tell.
    """
    bad = _impossible_gap(gap, valid) | _impossible_share("eps", eps)
    gap, eligible = _eligible(gap, valid)
    eps = jnp.asarray(eps, gap.dtype)
    uniform = eligible / jnp.maximum(eligible.sum(), 1).astype(gap.dtype)
    return jnp.where(bad, jnp.nan, (1 - eps) * gap / jnp.maximum(tree_sum(gap), TINY) + eps * uniform)


def boundary_probs(
    gap: Float[Array, "U"],
    score: Float[Array, "U"],
    valid: Bool[Array, "U"],
    share: RealLike = 0.8,
    fraction: RealLike = 0.05,
) -> Float[Array, "U"]:
    """Units near the selection boundary plus uniform units, as a law with known probabilities.

    A `share` of the draws falls uniformly on the boundary set, the `fraction` (at least one) of the eligible units with
    the highest score, i.e. those that a selector nearly took; the rest falls uniformly on all eligible units. Kept to
    be compared with `pps_probs`, which needs far fewer draws.

    Args:
        gap: as in `pps_probs`; eligible units are valid and have gap > 0.
        score: the selector's score, higher is nearer to being selected; ties go to the lower index.
        share: in [0, 1): below 1 because every unit with a gap must have p > 0.
        fraction: in (0, 1].
    """
    bad = _impossible_gap(gap, valid) | _impossible_share("share", share) | _impossible_share("fraction", fraction)
    gap, eligible = _eligible(gap, valid)
    count = eligible.sum()
    order = jnp.argsort(jnp.where(eligible, -score, jnp.inf), stable=True)
    rank = jnp.zeros(gap.shape, jnp.int32).at[order].set(jnp.arange(gap.size, dtype=jnp.int32))
    share, fraction = jnp.asarray(share, gap.dtype), jnp.asarray(fraction, gap.dtype)
    near = jnp.clip(jnp.ceil(fraction * count), 1, jnp.maximum(count, 1))
    boundary = eligible & (rank < near)
    size = jnp.maximum(boundary.sum(), 1).astype(gap.dtype)
    p = share * boundary / size + (1 - share) * eligible / jnp.maximum(count, 1).astype(gap.dtype)
    return jnp.where(bad, jnp.nan, p)


def _eligible(gap: Float[Array, "U"], valid: Bool[Array, "U"]) -> tuple[Float[Array, "U"], Bool[Array, "U"]]:
    eligible = valid & (gap > 0)
    return jnp.where(eligible, gap, 0), eligible


def _impossible_gap(gap: Float[Array, "U"], valid: Bool[Array, "U"]) -> Bool[Array, ""]:
    bad = valid & ~((gap >= 0) & (gap < jnp.inf))
    return refuse(bad, "gap", gap, "the width of a unit's bounds is at least 0 and finite")


def _impossible_share(name: str, value: RealLike) -> Bool[Array, ""]:
    value = jnp.asarray(value)
    return refuse(~((value >= 0) & (value <= 1)), name, value, "a share lies in [0, 1]")


def integer_law(p: Float[Array, "U"]) -> tuple[UInt32[Array, "U"], Float[Array, "U"]]:
    """The exact law of `draw_iid`.

    Rounds p to integers k of about 2**30 in total, at least 1 where p > 0. The law is k / sum(k) *by definition*: the
    rounding of a floating cumulative sum, which misstates small probabilities by a quarter at 1e5 units, never enters a
    statistic.

    Args:
        p: finite, >= 0, normalised here.

    Returns:
        (cumulative counts, k / sum(k)). All zero when p is.

    Raises:
        ValueError: no unit, or more than 2**28, for which the counts might pass 2**31; a weight that is none, outside
            of jit (inside the law is NaN).
    """
    if not p.size:
        raise ValueError("p has 0 units, but a law needs at least one.")
    if p.size > MAX_UNITS:
        raise ValueError(f"p has {p.size} units, but the integer law holds at most {MAX_UNITS}; split the population.")
    bad = refuse(~((p >= 0) & (p < jnp.inf)), "p", p, "a weight is at least 0 and finite")
    scaled = p / jnp.maximum(tree_sum(p), TINY) * TICKETS
    k = jnp.where(p > 0, jnp.maximum(jnp.round(scaled), 1), 0).astype(jnp.uint32)
    cum = jnp.cumsum(k, dtype=jnp.uint32)
    return cum, jnp.where(bad, jnp.nan, k.astype(p.dtype) / jnp.maximum(cum[-1], 1).astype(p.dtype))


def draw_iid(key: Key[Array, ""], cum: UInt32[Array, "U"], n: int) -> Int32[Array, "n"]:
    """n independent draws from `integer_law`, by inverse CDF; a unit of count 0 is never drawn.

    When every count is 0 the indices mean nothing; their law is 0 too, so that they carry no evidence.
    """
    high, low = jax.random.bits(key, (2, n), jnp.uint32)
    index = jnp.searchsorted(cum, _scale(high, low, cum[-1]), side="right")
    return jnp.minimum(index, cum.size - 1).astype(jnp.int32)


def draw_wor(key: Key[Array, ""], p: Float[Array, "U"], n: int) -> Int32[Array, "n"]:
    """The first n units of a Plackett-Luce order with weights p; units with p = 0 come last, and the caller masks them.

    The default Gumbel of float32 has 2**-23 steps in its uniform and ends near 16: mode "high" is needed to realise
    small p.

    Raises ValueError for more draws than units, and outside of jit for a weight that is none.
    """
    if n > p.shape[0]:
        raise ValueError(f"n is {n}, but only {p.shape[0]} units can be drawn without replacement; draw fewer.")
    refuse(~((p >= 0) & (p < jnp.inf)), "p", p, "a weight is at least 0 and finite")
    noise = jax.random.gumbel(key, p.shape, p.dtype, mode="high")
    return jax.lax.top_k(jnp.where(p > 0, jnp.log(jnp.maximum(p, TINY)) + noise, NEVER), n)[1].astype(jnp.int32)


def first_visits(index: Int32[Array, "n"], valid: Bool[Array, "n"]) -> Bool[Array, "n"]:
    """True where a valid draw visits its unit for the first time, so that distinct reads can be counted and summed."""
    index = jnp.where(valid, index, -1)
    order = jnp.argsort(index, stable=True)
    ordered = index[order]
    fresh = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros(index.shape, bool).at[order].set(fresh) & valid


def _scale(high: UInt32[Array, "n"], low: UInt32[Array, "n"], total: UInt32[Array, ""]) -> UInt32[Array, "n"]:
    """floor((high * 2**32 + low) * total / 2**64): uniform on [0, total) to one part in 2**33.

    `jax.random.randint` reduces 32 bits modulo the span, which for spans near 2**30 makes some tickets 4/3 as likely as
    others.
    """
    carry = (high * total + _mul_high(low, total)) < high * total
    return _mul_high(high, total) + carry.astype(jnp.uint32)


def _mul_high(a: UInt32[Array, "n"], b: UInt32[Array, ""]) -> UInt32[Array, "n"]:
    """The upper 32 bits of a 64-bit product, from 16-bit halves."""
    a0, a1, b0, b1 = a & 0xFFFF, a >> 16, b & 0xFFFF, b >> 16
    middle = a1 * b0 + (a0 * b0 >> 16)
    return a1 * b1 + (middle >> 16) + ((a0 * b1 + (middle & 0xFFFF)) >> 16)
