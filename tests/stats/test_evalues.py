"""Combined e-values against brute force in plain numbers, validity by enumeration, and rules that are not valid."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skg_jax.stats import evalues

LOGS = st.lists(st.floats(-5, 12, width=32) | st.sampled_from([-np.inf, np.inf, np.nan]), min_size=7, max_size=7)
ALPHA = 0.05
RULES = {"bonferroni": jax.jit(evalues.e_bonferroni), "bh": jax.jit(evalues.e_bh)}


def brute_bh(e, alpha):
    """Every set size tried: the largest k whose k-th largest e-value reaches H / (alpha k)."""
    ordered = sorted(e, reverse=True)
    sizes = [k for k in range(1, len(e) + 1) if ordered[k - 1] * alpha * k >= len(e)]
    return np.array([bool(sizes) and value >= ordered[max(sizes) - 1] for value in e])


@given(LOGS)
@settings(max_examples=60)
def test_bh_and_bonferroni_equal_brute_force(logs):
    e = [0.0 if np.isnan(v) else float(np.exp(np.float64(v))) for v in logs]
    found = {name: np.asarray(rule(jnp.asarray(logs, jnp.float32), ALPHA)) for name, rule in RULES.items()}
    np.testing.assert_array_equal(found["bh"], brute_bh(e, ALPHA))
    np.testing.assert_array_equal(found["bonferroni"], np.array(e) >= len(e) / ALPHA)
    assert np.all(found["bh"] >= found["bonferroni"])


def test_bh_takes_claims_below_their_own_threshold_with_company():
    """H = 4: e = 40 alone is not enough (80 wanted), two of them are (40 each), three at 27."""
    e = jnp.log(jnp.asarray([[41.0, 1, 1, 1], [41, 41, 1, 1], [27, 27, 27, 1]]))
    assert np.asarray(evalues.e_bh(e, ALPHA)).sum(-1).tolist() == [0, 2, 3]
    assert not np.asarray(evalues.e_bonferroni(e, ALPHA)).any()


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, 2.0, np.nan])
def test_no_claim_at_a_level_that_is_none(alpha):
    e = jnp.asarray([np.inf, 50.0, 3.0], jnp.float32)
    assert not any(np.asarray(rule(e, alpha)).any() for rule in RULES.values())


def test_combinations_equal_plain_arithmetic():
    rng = np.random.default_rng(1)
    logs = rng.normal(size=(5, 3)).astype(np.float32)
    weights = np.array([0.2, 0.5, 0.3], np.float32)
    e = np.exp(logs.astype(np.float64))
    close = lambda got, want: np.testing.assert_allclose(np.exp(np.asarray(got, np.float64)), want, rtol=1e-5)
    close(evalues.average(jnp.asarray(logs)), e.mean(1))
    close(evalues.average(jnp.asarray(logs), jnp.asarray(weights)), e @ weights)
    close(evalues.product(jnp.asarray(logs)), e.prod(1))
    close(evalues.min_conjunctive(jnp.asarray(logs)), e.min(1))


def test_nan_and_zero_are_no_evidence():
    e = jnp.asarray([np.nan, np.inf, 2.0], jnp.float32)
    assert float(evalues.product(e)) == -np.inf == float(evalues.min_conjunctive(e))
    assert float(evalues.average(e)) == np.inf  # one certain rejection among them
    assert float(evalues.average(e[::2])) == pytest.approx(2 - np.log(2))
    assert float(evalues.min_conjunctive(e, jnp.asarray([False, True, True]))) == 2.0
    assert np.asarray(evalues.union_bound(jnp.asarray([[0.1, 0.2], [np.nan, 0.0], [0.7, 0.6]]))) == pytest.approx(
        [0.3, 1, 1]
    )


# Two-point e-values with mean 1: 0 or `TOP`, so that every joint outcome can be weighed.
TOP = 1 / ALPHA


def _outcomes(count):
    for hits in itertools.product([False, True], repeat=count):
        chance = np.prod([ALPHA if hit else 1 - ALPHA for hit in hits])
        yield chance, jnp.log(jnp.where(jnp.asarray(hits), TOP, 0.0))


def test_means_under_the_null_by_enumeration():
    """Average and product keep mean 1 over independent e-values; the maximum, which is no e-value, does not."""
    means = {"average": 0.0, "product": 0.0, "max": 0.0}
    for chance, log_e in _outcomes(3):
        means["average"] += chance * float(jnp.exp(evalues.average(log_e)))
        means["product"] += chance * float(jnp.exp(evalues.product(log_e)))
        means["max"] += chance * float(jnp.exp(jnp.max(log_e)))
    assert means["average"] == pytest.approx(1, rel=1e-5) == means["product"]
    assert means["max"] > 2.8


def test_conjunctive_claim_needs_no_correction_but_single_claims_do():
    """One bad claim beside others that always pass: the minimum errs at alpha. Picking any claim of three bad ones at
    level alpha errs nearly three times as often, and Bonferroni repairs that."""
    errs = {"conjunctive": 0.0, "any of three": 0.0, "bonferroni": 0.0}
    for chance, log_e in _outcomes(3):
        beside = jnp.where(jnp.arange(3) == 0, log_e, 50.0)
        errs["conjunctive"] += chance * bool(evalues.min_conjunctive(beside) >= np.log(TOP) - 1e-6)
        errs["any of three"] += chance * bool(jnp.any(log_e >= np.log(TOP) - 1e-6))
        errs["bonferroni"] += chance * bool(evalues.e_bonferroni(log_e, ALPHA).any())
    assert errs["conjunctive"] == pytest.approx(ALPHA)
    assert errs["any of three"] == pytest.approx(1 - (1 - ALPHA) ** 3) and errs["any of three"] > 2.8 * ALPHA
    assert errs["bonferroni"] <= ALPHA


@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.1, float("nan")])
@pytest.mark.parametrize("claims", [evalues.e_bonferroni, evalues.e_bh])
def test_an_alpha_that_is_none_is_refused_and_claims_nothing(claims, alpha):
    log_e = jnp.full(3, 1e6)
    with pytest.raises(ValueError, match="alpha is .*strictly between 0 and 1"):
        claims(log_e, alpha)
    assert not np.asarray(jax.jit(claims)(log_e, alpha)).any()


@pytest.mark.parametrize("weights", [[2.0, 2.0], [-0.5, 1.0], [float("nan"), 0.5]])
def test_weights_that_do_not_average_are_refused_and_are_no_evidence(weights):
    log_e, weights = jnp.array([3.0, 3.0]), jnp.asarray(weights)
    with pytest.raises(ValueError, match="weights? is "):
        evalues.average(log_e, weights)
    assert float(jax.jit(evalues.average)(log_e, weights)) == -np.inf


def test_a_negative_error_probability_is_refused_and_counts_as_one():
    errors = jnp.array([-1.0, 0.5])
    with pytest.raises(ValueError, match="errors is -1.0"):
        evalues.union_bound(errors)
    assert float(jax.jit(evalues.union_bound)(errors)) == 1.0
