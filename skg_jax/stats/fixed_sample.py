"""Intervals for a sample size fixed beforehand, on the host: for reports on finished experiments, never for a peek.

References:
    Clopper, Pearson (1934), Biometrika 26: exact binomial limits, here those of scipy.
    Tango (1998), Statistics in Medicine 17, 891-908: score interval for the difference of paired proportions.
"""

import math
from typing import Literal, NamedTuple

from scipy.optimize import root_scalar
from scipy.stats import binomtest, norm

from skg_jax.stats._types import whole

type Side = Literal["two-sided", "less", "greater"]


class Interval(NamedTuple):
    low: float
    high: float


def clopper_pearson(successes: int, trials: int, alpha: float = 0.05, side: Side = "two-sided") -> Interval:
    """Limits of a binomial proportion that miss it with probability at most alpha.

    side: "less" gives an upper limit (low is 0), "greater" a lower one (high is 1).

    Raises ValueError for counts that no experiment gives, or alpha outside (0, 1).
    """
    _check_alpha(alpha)
    whole("successes", successes, 0)
    whole("trials", trials, 1)
    if successes > trials:
        raise ValueError(f"{successes} of {trials} is no count of successes; 0 <= successes <= trials and trials >= 1.")
    found = binomtest(successes, trials, alternative=side).proportion_ci(1 - alpha, method="exact")
    return Interval(float(found.low), float(found.high))


def tango(only_first: int, only_second: int, pairs: int, alpha: float = 0.05) -> Interval:
    """Score limits of p(first succeeds) - p(second succeeds) over paired trials.

    only_first, only_second: discordant pairs. The limits are the differences whose score test, with the nuisance
    proportion at its constrained maximum likelihood, has p-value alpha; approximate coverage 1 - alpha, also near 0
    and for few discordant pairs, where Wald's interval fails.

    Raises ValueError for counts that no experiment gives, or alpha outside (0, 1).
    """
    _check_alpha(alpha)
    for name, count in (("only_first", only_first), ("only_second", only_second), ("pairs", pairs)):
        whole(name, count, int(name == "pairs"))
    if pairs < 1 or min(only_first, only_second) < 0 or only_first + only_second > pairs:
        raise ValueError(
            f"{only_first} + {only_second} of {pairs} pairs cannot be discordant; counts are >= 0 and fit the pairs."
        )
    z = float(norm.isf(alpha / 2))
    observed = (only_first - only_second) / pairs
    at = lambda target: lambda delta: tango_score(delta, only_first, only_second, pairs) - target
    root = lambda target, *bracket: root_scalar(at(target), bracket=bracket, method="brentq", xtol=1e-12).root
    low = -1.0 if observed == -1 else root(z, -1 + 1e-12, observed)
    high = 1.0 if observed == 1 else root(-z, observed, 1 - 1e-12)
    return Interval(float(low), float(high))


def tango_score(delta: float, only_first: int, only_second: int, pairs: int) -> float:
    """The score statistic of "the difference is delta", standard normal under it; falls as delta grows."""
    quadratic = 2 * pairs
    linear = (2 * pairs - only_first + only_second) * delta - only_first - only_second
    constant = -only_second * delta * (1 - delta)
    nuisance = (math.sqrt(max(linear**2 - 4 * quadratic * constant, 0)) - linear) / (2 * quadratic)
    variance = pairs * (2 * nuisance + delta * (1 - delta))
    distance = only_first - only_second - pairs * delta
    if variance <= 0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")
