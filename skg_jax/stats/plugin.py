"""Predictable plug-in mixtures: the closed form that `hoeffding` and `empirical_bernstein` share.

With bets lambda_i >= 0 fixed before x_i, exp(sum lambda_i (x_i - mu_i) - sum cost_i) is a supermartingale from 1, with
mu_i the conditional mean: m, or (N m - sum of earlier x) / (N - i + 1) without replacement. It is at least 1/alpha at
some time with probability at most alpha (Ville), and linear in m, so

    m >= (sum lambda_i (x_i + earlier_i / left_i) - log(1/alpha) - sum cost_i) / sum lambda_i (1 + (i - 1) / left_i).

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686, section 3; (2020), arXiv:2006.04347, section 3.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from skg_jax.stats._types import RealLike
from skg_jax.stats.means import Design, MeanConfig, Moments, Past, as_interval, design, no_moments, thresholds
from skg_jax.stats.sums import prefix_sum


class PluginState(NamedTuple):
    """Sums of both sides (numerator, denominator, cost), and the best lower bound so far at the level tuned for."""

    plan: Design
    moments: Moments
    truncation: Float[Array, "*batch"]
    first_mean: Float[Array, "*batch"]
    numerator: Float[Array, "*batch 2"]
    denominator: Float[Array, "*batch 2"]
    cost: Float[Array, "*batch 2"]
    best: Float[Array, "*batch 2"]


def init(config: MeanConfig, truncation: float, dtype: DTypeLike, first_mean: float = 0.5) -> PluginState:
    """A process without observations."""
    choices = jnp.asarray(truncation, dtype), jnp.asarray(first_mean, dtype)
    return PluginState(design(config, dtype), no_moments(dtype), *choices, *(jnp.zeros(2, dtype),) * 4)


def extend(
    state: PluginState, moments: Moments, past: Past, bets: Float[Array, "2 n"], costs: Float[Array, "2 n"]
) -> PluginState:
    """Add observations with their bets and costs, and intersect the bounds after each."""
    if bets.shape[-1] == 0:
        return state
    bets = jnp.where(past.use, bets, 0)
    costs = jnp.where(past.use, costs, 0)
    num = state.numerator[:, None] + prefix_sum(bets * (past.x + past.total / past.left))
    den = state.denominator[:, None] + prefix_sum(bets * (1 + (past.time - 1) / past.left))
    cost = state.cost[:, None] + prefix_sum(costs)
    best = _lower(num, den, cost, thresholds(state.plan, state.plan.alpha)[:, None])
    best = jnp.maximum(state.best, best.max(1, initial=0))
    return state._replace(moments=moments, numerator=num[:, -1], denominator=den[:, -1], cost=cost[:, -1], best=best)


def bound(state: PluginState, alpha: RealLike) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the mean, at error alpha over all times.

    The present interval at alpha, intersected with all earlier ones at the level tuned for where that is not above
    alpha: a crossing at a smaller level is a crossing at alpha too, so this costs nothing.

    Raises:
        ValueError: alpha is a Python number outside (0, 1). An array outside gives (0, 1).
    """
    now = _lower(state.numerator, state.denominator, state.cost, thresholds(state.plan, alpha))
    known = jnp.asarray(alpha, state.plan.alpha.dtype) >= state.plan.alpha
    return as_interval(state.plan, state.moments, jnp.maximum(now, jnp.where(known, state.best, 0)), alpha)


def _lower(num: jax.Array, den: jax.Array, cost: jax.Array, threshold: jax.Array) -> jax.Array:
    return jnp.where(den > 0, (num - threshold - cost) / jnp.where(den > 0, den, 1), 0)
