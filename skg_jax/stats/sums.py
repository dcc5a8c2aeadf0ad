"""Sums of logarithmic depth.

A serial float32 sum of n terms may be wrong by n ulp: for 1e5 units that is 6e-3 of the total, more than any rounding
guard allows. A tree is wrong by about log2(n) ulp (Higham, Accuracy and Stability of Numerical Algorithms, section
4.2).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, Num

ROWS, LONG = 32, 256
RUN = 32  # terms that one thread of a GPU adds up
_FOLDS_OF_RUN = RUN.bit_length() - 1
OUTWARD = 4e-6  # above the relative error of `outward_sum` in float32 up to 2**28 terms: 31 + 23 + 1 roundings


def on_cpu() -> bool:
    """Which of two forms is meant, where they differ: a CPU has small caches and cheap launches, a GPU the opposite."""
    return jax.default_backend() == "cpu"


def materialized(x):
    """An array, or a tree of them, written down before it is used.

    Else a GPU makes one launch of many sums, a thread of which adds up all its terms by itself, one after the other.
    """
    return x if on_cpu() else jax.lax.optimization_barrier(x)


def tree_sum(x: Float[Array, "*batch U"]) -> Float[Array, "*batch"]:
    """Sum over the last axis by folding halves, in the dtype of x; 0 for an empty axis."""
    folds = max(0, x.shape[-1] - 1).bit_length()
    x = _padded(x, 1 << folds)
    for left in reversed(range(folds)):
        x = x[..., : 1 << left] + x[..., 1 << left :]
        if (folds - left) % _FOLDS_OF_RUN == 0:
            x = materialized(x)
    return x[..., 0]


def _padded(x: Num[Array, "*batch U"], size: int) -> Num[Array, "*batch {size}"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, size - x.shape[-1])])


def outward_sum(x: Float[Array, "*batch U"], way: int) -> Float[Array, "*batch"]:
    """At least the exact sum for way = 1, at most it for way = -1; every term is moved by OUTWARD of its size first.

    A long array is folded into 32 rows before the tree, which passes over memory once and without a copy. The rows are
    added one to one and not as a reduction, which a GPU does at a third of the speed.
    """
    x = x + way * OUTWARD * jnp.abs(x)
    if x.shape[-1] < LONG:
        return tree_sum(x)
    width = x.shape[-1] // ROWS
    rows = [x[..., i * width : (i + 1) * width] for i in range(ROWS)]
    while len(rows) > 1:
        rows = [a + b for a, b in zip(rows[::2], rows[1::2], strict=True)]
    return tree_sum(rows[0]) + x[..., ROWS * width :].sum(-1)


def prefix_sum(x: Num[Array, "*batch U"]) -> Num[Array, "*batch U"]:
    """Inclusive prefix sum over the last axis, log-depth (`jnp.cumsum` is serial on a CPU; on a GPU, in a sum with
    others, XLA computes all of its windows anew for every element)."""
    size = x.shape[-1]
    if on_cpu() or size <= RUN:
        return jax.lax.associative_scan(jnp.add, x, axis=x.ndim - 1)
    runs = -(-size // RUN)
    within = materialized(prefix_sum(_padded(x, runs * RUN).reshape(*x.shape[:-1], runs, RUN)))
    return (exclusive_prefix(within[..., -1])[..., None] + within).reshape(*x.shape[:-1], -1)[..., :size]


def ranks(valid: Bool[Array, "*batch n"]) -> Int32[Array, "*batch n"]:
    """How many there are before each."""
    return exclusive_prefix(valid.astype(jnp.int32))


def exclusive_prefix(x: Num[Array, "*batch U"]) -> Num[Array, "*batch U"]:
    """Prefix sum over the last axis without the element itself: 0, x0, x0+x1, ..."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1]), prefix_sum(x)[..., :-1]], axis=-1)
