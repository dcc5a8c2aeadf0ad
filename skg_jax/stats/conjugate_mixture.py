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

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats import plugin
from skg_jax.stats._types import BoolLike, Info, RealLike
from skg_jax.stats.boundaries import best_rho, gamma_exponential_root
from skg_jax.stats.means import MeanConfig, advance, centres, check_first_mean
from skg_jax.stats.plugin import PluginState

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


def init(config: ConjugateMixtureConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> PluginState:
    """A process without observations: its bounds are (0, 1)."""
    levels = [config.alpha * share for share in (config.lower_share, 1 - config.lower_share)]
    rho = [best_rho(config.v_opt, min(level, MAX_LEVEL)) if level > 0 else config.v_opt for level in levels]
    return plugin.init(config, (rho[0], rho[1]), dtype, config.first_mean)


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
    squares = (past.x - centres(past, state.first_mean)) ** 2
    return plugin.extend(state, moments, past, jnp.ones_like(squares), squares, _margin(state)), info


def bound(state: PluginState, alpha: RealLike) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the mean, at error alpha over all times; as `plugin.bound`."""
    return plugin.bound(state, alpha, _margin(state))


def _margin(state: PluginState) -> plugin.Margin:
    def margin(squares, tail):
        rho = state.choice.reshape(2, *(1,) * (squares.ndim - 1))
        full = lambda value: jnp.broadcast_to(value, squares.shape)
        return gamma_exponential_root(squares, full(tail), full(rho))

    return margin
