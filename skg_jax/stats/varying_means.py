"""Confidence sequence for the average of conditional means that vary: no common mean, no identical distribution.

The target after t observations in [0, 1] is (mu_1 + ... + mu_t) / t, mu_i = E[x_i | past]. As it moves with t, earlier
intervals say nothing about it and there is no running intersection; the interval at each t holds at all t at once. It
is (sum x -+ u(V)) / t with a curve u of `boundaries`: V = t/4 for the normal mixture, V = sum (x - prediction)^2 for
the gamma-exponential mixture and for stitching, where any prediction made before x is valid and a good one narrows.

References:
    Howard, Ramdas, McAuliffe, Sekhon (2021), arXiv:1810.08240, theorem 4.
"""

import dataclasses
from typing import Literal, NamedTuple, assert_never

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float

from skg_jax.stats import boundaries
from skg_jax.stats._types import Info, RealLike, refuse
from skg_jax.stats.means import (
    PRIOR_MEAN,
    Design,
    MeanConfig,
    Moments,
    Past,
    advance,
    as_interval,
    check_level,
    design,
    no_moments,
)
from skg_jax.stats.sums import tree_sum


@dataclasses.dataclass(frozen=True, kw_only=True)
class VaryingMeansConfig(MeanConfig):
    """A `MeanConfig` without a population, and two choices. Raises ValueError when a field is out of range.

    boundary: the curve. v_opt: V at which a mixture is narrowest, and from which stitching starts, > 0.
    """

    boundary: Literal["gamma_exponential", "normal", "stitching"] = "gamma_exponential"
    v_opt: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        boundaries.best_rho(self.v_opt, 0.05)
        if self.population is not None:
            raise ValueError(f"population is {self.population}, but varying means have none; leave it None.")
        if self.boundary not in ("gamma_exponential", "normal", "stitching"):
            raise ValueError(f"boundary is {self.boundary!r}, but it is gamma_exponential, normal or stitching.")


DEFAULT = VaryingMeansConfig()


class VaryingMeansState(NamedTuple):
    """variation: sum of (x - prediction)^2."""

    plan: Design
    moments: Moments
    variation: Float[Array, "*batch"]


def init(config: VaryingMeansConfig = DEFAULT, dtype: DTypeLike = jnp.float32) -> VaryingMeansState:
    """A process without observations: its bounds are (0, 1)."""
    return VaryingMeansState(design(config, dtype), no_moments(dtype), jnp.zeros((), dtype))


def update(
    state: VaryingMeansState, x: Float[Array, ""] | float, prediction: Float[Array, ""] | float | None = None
) -> tuple[VaryingMeansState, Info]:
    """Take one observation in [0, 1]; anything else raises outside of jit, and voids the state inside."""
    dtype = state.variation.dtype
    prediction = None if prediction is None else jnp.asarray(prediction, dtype)[None]
    return update_batch(state, jnp.asarray(x, dtype)[None], None, prediction)


def update_batch(
    state: VaryingMeansState,
    x: Float[Array, "n"],
    valid: Bool[Array, "n"] | None = None,
    predictions: Float[Array, "n"] | None = None,
) -> tuple[VaryingMeansState, Info]:
    """Take n observations in their order, skipping those that are not valid (padding).

    predictions: of each x, made before it was seen, in [0, 1]; default the mean so far. Others are refused likewise.
    """
    moments, past, info = advance(state.plan, state.moments, x, valid)
    predictions = _running_mean(past) if predictions is None else predictions.astype(past.x.dtype)
    asked = jnp.ones(x.shape, bool) if valid is None else valid
    bad = refuse(asked & ~((predictions >= 0) & (predictions <= 1)), "the prediction", predictions, "it lies in [0, 1]")
    squares = jnp.where(past.use & ~bad, (past.x[0] - predictions) ** 2, 0)
    moments = moments._replace(invalid=moments.invalid | bad)
    after = state._replace(moments=moments, variation=state.variation + tree_sum(squares))
    return after, info._replace(invalid=moments.invalid)


def bound(
    state: VaryingMeansState, alpha: RealLike, config: VaryingMeansConfig = DEFAULT
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the average of the conditional means so far, at error alpha over all times.

    config: the one given to `init`.

    Raises:
        ValueError: alpha lies outside of (0, 1) and is not traced; a traced one gives (0, 1) there.
    """
    check_level(alpha)
    time = state.moments.count.astype(state.variation.dtype)
    total = state.moments.total + state.moments.carry
    levels = jnp.asarray(alpha, state.variation.dtype) * state.plan.share
    v = time / 4 if config.boundary == "normal" else state.variation
    margin = _curve(config)(jnp.broadcast_to(v, (2,)), levels)
    lower = (jnp.stack([total, time - total]) - margin) / jnp.maximum(time, 1)
    return as_interval(state.plan, state.moments, lower, alpha)


def _running_mean(past: Past) -> Float[Array, "n"]:
    return (PRIOR_MEAN + past.total[0]) / past.time


def _curve(config: VaryingMeansConfig):
    level = min(config.alpha * max(config.lower_share, 1 - config.lower_share), 0.49)
    match config.boundary:
        case "normal":
            return lambda v, a: boundaries.normal_mixture_bound(v, a, v_opt=config.v_opt, alpha_opt=level)
        case "gamma_exponential":
            return lambda v, a: boundaries.gamma_exponential_mixture_bound(v, a, v_opt=config.v_opt, alpha_opt=level)
        case "stitching":
            return lambda v, a: boundaries.poly_stitching_bound(v, a, v_min=config.v_opt, c=1.0)
        case _:
            assert_never(config.boundary)
