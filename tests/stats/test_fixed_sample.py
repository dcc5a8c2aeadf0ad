"""Exact binomial limits against the tails that define them; Tango's against a likelihood maximised numerically."""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm

from skg_jax.stats.fixed_sample import clopper_pearson, tango, tango_score


@pytest.mark.parametrize(("successes", "trials"), [(0, 9), (3, 17), (17, 17), (35, 20000)])
def test_clopper_pearson_leaves_half_of_alpha_in_each_tail(successes, trials):
    low, high = clopper_pearson(successes, trials, 0.05)
    tails = (binom.sf(successes - 1, trials, low), binom.cdf(successes, trials, high))
    assert low == 0 if successes == 0 else tails[0] == pytest.approx(0.025)
    assert high == 1 if successes == trials else tails[1] == pytest.approx(0.025)


def test_one_sided_limits():
    assert clopper_pearson(0, 59, 0.05, "less") == pytest.approx((0, 1 - 0.05 ** (1 / 59)))
    assert clopper_pearson(59, 59, 0.05, "greater") == pytest.approx((0.05 ** (1 / 59), 1))


def test_clopper_pearson_covers_where_wald_does_not():
    """Exact coverage by summing over all counts: at p = .03, n = 30, Wald's interval misses far too often."""
    n, p = 30, 0.03
    counts = np.arange(n + 1)
    chance = binom.pmf(counts, n, p)
    exact = np.array([clopper_pearson(int(k), n) for k in counts])
    half = norm.isf(0.025) * np.sqrt(counts / n * (1 - counts / n) / n)
    covered = lambda low, high: chance[(low <= p) & (p <= high)].sum()
    assert covered(*exact.T) >= 0.95
    assert covered(counts / n - half, counts / n + half) < 0.7


def reference_score(delta, b, c, n):
    """The same test from the multinomial likelihood, maximised over the nuisance proportion by search."""
    likelihood = lambda q: (
        -(b * np.log(q + delta) + c * np.log(q) + (n - b - c) * np.log(max(1 - 2 * q - delta, 1e-300)))
    )
    low, high = max(0, -delta) + 1e-12, (1 - delta) / 2 - 1e-12
    q = minimize_scalar(likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    return ((b - c) / n - delta) / np.sqrt((2 * q + delta - delta**2) / n)


@pytest.mark.parametrize(("b", "c", "n"), [(9, 3, 41), (1, 7, 23), (12, 11, 200)])
@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_tango_limits_are_where_the_likelihood_score_test_turns(b, c, n, alpha):
    low, high = tango(b, c, n, alpha)
    z = norm.isf(alpha / 2)
    assert reference_score(low, b, c, n) == pytest.approx(z, abs=2e-5)
    assert reference_score(high, b, c, n) == pytest.approx(-z, abs=2e-5)
    assert low < (b - c) / n < high


def test_tango_at_the_edges():
    """Without discordant pairs the score test is n delta^2 / (|delta| (1 - |delta|)): limits at z^2 / (n + z^2)."""
    z2 = norm.isf(0.025) ** 2
    assert tango(0, 0, 37) == pytest.approx((-z2 / (37 + z2), z2 / (37 + z2)))
    low, high = tango(5, 0, 5)
    assert high == 1 and 0 < low < 1
    assert tango(0, 5, 5) == pytest.approx((-high, -low))
    assert tango(3, 8, 40) == pytest.approx(tuple(-v for v in tango(8, 3, 40)[::-1]), abs=1e-9)


def test_score_falls_with_the_difference():
    scores = [tango_score(d, 4, 1, 19) for d in np.linspace(-0.99, 0.99, 67)]
    assert all(a > b for a, b in zip(scores, scores[1:], strict=False))


@pytest.mark.parametrize("call", [
    lambda: clopper_pearson(3, 2), lambda: clopper_pearson(-1, 2), lambda: clopper_pearson(0, 0),
    lambda: clopper_pearson(1, 2, 0.0), lambda: tango(1, 1, 1), lambda: tango(-1, 1, 9), lambda: tango(0, 0, 0),
    lambda: tango(1, 1, 9, 1.0),
])  # fmt: skip
def test_impossible_input_is_refused(call):
    with pytest.raises(ValueError, match=r"\.$"):
        call()
