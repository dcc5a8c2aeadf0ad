"""What `pooled` and `per_head` share: units with known bounds, how they are read, and the checks of a configuration."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from skg_jax.stats._types import refuse
from skg_jax.stats.sums import outward_sum

type Read = Callable[[Int32[Array, "n"]], Float[Array, "n"]]


def check_rounds(rounds: tuple[int, ...], uniform_share: float) -> None:
    """Raises ValueError for rounds without a draw, or a share with which some unit could never be drawn."""
    if not rounds or min(rounds) < 1:
        raise ValueError(f"rounds is {rounds}, but it needs at least one round of at least one draw.")
    if not 0 < uniform_share <= 1:
        raise ValueError(f"uniform_share is {uniform_share}, but it must be in (0, 1].")


def weighted(
    bound: Float[Array, "*h U"], weights: Float[Array, "*h U"] | None, valid: Bool[Array, "*h U"] | None
) -> Float[Array, "*h U"]:
    """Weighted bounds, 0 for units that are not there."""
    bound = bound if weights is None else weights * bound
    return bound if valid is None else jnp.where(valid, bound, 0)


def totals(
    lower: Float[Array, "*h U"], upper: Float[Array, "*h U"]
) -> tuple[Float[Array, "*h"], Float[Array, "*h"], Bool[Array, ""]]:
    """(floor, cap) of every sum, rounded outwards, and whether all bounds are finite and in order.

    Raises ValueError outside of jit when they are not.
    """
    floor, cap = outward_sum(lower, -1), outward_sum(jnp.where(lower <= upper, upper, jnp.nan), 1)
    sound = jnp.all(jnp.isfinite(cap) & jnp.isfinite(floor))
    return floor, cap, ~refuse(~sound, "the sum of the bounds", cap, "bounds and weights are finite, and in order")


def reader(read: Read | Float[Array, "..."], weights: Float[Array, "U"] | None = None) -> Read:
    """Weighted values of units by their index."""
    value = read if callable(read) else lambda index: jnp.asarray(read).reshape(-1)[index]
    return value if weights is None else lambda index: weights[index] * value(index)
