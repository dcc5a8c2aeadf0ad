"""What `pooled` and `per_head` share: units with known bounds, how they are read, and the checks of a configuration."""

from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32

from skg_jax.stats._types import RealLike, refuse
from skg_jax.stats.sums import outward_sum

type Read = Callable[[Int32[Array, "n"]], Float[Array, "n"]]


def check_rounds(rounds: tuple[int, ...], uniform_share: float) -> None:
    """Raises ValueError for rounds without a draw, or a share with which some unit could never be drawn."""
    if not rounds or min(rounds) < 1:
        raise ValueError(f"rounds is {rounds}, but it needs at least one round of at least one draw.")
    if not 0 < uniform_share <= 1:
        raise ValueError(f"uniform_share is {uniform_share}, but it must be in (0, 1].")


def check_shapes(axes: str, **arrays: ArrayLike | None) -> None:
    """Raises ValueError, inside jit too, unless all arrays that are there have one shape, of these axes and not empty.

    An index beyond the end of a shorter array would be clamped, and another unit's value taken for the one that was
    drawn.
    """
    shapes = {name: jnp.shape(array) for name, array in arrays.items() if array is not None}
    shape = next(iter(shapes.values()))
    if len(shape) != len(axes.split()) or 0 in shape or set(shapes.values()) != {shape}:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"the shapes are {found}, but they must all be the same [{axes}], none of them empty.")


def check_scalars(**values: RealLike) -> None:
    """Raises ValueError, inside jit too, for what is an array where one number is meant."""
    for name, value in values.items():
        if jnp.ndim(value):
            raise ValueError(f"{name} has shape {jnp.shape(value)}, but it is one number; use jax.vmap for many.")


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
    return value if weights is None else lambda index: jnp.asarray(weights)[index] * value(index)
