"""Hoeffding confidence sequence for a mean in [0, 1]: the widest here and the simplest; it never looks at the variance.

bet_t = min(sqrt(8 log(1/alpha) / (t log(1 + t))), truncation), cost bet**2 / 8 (Hoeffding's lemma).

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686, section 3.1.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats import plugin
from skg_jax.stats._types import BoolLike, Info
from skg_jax.stats.means import MeanConfig, advance
from skg_jax.stats.plugin import PluginState, bound

__all__ = ["HoeffdingConfig", "PluginState", "bound", "init", "update", "update_batch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HoeffdingConfig(MeanConfig):
    """A `MeanConfig` and truncation, the largest bet, > 0. Raises ValueError when a field is out of range."""

    truncation: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.truncation < float("inf"):
            raise ValueError(f"truncation is {self.truncation}, but the largest bet is positive and finite.")


DEFAULT = HoeffdingConfig()


def init(config: HoeffdingConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> PluginState:
    """A process without observations: its bounds are (0, 1)."""
    return plugin.init(config, config.truncation, dtype)


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
    growth = past.time * jnp.log1p(past.time)
    bets = jnp.minimum(jnp.sqrt(8 * state.plan.tuned[:, None] / growth), state.choice[:, None])
    return plugin.extend(state, moments, past, bets, bets**2 / 8), info
