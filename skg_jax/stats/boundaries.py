"""Curves u(v) that a sum of centred terms crosses, at any time, with probability at most alpha.

For a process (S_t, V_t) with exp(l S_t - psi(l) V_t) <= a supermartingale from 1 for all l in [0, l_max), the
probability that S_t >= u(V_t) for some t is at most alpha. Conditional means may vary: only the sum of the terms minus
their conditional means is bounded. Which curve needs which psi:

    normal_mixture      psi_N(l) = l^2/2; two-sided also exp(-l S - ...). [0, 1] terms: V = t/4.
    gamma_exponential   psi_E(l) = (-log(1 - c l) - c l)/c^2. [0, 1] terms, c = 1: V = sum (x - predicted)^2.
    gamma_poisson       psi_P(l) = (exp(c l) - c l - 1)/c^2. Terms at most c: V = sum of conditional variances.
    beta_binomial       psi_B: terms in [-g, h]: V = g h t.
    poly_stitching      psi_G(l) = l^2/(2(1 - c l)), which is above all of the former but psi_B; c = 0 is psi_N.

Mixtures are narrowest near V = `v_opt`; stitching grows as sqrt(V log log V). A mixture has no closed form, so its
curve is the root of a convex increasing log mixture: Newton steps come down on it from above (gamma-exponential and
one-sided normal), the others are bisected. Both end on the safe side, up to rounding.

All curves take v of any shape and a number or array alpha of a matching shape, in the dtype of v. A v that is negative
or NaN, or an array alpha outside (0, 1), gives inf.

References:
    Howard, Ramdas, McAuliffe, Sekhon (2021), Annals of Statistics 49, arXiv:1810.08240: theorem 1 (stitching),
    propositions 5, 6, 7, 9, 10 (mixtures).
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.scipy.special import betainc, betaln, gammainc, gammaincc, gammaln, log_ndtr
from jaxtyping import Array, Float
from scipy.special import zeta

from skg_jax.stats._types import RealLike
from skg_jax.stats.means import check_alpha

NEWTON_STEPS = 16
DOUBLINGS = 20
STIRLING = 12.0  # from here the first terms of Stirling's series are exact to float64 rounding
SMALL = 0.05  # below this z - log(1 + z) is its series

Curve = Float[Array, "*v"]


def best_rho(v_opt: float, alpha_opt: float, one_sided: bool = True) -> float:
    """The precision for which a normal mixture is nearly narrowest at V = v_opt and error alpha_opt.

    Raises:
        ValueError: v_opt <= 0, or alpha_opt outside (0, 1), or outside (0, 1/2) one-sided.
    """
    if not 0 < v_opt < math.inf:
        raise ValueError(f"v_opt is {v_opt}, but the time to be narrowest at is positive and finite.")
    if not 0 < alpha_opt < (0.5 if one_sided else 1):
        raise ValueError(f"alpha_opt is {alpha_opt}, but it lies in (0, 1), and in (0, 1/2) for a one-sided mixture.")
    tail = -2 * math.log(2 * alpha_opt if one_sided else alpha_opt)
    return v_opt / (tail + math.log1p(tail))


def normal_mixture_bound(
    v: Curve, alpha: RealLike | Curve, *, v_opt: float, alpha_opt: float = 0.05, one_sided: bool = True
) -> Curve:
    """Boundary of a sub-Gaussian sum; two-sided: of its absolute value. Raises as `best_rho` does."""
    rho = best_rho(v_opt, alpha_opt, one_sided)
    v, tail, ok = _inputs(v, alpha)
    if not one_sided:
        return jnp.where(ok, jnp.sqrt((v + rho) * (jnp.log1p(v / rho) + 2 * tail)), jnp.inf)
    start = jnp.sqrt((v + rho) * (jnp.log1p(v / rho) + 2 * tail))
    return jnp.where(ok, _newton(functools.partial(normal_log_mixture, v=v, rho=rho), start, tail), jnp.inf)


def normal_log_mixture(s: Curve, v: Curve, rho: RealLike) -> Curve:
    """Log of the one-sided normal mixture: a half normal prior of precision rho on l > 0."""
    scale = v + rho
    return 0.5 * jnp.log(4 * rho / scale) + s**2 / (2 * scale) + jnp.asarray(log_ndtr(s / jnp.sqrt(scale)))


def gamma_exponential_mixture_bound(
    v: Curve, alpha: RealLike | Curve, *, v_opt: float, c: float = 1.0, alpha_opt: float = 0.05
) -> Curve:
    """Boundary of a sub-exponential sum of scale c > 0. Raises as `best_rho` does, and for another c."""
    _check_scale(c)
    v, tail, ok = _inputs(v, alpha)
    return jnp.where(ok, gamma_exponential_root(v, tail, best_rho(v_opt, alpha_opt), c), jnp.inf)


def gamma_exponential_root(v: Curve, tail: Curve, rho: RealLike | Curve, c: float = 1.0) -> Curve:
    """s with log mixture = tail, where v >= 0; rho may be an array."""
    start = 2 * (c * tail + jnp.sqrt((v + rho) * (jnp.log1p(v / rho) + 2 * tail)))
    return _newton(functools.partial(gamma_exponential_log_mixture, v=v, rho=rho, c=c), start, tail)


def gamma_exponential_log_mixture(s: Curve, v: Curve, rho: RealLike | Curve, c: float = 1.0) -> Curve:
    """Log of the gamma mixture of sub-exponential processes, for s >= 0, arranged so that large terms do not cancel."""
    rho = jnp.asarray(rho, v.dtype)
    a, r = (v + rho) / c**2, rho / c**2
    start = _stirling(a) - _stirling(r) - jnp.log(gammainc(r, r))
    return start + jnp.log(gammainc(a, a + s / c)) + a * _excess(s / (c * a))


def gamma_poisson_mixture_bound(
    v: Curve, alpha: RealLike | Curve, *, v_opt: float, c: float = 1.0, alpha_opt: float = 0.05
) -> Curve:
    """Boundary of a sub-Poisson sum of scale c > 0. Raises as `best_rho` does, and for another c."""
    _check_scale(c)
    rho = best_rho(v_opt, alpha_opt)
    v, tail, ok = _inputs(v, alpha)
    f = functools.partial(gamma_poisson_log_mixture, v=v, rho=rho, c=c)
    return jnp.where(ok, _bisect(f, _above(f, v + rho, tail), tail), jnp.inf)


def gamma_poisson_log_mixture(s: Curve, v: Curve, rho: RealLike, c: float = 1.0) -> Curve:
    """Log of the gamma mixture of sub-Poisson processes."""
    rho = jnp.asarray(rho, v.dtype)
    a, r = (v + rho) / c**2, rho / c**2
    y = a + s / c
    start = -_stirling(r) - jnp.log(gammaincc(r, r))
    z = s / (c * a)  # y log(y/a) - (y - a) = a ((1 + z) log(1 + z) - z)
    return start + _stirling(y) + jnp.log(gammaincc(y, a)) + a * ((1 + z) * jnp.log1p(z) - z)


def beta_binomial_mixture_bound(
    v: Curve,
    alpha: RealLike | Curve,
    *,
    v_opt: float,
    g: float,
    h: float,
    alpha_opt: float = 0.05,
    one_sided: bool = True,
) -> Curve:
    """Boundary of a sum of terms in [-g, h], at most v/g. Raises as `best_rho` does, and unless g > 0 and h > 0."""
    if not (g > 0 and h > 0):
        raise ValueError(f"g, h are {g}, {h}, but the range [-g, h] needs both to be positive.")
    rho = best_rho(v_opt, alpha_opt, one_sided)
    v, tail, ok = _inputs(v, alpha)
    f = functools.partial(beta_binomial_log_mixture, v=v, rho=rho, g=g, h=h, one_sided=one_sided)
    return jnp.where(ok, _bisect(f, v / g, tail), jnp.inf)


def beta_binomial_log_mixture(s: Curve, v: Curve, rho: float, g: float, h: float, one_sided: bool = True) -> Curve:
    """Log of the beta mixture of sub-Bernoulli processes, for s <= v/g."""
    r, width = max(rho - g * h, 1e-3 * g * h), g + h
    cut = jnp.asarray(h / width if one_sided else 1.0, v.dtype)
    hits, misses = (v + h * s) / (h * width), jnp.maximum(v - g * s, 0) / (g * width)
    r_hits, r_misses = r / (h * width), r / (g * width)
    likelihood = -hits * math.log(g / width) - misses * math.log(h / width)
    return (
        likelihood
        + _log_beta(r_misses + misses, r_hits + hits, cut)
        - _log_beta(jnp.asarray(r_misses, v.dtype), jnp.asarray(r_hits, v.dtype), cut)
    )


def poly_stitching_bound(
    v: Curve, alpha: RealLike | Curve, *, v_min: float, c: float = 0.0, s: float = 1.4, eta: float = 2.0
) -> Curve:
    """Boundary of a sub-gamma sum of scale c >= 0, in closed form; flat below v_min.

    Args:
        s: > 1, how the error is spread over epochs k as k**-s.
        eta: > 1, ratio of the epochs.

    Raises:
        ValueError: an argument out of range.
    """
    if not (0 < v_min < math.inf and 0 <= c < math.inf and s > 1 and eta > 1):
        raise ValueError(f"v_min, c, s, eta are {v_min}, {c}, {s}, {eta}, but need v_min > 0, c >= 0, s > 1, eta > 1.")
    k1, k2 = (eta**0.25 + eta**-0.25) / math.sqrt(2), (math.sqrt(eta) + 1) / 2
    v, tail, ok = _inputs(v, alpha)
    v = jnp.maximum(v, v_min)
    epochs = s * jnp.log(jnp.log(eta * v / v_min)) + math.log(float(zeta(s)) / math.log(eta) ** s)
    linear = k2 * c * (epochs + tail)
    return jnp.where(ok, jnp.sqrt(k1**2 * v * (epochs + tail) + linear**2) + linear, jnp.inf)


def _inputs(v: Curve, alpha: RealLike | Curve) -> tuple[Curve, Curve, jax.Array]:
    """(v, log(1/alpha), whether both make sense), with harmless numbers where they do not."""
    check_alpha(alpha)
    v, alpha = jnp.broadcast_arrays(v, jnp.asarray(alpha, v.dtype))
    ok = (v >= 0) & (v < jnp.inf) & (alpha > 0) & (alpha < 1)
    return jnp.where(ok, v, 1), -jnp.log(jnp.where(ok, alpha, 0.5)), ok


def _check_scale(c: float) -> None:
    if not 0 < c < math.inf:
        raise ValueError(f"c is {c}, but the scale of the terms is positive and finite.")


def _newton(f: Callable[[Curve], Curve], start: Curve, level: Curve) -> Curve:
    """Root of a convex increasing f. The first step from the left lands right of it, later ones descend on it."""

    def step(_, s):
        value, slope = jax.jvp(f, (s,), (jnp.ones_like(s),))
        return jnp.maximum(s - (value - level) / jnp.maximum(slope, jnp.finfo(s.dtype).tiny), 0)

    return jax.lax.fori_loop(0, NEWTON_STEPS, step, start)


def _above(f: Callable[[Curve], Curve], start: Curve, level: Curve) -> Curve:
    return jax.lax.fori_loop(0, DOUBLINGS, lambda _, s: jnp.where(f(s) > level, s, 2 * s), start)


def _bisect(f: Callable[[Curve], Curve], top: Curve, level: Curve) -> Curve:
    """The upper end of the last bracket, so the curve is not below the root; `top` where f is below the level there."""

    def step(_, ends):
        middle = (ends[0] + ends[1]) / 2
        above = f(middle) >= level
        return jnp.where(above, ends[0], middle), jnp.where(above, middle, ends[1])

    return jax.lax.fori_loop(0, jnp.finfo(top.dtype).nmant + 8, step, (jnp.zeros_like(top), top))[1]


def _stirling(a: Curve) -> Curve:
    """log gamma(a) - a log(a) + a, by its series where a is large."""
    large = jnp.maximum(a, STIRLING)
    inverse = 1 / large**2
    series = jnp.polyval(
        jnp.array([1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12], a.dtype), inverse
    )
    series = 0.5 * jnp.log(2 * math.pi / large) + series / large
    direct = jnp.minimum(a, STIRLING)
    return jnp.where(a >= STIRLING, series, gammaln(direct) - direct * jnp.log(direct) + direct)


def _excess(z: Curve) -> Curve:
    """z - log(1 + z) for z >= 0, to full precision also near 0."""
    k = jnp.arange(13, 1, -1, dtype=z.dtype)
    series = z**2 * jnp.polyval((-1) ** k / k, jnp.minimum(z, SMALL))
    return jnp.where(z < SMALL, series, z - jnp.log1p(z))


def _log_beta(a: Curve, b: Curve, x: Float[Array, ""]) -> Curve:
    """Log of the incomplete beta function."""
    return betaln(a, b) + jnp.log(betainc(a, b, x))
