"""Both sides of one sum at once: expectations over all orders, agreement with the one-sided process, and refusals."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling, weighted_sum
from skg_jax.stats.weighted_sum import Draw, WeightedSumConfig
from tests.stats import oracle
from tests.stats.oracle import UNITS, population
from tests.stats.unchecked import unchecked

EXACT = kw.KWConfig(guard=0.0, mass_guard=0.0, capacity=6)
SMALL = kw.KWConfig(capacity=UNITS)


def units(n, seed=5):
    rng = np.random.default_rng(seed)
    lower, x = np.sort(rng.random((2, n)) ** 3, axis=0)
    p = rng.random(n) + 0.05
    return x, lower, x + 0.05 + rng.random(n), p / p.sum()


@functools.partial(jax.jit, static_argnames="config")
def wealths(rows, x, lower, upper, p, config):
    """log K of both sides at the truth, for each sequence of units, one draw at a time."""

    def one(row):
        state = weighted_sum.init(config, lower, upper, x.dtype)
        step = lambda state, u: (weighted_sum.update(state, Draw(x[u], lower[u], upper[u], p[u]), config)[0], None)
        state, _ = jax.lax.scan(step, state, row)
        above = kw.wealth_path(state.above, upper.sum(), x.sum(), 0.0, config.betting)
        below = kw.wealth_path(state.below, -lower.sum(), -x.sum(), 0.0, config.betting)
        return jnp.exp(jnp.stack([above, below]))

    return jax.vmap(one)(rows)


@pytest.mark.parametrize("replacement", [False, True])
def test_mean_wealth_of_both_sides_is_one(replacement):
    x, lower, upper, p = units(4 if replacement else 5)
    rows = np.array(list(itertools.product(range(4), repeat=4)))
    rows, chance = (rows, p[rows].prod(1)) if replacement else oracle.orders(p)
    config = WeightedSumConfig(replacement=replacement, betting=EXACT)
    with jax.enable_x64(True):
        args = [jnp.asarray(v) for v in (rows, x, lower, upper, p)]
        k = np.asarray(wealths(*args, config))
    np.testing.assert_allclose(np.tensordot(chance, k, 1), 1, atol=1e-6)


@functools.partial(jax.jit, static_argnames=("config", "reps"))
def bounds(x, lower, upper, p, config, reps):
    """([reps, 2] bounds after 40 draws, the states)."""

    def one(key):
        index = sampling.draw_wor(key, p, 40)
        state, _ = weighted_sum.update_batch(
            weighted_sum.init(config, lower, upper), Draw(*(v[index] for v in (x, lower, upper, p))), config
        )
        return jnp.stack(weighted_sum.bound(state, 0.05, config)), state

    return jax.vmap(one)(jax.random.split(jax.random.key(2), reps))


def example(name):
    pop = population(name)
    p = sampling.pps_probs(jnp.asarray(pop.cap - pop.lo), jnp.ones(UNITS, bool), 0.05)
    return jnp.asarray(pop.x), jnp.asarray(pop.lo), jnp.asarray(pop.cap), p


@pytest.mark.parametrize("name", ["lognormal", "needle"])
def test_intervals_hold_the_sum_and_lie_within_the_known_bounds(name):
    x, lower, upper, p = example(name)
    found, _ = bounds(x, lower, upper, p, WeightedSumConfig(betting=SMALL), 2000)
    low, high = np.asarray(found, np.float64).T
    truth = np.asarray(x, np.float64).sum()
    assert ((low > truth) | (high < truth)).sum() <= binom.ppf(0.999, 2000, 0.05)
    assert np.all(low >= 0) and np.all(high <= float(upper.sum()) * (1 + 1e-5))
    assert np.median(high) < 0.5 * float(upper.sum()) and np.median(low) > 0.2 * truth


@pytest.mark.slow
def test_one_side_takes_all_of_alpha():
    x, lower, upper, p = example("lognormal")
    both, above, below = (
        np.median(bounds(x, lower, upper, p, WeightedSumConfig(betting=SMALL, lower_share=s), 50)[0], axis=0)
        for s in (0.5, 0.0, 1.0)
    )
    assert above[1] < both[1] and below[0] > both[0]
    assert above[0] < both[0] and below[1] > both[1]  # without alpha a side knows only what was read


def test_single_draws_equal_a_batch():
    x, lower, upper, p = (jnp.asarray(v, jnp.float32) for v in units(17))
    config = WeightedSumConfig(betting=kw.KWConfig(capacity=17))
    order = np.random.default_rng(1).permutation(17)
    start = weighted_sum.init(config, lower, upper)
    draws = Draw(x[order], lower[order], upper[order], p[order], jnp.asarray(order != 3))
    batch, info = jax.jit(weighted_sum.update_batch, static_argnums=2)(start, draws, config)
    step = lambda state, draw: (weighted_sum.update(state, draw, config)[0], None)
    single, _ = jax.jit(lambda s: jax.lax.scan(step, s, draws))(start)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), batch, single)
    assert (int(info.used), int(info.ignored), bool(info.invalid)) == (16, 0, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": 2.0}, "a value is 2.0"),
        ({"x": -0.5}, "a value is -0.5"),
        ({"x": np.nan}, "a value is nan"),
        ({"p": 1.5}, "prob is 1.5"),
        ({"p": np.nan}, "prob is nan"),
    ],
)
def test_what_cannot_be_raises_outside_of_jit_and_voids_inside(change, words):
    config = WeightedSumConfig(replacement=True, betting=EXACT)
    start = weighted_sum.init(config, jnp.zeros(3), jnp.ones(3))
    draw = Draw(**({k: jnp.float32(v) for k, v in ({"x": 0.5, "lower": 0, "upper": 1, "p": 0.3} | change).items()}))
    with pytest.raises(ValueError, match=words):
        weighted_sum.update(start, draw, config)
    state, info = jax.jit(weighted_sum.update, static_argnums=2)(start, draw, config)
    assert bool(info.invalid)
    assert [float(v) for v in jax.jit(weighted_sum.bound, static_argnums=2)(state, 0.05, config)] == [-np.inf, np.inf]


def test_bounds_out_of_order_and_levels_that_are_none_are_refused():
    with pytest.raises(ValueError, match="a lower bound is 2.0"):
        weighted_sum.init(WeightedSumConfig(), jnp.full(3, 2.0), jnp.ones(3))
    void = jax.jit(lambda l, u: weighted_sum.init(WeightedSumConfig(), l, u))(jnp.full(3, 2.0), jnp.ones(3))
    assert void.above.invalid and void.below.invalid
    state = weighted_sum.init(WeightedSumConfig(), jnp.zeros(3), jnp.ones(3))
    for alpha in (0.0, 1.0, float("nan")):
        with pytest.raises(ValueError, match="alpha is"):
            weighted_sum.bound(state, alpha)
        assert [float(v) for v in jax.jit(weighted_sum.bound)(state, jnp.float32(alpha))] == [-np.inf, np.inf]
    with pytest.raises(ValueError, match="lower_share is 2"):
        WeightedSumConfig(lower_share=2.0)


WITHOUT = WeightedSumConfig(betting=kw.KWConfig(capacity=16))
_append = jax.jit(lambda state, draws: weighted_sum.update_batch(state, draws, WITHOUT)[0])
_interval = jax.jit(lambda state: jnp.stack(weighted_sum.bound(state, 0.05, WITHOUT)))


def draws_with(p):
    n = len(p)
    return Draw(jnp.full(n, 0.5), jnp.zeros(n), jnp.ones(n), jnp.asarray(p, jnp.float32))


@pytest.mark.parametrize(
    ("p", "words"),
    [
        (np.full(12, 2.0), "the number of draws is 9"),
        (np.full(6, 2.0), "the weight of all draws is 2"),
        (np.full(8, 0.15), r"the weight of all draws is 1\.05"),  # 1.2 in all
        (np.full(8, 0.5), r"the weight of all draws is 1\.5"),
        (np.full(12, 0.01), "the number of draws is 9"),  # of 8 units
    ],
)
def test_more_draws_than_there_can_be_are_refused_and_void_the_sum(p, words):
    start = weighted_sum.init(WITHOUT, jnp.zeros(8), jnp.ones(8))
    draws = draws_with(p)
    halves = [jax.tree.map(lambda v, part=part: v[part], draws._replace(valid=p > 0)) for part in np.s_[:5, 5:]]
    with pytest.raises(ValueError, match=words + r".*, but .*\."):
        weighted_sum.update_batch(start, draws, WITHOUT)
    for state in (_append(start, draws), _append(_append(start, halves[0]), halves[1])):
        state = _append(state, draws_with([0.01]))  # for good
        assert state.above.invalid and state.below.invalid
        assert _interval(state).tolist() == [-np.inf, np.inf]
        assert [float(v) for v in weighted_sum.bound(state, 0.05, WITHOUT)] == [-np.inf, np.inf]


def test_every_unit_once_may_be_drawn_though_weights_sum_with_rounding():
    p = np.float32(np.random.default_rng(3).random(8) + 0.1)
    start = weighted_sum.init(WITHOUT, jnp.zeros(8), jnp.ones(8))
    for scale in (1 - 5e-5, 1, 1 + 5e-5):
        state, info = weighted_sum.update_batch(start, draws_with(p / p.sum() * scale), WITHOUT)
        assert not bool(info.invalid)
        np.testing.assert_allclose(_interval(state), 4, rtol=1e-3)


def test_columns_of_other_lengths_are_refused_also_inside_jit():
    start, draws = weighted_sum.init(WITHOUT, jnp.zeros(8), jnp.ones(8)), draws_with(np.full(5, 0.1))
    for change in ({"x": jnp.ones(4)}, {"lower": jnp.zeros(1)}, {"p": jnp.ones(6)}, {"valid": jnp.ones(1, bool)}):
        wrong = draws._replace(**change)
        for append in (
            lambda wrong: weighted_sum.update_batch(start, wrong, WITHOUT),
            lambda wrong: _append(start, wrong),
        ):
            with unchecked(), pytest.raises(ValueError, match=r"the shapes are .*, but .*\."):
                append(wrong)
    for lower, upper in ((jnp.zeros(1), jnp.ones(8)), (jnp.zeros(0), jnp.ones(0)), (jnp.zeros(()), jnp.ones(()))):
        with unchecked(), pytest.raises(ValueError, match=r"the shapes are .*, but .*\."):
            weighted_sum.init(WITHOUT, lower, upper)
