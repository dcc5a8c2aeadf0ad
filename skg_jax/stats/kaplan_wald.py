"""An anytime-valid bound on a sum of bounded unknowns, from few reads: the Kaplan-Wald process on the slack.

N units have unknown values x_u with known bounds l_u <= x_u <= c_u; reading a unit reveals x_u. Wanted: an upper bound
on R = sum x that holds at every number of reads at once. The slack r = c - x is nonnegative and sums to C - R, so a
*lower* bound on a sum of nonnegative numbers is enough, and needs no upper range. With draw J of known conditional
probability q,

    V(m) = r_J / (q(J) (C - m - slack removed before the draw))

has conditional mean (C - R - removed) / (C - m - removed) <= 1 whenever R >= m. With fixed bets beta_k of weight pi_k,

    K_t(m) = sum_k pi_k prod_{s <= t} (1 - beta_k + beta_k V_s(m))

is a nonnegative supermartingale from 1 under "R >= m", and it grows with m. By Ville's inequality its first crossing of
1/alpha, at any time and under any stopping rule, rejects "R >= m". Hence at error alpha, simultaneously for all t,
R <= inf {m : max_{s <= t} K_s(m) >= 1/alpha}.

How draws were made is data: `observe_iid` (with replacement, nothing removed), `observe_wor` (without), or rounds of
either (`removed` = slack taken out before the round); wealth is continued over rounds, never restarted. The lower bound
is the same process by reflection: give x - l in the place of the slack. `weighted_sum` keeps both sides of one sum.

All functions take one process; `jax.vmap` makes many. Nothing branches on data and the memory is fixed. The dtype is
the state's. A draw that cannot be (a negative or NaN slack: a value above its bound; a probability outside [0, 1])
raises ValueError outside of jit; inside it sets `invalid` for good, and then nothing is certified and bounds are
infinite.

References:
    Stark, ALPHA (2023), arXiv:2201.02707, and SHANGRLA (2020), arXiv:1911.10035: the Kaplan-Wald martingale.
    Ville (1939), Etude critique de la notion de collectif: the maximal inequality.
    Waudby-Smith, Ramdas (2020), arXiv:2006.04347: confidence sequences for sampling without replacement.
    Shekhar, Xu, Lipton, Liang, Ramdas (2023), arXiv:2305.06884: unequal, adaptive sampling probabilities.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from skg_jax.stats._types import BoolLike, Info, RealLike, refuse
from skg_jax.stats.sums import exclusive_prefix, materialized, prefix_sum, ranks, tree_sum

GUARD = 2e-5  # on the remaining slack, relative to the cap; without it float32 loses coverage near exhaustion
MASS_GUARD = 2e-6  # the probability mass still unread is rounded down by this
LOG_ERROR = 1e-6  # rounding of one log factor, in nats
UP = 1 + 1e-5  # what rounding may add to a probability of 1
EXCESS = 1e-4  # what rounding may add to sums that have a limit: float32 weights of 1, slack read of all slack
SLACK_RULE = "a value that was read lies within its bounds, so that its slack is at least 0 and finite"
KNOWN_RULE = "all slack is at most cap - floor, and only distinct units count"
TINY = 1e-37
HUGE = 1e30


@dataclasses.dataclass(frozen=True, kw_only=True)
class KWConfig:
    """Fixed choices of a process. Raises ValueError when one is out of range.

    betas, weights: the mixture of bets. Bets depend neither on m (K stays monotone) nor on the draw they meet
        (validity). beta = 1 is best for loose bounds, but one unit exactly at its bound ends it, hence the spread.
    guard, mass_guard: rounding guards, see `rounding_guard` and `observe_wor`; larger is only wider.
    log_floor: floor of the log of one factor, so that a dead bet stays finite.
    capacity: how many draws a process can hold; later ones are ignored, which is valid but wasteful.
    grid, levels: the inversion tries `grid` candidates at once, `levels` times, to a resolution of
        (cap - floor) / (grid + 1)**levels.
    """

    betas: tuple[float, ...] = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3, 0.15, 0.05)
    weights: tuple[float, ...] = (0.5, 0.15, 0.10, 0.08, 0.07, 0.05, 0.03, 0.02)
    guard: float = GUARD
    mass_guard: float = MASS_GUARD
    log_floor: float = -60.0
    capacity: int = 1024
    grid: int = 32
    levels: int = 3

    def __post_init__(self):
        if not self.betas or not all(0 <= b <= 1 for b in self.betas):
            raise ValueError(f"betas is {self.betas}, but it needs at least one bet and every bet lies in [0, 1].")
        if len(self.weights) != len(self.betas) or min(self.weights) <= 0 or not math.isclose(sum(self.weights), 1):
            raise ValueError(f"weights is {self.weights}, but it needs one positive weight for each bet, summing to 1.")
        if not (0 <= self.guard < math.inf and 0 <= self.mass_guard < math.inf):
            raise ValueError(
                f"guard, mass_guard are {self.guard}, {self.mass_guard}, but a guard is finite, not negative."
            )
        if not -80 <= self.log_floor <= -20:
            raise ValueError(f"log_floor is {self.log_floor}, but float32 needs it in [-80, -20].")
        if min(self.capacity, self.grid, self.levels) < 1:
            sizes = (self.capacity, self.grid, self.levels)
            raise ValueError(f"capacity, grid, levels are {sizes}, but each must be at least 1.")


DEFAULT = KWConfig()


class KWState(NamedTuple):
    """Evidence of the draws so far, in order (A = capacity).

    y: slack / conditional probability of the draw. spent: slack out of the population before the draw. count: draws
    offered, also those beyond the capacity. known: slack of distinct units known by reading. invalid: a draw
    could not be.
    """

    y: Float[Array, "*batch A"]
    spent: Float[Array, "*batch A"]
    count: Int32[Array, "*batch"]
    known: Float[Array, "*batch"]
    invalid: Bool[Array, "*batch"]

    @property
    def valid(self) -> Bool[Array, "*batch A"]:
        """Which slots hold a draw."""
        return jnp.arange(self.y.shape[-1]) < self.count[..., None]


class Observation(NamedTuple):
    """n draws in order, or one.

    slacks: cap minus value of the unit drawn.
    probs: probability of the draw given the past, in [0, 1]; 0 carries no evidence.
    valid: slots that hold a draw; the others may hold anything and take no room.
    removed: slack out of the population before each draw, or before all of them.
    distinct_known: slack of all distinct units read so far, these included; it bounds R by cap - known.
    """

    slacks: Float[Array, "*n"]
    probs: Float[Array, "*n"]
    valid: Bool[Array, "*n"]
    removed: Float[Array, "*#n"]
    distinct_known: Float[Array, ""]


def init(config: KWConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> KWState:
    """A process without draws: its wealth is 1 and its bound the cap."""
    zeros = jnp.zeros(config.capacity, dtype)
    return KWState(zeros, zeros, jnp.zeros((), jnp.int32), jnp.zeros((), dtype), jnp.zeros((), bool))


def rounding_guard(cap: RealLike, lo: RealLike = 0.0, guard: float = GUARD) -> Float[Array, ""]:
    """eta, the default absolute guard: `guard` times the largest magnitude in "cap - m - spent".

    It covers the float32 rounding of these differences for processes of some thousand draws (about n 2**-24 of the
    cap); half the units at their bound and no guard misses 33 times too often at alpha = 1e-3. The cap itself must be
    rounded outwards by whoever sums it. eta costs about n eta / (cap - budget) nats.
    """
    return guard * jnp.maximum(jnp.abs(jnp.asarray(cap)), jnp.abs(jnp.asarray(lo)))


def observe(
    slack: RealLike, prob: RealLike, removed: RealLike = 0.0, known: RealLike = 0.0, valid: BoolLike = True
) -> Observation:
    """One draw."""
    slack = jnp.asarray(slack, jnp.result_type(float) if isinstance(slack, float | int) else None)
    real = lambda value: jnp.asarray(value, slack.dtype)
    return Observation(slack, real(prob), jnp.asarray(valid), real(removed), real(known))


def observe_iid(
    slacks: Float[Array, "n"],
    law: Float[Array, "n"],
    valid: Bool[Array, "n"],
    removed: RealLike = 0.0,
    distinct_known: RealLike | None = None,
) -> Observation:
    """Draws with replacement from a law over the units left, whose other units held the slack `removed`.

    distinct_known: slack of all distinct units read, these draws included (repeats counted once); default `removed`.
    """
    removed = jnp.asarray(removed, slacks.dtype)
    known = removed if distinct_known is None else jnp.asarray(distinct_known, slacks.dtype)
    return Observation(slacks, law, valid, jnp.broadcast_to(removed, slacks.shape), known)


def observe_wor(
    slacks: Float[Array, "n"],
    p: Float[Array, "n"],
    valid: Bool[Array, "n"],
    p_left: RealLike = 1.0,
    removed: RealLike = 0.0,
    mass_guard: float = MASS_GUARD,
) -> Observation:
    """Successive draws without replacement, in Plackett-Luce order with weights p that sum to 1 over all units.

    p_left, removed: mass unread and slack read before the first of these draws. The mass left is rounded down (never
    below the draw's own), which rounds the evidence down. A draw of more than the mass left cannot be: a unit came
    twice, or the weights are those of no order. It raises ValueError outside of jit; inside its probability is NaN,
    which voids the process.
    """
    taken, p = _positive(slacks, valid), jnp.where(valid, p, 0)
    p_left = jnp.asarray(p_left, p.dtype)
    unread = p_left - exclusive_prefix(p)
    whole = refuse(~(p_left <= 1 + EXCESS), "p_left", p_left, "the weights of all units sum to 1")
    bad = valid & (whole | ~(p <= unread + EXCESS))
    refuse(bad, "the weight of all draws", 1 - unread + p, "each unit is drawn once, and the weights of all sum to 1")
    left = jnp.maximum(unread - mass_guard, p)
    removed = jnp.asarray(removed, taken.dtype)
    probs = jnp.where(bad, jnp.nan, p / jnp.maximum(left, TINY))
    return Observation(slacks, probs, valid, removed + exclusive_prefix(taken), removed + tree_sum(taken))


def update(state: KWState, observation: Observation) -> tuple[KWState, Info]:
    """Append one draw. Raises ValueError outside of jit for a draw that cannot be, see the module."""
    slack, prob, valid, removed, known = observation
    return update_batch(state, Observation(slack[None], prob[None], valid[None], removed[None], known))


def update_batch(state: KWState, observation: Observation) -> tuple[KWState, Info]:
    """Append n draws in array code.

    Draws beyond the capacity are ignored. That is valid, since which ones is known before they are drawn.

    Raises:
        ValueError: outside of jit, for a draw that cannot be; see the module.
    """
    dtype, capacity = state.y.dtype, state.y.shape[-1]
    slacks, probs, valid, removed, known = observation
    bad = _impossible(observation)
    probs = jnp.where(valid & (probs > 0), probs, 0)
    y = jnp.where(probs > 0, _positive(slacks, valid) / jnp.maximum(probs, TINY), 0)
    spent = _positive(jnp.broadcast_to(removed.astype(dtype), slacks.shape), valid)
    slot = jnp.where(valid, state.count + ranks(valid), capacity)
    y, spent = materialized((y, spent))
    after = KWState(
        state.y.at[slot].set(jnp.minimum(y, HUGE).astype(dtype), mode="drop"),
        state.spent.at[slot].set(spent, mode="drop"),
        state.count + valid.sum(dtype=jnp.int32),
        jnp.max(spent, initial=jnp.maximum(state.known, known.astype(dtype))),
        state.invalid | bad,
    )
    used = jnp.minimum(after.count, capacity) - jnp.minimum(state.count, capacity)
    return after, Info(used, after.count - state.count - used, after.invalid)


def _impossible(observation: Observation) -> Bool[Array, ""]:
    slacks, probs, valid, removed, known = observation
    slack = valid & ~((slacks >= 0) & (slacks < jnp.inf))
    prob = valid & ~((probs >= 0) & (probs <= UP))
    spent = valid & ~((removed >= 0) & (removed < jnp.inf))
    refuse(slack, "slack", slacks, SLACK_RULE)
    refuse(prob, "prob", probs, "the probability of a draw lies in [0, 1]")
    refuse(spent, "removed", removed, "slack read is not negative")
    total = refuse(~(known < jnp.inf), "distinct_known", known, "the slack of units that were read is finite")
    return jnp.any(materialized(slack | prob | spent)) | total


def _positive(x: Float[Array, "n"], valid: Bool[Array, "n"]) -> Float[Array, "n"]:
    return jnp.where(valid & (x > 0), x, 0)


def wealth_path(
    state: KWState, cap: RealLike, m: RealLike, eta: RealLike, config: KWConfig = DEFAULT
) -> Float[Array, "A"]:
    """log K_t(m) after each draw, against "R >= m"; +inf once m is certainly excluded. Empty slots repeat the last.

    0 throughout, which is no evidence, for a state that is invalid.
    """
    dtype = state.y.dtype
    cap, m, eta, beta = (jnp.asarray(value, dtype) for value in (cap, m, eta, config.betas))
    remaining = cap - m - state.spent
    room = jnp.maximum(remaining, 0) + eta  # larger is conservative
    v = jnp.minimum(jnp.where(room > 0, state.y / jnp.where(room > 0, room, 1), 0), HUGE)
    factor = (1 - beta)[:, None] + beta[:, None] * v  # not log1p(beta (v - 1)), which rounds v near 0 up
    step = jnp.where(state.valid, jnp.log(jnp.maximum(factor, math.exp(config.log_floor))), 0)
    logs = prefix_sum(step) + jnp.log(jnp.asarray(config.weights, dtype))[:, None]
    excluded = jax.lax.cummax((state.valid & (remaining < -eta)).astype(jnp.int32)) > 0
    path = jnp.where(excluded, jnp.inf, jax.scipy.special.logsumexp(logs, axis=0))
    return jnp.where(state.invalid, 0, path)


def log_wealth(
    state: KWState, cap: RealLike, m: RealLike, eta: RealLike, config: KWConfig = DEFAULT
) -> Float[Array, ""]:
    """Running maximum of log K(m) over all times so far, from log K_0 = 0.

    Rounded down by LOG_ERROR nats a draw, so that it may be compared with log(1/alpha) as it is.
    """
    path = wealth_path(state, cap, m, eta, config)
    return jnp.max(path - LOG_ERROR * jnp.arange(1, path.size + 1, dtype=path.dtype), initial=0)


def decide(
    state: KWState,
    cap: RealLike,
    budget: RealLike,
    log_inv_alpha: RealLike,
    eta: RealLike,
    config: KWConfig = DEFAULT,
) -> Bool[Array, ""]:
    """True when "R <= budget" is certified, by the bounds and reads alone or by the wealth. Needs no inversion."""
    return certified(state, cap, budget, log_inv_alpha, eta, log_wealth(state, cap, budget, eta, config))


def certified(
    state: KWState, cap: RealLike, budget: RealLike, log_inv_alpha: RealLike, eta: RealLike, peak: RealLike
) -> Bool[Array, ""]:
    """`decide` for a caller that has `log_wealth` at the budget at hand."""
    by_bounds = _cap_left(state, cap, eta) <= jnp.asarray(budget)
    level = check_level(log_inv_alpha)
    return (by_bounds | (jnp.asarray(peak) >= level)) & (level > 0) & ~state.invalid


def check_level(log_inv_alpha: RealLike) -> Float[Array, ""]:
    """log(1/alpha), or NaN, which nothing reaches, unless 0 <= alpha < 1. Outside of jit it raises ValueError then."""
    level = jnp.asarray(log_inv_alpha)
    refuse(~(level > 0), "log_inv_alpha", level, "log(1/alpha) is positive, since alpha is a probability below 1")
    return jnp.where(level > 0, level, jnp.nan)


def upper(
    state: KWState,
    cap: RealLike,
    floor: RealLike,
    log_inv_alpha: RealLike,
    eta: RealLike,
    config: KWConfig = DEFAULT,
) -> Float[Array, ""]:
    """Upper bound on R at every time: the smallest rejected candidate, rounded up to the grid.

    Args:
        cap, floor: known bounds of R, rounded outwards.
        eta: see `rounding_guard`.

    Returns:
        U <= min(cap, cap - known slack + eta); the cap itself without draws; inf for a state or level that is invalid,
        and when more slack was read than there is between cap and floor. Outside of jit it raises ValueError then.
    """
    dtype = state.y.dtype
    level = check_level(log_inv_alpha)
    over = _too_much(state, cap, floor, eta)
    high = _cap_left(state, cap, eta)
    low = jnp.minimum(jnp.asarray(floor, dtype), high)
    share = jnp.arange(1, config.grid + 1, dtype=dtype) / (config.grid + 1)
    peak = jax.vmap(lambda m: log_wealth(state, cap, m, eta, config))

    def refine(bracket, _):
        low, high = bracket
        edges = jnp.concatenate([low[None], low + (high - low) * share, high[None]])
        kept = ~(peak(edges[1:-1]) >= level)  # NaN is not a rejection
        last = jnp.max(jnp.where(kept, jnp.arange(1, config.grid + 1), 0))
        return (edges[last], jnp.minimum(edges[last + 1], high)), None

    found = jax.lax.scan(refine, (low, high), length=config.levels)[0][1]
    return jnp.where(state.invalid | over | ~(level > 0), jnp.inf, found)


def lower(
    state: KWState,
    floor: RealLike,
    top: RealLike,
    log_inv_alpha: RealLike,
    eta: RealLike,
    config: KWConfig = DEFAULT,
) -> Float[Array, ""]:
    """Lower bound on R from a process fed with x - l: the upper bound of -R, whose cap is -floor. At most `top`."""
    dtype = state.y.dtype
    return -upper(state, -jnp.asarray(floor, dtype), -jnp.asarray(top, dtype), log_inv_alpha, eta, config)


def violated(
    x: Float[Array, "*n"], lo: Float[Array, "*n"], cap: Float[Array, "*n"], valid: Bool[Array, "*n"] | None = None
) -> Bool[Array, ""]:
    """A read value outside its bounds, or NaN, voids every statement: test before clipping.

    Both sides count: lower bounds may enter the definition of the other units' values.
    """
    bad = outside(x, lo, cap)
    return jnp.any(bad if valid is None else bad & valid)


def outside(x: Float[Array, "*n"], lo: Float[Array, "*n"], cap: Float[Array, "*n"]) -> Bool[Array, "*n"]:
    """Which values are not within their bounds, NaN included."""
    return ~((x >= lo) & (x <= cap))


def planned_draws(cap: float, total: float, budget: float, log_inv_alpha: float, config: KWConfig = DEFAULT) -> float:
    """Draws that certify `budget` when R = total and slack is proportional to probability (first bet, beta = 1)."""
    return (log_inv_alpha - math.log(config.weights[0])) / math.log((cap - total) / (cap - budget))


def _too_much(state: KWState, cap: RealLike, floor: RealLike, eta: RealLike) -> Bool[Array, ""]:
    """Whether more slack was read than there is. Outside of jit it raises ValueError then."""
    cap, floor, eta = (jnp.asarray(value, state.known.dtype) for value in (cap, floor, eta))
    most = cap - floor + eta + EXCESS * jnp.maximum(jnp.abs(cap), jnp.abs(floor))
    return refuse(~state.invalid & ~(state.known <= most), "the slack read", state.known, KNOWN_RULE)


def _cap_left(state: KWState, cap: RealLike, eta: RealLike) -> Float[Array, ""]:
    cap = jnp.asarray(cap, state.known.dtype)
    return jnp.minimum(cap, cap - state.known + jnp.asarray(eta, state.known.dtype))
