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
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from skg_jax.stats import blocked, sampling
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats._types import RealLike, refuse
from skg_jax.stats.population import Read, check_rounds, check_scalars, check_shapes, reader, totals, weighted
from skg_jax.stats.sums import tree_sum

type Design = Literal["iid", "wor", "hybrid"]

VALUE_RULE = "a unit that was read lies within its bounds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PooledConfig:
    """Fixed choices. Raises ValueError when one is out of range.

    rounds: draws of each round; a round is made only if the earlier ones did not certify the budget.
    uniform_share: of the draws, in (0, 1], spread over all units; above 0, so that every unit with a gap can be drawn.
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
        check_rounds(self.rounds, self.uniform_share)
        if self.certain < 0:
            raise ValueError(f"certain is {self.certain}, but a number of units is not negative.")

    @property
    def process(self) -> kw.KWConfig:
        return dataclasses.replace(self.betting, capacity=sum(self.rounds))


class Population(NamedTuple):
    """Weighted bounds of the units. cap, floor bound R. there: units that are there."""

    lower: Float[Array, "U"]
    upper: Float[Array, "U"]
    cap: Float[Array, ""]
    floor: Float[Array, ""]
    eta: Float[Array, ""]
    there: Int32[Array, ""]
    sound: Bool[Array, ""]  # bounds, weights and what was read so far make sense

    @property
    def gap(self) -> Float[Array, "U"]:
        """0 for units that need no read."""
        return jnp.maximum(self.upper - self.lower, 0)


class Run(NamedTuple):
    """An audit under way: its process, and units drawn, in order, with their slack. first: not drawn before."""

    process: kw.KWState
    index: Int32[Array, "A"]
    slack: Float[Array, "A"]
    drawn: Bool[Array, "A"]
    first: Bool[Array, "A"]
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

    Raises:
        ValueError: outside of jit, when bounds, weights, budget or level make no sense or a value is outside of its
            bounds. Inside, `violated` says so, and nothing is certified. Inside too, when shapes differ or are empty.
    """
    check_shapes("U", lower=lower, upper=upper, read=None if callable(read) else read, weights=weights, valid=valid)
    check_scalars(budget=budget, log_inv_alpha=log_inv_alpha)
    level, budget = kw.check_level(log_inv_alpha), jnp.asarray(budget)
    refuse(jnp.isnan(budget), "budget", budget, "a budget is a number")
    pop = population(lower, upper, weights, valid, config)
    value = reader(read, weights)
    pop, certain = read_certain(pop, value, config)
    run, offset, peak = start(pop, config), 0, jnp.zeros((), pop.lower.dtype)
    law, order = first_law(pop, config), wor_order(key, pop, config)
    for part, size in enumerate(config.rounds):

        def round_of(run, part=part, size=size, offset=offset):
            if order is None:
                index, prob = draw(jax.random.fold_in(key, part), pop, law or hybrid_law(pop, run, config), size)
            else:
                index = order[offset : offset + size]
                once = offset + jnp.arange(size) < pop.lower.size
                prob = jnp.where(once, wor_law(pop, config)[index], 0)
            # Else XLA would search for the unit of a draw again wherever it is used.
            index, prob, x = jax.lax.optimization_barrier((index, prob, value(index)))
            run = absorb(run, pop, index, prob, x, offset, config)
            return run, blocked.log_wealth(run.process, pop.cap, budget, pop.eta, config.process)

        done = run.process.invalid | _accepted(run, pop, budget, level, peak)
        run, peak = jax.lax.cond(done, lambda run, peak=peak: (run, peak), round_of, run)
        offset += size
    return _report(run, pop, budget, level, peak, certain, config)


def population(lower, upper, weights, valid, config: PooledConfig = PooledConfig()) -> Population:  # noqa: B008
    """Arguments as in `audit`. Nothing is clipped silently: bounds that make no sense make it unsound."""
    check_shapes("U", lower=lower, upper=upper, weights=weights, valid=valid)
    there = jnp.int32(lower.size) if valid is None else jnp.asarray(valid).sum(dtype=jnp.int32)
    lower, upper = (weighted(jnp.asarray(bound), weights, valid) for bound in (lower, upper))
    return _population(lower, upper, there, jnp.ones((), bool), config)


def _population(lower, upper, there, sound, config: PooledConfig) -> Population:
    floor, cap, fine = totals(lower, upper)
    eta = kw.rounding_guard(cap, floor, config.betting.guard)
    return Population(lower, upper, cap, floor, eta, there, sound & fine)


def read_certain(pop: Population, value: Read, config: PooledConfig) -> tuple[Population, Int32[Array, ""]]:
    """Read the units with the largest gaps: their bounds become their values. Also how many that were."""
    if not config.certain:
        return pop, jnp.zeros((), jnp.int32)
    gap, index = jax.lax.top_k(pop.gap, min(config.certain, pop.lower.size))
    open_, x = gap > 0, value(index)
    outside = kw.outside(x, pop.lower[index], pop.upper[index]) & open_
    broken = refuse(outside, "a value", x, VALUE_RULE)
    put = lambda bound: bound.at[index].set(jnp.where(open_ & ~outside, x, bound[index]))
    count = open_.sum(dtype=jnp.int32)
    return _population(put(pop.lower), put(pop.upper), pop.there - count, pop.sound & ~broken, config), count


def start(pop: Population, config: PooledConfig) -> Run:
    """No draws yet."""
    blank = lambda dtype: jnp.zeros(config.process.capacity, dtype)
    dtype = pop.lower.dtype
    process = kw.init(config.process, dtype)
    return Run(process, blank(jnp.int32), blank(dtype), blank(bool), blank(bool), jnp.zeros((), bool))


def draw(
    key: Key[Array, ""], pop: Population, law: blocked.BlockedLaw, n: int
) -> tuple[Int32[Array, "n"], Float[Array, "n"]]:
    """n units with replacement, and their probabilities."""
    index = blocked.draw(key, law, n)
    return index, blocked.probs(law, index, pop.lower)


def first_law(pop: Population, config: PooledConfig) -> blocked.BlockedLaw | None:
    """The law of all rounds under "iid"; None under the others, which have another for every round."""
    if config.design != "iid":
        return None
    # Of the outward sums: never below the sum of the gaps, hence no count can overflow, and no pass of its own.
    total = jax.lax.optimization_barrier(pop.cap - pop.floor)  # else XLA computes it again for every unit
    return _law(pop.gap, total, pop.there, config)


def hybrid_law(pop: Population, run: Run, config: PooledConfig) -> blocked.BlockedLaw:
    """The law of the next round under "hybrid": without the units that were read."""
    gap = pop.gap.at[jnp.where(run.drawn, run.index, pop.lower.size)].set(0, mode="drop")
    return _law(gap, gap.sum(), (gap > 0).sum(), config)


def _law(gap: Float[Array, "U"], total, count, config: PooledConfig) -> blocked.BlockedLaw:
    """In proportion to the gap, with a uniform share over `count` units; those without a gap are never drawn."""
    eps = config.uniform_share
    flat = eps * total / jnp.maximum(count, 1).astype(gap.dtype)
    return blocked.integer_law(jnp.where(gap > 0, (1 - eps) * gap + flat, 0), total)


def wor_law(pop: Population, config: PooledConfig) -> Float[Array, "U"]:
    return sampling.pps_probs(pop.gap, pop.gap > 0, config.uniform_share)


def wor_order(key: Key[Array, ""], pop: Population, config: PooledConfig) -> Int32[Array, "A"] | None:
    """Under "wor" the units in drawing order; those without a gap come last, and 0 pads them to all draws."""
    if config.design != "wor":
        return None
    capacity, most = config.process.capacity, min(config.process.capacity, pop.lower.size)
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
    # Values out of bounds are flagged below; a product and a difference in one rounding may pass 0 for others.
    slack = jnp.where(drawn, jnp.maximum(pop.upper[index] - x, 0), 0)
    indices, slacks, seen = put(run.index, index), put(run.slack, slack), put(run.drawn, drawn)
    first = seen if config.design == "wor" else blocked.first_visits(indices, seen, pop.lower.size)
    distinct = lambda first, slack: tree_sum(jnp.where(first, slack, 0))
    before, known = distinct(run.first, run.slack), distinct(first, slacks)
    if config.design == "wor":
        law = wor_law(pop, config)[run.index]
        left = 1 - tree_sum(jnp.where(run.drawn, law, 0))
        seen_now = kw.observe_wor(slack, prob, drawn, left, before, config.betting.mass_guard)
    else:
        removed = before if config.design == "hybrid" else jnp.zeros_like(before)
        seen_now = kw.observe_iid(slack, prob, drawn, removed, known)
    violated = run.violated | kw.violated(x, pop.lower[index], pop.upper[index], drawn)
    return Run(kw.update_batch(run.process, seen_now)[0], indices, slacks, seen, first, violated)


def _accepted(run: Run, pop: Population, budget, level, peak) -> Bool[Array, ""]:
    return kw.certified(run.process, pop.cap, budget, level, pop.eta, peak)


def _report(run: Run, pop: Population, budget, level, peak, certain, config: PooledConfig) -> PooledReport:
    broken = run.violated | run.process.invalid | ~pop.sound | ~(level > 0) | jnp.isnan(budget)
    refuse(run.violated, "violated", run.violated, VALUE_RULE)
    accepted = _accepted(run, pop, budget, level, peak)
    if config.invert:
        bound = blocked.upper(run.process, pop.cap, pop.floor, level, pop.eta, config.process)
    else:
        bound = jnp.minimum(pop.cap, pop.cap - run.process.known + pop.eta)
    bound = jnp.where(accepted, jnp.minimum(bound, budget.astype(bound.dtype)), bound)
    return PooledReport(
        accepted=accepted & ~broken,
        upper=jnp.where(broken, jnp.inf, bound),
        cap=pop.cap,
        log_wealth=jnp.where(broken, 0, peak),
        violated=broken,
        draws=run.drawn.sum(dtype=jnp.int32),
        reads=run.first.sum(dtype=jnp.int32) + certain,
    )
