"""Importance-weighted betting on a sum of bounded unknowns: the comparator of `kaplan_wald`.

N units with known bounds l_u <= x_u <= c_u. Write g = x - l, b = c - l, B = sum b. A draw J of known conditional
probability q(J) gives Z = g_J / q(J), whose mean is what the units not yet removed hold of G = sum g. With stakes
lambda_t fixed before the draw,

    K+_t(m) = prod (1 + lambda_s (Z_s - mu_s(m)))    rejects "G <= m"
    K-_t(m) = prod (1 - lambda_s (Z_s - mu_s(m)))    rejects "G >= m",      mu_s(m) = m - sum of g removed before

are nonnegative supermartingales as long as no factor can turn negative: lambda <= c / (largest Z - mu), respectively
c / mu. Both limits are taken here over all m that are possible, so stakes do not depend on m and the bounds invert
monotonically. The stake is the predictable plug-in sqrt(2 log(1/alpha) / (variance t log(1 + t))).

Unlike the Kaplan-Wald process this bets on the value and not on the slack, so that the upper side needs the largest
possible Z. It is here to be measured beside it.

References:
    Shekhar, Xu, Lipton, Liang, Ramdas (2023), Risk-limiting financial audits via weighted sampling without replacement,
    arXiv:2305.06884: the importance-weighted process, section 2.
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686: predictable plug-in stakes, section 4.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from skg_jax.stats._types import Info, RealLike, refuse
from skg_jax.stats.kaplan_wald import check_level
from skg_jax.stats.sums import exclusive_prefix, prefix_sum

TINY = 1e-30
UP = 1 + 1e-5  # what rounding may add to the largest z


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShekharConfig:
    """Fixed choices. Raises ValueError when one is out of range.

    truncation: share of the largest stake that keeps every factor positive, in (0, 1).
    capacity: how many draws a process can hold; later ones are ignored, which is valid but wasteful.
    grid, levels: the inversion tries `grid` candidates at once, `levels` times.
    """

    truncation: float = 0.75
    capacity: int = 1024
    grid: int = 32
    levels: int = 3

    def __post_init__(self):
        if not 0 < self.truncation < 1:
            raise ValueError(f"truncation is {self.truncation}, but it must lie strictly between 0 and 1.")
        if min(self.capacity, self.grid, self.levels) < 1:
            sizes = (self.capacity, self.grid, self.levels)
            raise ValueError(f"capacity, grid, levels are {sizes}, but each must be at least 1.")


DEFAULT = ShekharConfig()


class ShekharState(NamedTuple):
    """Draws so far, in order (A = capacity).

    z: g / conditional probability. removed: g out of the population before the draw. reach: largest z the draw could
    have had. room: b of the units it was made from. count: draws offered. invalid: a draw could not be.
    """

    z: Float[Array, "*batch A"]
    removed: Float[Array, "*batch A"]
    reach: Float[Array, "*batch A"]
    room: Float[Array, "*batch A"]
    count: Int32[Array, "*batch"]
    invalid: Bool[Array, "*batch"]


class Observation(NamedTuple):
    """n draws in order, or one; the fields are those of the state."""

    z: Float[Array, "*n"]
    removed: Float[Array, "*n"]
    reach: Float[Array, "*n"]
    room: Float[Array, "*n"]
    valid: Bool[Array, "*n"]


def init(config: ShekharConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> ShekharState:
    """A process without draws: its wealth is 1 and it bounds nothing."""
    zeros = jnp.zeros(config.capacity, dtype)
    return ShekharState(zeros, zeros, zeros, zeros, jnp.zeros((), jnp.int32), jnp.zeros((), bool))


def observe_iid(
    gains: Float[Array, "n"], law: Float[Array, "n"], valid: Bool[Array, "n"], reach: RealLike, total: RealLike
) -> Observation:
    """Draws with replacement. gains: g. reach: max of b / law over all units with b > 0. total: B."""
    full = lambda value: jnp.full(gains.shape, value, gains.dtype)
    z = jnp.where(valid & (law > 0), gains / jnp.maximum(law, TINY), 0)
    return Observation(z, full(0), full(reach), full(total), valid)


def observe_wor(
    gains: Float[Array, "n"],
    gaps: Float[Array, "n"],
    p: Float[Array, "n"],
    valid: Bool[Array, "n"],
    reach: RealLike,
    total: RealLike,
) -> Observation:
    """The first draws of a Plackett-Luce order with weights p that sum to 1. gains, gaps: g, b. reach: max of b / p."""
    gains, gaps, p = (jnp.where(valid, v, 0) for v in (gains, gaps, p))
    left = jnp.maximum(1 - exclusive_prefix(p), p)
    z = jnp.where(p > 0, gains * left / jnp.maximum(p, TINY), 0)
    room = jnp.maximum(jnp.asarray(total, p.dtype) - exclusive_prefix(gaps), gaps)
    return Observation(z, exclusive_prefix(gains), left * jnp.asarray(reach, p.dtype), room, valid)


def update(state: ShekharState, observation: Observation) -> tuple[ShekharState, Info]:
    """Append one draw; see `update_batch`."""
    return update_batch(state, Observation(*(jnp.asarray(leaf)[None] for leaf in observation)))


def update_batch(state: ShekharState, observation: Observation) -> tuple[ShekharState, Info]:
    """Append n draws. Draws beyond the capacity are ignored, which is known before they are made, hence valid.

    A z that is negative, NaN or larger than its reach raises ValueError outside of jit; inside it sets `invalid`.
    """
    *columns, valid = observation
    z, removed, reach, room = columns
    possible = (z >= 0) & (z <= reach * UP) & (removed >= 0) & (room >= 0) & (room < jnp.inf)
    bad = refuse(valid & ~possible, "z", z, "a value within its bounds gives 0 <= z <= reach, of finite units")
    capacity = state.z.shape[-1]
    slot = jnp.where(valid, state.count + jnp.cumsum(valid) - 1, capacity)
    put = lambda whole, part: whole.at[slot].set(part.astype(whole.dtype), mode="drop")
    count = state.count + valid.sum(dtype=jnp.int32)
    used = jnp.minimum(count, capacity) - jnp.minimum(state.count, capacity)
    z, removed, reach, room = (put(a, b) for a, b in zip(state[:4], columns, strict=True))
    after = ShekharState(z, removed, reach, room, count, state.invalid | bad)
    return after, Info(used, count - state.count - used, after.invalid)


def stakes(
    state: ShekharState, log_inv_alpha: RealLike, side: int, config: ShekharConfig = DEFAULT
) -> Float[Array, "A"]:
    """lambda of each draw, from the draws before it. side: +1 for K+, -1 for K-."""
    dtype = state.z.dtype
    seen = _seen(state)
    scale = jnp.maximum(state.room[0], TINY)  # B: the whole population is open at the first draw
    value = jnp.where(seen, (state.z + state.removed) / scale, 0)  # of mean G / B whatever was removed
    t = jnp.arange(1, value.size + 1, dtype=dtype)
    mean = (0.5 + prefix_sum(value)) / (t + 1)
    spread = (0.25 + exclusive_prefix(jnp.where(seen, (value - mean) ** 2, 0))) / t
    plug_in = jnp.sqrt(2 * jnp.asarray(log_inv_alpha, dtype) / (spread * t * jnp.log1p(t))) / scale
    limit = jnp.where(side > 0, state.room, jnp.maximum(state.reach, TINY))
    return jnp.minimum(plug_in, config.truncation / jnp.maximum(limit, TINY))


def wealth_path(
    state: ShekharState, m: RealLike, log_inv_alpha: RealLike, side: int, config: ShekharConfig = DEFAULT
) -> Float[Array, "A"]:
    """log K+ (side 1) or log K- (side -1) at G = m after each draw. Empty slots repeat the last."""
    mean = jnp.asarray(m, state.z.dtype) - state.removed
    factor = 1 + side * stakes(state, log_inv_alpha, side, config) * (state.z - mean)
    return prefix_sum(jnp.where(_seen(state), jnp.log(jnp.maximum(factor, TINY)), 0))


def bound(
    state: ShekharState,
    floor: RealLike,
    cap: RealLike,
    log_inv_alpha: RealLike,
    config: ShekharConfig = DEFAULT,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for sum x, each at the level and at every time. floor, cap: sum l and sum c.

    (-inf, inf) for a state that is invalid, or a level that is none; see `kaplan_wald.check_level`.
    """
    floor, cap = (jnp.asarray(v, state.z.dtype) for v in (floor, cap))
    log_inv_alpha = check_level(log_inv_alpha)
    void = state.invalid | jnp.isnan(log_inv_alpha)
    peak = lambda m, side: jnp.max(wealth_path(state, m, log_inv_alpha, side, config), initial=0)
    rejected = lambda m, side: jax.vmap(lambda v: peak(v, side) >= log_inv_alpha)(m)
    upper = _invert(lambda m: rejected(m, -1), 0 * cap, cap - floor, config)
    lower = -_invert(lambda m: rejected(-m, 1), floor - cap, 0 * cap, config)
    return jnp.where(void, -jnp.inf, floor + lower), jnp.where(void, jnp.inf, floor + upper)


def _invert(rejected, low, high, config: ShekharConfig) -> Float[Array, ""]:
    """The smallest rejected candidate, rejection being monotone, rounded up to the grid; `high` when none is."""
    share = jnp.arange(1, config.grid + 1, dtype=low.dtype) / (config.grid + 1)

    def refine(bracket, _):
        low, high = bracket
        edges = jnp.concatenate([low[None], low + (high - low) * share, high[None]])
        last = jnp.max(jnp.where(rejected(edges[1:-1]), 0, jnp.arange(1, config.grid + 1)))
        return (edges[last], jnp.minimum(edges[last + 1], high)), None

    return jax.lax.scan(refine, (low, high), length=config.levels)[0][1]


def _seen(state: ShekharState) -> Bool[Array, "*batch A"]:
    return jnp.arange(state.z.shape[-1]) < state.count[..., None]


def log_level(alpha: float) -> float:
    """log(1/alpha). Raises ValueError unless 0 < alpha < 1."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")
    return -math.log(alpha)
