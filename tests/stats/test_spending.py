"""alpha over a request: it is never overspent, and a stream of bad attempts errs as often as the levels say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from skg_jax.stats import spending

ATTEMPTS = 200
LEDGER = spending.ledger(0.2, ATTEMPTS)
UNIFORM = spending.uniform(0.2, ATTEMPTS)
REPS = 20_000


def test_levels_equal_their_definition():
    assert (
        LEDGER.failures == 4 and spending.ledger(0.01, 1000).failures == 20 and spending.ledger(0.01, 7).failures == 1
    )
    np.testing.assert_allclose(UNIFORM.levels, (0.001, 0))
    np.testing.assert_allclose(LEDGER.levels, (0.0005, 0.025))
    each, extra = LEDGER.levels
    assert each * ATTEMPTS + extra * LEDGER.failures == pytest.approx(0.2)


@pytest.mark.parametrize("config", [UNIFORM, LEDGER, spending.ledger(1e-5, 3)], ids=["uniform", "ledger", "tiny"])
def test_levels_along_a_stream_of_failures(config):
    plan, state, (each, extra) = spending.schedule(config), spending.init(), config.levels
    for attempt in range(config.attempts):
        want = each + extra * (attempt < config.failures)
        level = _next(plan, state)
        np.testing.assert_allclose(level.alpha, want, rtol=1e-6)
        assert -np.log(want) <= float(level.log_inv_alpha) <= -np.log(want) * (1 + 1e-6)
        state = _update(plan, state, True, True)
    level = _next(plan, state)
    assert level.alpha == 0 and level.log_inv_alpha == np.float32(1e30) and spending.exhausted(plan, state)
    assert state.spent == np.float32(config.alpha)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, state, _update(plan, state, True, True)))


_next = jax.jit(lambda plan, state: spending.next_alpha(plan, state))
_update = jax.jit(lambda plan, state, counted, failed: spending.update(plan, state, counted, failed))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=230, max_size=230), st.booleans())
def test_never_spends_more_than_alpha(stream, use_ledger):
    config = LEDGER if use_ledger else UNIFORM
    counted, failed = (np.array(column) for column in zip(*stream, strict=True))
    states, before = _run(spending.schedule(config), counted, failed)
    spent = np.asarray(states.spent)
    assert np.all(np.diff(spent) >= 0) and spent[-1] <= np.float32(config.alpha)
    assert np.all(np.diff(spent)[~counted[1:]] == 0)
    assert int(states.attempts[-1]) == min(counted.sum(), ATTEMPTS)
    # what the union over epochs and attempts really costs: each level once an attempt, each extra once an epoch
    each, extra = config.levels
    epochs = len(set(np.asarray(before.failures)[counted][:ATTEMPTS]) & set(range(config.failures)))
    np.testing.assert_allclose(spent[-1], each * min(counted.sum(), ATTEMPTS) + extra * epochs, rtol=1e-5, atol=1e-9)


@jax.jit
def _run(plan, counted, failed):
    """States after and before each attempt."""

    def step(state, flags):
        after = spending.update(plan, state, *flags)
        return after, (after, state)

    return jax.lax.scan(step, spending.init(), (counted, failed))[1]


def _errors(config, bad, forgets=False) -> float:
    return float(_error_rate(spending.schedule(config), bad, forgets))


@functools.partial(jax.jit, static_argnames="forgets")
def _error_rate(plan, bad, forgets):
    """Share of streams that accept a bad attempt, whose chance is exactly its level; good ones are always accepted."""

    def step(carry, inputs):
        state, wrong = carry
        bad, luck = inputs
        accepted = ~bad | (luck < spending.next_alpha(plan, state).alpha)
        state = spending.update(plan, state, True, ~accepted & (not forgets))
        return (state, wrong | (bad & accepted)), None

    luck = jax.random.uniform(jax.random.key(3), (REPS, ATTEMPTS))
    stream = lambda row: jax.lax.scan(step, (spending.init(), jnp.array(False)), (bad, row))[0][1]
    return jax.vmap(stream)(luck).mean()


@pytest.mark.parametrize("config", [UNIFORM, LEDGER], ids=["uniform", "ledger"])
def test_error_of_a_stream_of_bad_attempts(config):
    each, extra = config.levels
    exact = 1 - (1 - each - extra) ** config.failures * (1 - each) ** (ATTEMPTS - config.failures)
    got = _errors(config, jnp.ones(ATTEMPTS, bool))
    assert abs(got - exact) < 4 * np.sqrt(exact * (1 - exact) / REPS)
    assert exact < config.alpha


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_error_of_mixed_streams(share):
    bad = jnp.asarray(np.random.default_rng(1).random(ATTEMPTS) < share)
    assert _errors(LEDGER, bad) * REPS <= binom.ppf(0.999, REPS, LEDGER.alpha)


def test_forgotten_failures_break_the_ledger():
    assert _errors(LEDGER, jnp.ones(ATTEMPTS, bool), True) > 0.9


@pytest.mark.parametrize(
    ("field", "value"), [("alpha", 0.0), ("alpha", 1.0), ("attempts", 0), ("failures", -1)], ids=lambda v: str(v)
)
def test_bad_configs_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        spending.SpendingConfig(**({"alpha": 0.1, "attempts": 9} | {field: value}))


def test_update_fits_both_branches_of_a_cond():
    plan, state = spending.schedule(LEDGER), spending.init()
    book = jax.jit(lambda go: jax.lax.cond(go, lambda s: spending.update(plan, s, True, False), lambda s: s, state))
    assert book(True).attempts == 1 and book(False).attempts == 0


def test_stacked_schedules_equal_single_ones():
    plans = [spending.schedule(config) for config in (UNIFORM, LEDGER)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *plans)
    states = jax.vmap(lambda _: spending.init())(jnp.zeros(2))
    states = jax.vmap(spending.update)(stacked, states, jnp.array([True, True]), jnp.array([True, True]))
    levels = jax.vmap(spending.next_alpha)(stacked, states)
    for row, plan in enumerate(plans):
        one = spending.update(plan, spending.init(), True, True)
        assert levels.alpha[row] == spending.next_alpha(plan, one).alpha and states.spent[row] == one.spent
