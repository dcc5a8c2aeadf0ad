"""The pooled audit: expectations over every sequence of two rounds, faults they notice, coverage, and its edges."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from skg_jax.stats import blocked, pooled
from skg_jax.stats import kaplan_wald as kw
from tests.stats import oracle
from tests.stats.oracle import POPULATIONS, UNITS, population
from tests.stats.unchecked import unchecked

EXACT = kw.KWConfig(guard=0.0, mass_guard=0.0)
COARSE = kw.KWConfig(grid=1, levels=12)
DESIGNS = ("iid", "wor", "hybrid")
LEVEL, REPS = float(-np.log(0.05)), 1000


def units(n, seed=1):
    rng = np.random.default_rng(seed)
    lower, x = np.sort(rng.random((2, n)) ** 3, axis=0)
    return lower, x + 0.05 + rng.random(n), x


def pps(gap, eps):
    return (1 - eps) * gap / gap.sum() + eps * (gap > 0) / (gap > 0).sum()


@functools.partial(jax.jit, static_argnames=("config", "fault"))
def path(sequence, lower, upper, x, weights, config, fault="none"):
    """log K_t at the truth for one sequence of draws, in rounds of 2."""
    pop = pooled.population(lower, upper, weights, None, config)
    run, x = pooled.start(pop, config), x * weights
    for offset in (0, 2):
        index = sequence[offset : offset + 2]
        drawn = pooled.start(pop, config) if fault == "stale law" else run
        law = pooled.first_law(pop, config) or pooled.hybrid_law(pop, drawn, config)
        prob = pooled.wor_law(pop, config)[index] if config.design == "wor" else blocked.probs(law, index, x)
        booked = pooled.start(pop, config) if fault == "restarted books" and offset else run
        run = pooled.absorb(booked._replace(process=run.process), pop, index, prob, x[index], offset, config)
    return kw.wealth_path(run.process, (weights * upper).sum(), x.sum(), 0.0, config.process)


def sequences(design, gap, eps):
    """All sequences of 2 + 2 draws with their chance, from the definition of the design."""
    p, n = pps(gap, eps), len(gap)
    if design == "wor":
        perms, chance = oracle.orders(p)
        return perms[:, :4], chance
    found = []
    for first in itertools.product(range(n), repeat=2):
        left = gap.copy()
        if design == "hybrid":
            left[list(first)] = 0
        q = pps(left, eps)
        for second in itertools.product(np.flatnonzero(left), repeat=2):
            found.append((first + second, p[list(first)].prod() * q[list(second)].prod()))
    rows, chance = zip(*found, strict=True)
    return np.array(rows), np.array(chance)


def mean_wealth(design, lower, upper, x, weights=None, fault="none"):
    weights = np.ones_like(x) if weights is None else weights
    config = pooled.PooledConfig(design=design, rounds=(2, 2), uniform_share=0.1, betting=EXACT)
    rows, chance = sequences(design, weights * (upper - lower), 0.1)
    assert chance.sum() == pytest.approx(1)
    with jax.enable_x64(True):
        args = (jnp.asarray(v) for v in (rows.astype(np.int32), lower, upper, x, weights))
        logs = jax.vmap(path, (0, None, None, None, None, None, None))(*args, config, fault)
        return chance @ np.exp(np.asarray(logs))


def output_residual(n=4, seed=8):
    """A head that attends to 3 tokens and leaves n pages of 2 out: bounds, values and factors of both variants.

    Returns (relative change of the output, mass terms (l, c, x), factors nu, exact terms z).
    """
    rng = np.random.default_rng(seed)
    scores, v = rng.normal(size=3 + 2 * n), rng.normal(size=(3 + 2 * n, 5))
    e = np.exp(scores)
    selected, pages = e[:3].sum(), e[3:].reshape(n, 2).sum(1)
    out = e[:3] @ v[:3] / selected
    low, high = pages * rng.uniform(0.3, 0.9, n), pages * rng.uniform(1.2, 4, n)
    rest = selected + low.sum() - low
    mass = lambda w: w / (rest + w)
    size = np.linalg.norm(out)
    nu = (np.linalg.norm(v[3:].reshape(n, 2, 5), axis=2).max(1) + size) / size
    moved = (e[3:, None] * (v[3:] - out)).reshape(n, 2, 5).sum(1)
    z = np.linalg.norm(moved, axis=1) / ((rest + pages) * size)
    change = np.linalg.norm(e @ v / e.sum() - out) / size
    return change, (mass(low), mass(high), mass(pages)), nu, z


@pytest.mark.parametrize("n", [4, 6])
@pytest.mark.parametrize("design", DESIGNS)
def test_mean_wealth_at_the_truth_is_one_over_all_sequences(design, n):
    np.testing.assert_allclose(mean_wealth(design, *units(n)), 1, atol=1e-6)


@pytest.mark.parametrize("design", DESIGNS)
def test_output_residual_by_factors_and_by_exact_terms(design):
    """The change of the output is below both sums, and the process on either has mean 1 at its own."""
    change, (low, high, x), nu, z = output_residual()
    assert change <= z.sum() <= (nu * x).sum() and np.all(z <= nu * x)
    assert np.any(z < nu * low)  # inside a page values cancel: the exact terms have no lower bound but 0
    np.testing.assert_allclose(mean_wealth(design, low, high, x, nu), 1, atol=1e-6)
    np.testing.assert_allclose(mean_wealth(design, 0 * z, nu * high, z), 1, atol=1e-6)


@pytest.mark.parametrize("fault", ["stale law", "restarted books"])
def test_enumeration_notices_rounds_booked_wrongly(fault):
    """The second round's probabilities under the first round's law, and slack of the first round not removed."""
    means = mean_wealth("hybrid", *units(4), fault=fault)
    np.testing.assert_allclose(means[:2], 1, atol=1e-6)
    assert np.all(np.abs(means[2:] - 1) > 0.02)


def audit_of(name, design: pooled.Design = "iid", variant="mass"):
    """(reports of many keys, truth, cap) with rounds of 20, 20 and 40 draws of 60 units."""
    pop, rng = population(name), np.random.default_rng(9)
    config = pooled.PooledConfig(design=design, rounds=(20, 20, 40), uniform_share=0.05, betting=COARSE)
    nu = np.ones(UNITS) if variant == "mass" else rng.uniform(1, 6, UNITS)
    x = pop.x * rng.random(UNITS) if variant == "exact terms" else pop.x
    x, nu = x.astype(np.float32), nu.astype(np.float32)
    truth, cap = ((v.astype(np.float64) * nu)[pop.valid].sum() for v in (x, pop.cap))
    x = np.where(pop.valid & (pop.cap > pop.lo), x, np.nan)  # what needs no read is not read
    bounds = [np.where(pop.valid, v, np.nan) for v in (pop.lo, pop.cap)]
    budget = truth + 0.02 * (cap - truth)
    return _reports(*bounds, x, nu, pop.valid, np.float32(budget), config), truth, cap


@functools.partial(jax.jit, static_argnames="config")
def _reports(lower, upper, x, weights, valid, budget, config):
    one = lambda key: pooled.audit(key, lower, upper, x, budget, LEVEL, weights, valid, config)
    return jax.vmap(one)(jax.random.split(jax.random.key(5), REPS))


@pytest.mark.parametrize("variant", ["mass", pytest.param("factors", marks=pytest.mark.slow), "exact terms"])
@pytest.mark.parametrize("design", ["iid", *(pytest.param(d, marks=pytest.mark.slow) for d in DESIGNS if d != "iid")])
def test_bound_is_rarely_below_the_truth(design, variant):
    """Going on until accepted or out of rounds, with padding and certain bounds poisoned."""
    for name in POPULATIONS:
        report, truth, cap = audit_of(name, design, variant)
        report = jax.tree.map(np.asarray, report)
        missed = (report.upper < truth * (1 - 1e-6)).sum()
        assert missed <= binom.ppf(0.999, REPS, 0.05), name
        assert not report.violated.any() and np.all(report.upper <= cap * (1 + 2e-5))
        assert np.all(report.reads <= report.draws) and np.all(report.reads <= UNITS)
        assert design != "wor" or np.all(report.reads == report.draws)


def test_an_accepted_audit_stops_reading():
    report, _, _ = audit_of("flat", "wor")
    draws, accepted = np.asarray(report.draws), np.asarray(report.accepted)
    assert accepted.any() and set(np.unique(draws)) <= {20, 40, 60}
    assert np.all(accepted[draws < 60])


def test_wrong_draws_are_noticed():
    """A stratum never drawn (its bounds are said to be tight) holds the mass: the reads cannot tell, the count can."""
    pop = population("needle")
    config = pooled.PooledConfig(rounds=(20, 20, 40), uniform_share=0.05, betting=COARSE)
    hidden = pop.cap.copy()
    hidden[16] = pop.lo[16]
    report = _reports(pop.lo, hidden, pop.x, np.ones(UNITS, np.float32), pop.valid, np.float32(0), config)
    assert (np.asarray(report.upper) < pop.x.sum()).mean() > 0.5


def test_reading_everything_gives_the_sum():
    lower, upper, x = (jnp.float32(v) for v in units(37))
    weights = jnp.asarray(np.random.default_rng(2).random(37), jnp.float32)
    config = pooled.PooledConfig(design="wor", rounds=(50,))
    key = jax.random.key(0)
    report = jax.jit(lambda b: pooled.audit(key, lower, upper, x, b, LEVEL, weights, None, config))(0.0)
    assert int(report.reads) == 37
    assert float(report.upper) == pytest.approx(float((weights * x).sum()), rel=1e-3)
    one = pooled.PooledConfig(rounds=(1,), certain=37)
    report = jax.jit(lambda b: pooled.audit(key, lower, upper, x, b, LEVEL, weights, None, one))(0.0)
    assert (int(report.reads), int(report.draws)) == (37, 0)
    assert float(report.upper) == pytest.approx(float((weights * x).sum()), rel=1e-5)


@pytest.mark.slow
def test_rounds_are_one_long_run():
    lower, upper, x = (jnp.float32(v) for v in units(90))
    both = [
        pooled.audit(jax.random.key(3), lower, upper, x, 0.0, LEVEL, config=pooled.PooledConfig(design="wor", rounds=r))
        for r in ((60,), (7, 13, 40))
    ]
    for a, b in zip(*both, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5)


def test_bounds_alone_accept_without_a_read():
    lower, upper, _ = (jnp.float32(v) for v in units(9))
    audit = jax.jit(lambda budget: pooled.audit(jax.random.key(0), lower, upper, upper * np.nan, budget, LEVEL))
    report = audit(float(upper.sum()) * 1.01)
    assert bool(report.accepted) and int(report.reads) == 0 == int(report.draws)


@pytest.mark.parametrize("fault", ["above", "below", "nan", "bounds", "infinite", "weight", "level", "budget"])
@pytest.mark.parametrize("certain", [0, 2])
def test_what_makes_no_sense_raises_outside_of_jit_and_voids_inside(fault, certain):
    lower, upper, x = (jnp.float32(v) for v in units(9))
    weights, level, budget = jnp.ones(9), LEVEL, 0.5 * float(upper.sum())
    fourth = jnp.arange(9) == 4
    x = {"above": upper + 1, "below": lower - 1, "nan": x * np.nan}.get(fault, x)
    lower = jnp.where(fourth, upper + 1, lower) if fault == "bounds" else lower
    upper = jnp.where(fourth, jnp.inf, upper) if fault == "infinite" else upper
    weights = -weights if fault == "weight" else weights
    level, budget = (0.0 if fault == "level" else level), (np.nan if fault == "budget" else budget)
    config = pooled.PooledConfig(rounds=(40,), certain=certain)
    args = [jax.random.key(0), lower, upper, x, jnp.float32(budget), jnp.float32(level), weights]
    with pytest.raises(ValueError, match=r"(bounds|value|violated|budget|log_inv_alpha) is .*, but .*\.$"):
        pooled.audit(*args, config=config)
    report = _void(*args, config)
    assert bool(report.violated) and not bool(report.accepted) and float(report.upper) == np.inf


_void = jax.jit(lambda *args: pooled.audit(*args[:-1], config=args[-1]), static_argnums=7)


@pytest.mark.parametrize("changes", [{"rounds": ()}, {"rounds": (0,)}, {"uniform_share": 0.0},
                                     {"certain": -1}])  # fmt: skip
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ValueError, match=r"\.$"):
        pooled.PooledConfig(**changes)


SHAPES = {
    "read": {"read": np.ones(3, np.float32)},
    "weights": {"weights": np.ones(64, np.float32)},
    "valid": {"valid": np.ones(8, bool)},
    "upper": {"upper": np.ones((9, 1), np.float32)},
    "lower": {"lower": np.zeros(10, np.float32)},
    "empty": {name: np.ones(0, np.float32) for name in ("lower", "upper", "read")},
    "budget": {"budget": np.ones(2, np.float32)},
    "level": {"log_inv_alpha": np.ones(1, np.float32)},
}


@pytest.mark.parametrize("fault", SHAPES)
def test_shapes_that_do_not_fit_are_refused_also_inside_jit(fault):
    """An index beyond a shorter array would be clamped."""
    lower, upper, x = (np.float32(v) for v in units(9))
    call = dict(lower=lower, upper=upper, read=x, budget=np.float32(3), log_inv_alpha=np.float32(LEVEL))  # noqa: C408
    audit = lambda call: pooled.audit(jax.random.key(0), **call, config=pooled.PooledConfig(rounds=(4,)))
    for run in (audit, jax.jit(audit)):
        with unchecked(), pytest.raises(ValueError, match=r"shapes? .*\(.*\), but .*\."):
            run(call | SHAPES[fault])


def test_arrays_of_numpy_are_taken_outside_of_jit():
    lower, upper, x = units(9)  # float64
    config, key = pooled.PooledConfig(rounds=(4,)), jax.random.key(0)
    args: list[Any] = [lower, upper, x, 0.9 * upper.sum(), LEVEL, np.full(9, 1.5), np.arange(9) != 4]
    with unchecked():
        found = pooled.audit(key, *args, config=config)
        want = pooled.audit(key, *[jnp.asarray(v) for v in args], config=config)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert found.upper.dtype == jnp.float32 and int(found.draws) == 4
