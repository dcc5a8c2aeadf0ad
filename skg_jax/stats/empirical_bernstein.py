"""Predictable plug-in empirical Bernstein confidence sequence for a mean in [0, 1]: narrow where the variance is small.

bet_t = min(sqrt(2 log(1/alpha) / (variance t log(1 + t))), truncation), with the variance of the observations before t;
cost (x - mean before)**2 psi(bet), psi(l) = -log(1 - l) - l.

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686, theorem 2; Fan, Grama, Liu (2015), arXiv:1501.04790, for psi.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats import plugin
from skg_jax.stats._types import BoolLike, Info
from skg_jax.stats.means import MeanConfig, advance, centres, check_first_mean
from skg_jax.stats.plugin import PluginState, bound

__all__ = ["EmpiricalBernsteinConfig", "PluginState", "bound", "init", "update", "update_batch"]

SERIES = 0.05  # below this bet psi is its series: -log(1 - l) - l would lose half of the digits


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmpiricalBernsteinConfig(MeanConfig):
    """A `MeanConfig` and two choices. Raises ValueError when a field is out of range.

    truncation: the largest bet, in (0, 1).
    first_mean: guess of the mean before the first observation, of x for the lower bound and of 1 - x for the upper.
    """

    truncation: float = 0.5
    first_mean: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.truncation < 1:
            raise ValueError(f"truncation is {self.truncation}, but the largest bet lies strictly between 0 and 1.")
        check_first_mean(self.first_mean)


DEFAULT = EmpiricalBernsteinConfig()


def init(config: EmpiricalBernsteinConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> PluginState:
    """A process without observations: its bounds are (0, 1)."""
    return plugin.init(config, config.truncation, dtype, config.first_mean)


def update(state: PluginState, x: Float[Array, ""] | float) -> tuple[PluginState, Info]:
    """Take one observation in [0, 1]; anything else raises outside of jit, and voids the state inside."""
    return update_batch(state, jnp.asarray(x, state.numerator.dtype)[None])


def update_batch(
    state: PluginState, x: Float[Array, "n"], valid: Bool[Array, "n"] | BoolLike | None = None
) -> tuple[PluginState, Info]:
    """Take n observations in their order, skipping those that are not valid (padding); one flag may stand for all.

    Raises:
        ValueError: outside of jit, for an observation that cannot be. Inside too, for another number of flags.
    """
    moments, past, info = advance(state.plan, state.moments, x, valid)
    growth = past.variance * past.time * jnp.log1p(past.time)
    bets = jnp.minimum(jnp.sqrt(2 * state.plan.tuned[:, None] / growth), state.choice[:, None])
    costs = (past.x - centres(past, state.first_mean)) ** 2 * psi(bets)
    return plugin.extend(state, moments, past, bets, costs), info


def psi(bet: Float[Array, "..."]) -> Float[Array, "..."]:
    """-log(1 - bet) - bet for 0 <= bet < 1, to full precision also near 0."""
    small = bet**2 * jnp.polyval(1 / jnp.arange(9, 1, -1, dtype=bet.dtype), bet)
    return jnp.where(bet < SERIES, small, -jnp.log1p(-bet) - bet)
