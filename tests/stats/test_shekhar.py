"""Importance-weighted betting: means over all orders and sequences, bounds, coverage, and beside Kaplan-Wald."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling, shekhar
from tests.stats import oracle
from tests.stats.oracle import population

LEVEL = shekhar.log_level(0.05)


def units(n, seed=2):
    rng = np.random.default_rng(seed)
    gain = rng.random(n) ** 2
    gap = gain + 0.05 + rng.random(n)
    p = rng.random(n) + 0.2
    return gain, gap, p / p.sum()


@functools.partial(jax.jit, static_argnames=("wor", "side"))
def _paths(rows, gain, gap, p, claim, m, wor, side):
    config = shekhar.ShekharConfig(capacity=rows.shape[1])

    def one(index):
        g, b, q, valid = gain[index], gap[index], claim[index], jnp.ones(index.shape, bool)
        reach, total = jnp.max(gap / claim), gap.sum()
        seen = (
            shekhar.observe_wor(g, b, q, valid, reach, total) if wor else shekhar.observe_iid(g, q, valid, reach, total)
        )
        state = shekhar.update_batch(shekhar.init(config, gain.dtype), seen)[0]
        return shekhar.wealth_path(state, m, LEVEL, side, config)

    return jnp.exp(jax.vmap(one)(rows))


def mean_wealth(n, wor, side, shift=0.0, claim=None):
    gain, gap, p = units(n)
    if wor:
        rows, chance = oracle.orders(p)
    else:
        rows = np.array(list(itertools.product(range(n), repeat=4)))
        chance = p[rows].prod(1)
    with jax.enable_x64(True):
        args = [jnp.asarray(v) for v in (rows.astype(np.int32), gain, gap, p, p if claim is None else claim)]
        return chance @ np.asarray(_paths(*args, gain.sum() + shift, wor, side))


@pytest.mark.parametrize("side", [1, -1])
@pytest.mark.parametrize(("n", "wor"), [(6, True), (3, True), (1, True), (4, False)])
def test_mean_wealth_at_the_truth_is_one(n, wor, side):
    np.testing.assert_allclose(mean_wealth(n, wor, side), 1, atol=1e-6)
    if n > 1:
        assert np.all(mean_wealth(n, wor, side, shift=0.05 * side) < 1)


def test_wrong_probabilities_are_noticed():
    for side in (1, -1):
        assert np.max(np.abs(mean_wealth(4, False, side, claim=np.full(4, 0.25)) - 1)) > 0.01


@functools.partial(jax.jit, static_argnames=("reps", "n"))
def compare(lo, cap, x, reps, n):
    """(bounds of this module, Kaplan-Wald upper bound) of the same n draws without replacement."""
    law = sampling.pps_probs(cap - lo, cap > lo, 0.05)
    reach = jnp.max(jnp.where(law > 0, (cap - lo) / jnp.maximum(law, 1e-30), 0))

    def one(key):
        index = sampling.draw_wor(key, law, n)
        valid, p = law[index] > 0, law[index]
        config = shekhar.ShekharConfig(capacity=n)
        seen = shekhar.observe_wor((x - lo)[index], (cap - lo)[index], p, valid, reach, (cap - lo).sum())
        drawn, _ = shekhar.update_batch(shekhar.init(config), seen)
        mine = shekhar.bound(drawn, lo.sum(), cap.sum(), LEVEL, config)
        state, _ = kw.update_batch(kw.init(kw.KWConfig(capacity=n)), kw.observe_wor((cap - x)[index], p, valid))
        return mine, kw.upper(state, cap.sum(), lo.sum(), LEVEL, kw.rounding_guard(cap.sum()))

    return jax.vmap(one)(jax.random.split(jax.random.key(1), reps))


@pytest.mark.parametrize("name", ["flat", "lognormal", "needle", "half at bound"])
def test_truth_is_rarely_excluded(name):
    pop = population(name)
    (low, high), _ = compare(*(jnp.asarray(v) for v in (pop.lo, pop.cap, pop.x)), 1000, 40)
    truth = pop.x.astype(np.float64).sum()
    limit = binom.ppf(0.999, 1000, 0.05)
    assert (np.asarray(low) > truth * (1 + 1e-5)).sum() <= limit
    assert (np.asarray(high) < truth * (1 - 1e-5)).sum() <= limit
    assert np.all(np.asarray(low) <= np.asarray(high))


def test_kaplan_wald_is_tighter_above():
    pop = population("lognormal")
    (_, high), other = compare(*(jnp.asarray(v) for v in (pop.lo, pop.cap, pop.x)), 1000, 40)
    assert np.median(other) < np.median(high) < pop.cap.sum()


def test_batch_equals_single_draws_and_edges_are_finite():
    gain, gap, p = (jnp.asarray(v, jnp.float32) for v in units(7))
    config = shekhar.ShekharConfig(capacity=9)
    valid = jnp.arange(7) != 3  # a gap in the slots
    seen = shekhar.observe_wor(gain, gap, p, valid, float((gap / p).max()), float(gap.sum()))
    batch, info = shekhar.update_batch(shekhar.init(config), seen)
    assert (int(info.used), int(info.ignored), bool(info.invalid)) == (6, 0, False)
    single = shekhar.init(config)
    for i in np.flatnonzero(valid):
        single, _ = shekhar.update(single, shekhar.Observation(*(column[i] for column in seen)))
    jax.tree.map(np.testing.assert_array_equal, batch, single)
    empty = shekhar.bound(shekhar.init(config), 0.5, 2.0, LEVEL, config)
    assert [float(v) for v in empty] == [0.5, 2.0]
    nothing = shekhar.observe_iid(gain * 0, p, jnp.ones(7, bool), 0.0, 0.0)
    bounds = shekhar.bound(shekhar.update_batch(shekhar.init(config), nothing)[0], 1.0, 1.0, LEVEL, config)
    assert [float(v) for v in bounds] == [1.0, 1.0]


@pytest.mark.parametrize("bad", [-0.1, np.nan, 2.0, np.inf])
def test_a_draw_that_cannot_be_raises_outside_of_jit_and_voids_inside(bad):
    """z is at most reach = 1."""
    config = shekhar.ShekharConfig(capacity=3)
    one = jnp.ones(1)
    draw = shekhar.Observation(jnp.full(1, bad), 0 * one, one, one, one > 0)
    with pytest.raises(ValueError, match=r"z is .*0 <= z <= reach"):
        shekhar.update_batch(shekhar.init(config), draw)
    state, info = jax.jit(shekhar.update_batch)(shekhar.init(config), draw)
    assert bool(info.invalid)
    assert [float(v) for v in shekhar.bound(state, 0.0, 1.0, LEVEL, config)] == [-np.inf, np.inf]
    assert np.isposinf(jax.jit(shekhar.bound)(shekhar.init(config), 0.0, 1.0, 0.0)[1])  # alpha = 1 is no level


@pytest.mark.parametrize("make", [
    lambda: shekhar.log_level(0.0), lambda: shekhar.log_level(1.0), lambda: shekhar.ShekharConfig(truncation=1.0),
    lambda: shekhar.ShekharConfig(capacity=0),
])  # fmt: skip
def test_impossible_input_is_refused(make):
    with pytest.raises(ValueError, match=r"\.$"):
        make()
