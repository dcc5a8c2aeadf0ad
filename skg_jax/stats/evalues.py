"""Combining e-values, in logs. An e-value is nonnegative with mean at most 1 under its null: wealth at any time is one.

A claim is the rejection of a null at level alpha, by e >= 1/alpha (Markov; for wealth at its maximum, Ville).

    all claims at once ("every head is within its budget")     min_conjunctive, no correction
    one null, e-values of any dependence                       average
    one null, independent or sequential e-values               product
    each claim on its own, none of them wrong                  e_bonferroni, union_bound
    each claim on its own, few of those made wrong             e_bh

NaN counts as no evidence, e = 0.

References:
    Vovk, Wang (2021), E-values: calibration, combination and applications, arXiv:1912.06116: average and product.
    Wang, Ramdas (2022), False discovery rate control with e-values, arXiv:2009.02824: e-BH.
    Stark (2020), SHANGRLA, arXiv:1911.10035: conjunctive claims need no correction (intersection-union, Berger 1982).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from skg_jax.stats._types import RealLike, refuse

SUM_ERROR = 1e-5  # what rounding may add to weights that sum to 1

type LogE = Float[Array, "*batch H"]


def union_bound(errors: Float[Array, "*batch H"]) -> Float[Array, "*batch"]:
    """Probability at most that any of the statements fails, whatever their dependence; NaN counts as 1.

    A negative one, which is none, raises ValueError outside of jit and counts as 1 inside.
    """
    refuse(errors < 0, "errors", errors, "an error probability is not negative")
    return jnp.minimum(jnp.sum(jnp.where(errors >= 0, errors, 1), axis=-1), 1)


def min_conjunctive(log_e: LogE, valid: Bool[Array, "*batch H"] | bool = True) -> Float[Array, "*batch"]:
    """log e-value of the null "some claim is false": the weakest evidence decides. +inf without a valid claim."""
    return jnp.min(jnp.where(valid, _clean(log_e), jnp.inf), axis=-1)


def average(log_e: LogE, weights: Float[Array, "H"] | None = None) -> Float[Array, "*batch"]:
    """log of the weighted mean; an e-value of the null "every null holds" under any dependence.

    weights: nonnegative, fixed before the data, summing to 1 at most; default equal. Others raise ValueError outside of
        jit, and are no evidence inside, -inf.
    """
    weights = jnp.full(log_e.shape[-1], 1 / log_e.shape[-1], log_e.dtype) if weights is None else weights
    bad = refuse(~(weights >= 0), "weights", weights, "a weight is not negative")
    bad |= refuse(~(weights.sum() <= 1 + SUM_ERROR), "the sum of weights", weights.sum(), "it is at most 1")
    mean = jax.scipy.special.logsumexp(_clean(log_e), axis=-1, b=jnp.broadcast_to(weights, log_e.shape))
    return jnp.where(bad, -jnp.inf, mean)


def product(log_e: LogE) -> Float[Array, "*batch"]:
    """log of the product; valid for independent e-values, or each conditional on those before it. 0 times inf is 0."""
    clean = _clean(log_e)
    return jnp.where(jnp.any(clean == -jnp.inf, axis=-1), -jnp.inf, jnp.sum(clean, axis=-1))


def e_bonferroni(log_e: LogE, alpha: RealLike) -> Bool[Array, "*batch H"]:
    """Claims with e >= H / alpha: with probability at least 1 - alpha none of them is wrong."""
    return _clean(log_e) >= _threshold(log_e, alpha, jnp.ones((), log_e.dtype))


def e_bh(log_e: LogE, alpha: RealLike) -> Bool[Array, "*batch H"]:
    """Claims of the k largest e-values, k the largest with e_(k) >= H / (alpha k), under any dependence.

    The expected share of wrong ones among the claims made is at most alpha: weaker than `e_bonferroni`, and never a
    statement about all of them.
    """
    clean = _clean(log_e)
    ordered = -jnp.sort(-clean, axis=-1)
    k = jnp.arange(1, log_e.shape[-1] + 1, dtype=log_e.dtype)
    claims = jnp.max(jnp.where(ordered >= _threshold(log_e, alpha, k), k, 0), axis=-1, keepdims=True)
    least = jnp.take_along_axis(ordered, jnp.maximum(claims - 1, 0).astype(jnp.int32), axis=-1)
    return (claims > 0) & (clean >= least)


def _threshold(log_e: LogE, alpha: RealLike, k: Float[Array, "*k"]) -> Float[Array, "*k"]:
    """log(H / (alpha k)), positive, and rounded up by a few ulp; NaN, which nothing reaches, unless 0 < alpha < 1."""
    alpha = jnp.asarray(alpha, log_e.dtype)
    refuse(~((alpha > 0) & (alpha < 1)), "alpha", alpha, "an error probability lies strictly between 0 and 1")
    level = jnp.log(jnp.asarray(log_e.shape[-1], log_e.dtype) / k) - jnp.log(alpha)
    return jnp.where((alpha > 0) & (alpha < 1), level * (1 + 8 * jnp.finfo(log_e.dtype).eps), jnp.nan)


def _clean(log_e: LogE) -> LogE:
    return jnp.where(jnp.isnan(log_e), -jnp.inf, log_e)
