"""What the confidence sequences for the mean of [0, 1] variables share; each process has a file of its own.

`hoeffding`, `empirical_bernstein`, `betting` and `conjugate_mixture` have one shape: `init(config) -> state`,
`update(state, x) -> (state, info)`, `update_batch` for n in order, `bound(state, alpha) -> (lower, upper)`. All assume
0 <= x <= 1 and, given the past, either one conditional mean (`population=None`) or uniform draws without replacement
from `population` items; nothing else. The bounds hold at every number of observations at once, so any stopping rule may
be used.

Both sides are lower bounds: row 0 on the mean of x, row 1 on the mean of 1 - x. alpha is split between them by
`lower_share`. lower > upper says that the set is empty, which has probability at most alpha.

A NaN, a value outside [0, 1], or more draws than the population raises ValueError outside of jit; inside it sets
`invalid` for good, and the bounds become (0, 1).

References:
    Waudby-Smith, Ramdas (2024), arXiv:2010.09686: predictable plug-in and betting confidence sequences.
    Waudby-Smith, Ramdas (2020), arXiv:2006.04347: sampling without replacement, logical bounds.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from skg_jax.stats._types import BoolLike, Info, RealLike, refuse
from skg_jax.stats.sums import exclusive_prefix, tree_sum

PRIOR_MEAN, PRIOR_VARIANCE = 0.5, 0.25  # one observation that was never made, so that the first bets are defined
UNUSED = 1e4  # log(1/alpha) that bets of a side without any alpha are tuned for; finite, so that 0 * bet is 0
RULE = "it lies in [0, 1], and there are no more of them than items of the population"
ROUNDING = 4  # ulps of the population that a remaining sum may be off by


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanConfig:
    """Fixed choices of a process. Raises ValueError when one is out of range.

    alpha: the level that bets are tuned for, and for which the closed forms keep the running intersection; `bound` is
        valid at any other level.
    lower_share: share of alpha for the lower bound: 0.5 both sides, 1 the lower only, 0 the upper only.
    population: items drawn from without replacement; None for draws that share a conditional mean.
    """

    alpha: float = 0.05
    lower_share: float = 0.5
    population: int | None = None

    def __post_init__(self):
        check_level(self.alpha)
        if not 0 <= self.lower_share <= 1:
            raise ValueError(f"lower_share is {self.lower_share}, but a share of alpha lies in [0, 1].")
        if self.population is not None and not (self.population >= 1 and self.population % 1 == 0):
            raise ValueError(f"population is {self.population}, but it is a whole number of at least 1 item, or None.")


class Design(NamedTuple):
    """A `MeanConfig` as arrays. population is inf for draws with replacement; tuned is log(1/alpha) of each side."""

    alpha: Float[Array, "*batch"]
    share: Float[Array, "*batch 2"]
    population: Float[Array, "*batch"]
    tuned: Float[Array, "*batch 2"]


class Moments(NamedTuple):
    """Running sums. total + carry is the sum of x; squares is that of (x - mean)**2, each mean including its x."""

    count: Int32[Array, "*batch"]
    total: Float[Array, "*batch"]
    carry: Float[Array, "*batch"]
    squares: Float[Array, "*batch"]
    invalid: Bool[Array, "*batch"]


class Past(NamedTuple):
    """n observations seen from both sides, each with what was known before it (so any use of it is predictable).

    x: the observation. use: it exists and may be used. time: its number, from 1. total: sum before it. variance:
    regularised variance before it, > 0. left: items not drawn yet, inf with replacement.
    """

    x: Float[Array, "2 n"]
    use: Bool[Array, "n"]
    time: Float[Array, "n"]
    total: Float[Array, "2 n"]
    variance: Float[Array, "n"]
    left: Float[Array, "n"]


def check_alpha(alpha: RealLike | Float[Array, "..."]) -> None:
    """Raises ValueError for a Python number outside (0, 1); arrays are checked where they are used."""
    if isinstance(alpha, float | int) and not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")


def check_level(alpha: RealLike) -> None:
    """Raises ValueError for an alpha outside (0, 1) unless it is traced, and for several at once, which no bound takes.

    For the level of a bound; `check_alpha` lets the 0 pass that is the level of a side without alpha.
    """
    if jnp.ndim(alpha):
        raise ValueError(f"alpha has shape {jnp.shape(alpha)}, but it is one number; use jax.vmap for many.")
    if not isinstance(alpha, Tracer) and not 0 < np.asarray(alpha) < 1:
        raise ValueError(f"alpha is {alpha}, but an error probability lies strictly between 0 and 1.")


def check_first_mean(first_mean: float) -> None:
    """Raises ValueError for a guess outside [0, 1], with which the process would be none."""
    if not 0 <= first_mean <= 1:
        raise ValueError(f"first_mean is {first_mean}, but the mean of [0, 1] variables lies in [0, 1].")


def design(config: MeanConfig, dtype: DTypeLike) -> Design:
    """The arrays of a configuration."""
    shares = (config.lower_share, 1 - config.lower_share)
    tuned = [-math.log(config.alpha * s) if s > 0 else UNUSED for s in shares]
    size = math.inf if config.population is None else config.population
    return Design(*(jnp.asarray(v, dtype) for v in (config.alpha, shares, size, tuned)))


def no_moments(dtype: DTypeLike) -> Moments:
    """Nothing observed."""
    zero = jnp.zeros((), dtype)
    return Moments(jnp.zeros((), jnp.int32), zero, zero, zero, jnp.zeros((), bool))


def advance(
    plan: Design, moments: Moments, x: Float[Array, "n"], valid: Bool[Array, "n"] | BoolLike | None = None
) -> tuple[Moments, Past, Info]:
    """Take n observations, skipping those that are not valid.

    Returns:
        (moments after them, `Past` of each, info). Once something invalid was met, nothing is used any more.

    Raises:
        ValueError: outside of jit, for an observation that cannot be. Inside too, for another number of flags.
    """
    dtype = moments.total.dtype
    x = jnp.asarray(x, dtype)
    valid = _flags(x, valid)
    after = moments.count + jnp.cumsum(valid, dtype=jnp.int32)
    bad = valid & (~((x >= 0) & (x <= 1)) | (after > plan.population))
    invalid = moments.invalid | refuse(bad, "the observation", x, RULE)
    use = valid & ~invalid
    x = jnp.where(use, x, 0)
    time = jnp.maximum(after, 1).astype(dtype)
    total = moments.total + (moments.carry + exclusive_prefix(x))
    around = jnp.where(use, (x - (PRIOR_MEAN + total + x) / (time + 1)) ** 2, 0)
    variance = (PRIOR_VARIANCE + moments.squares + exclusive_prefix(around)) / time
    both = jnp.stack([total, time - 1 - total])
    past = Past(jnp.stack([x, 1 - x]), use, time, both, variance, jnp.maximum(plan.population - time + 1, 1))
    high, low = two_sum(moments.total, moments.carry + tree_sum(x))
    count = moments.count + valid.sum(dtype=jnp.int32)
    used = use.sum(dtype=jnp.int32)
    info = Info(used, count - moments.count - used, invalid)
    return Moments(count, high, low, moments.squares + tree_sum(around), invalid), past, info


def _flags(x: Float[Array, "n"], valid: Bool[Array, "n"] | BoolLike | None) -> Bool[Array, "n"]:
    """Which observations are there: all by default, one flag may stand for all, and no other number of them."""
    valid = jnp.asarray(True if valid is None else valid)
    if x.ndim != 1 or valid.shape not in ((), x.shape):
        raise ValueError(f"x has shape {x.shape} and valid {valid.shape}, but x is a list, with one flag for each x.")
    return jnp.broadcast_to(valid, x.shape)


def centres(past: Past, first_mean: RealLike) -> Float[Array, "2 n"]:
    """The mean of the observations before each one, from both sides; a guess before the first."""
    return jnp.where(past.time == 1, first_mean, past.total / jnp.maximum(past.time - 1, 1))


def two_sum(a: Float[Array, ""], b: Float[Array, ""]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """a + b as (rounded sum, what rounding lost), so that a long run of single updates adds up like a batch.

    Knuth, The Art of Computer Programming, volume 2, section 4.2.2, theorem B.
    """
    total = a + b
    from_b = total - a
    return total, (a - (total - from_b)) + (b - from_b)


def thresholds(plan: Design, alpha: RealLike) -> Float[Array, "2"]:
    """log(1/alpha) of each side; inf for a side without alpha, and for an alpha that is no probability."""
    level = jnp.asarray(alpha, plan.share.dtype) * plan.share
    usable = (jnp.asarray(alpha) > 0) & (jnp.asarray(alpha) < 1) & (level > 0)
    return jnp.where(usable, -jnp.log(jnp.where(usable, level, 1)), jnp.inf)


def logical(plan: Design, moments: Moments) -> Float[Array, "2"]:
    """What the drawn items alone say about the mean of the population: the others are at least 0.

    Rounded down, because at exhaustion the bound is the truth.
    """
    dtype = moments.total.dtype
    total = moments.total + moments.carry
    sums = jnp.stack([total, moments.count.astype(dtype) - total])
    share = sums / plan.population
    guard = jnp.where(jnp.isfinite(plan.population), ROUNDING * jnp.finfo(dtype).eps, 0)
    return jnp.where(plan.share > 0, jnp.maximum(share - guard, 0), 0)


def as_interval(
    plan: Design, moments: Moments, lower: Float[Array, "2"], alpha: RealLike
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """(lower, upper) from the lower bounds of both sides, within [0, 1] and what is logically possible."""
    usable = (jnp.asarray(alpha) > 0) & (jnp.asarray(alpha) < 1) & ~moments.invalid
    lower = jnp.clip(jnp.maximum(lower, logical(plan, moments)), 0, 1)
    lower = jnp.where(usable, lower, 0)
    return lower[0], 1 - lower[1]
