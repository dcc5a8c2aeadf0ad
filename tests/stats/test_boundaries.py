"""Curves against scipy integration of their mixtures and brentq roots; edges; the crossing probability itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from skg_jax.stats import boundaries

V_OPT, LEVEL = 5.0, 0.05
GE = functools.partial(boundaries.gamma_exponential_mixture_bound, v_opt=V_OPT, c=1.0, alpha_opt=LEVEL)
NORMAL = functools.partial(boundaries.normal_mixture_bound, v_opt=V_OPT, alpha_opt=LEVEL)
TWO_SIDED = functools.partial(boundaries.normal_mixture_bound, v_opt=V_OPT, alpha_opt=LEVEL, one_sided=False)
POISSON = functools.partial(boundaries.gamma_poisson_mixture_bound, v_opt=V_OPT, c=1.0, alpha_opt=LEVEL)
BINOMIAL = functools.partial(boundaries.beta_binomial_mixture_bound, v_opt=V_OPT, g=0.3, h=0.7, alpha_opt=LEVEL)
STITCHED = functools.partial(boundaries.poly_stitching_bound, v_min=V_OPT, c=1.0)
CURVES = {
    "GE": GE,
    "normal": NORMAL,
    "two-sided": TWO_SIDED,
    "Poisson": POISSON,
    "binomial": BINOMIAL,
    "stitch": STITCHED,
}


def gamma_exponential_by_integration(s, v, rho):
    """log of the integral of exp(l s - psi_E(l) v) over the prior ~ (1 - l)^(rho - 1) exp(rho l), 0 <= l < 1."""
    prior = lambda l: (1 - l) ** (rho - 1) * np.exp(rho * l)
    process = lambda l: prior(l) * np.exp(l * s + (np.log1p(-l) + l) * v)
    return np.log(integrate.quad(process, 0, 1, limit=200)[0] / integrate.quad(prior, 0, 1, limit=200)[0])


def normal_by_integration(s, v, rho):
    """A half-normal prior of precision rho."""
    process = lambda l: 2 * np.sqrt(rho / 2 / np.pi) * np.exp(l * s - l * l * (v + rho) / 2)
    return np.log(integrate.quad(process, 0, 60, limit=200)[0])


@pytest.mark.parametrize(("curve", "oracle"), [(GE, gamma_exponential_by_integration), (NORMAL, normal_by_integration)])
def test_curve_is_where_the_integrated_mixture_reaches_one_over_alpha(curve, oracle):
    rho, v = boundaries.best_rho(V_OPT, LEVEL), np.array([0.0, 0.3, 7.0, 60.0])
    with jax.enable_x64(True):
        got = np.asarray(curve(jnp.asarray(v), 0.01))
    crossing = lambda at: lambda s: oracle(s, at, rho) - np.log(100)
    exact = [optimize.root_scalar(crossing(at), bracket=(1e-9, 30 + at), xtol=1e-12).root for at in v]
    np.testing.assert_allclose(got, exact, rtol=1e-7)


@pytest.mark.parametrize("name", CURVES)
def test_curve_rises_with_v_and_falls_with_alpha(name):
    v = jnp.array([0.1, 1.0, 5.0, 37.0, 1e3, 1e5], jnp.float32)
    wide, narrow = np.asarray(CURVES[name](v, 0.001)), np.asarray(CURVES[name](v, 0.1))
    assert np.isfinite(wide).all() and (np.diff(wide) >= 0).all() and (np.diff(narrow) >= 0).all()
    assert (narrow <= wide).all() and (narrow[2:] < wide[2:]).all()


@pytest.mark.parametrize("name", ["GE", "normal", "two-sided", "stitch"])
def test_float32_is_near_float64_at_every_size(name):
    v = np.array([0.0, 1e-3, 1.0, 11.0, 13.0, 1e3, 1e5])
    with jax.enable_x64(True):
        exact = np.asarray(CURVES[name](jnp.asarray(v), 1e-4))
    np.testing.assert_allclose(CURVES[name](jnp.asarray(v, jnp.float32), 1e-4), exact, rtol=2e-5)


@pytest.mark.parametrize("name", CURVES)
def test_what_makes_no_sense_gives_no_bound(name):
    got = jax.jit(CURVES[name])(jnp.array([-1.0, np.nan, 1.0, 1.0, 1.0]), jnp.array([0.1, 0.1, 0.0, 1.0, np.nan]))
    assert np.isposinf(got).all()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: GE(jnp.ones(1), 0.0), "alpha is 0.0"),
        (lambda: boundaries.best_rho(0.0, 0.05), "v_opt is 0.0"),
        (lambda: boundaries.best_rho(1.0, 0.5), "alpha_opt is 0.5"),
        (lambda: boundaries.gamma_exponential_mixture_bound(jnp.ones(1), 0.05, v_opt=1.0, c=0.0), "c is 0.0"),
        (lambda: boundaries.beta_binomial_mixture_bound(jnp.ones(1), 0.05, v_opt=1.0, g=0.0, h=1.0), "g, h are 0.0"),
        (lambda: boundaries.poly_stitching_bound(jnp.ones(1), 0.05, v_min=1.0, s=1.0), "v_min, c, s, eta are"),
    ],
)
def test_refusals(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def crossings(curve, scale: float, reps: int) -> int:
    """Walks of 200 steps of +-1/2 that ever cross `scale` times the curve, at alpha = .05."""
    steps = np.random.default_rng(5).integers(0, 2, (reps, 200)) - 0.5
    u = np.asarray(curve(jnp.arange(1, 201, dtype=jnp.float32) / 4, 0.05))
    return int((np.cumsum(steps, 1) >= scale * u).any(1).sum())


@pytest.mark.parametrize("name", ["GE", "normal", "stitch"])
def test_walks_rarely_cross(name):
    assert crossings(CURVES[name], 1.0, 5000) <= stats.binom.ppf(0.999, 5000, 0.05)


@pytest.mark.parametrize("name", ["GE", "normal", "stitch"])
def test_walks_cross_a_fixed_time_curve(name):
    """Control: half the curve is about what a test at one time would use."""
    assert crossings(CURVES[name], 0.4, 5000) > stats.binom.ppf(0.999, 5000, 0.05)
