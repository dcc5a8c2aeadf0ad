"""The law and the wealth in blocks, against every ticket and against the path of each draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.stats import blocked, pooled, sums
from skg_jax.stats import kaplan_wald as kw

SIZES = [1, 5, 15, 16, 17, 31, 32, 53, 16 * 23 + 7]


def counts_of(units, seed=0):
    """Small counts, many of them 0."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 8, units) * (rng.random(units) < 0.6) + (np.arange(units) == units // 2)


def found(law, total):
    """How many of all tickets each unit holds."""
    units = np.asarray(jax.jit(blocked.unit_of)(law, jnp.arange(total, dtype=jnp.uint32)))
    return np.bincount(units, minlength=law.k.size)


@pytest.mark.parametrize("units", SIZES)
def test_every_unit_holds_as_many_tickets_as_it_counts(units):
    counts = counts_of(units)
    law = blocked.fold(jnp.asarray(counts, jnp.uint32))
    assert int(law.ends[-1]) == counts.sum()
    np.testing.assert_array_equal(found(law, counts.sum()), counts)
    prob = blocked.probs(law, jnp.arange(units), jnp.zeros(1))
    np.testing.assert_allclose(prob, counts / counts.sum(), rtol=1e-6)


@pytest.mark.parametrize("part", ["k", "first fold", "ends"])
def test_enumeration_notices_one_ticket_in_the_wrong_place(part):
    counts = counts_of(53)
    law = blocked.fold(jnp.asarray(counts, jnp.uint32))
    more = lambda x: x.at[int(np.flatnonzero(x)[0])].add(1)
    wrong = {
        "k": law._replace(k=more(law.k)),
        "first fold": law._replace(folds=(more(law.folds[0]), *law.folds[1:])),
        "ends": law._replace(ends=law.ends.at[0].add(1)),
    }[part]
    assert np.any(found(wrong, counts.sum()) != np.asarray(wrong.k))


@pytest.mark.parametrize("units", SIZES)
def test_counts_are_the_weights_rounded_and_at_least_one(units):
    p = (counts_of(units, 1) * np.random.default_rng(2).random(units)).astype(np.float32)
    p[0], p[-1] = 1e-12, 1.0
    law = jax.jit(blocked.integer_law)(jnp.asarray(p), np.float32(p.sum()))
    want = np.where(p > 0, np.maximum(p.astype(np.float64) / p.sum() * 2**30, 1), 0)
    np.testing.assert_allclose(law.k, want, rtol=1e-6, atol=0.51)
    assert int(law.ends[-1]) == np.asarray(law.k, np.int64).sum()


def test_draws_follow_the_claimed_law():
    """And are in range with nothing to draw, when the law is 0 too."""
    counts = counts_of(53)
    law, n = blocked.fold(jnp.asarray(counts, jnp.uint32)), 200_000
    draw = jax.jit(blocked.draw, static_argnums=2)
    index = np.asarray(draw(jax.random.key(3), law, n))
    p = np.asarray(blocked.probs(law, jnp.arange(53), jnp.zeros(1)), np.float64)
    seen = np.bincount(index, minlength=53) / n
    assert np.all(np.abs(seen - p) <= 5 * np.sqrt(p * (1 - p) / n))
    flat = (counts > 0) / (counts > 0).sum()
    assert np.any(np.abs(seen - flat) > 5 * np.sqrt(p * (1 - p) / n))  # another law is noticed
    for units in (5, 16, 53):
        empty = blocked.fold(jnp.zeros(units, jnp.uint32))
        index = draw(jax.random.key(4), empty, 9)
        assert np.all((np.asarray(index) >= 0) & (np.asarray(index) < units))
        assert not np.any(blocked.probs(empty, index, jnp.zeros(1)))


@pytest.mark.parametrize("units", [3, 4095, 4096, 50_021])
@pytest.mark.parametrize("signs", [1, -1])
def test_outward_sums_enclose_the_exact_sum(units, signs):
    x = np.random.default_rng(units).lognormal(0, 3, units).astype(np.float32)
    x[::2] *= signs
    exact, size = x.astype(np.float64).sum(), np.abs(x.astype(np.float64)).sum()
    low, high = (float(jax.jit(sums.outward_sum, static_argnums=1)(x, way)) for way in (-1, 1))
    assert exact - 9e-6 * size <= low <= exact <= high <= exact + 9e-6 * size


@pytest.mark.parametrize("at", [0, 4095, 49_999, 50_020])  # in the rows, and in the last units, which are in none
@pytest.mark.parametrize(("lower", "upper"), [(np.nan, 1), (0, np.nan), (2, 1), (-np.inf, 1), (0, np.inf)])
def test_one_bad_bound_among_many_makes_the_population_unsound(at, lower, upper):
    bounds = np.zeros(50_021, np.float32), np.ones(50_021, np.float32)
    assert bool(_sound(*bounds))
    bounds[0][at], bounds[1][at] = lower, upper
    assert not bool(_sound(*bounds))


_sound = jax.jit(lambda lower, upper: pooled.population(lower, upper, None, None).sound)


def test_blocked_wealth_is_the_path_at_the_ends_of_blocks():
    config = kw.KWConfig(capacity=300)
    y = np.float32(np.random.default_rng(4).exponential(1.3, 290))
    booked = jax.jit(lambda y: kw.update_batch(kw.init(config), kw.observe_iid(y, jnp.ones(290), jnp.ones(290, bool))))
    state, _ = booked(y)
    path_of, wealth_of = (jax.jit(f, static_argnames="config") for f in (kw.wealth_path, blocked.log_wealth))
    for m in (-0.5, -0.05, 0.4):
        path = np.asarray(path_of(state, 1.0, m, 1e-5, config=config), np.float64)
        ends = path[[63, 127, 191, 255, 299]]
        got = float(wealth_of(state, 1.0, m, 1e-5, config=config))
        assert got == pytest.approx(max(0, ends.max()), abs=1e-3)
        assert got <= max(0, (path - kw.LOG_ERROR * np.arange(1, 301)).max()) + 1e-6
    dead = wealth_of(state._replace(spent=jnp.full(300, 2.0)), 1.0, 0.0, 1e-5, config=config)
    assert float(dead) == np.inf
