"""The truth table of `decide`, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.audit import AuditReport
from skg_jax.guard import policy as guard
from skg_jax.guard.policy import Verdict
from skg_jax.stats import spending

LENGTH = 500  # tokens in the cache


def _policy(spares=2, to_exact=True, attempts=10, plan=spending.uniform, dense_below=0):
    schedule = jax.tree.map(lambda x: x[None], spending.schedule(plan(0.01, attempts)))
    return guard.Policy(
        jnp.full(1, 0.2),
        jnp.array([[0.1, 0.25, jnp.inf]]),
        jnp.full(1, spares, jnp.int32),
        jnp.full(1, to_exact),
        jnp.full(1, dense_below, jnp.int32),
        schedule,
    )


def _report(accepted=False, violated=False, corrupt=(-1, -1), units=100):
    one = lambda value, dtype: jnp.full(1, value, dtype)
    return AuditReport(
        one(accepted, bool), one(0.3, jnp.float32), one(0.5, jnp.float32), one(0.0, jnp.float32), one(violated, bool),
        jnp.asarray([corrupt], jnp.int32), one(units, jnp.int32), one(1, jnp.int32), one(1, jnp.int32),
    )  # fmt: skip


def _decide(policy=None, state=None, report=None, tier=0, attempt=0, active=True, length=LENGTH):
    one = lambda value: jnp.full(1, value)
    decision, after = guard.decide(
        policy or _policy(), state or guard.init(1), report or _report(), one(tier), one(attempt), one(active),
        one(length),
    )  # fmt: skip
    return jax.tree.map(lambda x: np.asarray(x)[0], (decision, after))


TRUTH = pytest.mark.parametrize(
    ("case", "verdict", "next_tier"),
    [
        ({"report": _report(accepted=True)}, Verdict.ACCEPT, 0),
        ({"tier": 2}, Verdict.ACCEPT, 0),  # exact: nothing to audit
        ({}, Verdict.EXPAND, 1),
        ({"tier": 1}, Verdict.FALLBACK, 2),  # no sparse tier above
        ({"policy": _policy(spares=0)}, Verdict.FALLBACK, 2),
        ({"policy": _policy(spares=0, to_exact=False)}, Verdict.RELEASE, 0),
        ({"tier": 1, "policy": _policy(to_exact=False)}, Verdict.RELEASE, 0),
        ({"report": _report(violated=True)}, Verdict.FALLBACK, 2),
        ({"report": _report(violated=True), "policy": _policy(to_exact=False)}, Verdict.FALLBACK, 2),
        ({"report": _report(accepted=True, corrupt=(3, 4))}, Verdict.STOP, 0),
    ],
)


@TRUTH
def test_truth_table(case, verdict, next_tier):
    decision, _ = _decide(**case)
    assert (decision.verdict, decision.next_tier) == (verdict, next_tier)


@TRUTH
def test_below_the_crossover_only_the_tier_of_a_new_step_changes(case, verdict, next_tier):
    policy = case.get("policy", _policy())._replace(dense_below=jnp.full(1, LENGTH + 2, jnp.int32))
    decision, _ = _decide(**case | {"policy": policy})
    retried = verdict in (Verdict.EXPAND, Verdict.FALLBACK)
    assert (decision.verdict, decision.next_tier) == (verdict, next_tier if retried else 2)


@pytest.mark.parametrize("length, tier", [(1, 2), (LENGTH - 1, 2), (LENGTH, 0), (LENGTH + 1, 0)])
def test_the_first_step_is_exact_below_the_crossover_and_sparse_from_it_on(length, tier):
    rest = lambda below: guard.resting_tier(_policy(dense_below=below), guard.init(1), jnp.full(1, length)).tolist()
    assert rest(LENGTH) == [tier]
    assert rest(0) == [0]


def test_exact_steps_end_at_the_crossover_and_cost_no_alpha():
    policy, state, tier, tiers = _policy(dense_below=LENGTH), guard.init(1), 2, []
    for attempt, length in enumerate(range(LENGTH - 3, LENGTH + 2)):
        tiers.append(tier)
        audited = _report(accepted=True) if tier < 2 else _report(units=0)
        batched = jax.tree.map(lambda x: jnp.asarray(x)[None], state) if attempt else state
        level = float(guard.budget(policy, batched).log_inv_alpha[0])
        assert level == pytest.approx(np.log(10 / 0.01), rel=1e-6)  # the share of one of ten attempts, still
        decision, state = _decide(policy, batched, audited, tier, attempt, length=length)
        assert decision.verdict == Verdict.ACCEPT
        assert state.spending.attempts == max(length - LENGTH + 1, 0)
        tier = int(decision.next_tier)
    assert tiers == [2, 2, 2, 0, 0]
    assert state.last_key == 4


def test_each_row_has_its_own_crossover():
    one = _policy()
    policy = jax.tree.map(lambda x: jnp.concatenate([x, x, x]), one)._replace(dense_below=jnp.array([0, 500, 501]))
    assert guard.resting_tier(policy, guard.init(3), jnp.full(3, 500)).tolist() == [0, 0, 2]


def test_every_verdict_has_its_sentence():
    assert len({v.sentence for v in Verdict}) == len(Verdict)


def test_spares_are_counted_and_end():
    state, verdicts = guard.init(1), []
    for attempt in range(4):
        one = lambda value: jnp.full(1, value)
        decision, state = guard.decide(_policy(), state, _report(), one(0), one(attempt), one(True), one(LENGTH))
        verdicts.append(int(decision.verdict[0]))
    assert verdicts == [Verdict.EXPAND, Verdict.EXPAND, Verdict.FALLBACK, Verdict.FALLBACK]


def test_a_broken_bound_is_never_forgotten():
    _, state = _decide(report=_report(violated=True))
    assert state.distrust
    again = guard.resting_tier(_policy(), jax.tree.map(lambda x: jnp.asarray(x)[None], state), jnp.full(1, LENGTH))
    assert int(again[0]) == 2


def test_a_reused_key_accepts_nothing():
    _, state = _decide(report=_report(accepted=True), attempt=5)
    state = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
    decision, _ = _decide(state=state, report=_report(accepted=True), attempt=5)
    assert decision.key_reused and decision.verdict != Verdict.ACCEPT
    decision, _ = _decide(state=state, report=_report(accepted=True), attempt=6)
    assert not decision.key_reused and decision.verdict == Verdict.ACCEPT


def test_without_alpha_left_steps_are_exact_or_stand_alone():
    for to_exact in (True, False):
        policy = _policy(attempts=1, to_exact=to_exact)
        _, state = _decide(policy, report=_report(accepted=True))
        state = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
        assert int(guard.resting_tier(policy, state, jnp.full(1, LENGTH))[0]) == (2 if to_exact else 0)
        level = float(guard.budget(policy, state).log_inv_alpha[0])
        assert level == (pytest.approx(np.log(100), rel=1e-6) if not to_exact else np.float32(spending.NO_ALPHA))
        decision, _ = _decide(policy, state, _report(accepted=True), attempt=1)
        assert decision.uncovered


def test_steps_without_units_cost_no_alpha():
    _, state = _decide(report=_report(accepted=True, units=0))
    assert state.spending.attempts == 0
    _, state = _decide(report=_report(accepted=True), tier=2)
    assert state.spending.attempts == 0
    _, state = _decide(report=_report(accepted=True), active=False)
    assert state.spending.attempts == 0 and state.last_key == -1


def test_ledger_counts_rejected_audits():
    policy = _policy(attempts=200, plan=spending.ledger)
    before = float(guard.budget(policy, guard.init(1)).log_inv_alpha[0])
    state = guard.init(1)
    for attempt in range(4):
        _, state = guard.decide(
            policy, state, _report(), jnp.zeros(1, jnp.int32), jnp.full(1, attempt), jnp.ones(1, bool),
            jnp.full(1, LENGTH),
        )  # fmt: skip
    assert int(state.spending.failures[0]) == 4
    after = float(guard.budget(policy, state).log_inv_alpha[0])
    assert after > before  # the funded epochs are over: only the floor is left
