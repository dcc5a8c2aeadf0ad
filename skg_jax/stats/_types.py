"""Scalar aliases: a number of Python, of numpy or of jax (traced or not)."""

import numpy as np
from jaxtyping import Array, Bool, Float, Int

RealLike = float | int | np.floating | np.integer | Float[np.ndarray, ""] | Float[Array, ""] | Int[Array, ""]
BoolLike = bool | np.bool_ | Bool[np.ndarray, ""] | Bool[Array, ""]
