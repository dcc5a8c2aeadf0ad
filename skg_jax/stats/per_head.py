"""The audit of every head by itself: each sum of unknowns is within its own budget, or the claim is not made.

An average over heads can be small while one head lost nearly everything. Here every head has its own population, budget
and Kaplan-Wald process. "All heads are within budget" is a conjunctive claim: it is made only when every head passes,
so that a single bad head has to be missed for it to be wrong, and each is tested at the full level (intersection-union;
Berger 1982, and SHANGRLA, arXiv:1911.10035). No correction for the number of heads.

Reads go where the bounds are loose: heads that the bounds certify get none, the others in proportion to the draws that
they would need if every unread unit were at its lower bound. The plan of a round uses what was read before it, and
never an unread value or the unused part of an order, so every head's wealth stays a martingale. Draws are without
replacement, since the population of one head is small.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Key

from skg_jax.stats import evalues, sampling
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats._types import RealLike, refuse
from skg_jax.stats.population import Read, check_rounds, check_scalars, check_shapes, reader, totals, weighted
from skg_jax.stats.sums import tree_sum

TINY = 1e-30


@dataclasses.dataclass(frozen=True, kw_only=True)
class PerHeadConfig:
    """Fixed choices. Raises ValueError when one is out of range.

    rounds: reads of each round, over all heads. uniform_share: of the draws, in (0, 1].
    betting: bets, guards, and how finely bounds are inverted; its capacity is the most reads of one head.
    """

    rounds: tuple[int, ...] = (256, 256, 512)
    uniform_share: float = 0.05
    betting: kw.KWConfig = kw.KWConfig(capacity=128)

    def __post_init__(self):
        check_rounds(self.rounds, self.uniform_share)


class Population(NamedTuple):
    """Bounds of each head's units, the weights of its order, and bounds of its sum."""

    lower: Float[Array, "H U"]
    upper: Float[Array, "H U"]
    law: Float[Array, "H U"]
    cap: Float[Array, "H"]
    floor: Float[Array, "H"]
    eta: Float[Array, "H"]
    sound: Bool[Array, ""]


class Run(NamedTuple):
    """An audit under way: slack of the units read, by head, in the head's order; how many; wealth at the budget."""

    slack: Float[Array, "H A"]
    count: Int32[Array, "H"]
    log_wealth: Float[Array, "H"]
    violated: Bool[Array, ""]


class PerHeadReport(NamedTuple):
    """accepted: every head is within its budget. passed: head by head, evidence for `accepted`, no claim by itself.

    upper: bound on each head's sum at the level, inf when nothing can be said; any one of them, not all at once.
    violated: a value outside its bounds, or bounds or a level that make no sense: no statement holds.
    """

    accepted: Bool[Array, ""]
    passed: Bool[Array, "H"]
    upper: Float[Array, "H"]
    cap: Float[Array, "H"]
    log_wealth: Float[Array, "H"]
    reads: Int32[Array, "H"]
    violated: Bool[Array, ""]


def audit(
    key: Key[Array, ""],
    lower: Float[Array, "H U"],
    upper: Float[Array, "H U"],
    read: Read | Float[Array, "H U"],
    budgets: Float[Array, "H"],
    log_inv_alpha: RealLike,
    valid: Bool[Array, "H U"] | None = None,
    config: PerHeadConfig = PerHeadConfig(),  # noqa: B008
) -> PerHeadReport:
    """Certify "the sum of each head is within its budget" at error exp(-log_inv_alpha) for the whole claim.

    Args:
        key: fresh, and unknown when bounds and budgets were fixed.
        lower, upper: known bounds of the unknowns, finite where valid.
        read: all values, or a function of indices head * U + unit (it may be given any index).
        valid: units that exist; the others may hold anything.

    Raises:
        ValueError: outside of jit, when bounds, budgets or level make no sense or a value is outside of its bounds.
            Inside, `violated` says so, and nothing is certified. Inside too, when shapes differ or are empty.
    """
    pop = population(lower, upper, valid, config)
    return audit_order(orders(key, pop, config), pop, read, budgets, log_inv_alpha, config)


def population(lower, upper, valid=None, config: PerHeadConfig = PerHeadConfig()) -> Population:  # noqa: B008
    """Arguments as in `audit`. Nothing is clipped silently: bounds that make no sense make it unsound."""
    check_shapes("H U", lower=lower, upper=upper, valid=valid)
    lower, upper = (weighted(jnp.asarray(bound), None, valid) for bound in (lower, upper))
    floor, cap, sound = totals(lower, upper)
    gap = jnp.where(upper > lower, upper - lower, 0)
    law = jax.vmap(lambda g: sampling.pps_probs(g, g > 0, config.uniform_share))(gap)
    eta = jax.vmap(lambda c, l: kw.rounding_guard(c, l, config.betting.guard))(cap, floor)
    return Population(lower, upper, law, cap, floor, eta, sound)


def orders(key: Key[Array, ""], pop: Population, config: PerHeadConfig) -> Int32[Array, "H A"]:
    """The first units of every head's Plackett-Luce order."""
    heads, units = pop.law.shape
    most = min(units, config.betting.capacity)
    return jax.vmap(lambda k, p: sampling.draw_wor(k, p, most))(jax.random.split(key, heads), pop.law)


def audit_order(
    order: Int32[Array, "H A"],
    pop: Population,
    read: Read | Float[Array, "H U"],
    budgets: Float[Array, "H"],
    log_inv_alpha: RealLike,
    config: PerHeadConfig,
) -> PerHeadReport:
    """`audit` along given orders."""
    check_shapes("H U", bounds=pop.lower, read=None if callable(read) else read)
    check_shapes("H", heads=pop.cap, budgets=budgets, order=order[..., 0])
    check_scalars(log_inv_alpha=log_inv_alpha)
    budgets = jnp.asarray(budgets)
    refuse(jnp.isnan(budgets), "budgets", budgets, "a budget is a number")
    kw.check_level(log_inv_alpha)
    value = reader(read)
    run = start(order, pop)
    for size in config.rounds:
        more = lambda run, need, size=size: _round(run, need, order, pop, value, budgets, size, config)
        need = needs(run, order, pop, budgets, log_inv_alpha, config)
        run = jax.lax.cond(jnp.any(need > 0), more, lambda run, need: run, run, need)
    return _report(run, order, pop, budgets, log_inv_alpha, config)


def start(order: Int32[Array, "H A"], pop: Population) -> Run:
    """Nothing is read yet."""
    heads = order.shape[0]
    zeros = jnp.zeros(heads, pop.cap.dtype)
    return Run(jnp.zeros(order.shape, pop.cap.dtype), jnp.zeros(heads, jnp.int32), zeros, jnp.zeros((), bool))


def processes(run: Run, order: Int32[Array, "H A"], pop: Population, config: PerHeadConfig) -> kw.KWState:
    """The Kaplan-Wald process of every head, from its reads in order."""
    law = jnp.take_along_axis(pop.law, order, axis=1)
    seen = jnp.arange(order.shape[1]) < run.count[:, None]
    settings = dataclasses.replace(config.betting, capacity=order.shape[1])

    def one(slack, p, valid):
        state = kw.init(settings, slack.dtype)
        return kw.update_batch(state, kw.observe_wor(slack, p, valid, mass_guard=settings.mass_guard))[0]

    return jax.vmap(one)(run.slack, law, seen)


def needs(run: Run, order, pop: Population, budgets, log_inv_alpha, config: PerHeadConfig) -> Float[Array, "H"]:
    """Reads that each head would still need if all its unread units were at their lower bounds.

    0 for heads that passed. 0 for all when some head can no longer pass, for then reads are of no use.
    """
    states = processes(run, order, pop, config)
    over = pop.cap - states.known - budgets  # slack that is to be found yet
    read = jnp.arange(order.shape[1]) < run.count[:, None]
    gaps = jnp.take_along_axis(pop.upper - pop.lower, order, axis=1)
    gap = tree_sum(pop.upper - pop.lower) - tree_sum(jnp.where(read, gaps, 0))
    open_ = ~_passed(states, run, pop, budgets, log_inv_alpha)
    hopeless = open_ & (gap + pop.eta < over)
    rate = jnp.log(jnp.maximum(gap, TINY) / jnp.maximum(over, TINY))
    wanted = (jnp.asarray(log_inv_alpha, gap.dtype) - run.log_wealth) / jnp.maximum(rate, 1e-3)
    left = _available(order, pop) - run.count
    return jnp.where(open_ & ~jnp.any(hopeless), jnp.clip(wanted, 1, left), 0)


def allocate(need: Float[Array, "H"], left: Int32[Array, "H"], size: int) -> Int32[Array, "H"]:
    """Whole numbers of reads, `size` at most in all, in proportion to need and at most what is left of each head."""
    counts = jnp.zeros(need.shape, jnp.int32)
    for _ in range(2):  # once more for what heads with few units left could not take
        want = jnp.where(left > counts, need, 0)
        free = (size - counts.sum()).astype(need.dtype)
        ends = jnp.floor(jnp.cumsum(want) / jnp.maximum(want.sum(), TINY) * free + 1e-3).astype(jnp.int32)
        counts = jnp.minimum(counts + jnp.diff(ends, prepend=0), left)
    return counts


def _round(run: Run, need, order, pop: Population, value: Read, budgets, size: int, config: PerHeadConfig) -> Run:
    counts = allocate(need, _available(order, pop) - run.count, size)
    ends = jnp.cumsum(counts)
    slot = jnp.arange(size)
    used = slot < ends[-1]
    head = jnp.minimum(jnp.searchsorted(ends, slot, side="right"), ends.size - 1).astype(jnp.int32)
    place = jnp.where(used, run.count[head] + slot - (ends - counts)[head], 0)
    unit = order[head, place]
    x = value(head * pop.law.shape[1] + unit)
    broken = kw.violated(x, pop.lower[head, unit], pop.upper[head, unit], used)
    found = jnp.maximum(pop.upper[head, unit] - x, 0)  # below 0 by a fused rounding, or broken
    slack = run.slack.at[head, jnp.where(used, place, order.shape[1])].set(found, mode="drop")
    run = run._replace(slack=slack, count=run.count + counts, violated=run.violated | broken)
    wealth = jax.vmap(lambda s, c, m, e: kw.log_wealth(s, c, m, e, config.betting))
    return run._replace(log_wealth=wealth(processes(run, order, pop, config), pop.cap, budgets, pop.eta))


def _available(order: Int32[Array, "H A"], pop: Population) -> Int32[Array, "H"]:
    """Units of each head that can be read: those with a gap, up to the length of the order."""
    return jnp.minimum((pop.law > 0).sum(1, dtype=jnp.int32), order.shape[1])


def _passed(states: kw.KWState, run: Run, pop: Population, budgets, log_inv_alpha) -> Bool[Array, "H"]:
    judge = jax.vmap(lambda s, c, m, e, k: kw.certified(s, c, m, log_inv_alpha, e, k))
    return judge(states, pop.cap, budgets, pop.eta, run.log_wealth)


def _report(run: Run, order, pop: Population, budgets, log_inv_alpha, config: PerHeadConfig) -> PerHeadReport:
    states = processes(run, order, pop, config)
    level = kw.check_level(log_inv_alpha)
    refuse(run.violated, "violated", run.violated, "a unit that was read lies within its bounds")
    broken = run.violated | ~pop.sound | ~(level > 0) | jnp.any(jnp.isnan(budgets))
    passed = _passed(states, run, pop, budgets, level) & ~broken
    weakest = evalues.min_conjunctive(jnp.where(passed, jnp.inf, run.log_wealth))
    bound = jax.vmap(lambda s, c, f, e: kw.upper(s, c, f, level, e, config.betting))
    upper = bound(states, pop.cap, pop.floor, pop.eta)
    return PerHeadReport(
        accepted=(weakest >= level) & ~broken,
        passed=passed,
        upper=jnp.where(broken, jnp.inf, upper),
        cap=pop.cap,
        log_wealth=jnp.where(broken, 0, run.log_wealth),
        reads=run.count,
        violated=broken,
    )
