"""Closed forms that are linear in the mean: what `hoeffding`, `empirical_bernstein` and `conjugate_mixture` share.

With weights lambda_i >= 0 fixed before x_i, and mu_i the conditional mean: m, or (N m - sum of earlier x) / (N - i + 1)
without replacement, the sum of lambda_i (x_i - mu_i) exceeds a margin at some time with probability at most alpha. It
is linear in m, so

    m >= (sum lambda_i (x_i + earlier_i / left_i) - margin) / sum lambda_i (1 + (i - 1) / left_i).

For predictable plug-in bets exp(sum lambda_i (x_i - mu_i) - sum cost_i) is a supermartingale from 1, and by Ville's
inequality margin = log(1/alpha) + sum cost_i. A mixture over bets gives another margin.

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686, section 3; (2020), arXiv:2006.04347, section 3.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from skg_jax.stats._types import RealLike
from skg_jax.stats.means import (
    Design,
    MeanConfig,
    Moments,
    Past,
    as_interval,
    check_level,
    design,
    no_moments,
    thresholds,
)
from skg_jax.stats.sums import prefix_sum

type Margin = Callable[[jax.Array, jax.Array], jax.Array]  # of (sums of costs, log(1/alpha))


class PluginState(NamedTuple):
    """Sums of both sides (numerator, denominator, cost), and the best lower bound so far at the level tuned for.

    choice: the largest bet, or the precision of the mixture, of each side. first_mean: the guess before any x.
    """

    plan: Design
    moments: Moments
    choice: Float[Array, "*batch 2"]
    first_mean: Float[Array, "*batch"]
    numerator: Float[Array, "*batch 2"]
    denominator: Float[Array, "*batch 2"]
    cost: Float[Array, "*batch 2"]
    best: Float[Array, "*batch 2"]


def init(
    config: MeanConfig, choice: float | tuple[float, float], dtype: DTypeLike, first_mean: float = 0.5
) -> PluginState:
    """A process without observations."""
    choices = jnp.broadcast_to(jnp.asarray(choice, dtype), (2,)), jnp.asarray(first_mean, dtype)
    return PluginState(design(config, dtype), no_moments(dtype), *choices, *(jnp.zeros(2, dtype),) * 4)


def add(cost: Float[Array, "2 *n"], tail: Float[Array, "2 *#n"]) -> Float[Array, "2 *n"]:
    """The margin of plug-in bets."""
    return tail + cost


def extend(
    state: PluginState,
    moments: Moments,
    past: Past,
    weights: Float[Array, "2 n"],
    costs: Float[Array, "2 n"],
    margin: Margin = add,
) -> PluginState:
    """Add observations with their weights and costs, and intersect the bounds after each."""
    if weights.shape[-1] == 0:
        return state
    sums = lambda start, terms: start[:, None] + prefix_sum(jnp.where(past.use, terms, 0))
    num = sums(state.numerator, weights * (past.x + past.total / past.left))
    den = sums(state.denominator, weights * (1 + (past.time - 1) / past.left))
    cost = sums(state.cost, costs)
    best = _lower(num, den, cost, thresholds(state.plan, state.plan.alpha)[:, None], margin)
    best = jnp.maximum(state.best, best.max(1, initial=0))
    return state._replace(moments=moments, numerator=num[:, -1], denominator=den[:, -1], cost=cost[:, -1], best=best)


def bound(state: PluginState, alpha: RealLike, margin: Margin = add) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the mean, at error alpha over all times.

    The present interval at alpha, intersected with all earlier ones at the level tuned for where that is not above
    alpha: a crossing at a smaller level is a crossing at alpha too, so this costs nothing.

    Raises:
        ValueError: outside of jit, for an alpha outside (0, 1). Inside it gives (0, 1).
    """
    check_level(alpha)
    now = _lower(state.numerator, state.denominator, state.cost, thresholds(state.plan, alpha), margin)
    known = jnp.asarray(alpha, state.plan.alpha.dtype) >= state.plan.alpha
    return as_interval(state.plan, state.moments, jnp.maximum(now, jnp.where(known, state.best, 0)), alpha)


def _lower(num: jax.Array, den: jax.Array, cost: jax.Array, tail: jax.Array, margin: Margin) -> jax.Array:
    used = (den > 0) & jnp.isfinite(tail)
    over = num - margin(cost, jnp.where(jnp.isfinite(tail), tail, 1))
    return jnp.where(used, over / jnp.where(used, den, 1), 0)
