"""The budget against exact rational sums, geometric levels against their series, and books that overdraw."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skg_jax.stats import risk
from skg_jax.stats.spending import NO_ALPHA

exact = lambda value: Fraction(float(value))
ASKED = st.floats(-0.015625, 0.0625) | st.sampled_from([1e-30, 1e-9, 0.01, 0.05, np.nan, np.inf])


@jax.jit
def spend_all(budget, amounts):
    def one(budget, amount):
        budget, level = risk.spend(budget, amount)
        return budget, (level, risk.holds(budget))

    return jax.lax.scan(one, budget, amounts)


@given(st.lists(ASKED, min_size=12, max_size=12))
@settings(max_examples=100)
def test_granted_levels_never_exceed_alpha(amounts):
    budget, (levels, held) = spend_all(risk.init(0.05), jnp.asarray(amounts, jnp.float32))
    granted = [exact(a) for a in np.asarray(levels.alpha)]
    assert np.asarray(held).all()
    assert sum(granted) <= exact(budget.alpha) <= Fraction(0.05)
    assert sum(granted) <= exact(budget.spent) + exact(budget.rest)
    for asked, got, tail in zip(amounts, granted, np.asarray(levels.log_inv_alpha), strict=True):
        assert got in (0, exact(np.float32(asked)) if np.isfinite(asked) else 0)
        assert tail == np.float32(NO_ALPHA) if got == 0 else np.exp(-np.float64(tail)) <= float(got)


@pytest.mark.parametrize("attempts", [1, 3, 1000])
def test_all_shares_are_granted_and_no_more(attempts):
    amounts = jnp.full(attempts + 1, risk.share(0.01, attempts))
    _, (levels, _) = spend_all(risk.init(0.01), amounts)
    assert (np.asarray(levels.alpha) > 0).tolist() == [True] * attempts + [False]


def test_a_plain_float32_sum_overdraws():
    """The fault that the second word prevents: shares too small to move the sum are spent for ever."""
    amounts = jnp.full(4000, 1e-9, jnp.float32)
    start = risk.init(0.05)
    budget = start._replace(spent=start.alpha - jnp.float32(2e-8))
    _, (levels, _) = spend_all(budget, amounts)
    granted = sum(exact(a) for a in np.asarray(levels.alpha))
    assert 0 < granted <= exact(budget.alpha) - exact(budget.spent)
    plain = np.float32(budget.spent)
    for a in np.asarray(amounts):
        plain = np.float32(plain + a)
    assert plain <= np.float32(budget.alpha)  # it would grant all 4000, two hundred times what is left


def test_budgets_of_a_batch_are_their_own():
    budgets = jax.vmap(lambda _: risk.init(0.05))(jnp.arange(3))
    after, level = jax.vmap(risk.spend)(budgets, jnp.asarray([0.01, 0.06, 0.05 * (1 - 1e-6)]))
    assert (np.asarray(level.alpha) > 0).tolist() == [True, False, True]
    np.testing.assert_allclose(np.asarray(risk.remaining(after)), [0.04, 0.05, 0], atol=1e-7)


@pytest.mark.parametrize("ratio", [0.5, 0.99])
def test_geometric_levels_sum_to_alpha_and_never_to_more(ratio):
    config = risk.GeometricConfig(alpha=0.05, ratio=ratio)
    level = jax.jit(lambda i: risk.geometric(config, i))(jnp.arange(3000))
    tails = np.asarray(level.log_inv_alpha, np.float64)
    assert sum(exact(a) for a in np.asarray(level.alpha)) <= Fraction(0.05)
    assert np.exp(-tails).sum() <= 0.05 and np.exp(-tails).sum() == pytest.approx(0.05, rel=1e-4)
    assert np.all(np.asarray(level.alpha, np.float64) <= np.exp(-tails))
    want = 0.05 * (1 - ratio) * ratio ** np.arange(40.0)
    np.testing.assert_allclose(np.asarray(level.alpha)[:40], want, rtol=4e-5)  # 8 ulp of a log of 31
    assert np.isfinite(tails).all() and np.all(np.diff(tails) > 0)  # also where the level itself underflows


def test_geometric_levels_are_granted_by_a_budget_of_the_same_alpha():
    level = risk.geometric(risk.GeometricConfig(alpha=0.05), jnp.arange(500))
    _, (granted, _) = spend_all(risk.init(0.05), level.alpha)
    np.testing.assert_array_equal(np.asarray(granted.alpha), np.asarray(level.alpha))


def test_negative_attempts_get_nothing():
    level = risk.geometric(risk.GeometricConfig(alpha=0.05), jnp.asarray(-1))
    assert float(level.alpha) == 0 and float(level.log_inv_alpha) == pytest.approx(NO_ALPHA)


@pytest.mark.parametrize("make", [
    lambda: risk.init(0.0), lambda: risk.init(1.0), lambda: risk.GeometricConfig(alpha=2.0),
    lambda: risk.GeometricConfig(alpha=0.1, ratio=1.0), lambda: risk.GeometricConfig(alpha=0.1, ratio=0.0),
])  # fmt: skip
def test_impossible_input_is_refused(make):
    with pytest.raises(ValueError, match=r"strictly between 0 and 1"):
        make()


@pytest.mark.parametrize(("alpha", "attempts"), [(float("nan"), 3), (0.0, 3), (0.05, 0), (0.05, -1)])
def test_shares_of_what_is_no_budget_are_refused(alpha, attempts):
    with pytest.raises(ValueError, match="(alpha|attempts) is "):
        risk.share(alpha, attempts)
