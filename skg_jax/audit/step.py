"""One audit of one decode step: draw units, read them, and bound the attention that the step lost.

The population is fixed before the key is used. Rounds continue one Kaplan-Wald process; Ville's inequality covers any
rule for stopping between them. Every row of a batch has its own population, key and error level.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.draws import Population, draw, order_of, population, weights_at
from skg_jax.audit.reads import UnitReads, first_corrupt, read_units
from skg_jax.audit.report import AuditReport, Budget, HeadWeights
from skg_jax.audit.units import StepEvidence
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas.dispatch import Implementation
from skg_jax.stats import blocked
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats.sums import ranks, tree_sum

EVERY_DRAW = 2048  # draws of a process that is looked at after each of them


class _Run(NamedTuple):
    """An audit under way; n is the most draws that it can make."""

    process: kw.KWState
    index: Int[Array, "B n"]  # units drawn so far
    slack: Float[Array, "B n"]  # upper bound minus value of each
    valid: Bool[Array, "B n"]  # slots in use
    parts: Int[Array, ""]  # parts read so far
    offset: Int[Array, " B"]  # draws made so far
    log_wealth: Float[Array, " B"]  # against "residual >= tau"
    done: Bool[Array, " B"]
    violated: Bool[Array, " B"]
    corrupt: Int[Array, "B 2"]


def run(
    key: Key[Array, " B"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    weights: HeadWeights,
    budget: Budget,
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> AuditReport:
    """Audit one step.

    Args:
      key: one per row, fresh: never used before and unknown when the step's pages were chosen.
      evidence: of all layers. cache: the version that the step used.

    Returns: the report. A row with nothing unread is accepted with bound `uncovered`.
    """
    pop = population(evidence, config)
    limit = budget._replace(tau=budget.tau - weights.uncovered)
    size = math.ceil(config.rate * pop.upper.shape[1])
    kw_config = _betting(size * sum(config.rounds))
    order = order_of(key, pop, kw_config.capacity) if config.design == "wor" else None
    ends = jnp.cumsum(jnp.asarray(config.rounds))

    def part(state):
        """As many draws as the first round has; later rounds are several of these."""
        drawn, law = draw(key, pop, order, state.parts, state.offset, size)
        reads = read_units(drawn, evidence, cache, weights.omega, config, implementation)
        slack = jnp.maximum(jnp.take_along_axis(pop.upper, drawn, axis=1) - reads.x, 0)  # a fused rounding may pass 0
        # Made before they are counted: fused into sums over few rows they would take a GPU ten times as long.
        law, slack, reads = jax.lax.optimization_barrier((law, slack, reads))
        slots = (jnp.arange(size) < jnp.ceil(config.rate * pop.count)[:, None]) & (law > 0)
        state = _absorb(state, pop, drawn, law, slots & ~state.done[:, None], slack, reads, config)
        return _judge(state, pop, limit, jnp.any(state.parts == ends), kw_config)

    def going(state):  # the first round is always read: it is where broken bounds and corrupt keys show
        return (state.parts == 0) | ((state.parts < ends[-1]) & ~jnp.all(state.done))

    start = _start(pop, kw_config)
    # One round needs no loop, for whose condition a GPU would wait for the host.
    state = part(start) if sum(config.rounds) == 1 else jax.lax.while_loop(going, part, start)
    return _report(state, pop, limit, weights, evidence, kw_config)


def _betting(capacity: int) -> kw.KWConfig:
    return kw.KWConfig(capacity=capacity, grid=32 if capacity <= EVERY_DRAW else 16)


class _Looks(NamedTuple):
    """When a process is looked at, and how its bound is found."""

    log_wealth: Callable[..., Float[Array, ""]]
    upper: Callable[..., Float[Array, ""]]


def _looks(config: kw.KWConfig) -> _Looks:
    """The wealth after every draw, or of a long process after every 64th: lower, hence valid, and far cheaper."""
    if config.capacity <= EVERY_DRAW:
        return _Looks(kw.log_wealth, kw.upper)
    return _Looks(blocked.log_wealth, blocked.upper_at_once)


def _start(pop: Population, config: kw.KWConfig) -> _Run:
    batch = pop.cap.shape[0]
    blank = lambda dtype: jnp.zeros((batch, config.capacity), dtype)
    process = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), kw.init(config))
    return _Run(
        process=process,
        index=blank(jnp.int32),
        slack=blank(jnp.float32),
        valid=blank(bool),
        parts=jnp.int32(0),
        offset=jnp.zeros(batch, jnp.int32),
        log_wealth=jnp.zeros(batch),
        done=pop.count == 0,
        violated=jnp.zeros(batch, bool),
        corrupt=jnp.full((batch, 2), -1, jnp.int32),
    )


def _absorb(state: _Run, pop: Population, drawn, law, valid, slack, reads: UnitReads, config: AuditConfig) -> _Run:
    """Continue every row's process with the units of one part."""
    at = jnp.where(valid, state.offset[:, None] + ranks(valid), state.index.shape[1])
    put = lambda whole, part: jax.vmap(lambda w, p, i: w.at[i].set(p, mode="drop"))(whole, part, at)
    index, slacks, seen = put(state.index, drawn), put(state.slack, slack), put(state.valid, valid)
    known = tree_sum(jnp.where(_first_visits(index, seen, pop), slacks, 0.0))
    if config.design == "wor":
        before = jnp.where(state.valid, weights_at(pop, state.index), 0.0)
        left, removed = 1.0 - tree_sum(before), tree_sum(jnp.where(state.valid, state.slack, 0.0))
        seen_now = jax.vmap(kw.observe_wor)(slack, law, valid, left, removed)
    else:
        seen_now = jax.vmap(lambda s, p, v, k: kw.observe_iid(s, p, v, 0.0, k))(slack, law, valid, known)
    return state._replace(
        process=jax.vmap(lambda process, new: kw.update_batch(process, new)[0])(state.process, seen_now),
        index=index,
        slack=slacks,
        valid=seen,
        parts=state.parts + 1,
        offset=state.offset + valid.sum(1, dtype=jnp.int32),
        violated=state.violated | (reads.violated & valid).any(1),
        corrupt=jnp.where(state.corrupt < 0, first_corrupt(reads, valid), state.corrupt),
    )


def _judge(state: _Run, pop: Population, limit: Budget, at_end, config: kw.KWConfig) -> _Run:
    """Update the wealth, and at the end of a round stop the rows that it certifies."""
    look = lambda *a: _looks(config).log_wealth(*a, config=config)
    wealth = jax.vmap(look)(state.process, pop.cap, limit.tau, pop.eta)
    certified = jax.vmap(kw.certified)(state.process, pop.cap, limit.tau, limit.log_inv_alpha, pop.eta, wealth)
    return state._replace(log_wealth=wealth, done=state.done | (certified & at_end))


def _report(state: _Run, pop: Population, limit: Budget, weights: HeadWeights, evidence, config) -> AuditReport:
    bound = jax.vmap(lambda *a: _looks(config).upper(*a, config=config))(
        state.process, pop.cap, pop.floor, limit.log_inv_alpha, pop.eta
    )
    sound = (evidence.unbounded.sum(0) == 0) & ~state.violated & (state.corrupt[:, 0] < 0) & jnp.isfinite(pop.cap)
    sound &= ~state.process.invalid
    bound = jnp.where(state.done, jnp.minimum(bound, limit.tau), bound)  # what was certified bounds it as well
    nothing = pop.count == 0
    bound = jnp.where(nothing, 0.0, bound) + weights.uncovered
    return AuditReport(
        accepted=sound & jnp.where(nothing, limit.tau >= 0, state.done),
        bound=jnp.where(sound, bound, jnp.inf),
        cap=pop.cap + weights.uncovered,
        log_wealth=state.log_wealth,
        violated=state.violated,
        corrupt=state.corrupt,
        units=pop.count,
        drawn=state.offset,
        pages_read=_first_visits(state.index, state.valid, pop).sum(1, dtype=jnp.int32),
    )


def _first_visits(index: Int[Array, "B n"], valid: Bool[Array, "B n"], pop: Population) -> Bool[Array, "B n"]:
    return jax.vmap(lambda i, v: blocked.first_visits(i, v, pop.upper.shape[1]))(index, valid)
