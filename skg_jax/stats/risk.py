"""A budget of error probability that cannot be overdrawn, and geometric spending for requests without a known end.

`spending` plans the levels of a request with a known number of attempts. Here a level is asked for and granted only
while the budget lasts: the sum of all granted levels, taken exactly, is at most alpha, whatever is asked for and in
whatever order. The statement is Boole's: statements made each at a granted level are all true with probability at least
1 - alpha.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from skg_jax.stats._types import RealLike, whole
from skg_jax.stats.spending import NO_ALPHA, Level


class RiskBudget(NamedTuple):
    """alpha in all; spent + rest is what was granted so far, rest being the rounding of spent."""

    alpha: Float[Array, "*batch"]
    spent: Float[Array, "*batch"]
    rest: Float[Array, "*batch"]


def init(alpha: float, dtype: DTypeLike = jnp.float32) -> RiskBudget:
    """An unspent budget, alpha rounded down to the dtype. Raises ValueError unless 0 < alpha < 1."""
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")
    zero = jnp.zeros((), dtype)
    return RiskBudget(jnp.asarray(_floor(alpha, dtype), dtype), zero, zero)


def spend(budget: RiskBudget, amount: RealLike) -> tuple[RiskBudget, Level]:
    """Ask for a level. Refused (alpha 0, nothing spent) when it is not positive or would overdraw the budget."""
    amount = jnp.asarray(amount, budget.spent.dtype)
    total, error = _two_sum(budget.spent, amount)
    total, rest = _two_sum(total, _up(error + budget.rest))
    granted = (amount > 0) & _within(total, rest, budget.alpha)
    keep = lambda new, old: jnp.where(granted, new, old)
    level = jnp.where(granted, amount, 0)
    tail = _up(-jnp.log(jnp.where(granted, amount, 1)))
    return (
        budget._replace(spent=keep(total, budget.spent), rest=keep(rest, budget.rest)),
        Level(level, jnp.where(granted, _up(tail), NO_ALPHA)),
    )


def remaining(budget: RiskBudget) -> Float[Array, "*batch"]:
    """About what is left; asking for exactly this may be refused by a rounding."""
    return jnp.maximum(budget.alpha - budget.spent - budget.rest, 0)


def holds(budget: RiskBudget) -> Bool[Array, "*batch"]:
    """The invariant: what was granted is at most alpha."""
    return _within(budget.spent, budget.rest, budget.alpha)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GeometricConfig:
    """alpha (1 - ratio) ratio**i for attempt i = 0, 1, ...: sums to alpha over endless attempts.

    Raises ValueError when a field is out of range.
    """

    alpha: float
    ratio: float = 0.99

    def __post_init__(self):
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}, but an error probability lies strictly between 0 and 1.")
        if not 0 < self.ratio < 1:
            raise ValueError(f"ratio is {self.ratio}, but a geometric series needs one strictly between 0 and 1.")


def geometric(config: GeometricConfig, attempt: Int32[Array, "*batch"], dtype: DTypeLike = jnp.float32) -> Level:
    """Level of an attempt counted from 0, rounded down; its log never underflows. Negative attempts get nothing."""
    eps = float(jnp.finfo(dtype).eps)
    first, step = -math.log(config.alpha) - math.log1p(-config.ratio), -math.log(config.ratio)
    log_inv = (jnp.asarray(first, dtype) + attempt.astype(dtype) * jnp.asarray(step, dtype)) * (1 + 8 * eps)
    log_inv = jnp.where(attempt >= 0, log_inv, NO_ALPHA)
    return Level(jnp.where(attempt >= 0, jnp.exp(-log_inv) * (1 - 8 * eps), 0), log_inv)


def share(alpha: float, attempts: int, dtype: DTypeLike = jnp.float32) -> Float[Array, ""]:
    """alpha / attempts rounded down, so that a `RiskBudget` grants it `attempts` times.

    Raises ValueError unless 0 < alpha < 1 and attempts is a whole number from 1 up.
    """
    whole("attempts", attempts, 1)
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")
    below = np.nextafter(np.asarray(_floor(alpha, dtype) / attempts, dtype), np.zeros((), dtype))
    return jnp.asarray(below, dtype)  # half an ulp at least, so that the exact sum has room for its own rounding


def _two_sum(a: Float[Array, "*n"], b: Float[Array, "*n"]) -> tuple[Float[Array, "*n"], Float[Array, "*n"]]:
    """(rounded sum, its exact rounding error); Knuth, The Art of Computer Programming, volume 2, section 4.2.2."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _within(total: Float[Array, "*n"], rest: Float[Array, "*n"], alpha: Float[Array, "*n"]) -> Bool[Array, "*n"]:
    return (total < alpha) | ((total == alpha) & (rest <= 0))


def _up(x: Float[Array, "*n"]) -> Float[Array, "*n"]:
    return jnp.where(x == 0, x, jnp.nextafter(x, jnp.full_like(x, jnp.inf)))


def _floor(value: float, dtype: DTypeLike) -> float:
    """The largest number of the dtype that is at most the value."""
    rounded = np.asarray(value, dtype)
    return float(rounded if float(rounded) <= value else np.nextafter(rounded, np.zeros((), dtype)))
