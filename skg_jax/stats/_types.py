"""Scalar aliases (a number of Python, of numpy or of jax, traced or not), what updates return, and how they refuse."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Int32

RealLike = float | int | np.floating | np.integer | Float[np.ndarray, ""] | Float[Array, ""] | Int[Array, ""]
BoolLike = bool | np.bool_ | Bool[np.ndarray, ""] | Bool[Array, ""]


class Info(NamedTuple):
    """What an update did. used: observations taken. ignored: valid ones not taken, for want of room or as invalid.

    invalid: something impossible was observed, now or earlier; the state says nothing any more.
    """

    used: Int32[Array, "*batch"]
    ignored: Int32[Array, "*batch"]
    invalid: Bool[Array, "*batch"]


def whole(name: str, value: int, least: int) -> None:
    """Raises ValueError unless a setting is a whole number from `least` up."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} is {value!r}, but it is a whole number, at least {least}.")


def refuse(bad: Bool[Array, "*n"], name: str, values: Array, rule: str) -> Bool[Array, ""]:
    """Whether any is bad, for a flag in the state. Outside of jit, where one can, it raises ValueError instead.

    Nothing is ever clipped: a value that cannot be voids what rests on it.
    """
    if not isinstance(bad, Tracer) and bool(jnp.any(bad)):
        bad, values = jnp.broadcast_arrays(bad, values)
        raise ValueError(f"{name} is {values[bad][0]}, but {rule}.")
    return jnp.any(bad)
