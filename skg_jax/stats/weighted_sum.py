"""A sum of bounded unknowns from weighted draws, bounded on both sides at once.

The common shape for the process of `kaplan_wald`: two of them, on the slack u - x for the upper bound and on x - l for
the lower, fed by the same draws. A population is given by its known bounds; a draw by the unit's value and bounds and
its weight p. With `replacement` p is the probability of every draw. Without, draws come in Plackett-Luce order of
weights that sum to 1 (`sampling.draw_wor`), and what was read leaves the population.

References: those of `kaplan_wald`.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats._types import Info, RealLike, refuse
from skg_jax.stats.means import check_level, two_sum
from skg_jax.stats.population import check_shapes
from skg_jax.stats.sums import outward_sum, tree_sum

RULE = "a unit that was read lies within its bounds"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightedSumConfig:
    """Fixed choices. Raises ValueError when one is out of range.

    replacement: whether a unit may be drawn again. lower_share: share of alpha for the lower bound: 0.5 both sides, 1
    the lower only, 0 the upper only. betting: bets, guards, most draws, and how finely the bounds are inverted.
    """

    replacement: bool = False
    lower_share: float = 0.5
    betting: kw.KWConfig = kw.DEFAULT

    def __post_init__(self):
        if not 0 <= self.lower_share <= 1:
            raise ValueError(f"lower_share is {self.lower_share}, but a share of alpha lies in [0, 1].")


DEFAULT = WeightedSumConfig()


class WeightedSumState(NamedTuple):
    """units: how many there are. floor, cap: the sums of all bounds, rounded outwards.

    left + carry: weight of the units not read yet.
    """

    units: Int32[Array, "*batch"]

    floor: Float[Array, "*batch"]
    cap: Float[Array, "*batch"]
    left: Float[Array, "*batch"]
    carry: Float[Array, "*batch"]
    below: kw.KWState
    above: kw.KWState


class Draw(NamedTuple):
    """n draws in order, or one: value, known bounds and weight of the unit; slots that are not valid hold anything."""

    x: Float[Array, "*n"]
    lower: Float[Array, "*n"]
    upper: Float[Array, "*n"]
    p: Float[Array, "*n"]
    valid: Bool[Array, "*n"] | bool = True


def init(
    config: WeightedSumConfig, lower: Float[Array, "U"], upper: Float[Array, "U"], dtype: DTypeLike = jnp.float32
) -> WeightedSumState:
    """A process without draws: its bounds are the sums of the known bounds.

    Raises:
        ValueError: outside of jit, for bounds that are not finite or not in order. Inside they void the state. Inside
            too, when their shapes differ or are empty.
    """
    check_shapes("U", lower=lower, upper=upper)
    lower, upper = jnp.asarray(lower), jnp.asarray(upper)
    fine = (lower <= upper) & jnp.isfinite(lower) & jnp.isfinite(upper)
    bad = refuse(~fine, "a lower bound", lower, "bounds are finite and the lower is not above the upper")
    empty = kw.init(config.betting, dtype)._replace(invalid=bad)
    floor, cap = (outward_sum(jnp.where(fine, b, 0).astype(dtype), way) for b, way in ((lower, -1), (upper, 1)))
    return WeightedSumState(jnp.int32(lower.size), floor, cap, jnp.ones((), dtype), jnp.zeros((), dtype), empty, empty)


def update(state: WeightedSumState, draw: Draw, config: WeightedSumConfig = DEFAULT) -> tuple[WeightedSumState, Info]:
    """Append one draw; see `update_batch`."""
    return update_batch(state, Draw(*(jnp.asarray(leaf)[None] for leaf in draw)), config)


def update_batch(
    state: WeightedSumState, draws: Draw, config: WeightedSumConfig = DEFAULT
) -> tuple[WeightedSumState, Info]:
    """Append n draws in their order.

    A value outside its bounds, NaN, a weight that is no probability, and without replacement weights of more than 1 or
    more draws than units raise ValueError outside of jit; inside they void the state for good. Columns of different
    lengths raise it inside too.
    """
    x, lower, upper, p, valid = draws
    check_shapes("n", x=x, lower=lower, upper=upper, p=p, valid=valid if jnp.ndim(valid) else None)
    valid = jnp.broadcast_to(jnp.asarray(valid), x.shape)
    outside = refuse(valid & ~((x >= lower) & (x <= upper)), "a value", x, RULE)
    if not config.replacement:
        count = state.above.count + jnp.cumsum(valid, dtype=jnp.int32)
        outside |= refuse(valid & (count > state.units), "the number of draws", count, "no unit is drawn twice")
    gain, slack = jnp.maximum(x - lower, 0), jnp.maximum(upper - x, 0)  # beyond 0 by a fused rounding at most
    below, _ = _absorb(state.below, gain, p, valid & ~outside, state.left, config)
    above, info = _absorb(state.above, slack, p, valid & ~outside, state.left, config)
    void = below.invalid | above.invalid | outside
    left, carry = two_sum(state.left, state.carry - tree_sum(jnp.where(valid, p, 0)))
    processes = {"below": below._replace(invalid=void), "above": above._replace(invalid=void)}
    return state._replace(left=left, carry=carry, **processes), info._replace(invalid=void)


def bound(
    state: WeightedSumState, alpha: RealLike, config: WeightedSumConfig = DEFAULT
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) for the sum, at error alpha over all times; (-inf, inf) once the state is void.

    Raises:
        ValueError: outside of jit, for an alpha outside (0, 1). Inside it gives (-inf, inf).
    """
    check_level(alpha)
    alpha = jnp.asarray(alpha, state.cap.dtype)
    eta = kw.rounding_guard(state.cap, state.floor, config.betting.guard)
    level = lambda share: jnp.where((alpha > 0) & (alpha < 1), -jnp.log(alpha * share), jnp.nan)
    low = kw.lower(state.below, state.floor, state.cap, level(config.lower_share), eta, config.betting)
    high = kw.upper(state.above, state.cap, state.floor, level(1 - config.lower_share), eta, config.betting)
    return low, high


def _absorb(process: kw.KWState, slack, p, valid, left, config: WeightedSumConfig) -> tuple[kw.KWState, Info]:
    if config.replacement:
        return kw.update_batch(process, kw.observe_iid(slack, p, valid))
    guard = config.betting.mass_guard
    return kw.update_batch(process, kw.observe_wor(slack, p, valid, left, process.known, guard))
