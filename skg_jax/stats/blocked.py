"""The integer law and the wealth of a large population, in blocks: less work a unit and a draw, the same statements.

The law folds its counts in halves a few times and accumulates only the last of these; a draw descends again. The wealth
is looked at after each block of draws instead of after each draw: a running maximum over fewer times is lower, hence
valid, and products of four factors need one logarithm instead of four.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key, UInt32

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from skg_jax.stats._types import RealLike
from skg_jax.stats.sums import on_cpu, prefix_sum

FOLDS = 4  # so that 1/16 of the counts is accumulated, which is serial
DRAWS = 64  # draws of a block of the wealth
MOST = 1e9  # a factor is cut here, which is conservative, so that the product of four stays in float32
NEXT = 1.2  # ratio of the distances of two candidates from the estimate
LEAST = 1e-30  # and their product raised to this: it adds at most this to the mean


class BlockedLaw(NamedTuple):
    """k / sum(k) over the units, as `sampling.integer_law`.

    folds: sums of the halves of k, of their halves, and so on, each half as long. Units at the end of k that would make
    a half longer than the other are left out of them.
    ends: the last of these sums and the units left out, accumulated.
    """

    k: UInt32[Array, "U"]
    folds: tuple[UInt32[Array, "..."], ...]
    ends: UInt32[Array, "blocks"]


def integer_law(p: Float[Array, "U"], total: RealLike) -> BlockedLaw:
    """Integers k of about 2**30 in total in proportion to p, at least 1 where p > 0.

    p: finite, >= 0. total: their sum, up to a few percent.

    Raises ValueError for more than 2**28 units, for which the counts might pass 2**31.
    """
    if p.size > sampling.MAX_UNITS:
        raise ValueError(f"p has {p.size} units, but the law holds at most {sampling.MAX_UNITS}; split the population.")
    scaled = p * (sampling.TICKETS / jnp.maximum(jnp.asarray(total), sampling.TINY))
    k = jnp.maximum(scaled + 0.5, 1).astype(jnp.int32)  # to uint32 would be slower
    # The choice comes last: XLA would compute one operation on k alone again for every fold.
    return fold(jnp.where(p > 0, jax.lax.bitcast_convert_type(k, jnp.uint32), 0))


def fold(k: UInt32[Array, "U"]) -> BlockedLaw:
    """The law of given counts."""
    blocks, folds, last = k.size >> FOLDS, [], k
    for level in reversed(range(FOLDS)):
        half = blocks << level
        last = last[:half] + last[half : 2 * half]
        folds.append(last)
    ends = jnp.cumsum(jnp.concatenate([last, k[blocks << FOLDS :]]), dtype=jnp.uint32)
    return BlockedLaw(k, tuple(folds[:-1]), ends)


def probs(law: BlockedLaw, index: Int32[Array, "n"], like: Float[Array, "..."]) -> Float[Array, "n"]:
    """Probability of each unit, in the dtype of `like`; 0 for all when there is nothing to draw."""
    return law.k[index].astype(like.dtype) / jnp.maximum(law.ends[-1], 1).astype(like.dtype)


def draw(key: Key[Array, ""], law: BlockedLaw, n: int) -> Int32[Array, "n"]:
    """n independent draws; a unit of count 0 is never drawn unless all are."""
    high, low = jax.random.bits(key, (2, n), jnp.uint32)
    return unit_of(law, sampling._scale(high, low, law.ends[-1]))


def unit_of(law: BlockedLaw, ticket: UInt32[Array, "n"]) -> Int32[Array, "n"]:
    """The unit that holds a ticket, 0 <= ticket < sum(k)."""
    method = "scan" if on_cpu() else "scan_unrolled"  # one launch instead of three a bisection
    found = jnp.searchsorted(law.ends, ticket, side="right", method=method)
    block = jnp.minimum(found, law.ends.size - 1).astype(jnp.int32)
    ticket = ticket - jnp.where(block > 0, law.ends[block - 1], 0)
    index, width = block, law.k.size >> FOLDS
    folded = block < width
    for sums in (*law.folds[::-1], law.k) if width else ():
        left = sums[index]
        right = ticket >= left
        ticket = jnp.where(right, ticket - left, ticket)
        index, width = index + right * width, 2 * width
    return jnp.where(folded, index, block + (law.k.size - law.ends.size))


def first_visits(index: Int32[Array, "n"], valid: Bool[Array, "n"], units: int) -> Bool[Array, "n"]:
    """As `sampling.first_visits`, without sorting the draws; memory of `units`."""
    turn = jnp.arange(index.size, dtype=jnp.int32)
    first = jnp.full(units, index.size, jnp.int32).at[jnp.where(valid, index, units)].min(turn, mode="drop")
    return valid & (first[index] == turn)


def log_wealth(state: kw.KWState, cap: RealLike, m: RealLike, eta: RealLike, config: kw.KWConfig) -> Float[Array, ""]:
    """At most `kw.log_wealth`: its running maximum over the ends of blocks of 64 draws."""
    dtype = state.y.dtype
    cap, m, eta = (jnp.asarray(value, dtype) for value in (cap, m, eta))
    valid = jnp.arange(state.y.size) < state.count
    remaining = cap - m - state.spent
    room = jnp.maximum(remaining, 0) + eta
    v = jnp.where(valid & (room > 0), jnp.minimum(state.y / jnp.where(room > 0, room, 1), MOST), 0)
    excluded = (valid & (remaining < -eta)).any()
    v, valid = _blocks(v, 0.0), _blocks(valid, False)
    logs = jnp.stack([_log_products(v, valid, beta) for beta in config.betas])
    weights = jnp.log(jnp.asarray(config.weights, dtype))[:, None]
    path = jax.scipy.special.logsumexp(prefix_sum(logs) + weights, axis=0)
    peak = jnp.max(path - kw.LOG_ERROR * DRAWS * jnp.arange(1, path.size + 1, dtype=dtype), initial=0)
    return jnp.where(excluded, jnp.inf, peak)


def _log_products(v: Float[Array, "blocks draws"], valid: Bool[Array, "blocks draws"], beta: float):
    """log of the product of the factors of a bet over each block."""
    factor = jnp.where(valid, (1 - beta) + beta * v, 1)
    quarter = DRAWS // 4
    four = [factor[:, i * quarter : (i + 1) * quarter] for i in range(4)]
    return jnp.log(jnp.maximum(four[0] * four[1] * four[2] * four[3], LEAST)).sum(1)


def _blocks(x: Array, empty) -> Array:
    return jnp.pad(x, (0, -x.size % DRAWS), constant_values=empty).reshape(-1, DRAWS)


def upper(
    state: kw.KWState, cap: RealLike, floor: RealLike, log_inv_alpha: RealLike, eta: RealLike, config: kw.KWConfig
) -> Float[Array, ""]:
    """As `kw.upper`, by `log_wealth` of this module: `levels` refinements of `grid` candidates each, one at a time."""
    dtype = state.y.dtype
    cap = jnp.asarray(cap, dtype)
    high = jnp.minimum(cap, cap - state.known + jnp.asarray(eta, dtype))
    low = jnp.minimum(jnp.asarray(floor, dtype), high)

    def refine(bracket, _):
        low, high = bracket
        share = jnp.arange(1, config.grid + 1, dtype=dtype) / (config.grid + 1)
        edges = jnp.concatenate([low[None], low + (high - low) * share, high[None]])
        at_once = 1 if on_cpu() else config.grid
        peaks = jax.lax.map(lambda m: log_wealth(state, cap, m, eta, config), edges[1:-1], batch_size=at_once)
        last = jnp.max(jnp.where(peaks >= log_inv_alpha, 0, jnp.arange(1, config.grid + 1)))
        return (edges[last], jnp.minimum(edges[last + 1], high)), None

    return jax.lax.scan(refine, (low, high), length=config.levels)[0][1]


def upper_at_once(
    state: kw.KWState, cap: RealLike, floor: RealLike, log_inv_alpha: RealLike, eta: RealLike, config: kw.KWConfig
) -> Float[Array, ""]:
    """As `upper`, for a machine to which a pass over all candidates costs no more than one over a few.

    `grid` candidates lie above the mean estimate, at 2, 2.4, 2.88, ... of its standard errors. Any candidates are
    valid, also such that depend on the draws: the bound is the least of them above which all are rejected, or the cap.
    """
    dtype = state.y.dtype
    cap = jnp.asarray(cap, dtype)
    high = jnp.minimum(cap, cap - state.known + jnp.asarray(eta, dtype))
    valid, count = state.valid, jnp.maximum(jnp.minimum(state.count, state.y.size), 1)
    taken = jnp.where(valid, state.y + state.spent, 0)
    mean = taken.sum() / count
    error = jnp.sqrt(jnp.where(valid, (taken - mean) ** 2, 0).sum()) / count
    tried = cap - mean + error * 2 * NEXT ** jnp.arange(config.grid, dtype=dtype)
    tried = jnp.clip(tried, jnp.minimum(jnp.asarray(floor, dtype), high), high)
    peaks = jax.vmap(lambda m: log_wealth(state, cap, m, eta, config))(tried)
    kept = ~(peaks >= log_inv_alpha)  # NaN is not a rejection
    return jnp.append(tried, high)[jnp.max(jnp.where(kept, jnp.arange(1, config.grid + 1), 0))]
