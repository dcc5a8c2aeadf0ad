"""Every row of the table of scopes in docs/guarantee.md: what a request may still claim, and the reason it names."""

from __future__ import annotations

import dataclasses

import pytest

from skg_jax.guard import Attempt, Terms, Verdict, certify

TERMS = Terms("guarded", alpha=0.01, tau=0.2, residual="mass", spending="uniform")
STEP = Attempt(
    position=100, token=5, verdict=Verdict.ACCEPT, exact=False, bound=0.15, cap=0.4, units=900, drawn=9, audited=9,
    selected=100, total=1000, violated=False, unbounded=0, key_reused=False, uncovered=False, corrupt=None,
)  # fmt: skip
EXACT = STEP._replace(exact=True, bound=0.0, units=0, drawn=0, audited=0, selected=1000)


def _claim(*attempts: Attempt, terms: Terms = TERMS):
    return certify(terms, attempts)


def test_clean_run():
    retry = STEP._replace(token=None, verdict=Verdict.EXPAND, bound=0.3)
    fallen = STEP._replace(token=None, verdict=Verdict.FALLBACK, bound=0.3)
    got = _claim(STEP, retry, STEP._replace(bound=0.1), fallen, EXACT)
    assert (got.scope, got.reason) == ("request", "")
    assert (got.steps, got.accepted, got.expanded, got.fallback, got.uncertified) == (3, 2, 1, 1, 0)
    assert got.worst_bound == 0.15 and got.mean_bound == pytest.approx(0.25 / 3)
    assert "every one of the 3 steps" in got.statement and "at most 0.2" in got.statement and "0.99" in got.statement


def test_steps_below_the_crossover_are_counted_apart_and_weaken_nothing():
    terms = TERMS._replace(dense_below=102)
    below, at = EXACT._replace(position=100), EXACT._replace(position=101)  # 101 and 102 tokens with their own
    got = _claim(below, at, STEP._replace(position=102), terms=terms)
    assert (got.scope, got.reason, got.fallback, got.short, got.accepted) == ("request", "", 2, 1, 1)
    sentence = "Attention was exact in 1 of the 3 steps because their context was below 102 tokens."
    assert str(got) == f"{got.statement} {sentence}" and "every one of the 3 steps" in got.statement
    record = got.to_json()
    assert (record["short"], record["dense_below"]) == (1, 102)


def test_without_steps_below_the_crossover_nothing_is_said_of_it():
    for terms in (TERMS, TERMS._replace(dense_below=101)):
        got = _claim(EXACT, STEP, terms=terms)
        assert got.short == 0 and str(got) == got.statement
    sparse = STEP._replace(position=3)  # sparse below the crossover, as a forced schedule makes it
    assert _claim(sparse, terms=TERMS._replace(dense_below=100)).short == 0


def test_no_steps():
    got = _claim()
    assert got.scope == "request" and got.worst_bound is None and got.mean_bound is None


def test_bound_seen_broken():
    got = _claim(STEP, STEP._replace(token=None, verdict=Verdict.FALLBACK, violated=True), EXACT)
    assert got.scope == "none" and "outside its bounds at position 100" in got.reason
    assert got.statement == "No guarantee is given for this request."


def test_corrupt_keys():
    got = _claim(STEP, STEP._replace(token=None, verdict=Verdict.STOP, corrupt=(7, 3)))
    assert got.scope == "none" and "block 3 in layer 7" in got.reason


def test_attempts_exhausted():
    got = _claim(STEP, STEP._replace(uncovered=True))
    assert got.scope == "per_decision" and "1 attempts came after alpha was used up" in got.reason
    assert "taken alone" in got.statement


def test_step_released_unaccepted():
    got = _claim(STEP, STEP._replace(verdict=Verdict.RELEASE, bound=0.5))
    assert got.scope == "per_decision" and "1 steps were released although not certified" in got.reason
    assert got.uncertified == 1 and got.worst_bound == 0.15


def test_stale_block_left_unread():
    got = _claim(STEP._replace(verdict=Verdict.RELEASE, bound=float("inf"), unbounded=4))
    assert got.scope == "per_decision" and "unread pages that have no valid bounds" in got.reason


def test_head_not_covered():
    got = _claim(STEP, terms=TERMS._replace(uncovered_heads=((1, 2), (3, 0))))
    assert got.scope == "request" and "layer 1 head 2, layer 3 head 0 not covered" in got.reason


def test_key_reused():
    got = _claim(STEP, STEP._replace(key_reused=True))
    assert got.scope == "none" and "audit key of position 100" in got.reason


def test_worst_scope_wins_and_all_reasons_are_named():
    got = _claim(STEP._replace(uncovered=True), STEP._replace(key_reused=True))
    assert got.scope == "none" and "alpha was used up" in got.reason and "key" in got.reason


def test_sparse_without_audit():
    got = _claim(STEP._replace(bound=0.0), terms=TERMS._replace(attention="sparse"))
    assert got.scope == "none" and "without an audit" in got.reason and got.uncertified == 1 and got.accepted == 0


def test_dense_attention_needs_no_audit():
    got = _claim(EXACT, EXACT, terms=TERMS._replace(attention="dense"))
    assert got.scope == "request" and got.fallback == 2 and got.statement == "Every step (2) used exact attention."


@pytest.mark.parametrize(
    ("spending", "tau", "scope"),
    [
        ("uniform", 0.17, "request"),
        ("uniform", 0.1, "none"),
        ("ledger", 0.17, "per_decision"),
        ("ledger", 0.2, "request"),
    ],
)
def test_tau_chosen_after_looking(spending, tau, scope):
    got = _claim(STEP, terms=TERMS._replace(spending=spending)).quote(tau)
    assert got.scope == scope and got.tau == tau
    assert bool(got.reason) == (scope != "request")


def test_weights_chosen_after_looking():
    got = _claim(STEP).quote(new_weights=True)
    assert got.scope == "none" and "weights were chosen after looking" in got.reason


def test_quoting_never_strengthens():
    broken = _claim(STEP._replace(key_reused=True))
    assert broken.quote(0.17).scope == "none"


def test_json_has_the_promised_fields():
    got = _claim(STEP).to_json()
    promised = {
        "scope", "reason", "alpha", "tau", "steps", "accepted", "expanded", "fallback", "uncertified", "worst_bound",
        "mean_bound",
    }  # fmt: skip
    assert promised <= set(got) and "terms" not in got
    assert dataclasses.is_dataclass(_claim(STEP))
