"""Conjugate-mixture empirical Bernstein confidence sequence for a mean in [0, 1].

In the empirical Bernstein supermartingale exp(l sum (x - mu) - psi_E(l) sum (x - mean before)^2) the bet l is mixed
over, not chosen, so no bet has to suit the unknown variance: the sum crosses the gamma-exponential boundary u with
probability at most alpha, and m >= (sum (x_i + earlier_i / left_i) - u(V)) / sum (1 + (i - 1) / left_i), where the
terms in left_i, the items not drawn yet, vanish for draws with replacement.

References:
    Howard, Ramdas, McAuliffe, Sekhon (2021), arXiv:1810.08240, theorem 4 and proposition 9.
    Waudby-Smith, Ramdas (2020), arXiv:2006.04347, for the mean of what is left.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats._types import RealLike
from skg_jax.stats.boundaries import best_rho, gamma_exponential_root
from skg_jax.stats.means import (
    Design,
    MeanConfig,
    Moments,
    advance,
    as_interval,
    centres,
    check_first_mean,
    design,
    no_moments,
    thresholds,
)
from skg_jax.stats.sums import prefix_sum

MAX_LEVEL = 0.49  # the one-sided mixture has no best precision from 1/2 on


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConjugateMixtureConfig(MeanConfig):
    """A `MeanConfig` and two choices. Raises ValueError when a field is out of range.

    v_opt: sum of squared deviations at which the interval is narrowest: observations times their variance, > 0.
    first_mean: guess of the mean before the first observation, of x for the lower bound and of 1 - x for the upper.
    """

    v_opt: float = 1.0
    first_mean: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        best_rho(self.v_opt, 0.05)
        check_first_mean(self.first_mean)


DEFAULT = ConjugateMixtureConfig()


class ConjugateMixtureState(NamedTuple):
    """Sums of both sides, and the best lower bound so far at the configured level. rho: precision of the mixture."""

    plan: Design
    moments: Moments
    rho: Float[Array, "*batch 2"]
    first_mean: Float[Array, "*batch"]
    numerator: Float[Array, "*batch 2"]
    denominator: Float[Array, "*batch 2"]
    variation: Float[Array, "*batch 2"]
    best: Float[Array, "*batch 2"]


def init(config: ConjugateMixtureConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> ConjugateMixtureState:
    """A process without observations: its bounds are (0, 1)."""
    levels = [config.alpha * share for share in (config.lower_share, 1 - config.lower_share)]
    rho = [best_rho(config.v_opt, min(level, MAX_LEVEL)) if level > 0 else config.v_opt for level in levels]
    choices = jnp.asarray(rho, dtype), jnp.asarray(config.first_mean, dtype)
    return ConjugateMixtureState(design(config, dtype), no_moments(dtype), *choices, *(jnp.zeros(2, dtype),) * 4)


def update(state: ConjugateMixtureState, x: Float[Array, ""] | float) -> ConjugateMixtureState:
    """Take one observation in [0, 1]; anything else sets `state.moments.invalid`."""
    return update_batch(state, jnp.asarray(x, state.numerator.dtype)[None])


def update_batch(
    state: ConjugateMixtureState, x: Float[Array, "n"], valid: Bool[Array, "n"] | None = None
) -> ConjugateMixtureState:
    """Take n observations in their order, skipping those that are not valid (padding)."""
    moments, past = advance(state.plan, state.moments, x, valid)
    sums = lambda start, terms: start[:, None] + prefix_sum(jnp.where(past.use, terms, 0))
    num = sums(state.numerator, past.x + past.total / past.left)
    den = sums(state.denominator, jnp.broadcast_to(1 + (past.time - 1) / past.left, past.x.shape))
    squares = sums(state.variation, (past.x - centres(past, state.first_mean)) ** 2)
    best = _lower(num, den, squares, thresholds(state.plan, state.plan.alpha)[:, None], state.rho[:, None])
    best = jnp.maximum(state.best, best.max(1, initial=0))
    return state._replace(
        moments=moments, numerator=num[:, -1], denominator=den[:, -1], variation=squares[:, -1], best=best
    )


def bound(state: ConjugateMixtureState, alpha: RealLike) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the mean, at error alpha over all times.

    The present interval at alpha, intersected with all earlier ones at the configured level where that is not above
    alpha.

    Raises:
        ValueError: alpha is a Python number outside (0, 1). An array outside gives (0, 1).
    """
    now = _lower(state.numerator, state.denominator, state.variation, thresholds(state.plan, alpha), state.rho)
    known = jnp.asarray(alpha, state.plan.alpha.dtype) >= state.plan.alpha
    return as_interval(state.plan, state.moments, jnp.maximum(now, jnp.where(known, state.best, 0)), alpha)


def _lower(
    num: Float[Array, "2 *n"],
    den: Float[Array, "2 *n"],
    squares: Float[Array, "2 *n"],
    tail: Float[Array, "2 *#n"],
    rho: Float[Array, "2 *#n"],
) -> Float[Array, "2 *n"]:
    used = (den > 0) & jnp.isfinite(tail)
    tail, rho = jnp.broadcast_arrays(jnp.where(jnp.isfinite(tail), tail, 1), rho)
    margin = gamma_exponential_root(squares, jnp.broadcast_to(tail, num.shape), jnp.broadcast_to(rho, num.shape))
    return jnp.where(used, (num - margin) / jnp.where(used, den, 1), 0)
