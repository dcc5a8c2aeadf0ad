"""From an audit to a decision. Policy is data: tiers, budgets and error levels are arrays, one row per sequence."""

from __future__ import annotations

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.audit import AuditReport, Budget
from skg_jax.stats import spending


class Verdict(enum.IntEnum):
    """Outcome of one attempt at one token: an integer for the device that carries its sentence for people."""

    ACCEPT = 0
    EXPAND = 1
    FALLBACK = 2
    RELEASE = 3
    STOP = 4

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]


_SENTENCES = {
    Verdict.ACCEPT: "the step stands: it was exact, or its audit kept the lost attention within the budget",
    Verdict.EXPAND: "the step is repeated with more pages",
    Verdict.FALLBACK: "the step is repeated with exact attention",
    Verdict.RELEASE: "the step stands without a certificate, as the policy prefers it to exact attention",
    Verdict.STOP: "the request ends: keys in the cache do not match their checksum",
}


class Policy(NamedTuple):
    """What a request asked for, per row; traced, so that another budget compiles nothing."""

    tau: Float[Array, " B"]
    budgets: Float[Array, "B tiers"]  # page budget of each tier, ascending; the last is inf: exact
    spares: Int[Array, " B"]  # attempts beyond one per step that may be audited
    to_exact: Bool[Array, " B"]  # a step that no tier saves: exact attention, or released as it is
    dense_below: Int[Array, " B"]  # steps over fewer tokens start exact: dense attention is faster there; 0: none
    schedule: spending.Schedule  # error level of each attempt


class GuardState(NamedTuple):
    """What the guard remembers of a request."""

    spending: spending.SpendingState
    expanded: Int[Array, " B"]  # spare attempts used
    last_key: Int[Array, " B"]  # number of the latest attempt whose key was used
    distrust: Bool[Array, " B"]  # a bound was seen broken: exact from here on


class Decision(NamedTuple):
    """One attempt, decided."""

    verdict: Int[Array, " B"]
    next_tier: Int[Array, " B"]
    key_reused: Bool[Array, " B"]
    uncovered: Bool[Array, " B"]  # audited beyond the attempts that alpha was split over


def init(batch: int) -> GuardState:
    """Before the first attempt of every row."""
    zero = jnp.zeros(batch, jnp.int32)
    start = jax.vmap(lambda _: spending.init())(zero)
    return GuardState(start, zero, zero - 1, jnp.zeros(batch, bool))


def budget(policy: Policy, state: GuardState) -> Budget:
    """Limit and error level of the next audit, fixed before its key is used."""
    level = jax.vmap(spending.next_alpha)(policy.schedule, state.spending)
    # past the attempts that alpha covers a policy without exact attention goes on decision by decision
    alone = _exhausted(policy, state) & ~policy.to_exact
    return Budget(policy.tau, jnp.where(alone, policy.schedule.log_inv[:, 1], level.log_inv_alpha))


def resting_tier(policy: Policy, state: GuardState, length: Int[Array, " B"]) -> Int[Array, " B"]:
    """Tier at which the next token starts: exact in a short context, once a bound broke, or without alpha to certify.

    Args:
      length: tokens of the cache in that step, its own included.
    """
    short = length < policy.dense_below
    exact = short | state.distrust | (_exhausted(policy, state) & policy.to_exact)
    return jnp.where(exact, policy.budgets.shape[1] - 1, 0).astype(jnp.int32)


def _exhausted(policy: Policy, state: GuardState) -> Bool[Array, " B"]:
    return jax.vmap(spending.exhausted)(policy.schedule, state.spending)


def decide(
    policy: Policy,
    state: GuardState,
    report: AuditReport,
    tier: Int[Array, " B"],
    attempt: Int[Array, " B"],
    active: Bool[Array, " B"],
    length: Int[Array, " B"],
) -> tuple[Decision, GuardState]:
    """Decide every row. length: tokens of the cache in this attempt, its own included.

    exact tier            -> ACCEPT
    corrupt keys          -> STOP
    audit accepted        -> ACCEPT
    bound seen broken     -> FALLBACK, and exact from here on
    spare and sparse tier -> EXPAND
    otherwise             -> FALLBACK, or RELEASE if the policy says so

    An audit whose key was used before accepts nothing: its error probability is unknown.
    """
    last = policy.budgets.shape[1] - 1
    exact = tier >= last
    audited = active & ~exact
    reused = audited & (attempt <= state.last_key)
    corrupt = (report.corrupt[:, 0] >= 0) & ~exact
    ok = exact | (report.accepted & ~reused)
    expand = (state.expanded < policy.spares) & (tier + 1 < last) & ~report.violated
    to_exact = policy.to_exact | report.violated
    verdict = jnp.select(
        [corrupt, ok, expand, to_exact],
        [Verdict.STOP.value, Verdict.ACCEPT.value, Verdict.EXPAND.value, Verdict.FALLBACK.value],
        Verdict.RELEASE.value,
    )
    counted = audited & (report.units > 0)
    new = GuardState(
        jax.vmap(spending.update)(policy.schedule, state.spending, counted, ~ok),
        state.expanded + (active & (verdict == Verdict.EXPAND)),
        jnp.where(audited, jnp.maximum(state.last_key, attempt), state.last_key),
        state.distrust | (report.violated & audited),
    )
    rest = resting_tier(policy, new, length + 1)
    next_tier = jnp.select([verdict == Verdict.EXPAND, verdict == Verdict.FALLBACK], [tier + 1, last], rest)
    uncovered = counted & _exhausted(policy, state)
    return Decision(verdict.astype(jnp.int32), next_tier.astype(jnp.int32), reused, uncovered), new
