"""Every stored value of the reference, except the Kaplan-Wald block, which has its own test."""

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.stats import betting, boundaries, conjugate_mixture, empirical_bernstein, hoeffding
from skg_jax.stats.means import advance

REFERENCE = json.loads((pathlib.Path(__file__).parent / "confseq_reference.json").read_text())
DTYPES = ["float32", "float64"]


def reference(block: str, **wanted) -> list[dict]:
    """Cases of a block with the given entries."""
    found = [case for case in REFERENCE[block] if all(case[k] == v for k, v in wanted.items())]
    assert found
    return found


def sample(case: dict) -> np.ndarray:
    return np.array(REFERENCE["data"][case["data_key"]][: case["n"]])


@functools.partial(jax.jit, static_argnames="module")
def path(module, state, x, alpha):
    """Bounds after each observation, [n, 2]."""

    def step(state, x):
        state, _ = module.update(state, x)
        return state, jnp.stack(module.bound(state, alpha))

    return jax.lax.scan(step, state, x)[1]


def bounds(module, config, case: dict, dtype: str) -> np.ndarray:
    with jax.enable_x64(dtype == "float64"):
        x = jnp.asarray(sample(case), dtype)
        return np.asarray(path(module, module.init(config, dtype), x, jnp.asarray(config.alpha, dtype)), np.float64)


def logical(case: dict) -> np.ndarray:
    """What the drawn items alone say, [n, 2]: the reference leaves it out of the closed forms."""
    x, size = sample(case), case["parameters"].get("N")
    if size is None:
        return np.tile([0.0, 1.0], (x.size, 1))
    return np.stack([np.cumsum(x) / size, 1 - np.cumsum(1 - x) / size], 1)


def expected(case: dict) -> np.ndarray:
    """[n, 2] in [0, 1]; the side that a one-sided case leaves open is its trivial bound."""
    lower, upper = case["lower"], case["upper"]
    lower = np.zeros(case["n"]) if lower is None else np.array(lower, float)
    upper = np.ones(case["n"]) if upper is None else np.array(upper, float)
    known = logical(case)
    return np.stack([np.maximum(lower, known[:, 0]).clip(0, 1), np.minimum(upper, known[:, 1]).clip(0, 1)], 1)


def tolerance(case: dict, dtype: str) -> float:
    return 1e-5 if dtype == "float32" else min(case["atol"], 1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hoeffding(dtype):
    for case in reference("cases", method="predmix_hoeffding_cs"):
        p = case["parameters"]
        config = hoeffding.HoeffdingConfig(alpha=p["alpha"], population=p["N"], truncation=float(p["truncation"]))
        np.testing.assert_allclose(
            bounds(hoeffding, config, case, dtype), expected(case), rtol=1e-5, atol=tolerance(case, dtype)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_empirical_bernstein(dtype):
    """The reference guesses 0 before the first observation, on both sides."""
    for case in reference("cases", method="predmix_empbern_twosided_cs"):
        p = case["parameters"]
        config = empirical_bernstein.EmpiricalBernsteinConfig(
            alpha=p["alpha"], population=p["N"], truncation=p["truncation"], first_mean=0.0
        )
        np.testing.assert_allclose(
            bounds(empirical_bernstein, config, case, dtype), expected(case), rtol=1e-5, atol=tolerance(case, dtype)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_conjugate_mixture(dtype):
    """The reference halves alpha twice on each side."""
    for case in reference("cases", method="conjmix_empbern_twosided_cs"):
        p = case["parameters"]
        config = conjugate_mixture.ConjugateMixtureConfig(alpha=p["alpha"] / 2, v_opt=p["v_opt"])
        np.testing.assert_allclose(bounds(conjugate_mixture, config, case, dtype), expected(case), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("method", "lower_share"), [("hedged_cs", 0.5), ("betting_lower_cs(1-x) => one-sided upper", 0.0)]
)
def test_betting(method, lower_share, dtype):
    """The reference's set is rounded outward to its grid, so both lie within two grid steps."""
    for case in reference("cases", method=method):
        p = case["parameters"]
        config = betting.BettingConfig(
            alpha=p["alpha"], population=p["N"], breaks=p["breaks"], cap=p["trunc_scale"], lower_share=lower_share
        )
        wanted = expected(case) if lower_share else np.stack([np.zeros(case["n"]), expected(case)[:, 1]], 1)
        assert np.abs(bounds(betting, config, case, dtype) - wanted).max() <= 2 / p["breaks"] + 1e-6


@jax.jit
def _capital_path(start, x):
    def step(state, x):
        state, _ = betting.update(state, x)
        return state, (state.capital, state.peak)

    capital, peak = jax.lax.scan(step, start, x)[1]
    bets = betting.bets(start.plan, advance(start.plan, start.moments, x)[1])
    return jnp.where(peak >= betting.DEAD, jnp.inf, capital), bets


@functools.cache
def capital_path(config, data_key: str, n: int) -> tuple[np.ndarray, np.ndarray]:
    """(log capital after each observation, [n, 2, G]; the bets, [2, n]) in float64."""
    with jax.enable_x64(True):
        x = jnp.asarray(REFERENCE["data"][data_key][:n], "float64")
        capital, bets = _capital_path(betting.init(config, jnp.float64), x)
        return np.asarray(capital), np.asarray(bets)


def test_log_capital():
    """At candidates of the grid; a candidate that either side rules out has infinite capital there."""
    for case in REFERENCE["martingales"]:
        breaks, side = 20, 0 if case["side"] == "positive" else 1
        config = betting.BettingConfig(
            alpha=case["alpha"],
            population=case["N"],
            breaks=breaks,
            cap=case["trunc_scale"],
            lower_share=case["theta"],
        )
        paths, _ = capital_path(config, case["data_key"], case["n"])
        at = round(case["m"] * breaks)
        both = paths[:, 0, at], paths[:, 1, breaks - at]
        got = np.where(np.isinf(both[0]) | np.isinf(both[1]), np.inf, both[side])
        wanted = np.array([float(v) for v in case["log_capital"]])
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-9)


def test_bets():
    for case in REFERENCE["bets"]:
        config = betting.BettingConfig(alpha=case["alpha"], lower_share=1.0, breaks=1)
        bets = capital_path(config, case["data_key"], case["n"])[1]
        np.testing.assert_allclose(bets[0], case["lambdas"], rtol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", sorted({case["function"] for case in REFERENCE["boundaries"]}))
def test_boundaries(function, dtype):
    cases = reference("boundaries", function=function)
    fixed = {k: v for k, v in cases[0].items() if k not in ("function", "v", "alpha", "value", "rtol")}
    assert all(fixed.items() <= case.items() for case in cases)
    v, alpha, values = (np.array([case[k] for case in cases]) for k in ("v", "alpha", "value"))
    if "is_one_sided" in fixed:
        fixed["one_sided"] = fixed.pop("is_one_sided")
    with jax.enable_x64(dtype == "float64"):
        got = getattr(boundaries, function)(jnp.asarray(v, dtype), jnp.asarray(alpha, dtype), **fixed)
        assert got.dtype == dtype
    np.testing.assert_allclose(got, values, rtol=1e-5 if dtype == "float32" else cases[0]["rtol"])


def test_all_of_the_reference_is_compared():
    assert {case["method"] for case in REFERENCE["cases"]} == {
        "predmix_hoeffding_cs",
        "predmix_empbern_twosided_cs",
        "conjmix_empbern_twosided_cs",
        "hedged_cs",
        "betting_lower_cs(1-x) => one-sided upper",
    }
    assert {case["method"] for case in REFERENCE["martingales"]} == {"betting_mart"}
    assert {case["method"] for case in REFERENCE["bets"]} == {"lambda_predmix_eb"}
