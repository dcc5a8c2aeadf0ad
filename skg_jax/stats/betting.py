"""Hedged-capital betting confidence sequence for a mean in [0, 1]: the narrowest here, at the cost of a grid.

For a candidate mean m the capital of the lower side is prod (1 + bet_i(m) (x_i - mu_i(m))), with mu_i(m) = m, or
(N m - sum of earlier x) / (N - i + 1) without replacement, and bet_i(m) = min(lambda_i, cap / mu_i(m)), where lambda_i
is the plug-in empirical Bernstein bet. Under the mean m it is a martingale from 1, and it does not grow with m, so the
largest candidate of the grid whose capital ever reached 1/alpha is a lower bound: all below it are rejected as well.
The upper side is the same for 1 - x. To reject when one of the sides reaches its share is to hedge (theta: the share).

The state holds the peaks, so the running intersection is exact at every alpha. Memory and time of one observation are
proportional to `breaks`; a batch of n needs n * breaks numbers at once.

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686, section 4; (2020), arXiv:2006.04347, for the remaining mean.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats._types import BoolLike, Info, RealLike
from skg_jax.stats.means import (
    ROUNDING,
    Design,
    MeanConfig,
    Moments,
    Past,
    advance,
    as_interval,
    check_level,
    design,
    no_moments,
    thresholds,
)

DEAD = 1e30  # log capital of a candidate that the drawn items rule out


@dataclasses.dataclass(frozen=True, kw_only=True)
class BettingConfig(MeanConfig):
    """A `MeanConfig` and two choices. Raises ValueError when a field is out of range.

    breaks: the candidates are 0, 1/breaks, ..., 1.
    cap: share of its capital that a side may lose with one observation, in (0, 1).
    """

    breaks: int = 1000
    cap: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.breaks < 1:
            raise ValueError(f"breaks is {self.breaks}, but a grid needs at least 1 interval.")
        if not 0 < self.cap < 1:
            raise ValueError(f"cap is {self.cap}, but the share that may be lost lies strictly between 0 and 1.")


DEFAULT = BettingConfig()


class BettingState(NamedTuple):
    """Log capital of each side at each candidate (G = breaks + 1), now and at its highest."""

    plan: Design
    moments: Moments
    cap: Float[Array, "*batch"]
    capital: Float[Array, "*batch 2 G"]
    peak: Float[Array, "*batch 2 G"]


def init(config: BettingConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> BettingState:
    """A process without observations: its bounds are (0, 1)."""
    zeros = jnp.zeros((2, config.breaks + 1), dtype)
    return BettingState(design(config, dtype), no_moments(dtype), jnp.asarray(config.cap, dtype), zeros, zeros)


def update(state: BettingState, x: Float[Array, ""] | float) -> tuple[BettingState, Info]:
    """Take one observation in [0, 1]; anything else raises outside of jit, and voids the state inside."""
    return update_batch(state, jnp.asarray(x, state.capital.dtype)[None])


def update_batch(
    state: BettingState, x: Float[Array, "n"], valid: Bool[Array, "n"] | BoolLike | None = None
) -> tuple[BettingState, Info]:
    """Take n observations in their order, skipping those that are not valid (padding); one flag may stand for all.

    Raises:
        ValueError: outside of jit, for an observation that cannot be. Inside too, for another number of flags.
    """
    moments, past, info = advance(state.plan, state.moments, x, valid)
    if past.time.size == 0:
        return state, info
    mu, dead = _means(state, past)
    bet = jnp.minimum(bets(state.plan, past)[..., None], state.cap / mu)
    gains = jnp.where(past.use[:, None], jnp.log1p(bet * (past.x[..., None] - mu)), 0)
    path = state.capital[:, None] + jnp.cumsum(gains, axis=1)
    peak = jnp.where(dead & past.use[:, None], DEAD, path).max(1, initial=0)
    return state._replace(moments=moments, capital=path[:, -1], peak=jnp.maximum(state.peak, peak)), info


def bets(plan: Design, past: Past) -> Float[Array, "2 n"]:
    """The bets before they are capped: sqrt(2 log(1/alpha) / (variance before * t log(1 + t)))."""
    return jnp.sqrt(2 * plan.tuned[:, None] / (past.variance * past.time * jnp.log1p(past.time)))


def bound(state: BettingState, alpha: RealLike) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the mean, at error alpha over all times: the running intersection, outward on the grid.

    Raises:
        ValueError: outside of jit, for an alpha outside (0, 1). Inside it gives (0, 1).
    """
    check_level(alpha)
    rejected = state.peak >= thresholds(state.plan, alpha)[:, None]
    lower = jnp.where(rejected, _grid(state), 0).max(1)
    return as_interval(state.plan, state.moments, lower, alpha)


def _means(state: BettingState, past: Past) -> tuple[Float[Array, "2 n G"], Bool[Array, "2 n G"]]:
    """(conditional mean of each observation at each candidate, > 0; whether the drawn items rule the candidate out).

    The mean is rounded up, which makes the capital smaller.
    """
    m, eps = _grid(state), jnp.finfo(state.capital.dtype).eps
    size, finite = state.plan.population, jnp.isfinite(state.plan.population)
    remaining = jnp.where(finite, size, 0) * m - past.total[..., None]
    guard = jnp.where(finite, ROUNDING * eps * size, 0)
    mu = jnp.where(finite, (jnp.maximum(remaining, 0) + guard) / past.left[:, None], m)
    return jnp.maximum(mu, jnp.finfo(mu.dtype).tiny), finite & (remaining < -guard)


def _grid(state: BettingState) -> Float[Array, "G"]:
    """The candidates, rounded up or down by an ulp at most."""
    last = state.capital.shape[-1] - 1
    return jnp.arange(last + 1, dtype=state.capital.dtype) / last
