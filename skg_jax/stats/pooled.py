"""The pooled audit: one upper bound on a weighted sum of bounded unknowns, read a few at a time, in rounds.

Units may come from many layers and heads: one process over their union needs one error level. A unit has known bounds
l <= x <= c and a known weight; `read` tells x. Wanted is "R = sum of weight x <= budget" with error alpha, or a bound
on R. Draws are made with probability proportional to the gap c - l with a uniform share, by one of

    iid      with replacement, repeats cost no read; the default for large populations
    wor      without replacement, one Plackett-Luce order continued over the rounds
    hybrid   with replacement within a round, from the units not read in earlier rounds

The evidence is the Kaplan-Wald process of `kaplan_wald`, continued over rounds, never restarted; Ville's inequality
covers any rule for going on. `certain` units with the largest gaps may be read first; this costs no error probability,
since which ones they are is known before the key is used.

References: those of `kaplan_wald`.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from skg_jax.stats import blocked, sampling
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats._types import RealLike
from skg_jax.stats.sums import tree_sum

type Design = Literal["iid", "wor", "hybrid"]
type Read = Callable[[Int32[Array, "n"]], Float[Array, "n"]]

UP = 1.0 + 1e-6  # outward rounding of sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledConfig:
    """Fixed choices. Raises ValueError when one is out of range.

    rounds: draws of each round; a round is made only if the earlier ones did not certify the budget.
    uniform_share: of the draws, in (0, 1]; above 0, so that every unit with a gap can be drawn.
    certain: how many units with the largest gaps are read before any draw.
    invert: compute the bound too; without, only the decision is made.
    betting: bets, guards, and how finely the bound is inverted; its capacity is not used.
    """

    design: Design = "iid"
    rounds: tuple[int, ...] = (256, 256, 512)
    uniform_share: float = 0.02
    certain: int = 0
    invert: bool = True
    betting: kw.KWConfig = kw.KWConfig(grid=1, levels=18)

    def __post_init__(self):
        if self.design not in ("iid", "wor", "hybrid"):
            raise ValueError(f"design is {self.design!r}, but it must be 'iid', 'wor' or 'hybrid'.")
        if not self.rounds or min(self.rounds) < 1:
            raise ValueError(f"rounds is {self.rounds}, but it needs at least one round of at least one draw.")
        if not 0 < self.uniform_share <= 1:
            raise ValueError(f"uniform_share is {self.uniform_share}, but it must be in (0, 1].")
        if self.certain < 0:
            raise ValueError(f"certain is {self.certain}, but a number of units is not negative.")

    @property
    def process(self) -> kw.KWConfig:
        return dataclasses.replace(self.betting, capacity=sum(self.rounds))


class Population(NamedTuple):
    """Weighted bounds, and the law of the first draw. gap is 0 for units that need no read. cap, floor bound R."""

    lower: Float[Array, "U"]
    upper: Float[Array, "U"]
    gap: Float[Array, "U"]
    cap: Float[Array, ""]
    floor: Float[Array, ""]
    eta: Float[Array, ""]
    sound: Bool[Array, ""]  # bounds, weights and what was read so far make sense


class Run(NamedTuple):
    """An audit under way: its process, and units drawn, in order, with their slack."""

    process: kw.KWState
    index: Int32[Array, "A"]
    slack: Float[Array, "A"]
    drawn: Bool[Array, "A"]
    violated: Bool[Array, ""]


class PooledReport(NamedTuple):
    """accepted: R <= budget is certified. upper: bound on R, inf when nothing can be said. cap: bound without reads.

    violated: a value outside its bounds, or bounds, weights or a level that make no sense: no statement holds.
    draws, reads: draws made (repeats included), distinct units read (certain ones included).
    """

    accepted: Bool[Array, ""]
    upper: Float[Array, ""]
    cap: Float[Array, ""]
    log_wealth: Float[Array, ""]
    violated: Bool[Array, ""]
    draws: Int32[Array, ""]
    reads: Int32[Array, ""]


def audit(
    key: Key[Array, ""],
    lower: Float[Array, "U"],
    upper: Float[Array, "U"],
    read: Read | Float[Array, "U"],
    budget: RealLike,
    log_inv_alpha: RealLike,
    weights: Float[Array, "U"] | None = None,
    valid: Bool[Array, "U"] | None = None,
    config: PooledConfig = PooledConfig(),  # noqa: B008
) -> PooledReport:
    """Certify "sum of weights x <= budget", and bound that sum, at error exp(-log_inv_alpha).

    Args:
        key: fresh, and unknown when bounds, weights and budget were fixed.
        lower, upper: known bounds of x, finite where valid.
        read: all values, or a function of unit indices that returns theirs (it may be given any index).
        weights: known and nonnegative; default 1.
        valid: units that exist; the others may hold anything.
    """
    pop = population(lower, upper, weights, valid, config)
    value = reader(read, weights)
    pop, certain = read_certain(pop, value, config)
    run, offset = start(pop, config), 0
    peak = jnp.zeros((), lower.dtype)
    order = wor_order(key, pop, config)
    for part, size in enumerate(config.rounds):

        def round_of(run, part=part, size=size, offset=offset):
            if order is None:
                index, prob = draw(jax.random.fold_in(key, part), pop, run, size, config)
            else:
                index = order[offset : offset + size]
                once = offset + jnp.arange(size) < pop.gap.size
                prob = jnp.where(once, wor_law(pop, config)[index], 0)
            run = absorb(run, pop, index, prob, value(index), offset, config)
            return run, blocked.log_wealth(run.process, pop.cap, budget, pop.eta, config.process)

        done = kw.certified(run.process, pop.cap, budget, log_inv_alpha, pop.eta, peak)
        run, peak = jax.lax.cond(done, lambda run, peak=peak: (run, peak), round_of, run)
        offset += size
    return _report(run, pop, budget, log_inv_alpha, peak, certain, config)


def population(lower, upper, weights, valid, config: PooledConfig = PooledConfig()) -> Population:  # noqa: B008
    """Arguments as in `audit`. Nothing is clipped silently: bounds that make no sense make it unsound."""
    there = jnp.ones(lower.shape, bool) if valid is None else valid
    weights = jnp.ones_like(lower) if weights is None else weights
    known = (lower <= upper) & (weights >= 0) & jnp.isfinite(lower) & jnp.isfinite(upper) & jnp.isfinite(weights)
    lower, upper = (jnp.where(there & known, weights * bound, 0) for bound in (lower, upper))
    sound = jnp.all(known | ~there)
    return _sums(lower, upper, upper - lower, sound, config)


def _sums(lower, upper, gap, sound, config: PooledConfig) -> Population:
    total = lambda bound, way: tree_sum(bound) + way * (UP - 1) * tree_sum(jnp.abs(bound))
    cap, floor = total(upper, 1), total(lower, -1)
    return Population(lower, upper, gap, cap, floor, kw.rounding_guard(cap, floor, config.betting.guard), sound)


def reader(read: Read | Float[Array, "U"], weights: Float[Array, "U"] | None) -> Read:
    """Weighted values of units."""
    value = read if callable(read) else lambda index: jnp.asarray(read)[index]
    return value if weights is None else lambda index: weights[index] * value(index)


def read_certain(pop: Population, value: Read, config: PooledConfig) -> tuple[Population, Int32[Array, ""]]:
    """Read the units with the largest gaps: their bounds become their values. Also how many that were."""
    if not config.certain:
        return pop, jnp.zeros((), jnp.int32)
    _, index = jax.lax.top_k(pop.gap, min(config.certain, pop.gap.size))
    open_, x = pop.gap[index] > 0, value(index)
    broken = kw.violated(x, pop.lower[index], pop.upper[index], open_)
    put = lambda bound: bound.at[index].set(jnp.where(open_, x, bound[index]))
    known = _sums(put(pop.lower), put(pop.upper), pop.gap.at[index].set(0), pop.sound & ~broken, config)
    return known, open_.sum(dtype=jnp.int32)


def start(pop: Population, config: PooledConfig) -> Run:
    """No draws yet."""
    blank = lambda dtype: jnp.zeros(config.process.capacity, dtype)
    process = kw.init(config.process, pop.gap.dtype)
    return Run(process, blank(jnp.int32), blank(pop.gap.dtype), blank(bool), jnp.zeros((), bool))


def draw(
    key: Key[Array, ""], pop: Population, run: Run, n: int, config: PooledConfig
) -> tuple[Int32[Array, "n"], Float[Array, "n"]]:
    """n units with replacement from the law of this round, and their probabilities."""
    law = round_law(pop, run, config)
    index = jnp.minimum(blocked.draw(key, law, n), pop.gap.size - 1)
    return index, blocked.probs(law, index, pop.gap)


def round_law(pop: Population, run: Run, config: PooledConfig) -> blocked.BlockedLaw:
    """Of the units with a gap, under "hybrid" without those that were read."""
    gap = pop.gap
    if config.design == "hybrid":
        gap = gap.at[jnp.where(run.drawn, run.index, gap.size)].set(0, mode="drop")
    floor = config.uniform_share / (1 - config.uniform_share) if config.uniform_share < 1 else 1.0
    mean = gap.sum() / jnp.maximum((gap > 0).sum(), 1)
    pull = jnp.where(config.uniform_share < 1, gap, 0)
    return blocked.integer_law(jnp.where(gap > 0, pull + floor * mean, 0))


def wor_law(pop: Population, config: PooledConfig) -> Float[Array, "U"]:
    return sampling.pps_probs(pop.gap, pop.gap > 0, config.uniform_share)


def wor_order(key: Key[Array, ""], pop: Population, config: PooledConfig) -> Int32[Array, "A"] | None:
    """Under "wor" the units in drawing order; those without a gap come last, and 0 pads them to all draws."""
    if config.design != "wor":
        return None
    capacity, most = config.process.capacity, min(config.process.capacity, pop.gap.size)
    return jnp.pad(sampling.draw_wor(key, wor_law(pop, config), most), (0, capacity - most))


def absorb(
    run: Run,
    pop: Population,
    index: Int32[Array, "n"],
    prob: Float[Array, "n"],
    x: Float[Array, "n"],
    offset: int,
    config: PooledConfig,
) -> Run:
    """Continue the process with the draws of one round.

    prob: of each unit under the law of the round; under "wor" its weight in the whole order. x: weighted values.
    offset: draws of earlier rounds.
    """
    drawn = prob > 0
    put = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, offset, 0)
    slack = jnp.where(drawn, pop.upper[index] - x, 0)
    indices, slacks, seen = put(run.index, index), put(run.slack, slack), put(run.drawn, drawn)
    before = jnp.sum(jnp.where(run.drawn & _first(run.index, run.drawn, pop), run.slack, 0))
    known = tree_sum(jnp.where(_first(indices, seen, pop), slacks, 0))
    if config.design == "wor":
        law = wor_law(pop, config)[run.index]
        left = 1 - tree_sum(jnp.where(run.drawn, law, 0))
        seen_now = kw.observe_wor(slack, prob, drawn, left, before, config.betting.mass_guard)
    else:
        removed = before if config.design == "hybrid" else jnp.zeros_like(before)
        seen_now = kw.observe_iid(slack, prob, drawn, removed, known)
    violated = run.violated | kw.violated(x, pop.lower[index], pop.upper[index], drawn)
    return Run(kw.update_batch(run.process, *seen_now), indices, slacks, seen, violated)


def _first(index: Int32[Array, "n"], drawn: Bool[Array, "n"], pop: Population) -> Bool[Array, "n"]:
    return blocked.first_visits(index, drawn, pop.gap.size)


def _report(run: Run, pop: Population, budget, log_inv_alpha, peak, certain, config: PooledConfig) -> PooledReport:
    level = jnp.asarray(log_inv_alpha, pop.gap.dtype)
    broken = run.violated | ~pop.sound | ~(level > 0) | jnp.isnan(jnp.asarray(budget))
    accepted = kw.certified(run.process, pop.cap, budget, level, pop.eta, peak)
    if config.invert:
        bound = blocked.upper(run.process, pop.cap, pop.floor, level, pop.eta, config.process)
    else:
        bound = jnp.minimum(pop.cap, pop.cap - run.process.known + pop.eta)
    bound = jnp.where(accepted, jnp.minimum(bound, jnp.asarray(budget, pop.gap.dtype)), bound)
    reads = _first(run.index, run.drawn, pop).sum(dtype=jnp.int32)
    return PooledReport(
        accepted=accepted & ~broken,
        upper=jnp.where(broken, jnp.inf, bound),
        cap=pop.cap,
        log_wealth=jnp.where(broken, 0, peak),
        violated=broken,
        draws=run.drawn.sum(dtype=jnp.int32),
        reads=reads + certain,
    )
