"""The processes as programs: batch against single updates, edges, refusals, monotonicity, reflection, compilation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skg_jax.stats import betting, conjugate_mixture, empirical_bernstein, hoeffding, varying_means
from skg_jax.stats.betting import BettingConfig
from skg_jax.stats.conjugate_mixture import ConjugateMixtureConfig
from skg_jax.stats.empirical_bernstein import EmpiricalBernsteinConfig
from skg_jax.stats.hoeffding import HoeffdingConfig
from skg_jax.stats.varying_means import VaryingMeansConfig
from tests.stats.unchecked import unchecked

N = 17
CONFIGS = {
    hoeffding: HoeffdingConfig,
    empirical_bernstein: EmpiricalBernsteinConfig,
    betting: functools.partial(BettingConfig, breaks=50),
    conjugate_mixture: ConjugateMixtureConfig,
}
MODULES = list(CONFIGS)
SAMPLES = st.lists(st.floats(0, 1, width=32), min_size=N, max_size=N).map(lambda v: np.array(v, np.float32))
LEVELS = (0.2, 0.05, 0.001)

MOST = 300  # observations of a test, padded to this so that a module is compiled once
_update_batch = jax.jit(lambda module, state, x, valid: module.update_batch(state, x, valid)[0], static_argnums=0)
_bound = jax.jit(lambda module, state, alpha: jnp.stack(module.bound(state, alpha)), static_argnums=0)


def update_batch(module, state, x, valid=None):
    valid = np.ones(x.size, bool) if valid is None else np.asarray(valid)
    more = (0, MOST - x.size)
    return _update_batch(module, state, np.pad(np.asarray(x), more, constant_values=np.nan), np.pad(valid, more))


def bound(module, state, alpha):
    return np.asarray(_bound(module, state, np.asarray(alpha, state.plan.alpha.dtype)))


@functools.partial(jax.jit, static_argnums=0)
def path(module, state, x):
    """(last state, bounds at LEVELS after each observation, [n, 3, 2]), one update at a time."""

    def step(state, x):
        state, _ = module.update(state, x)
        return state, jnp.stack([jnp.stack(module.bound(state, a)) for a in LEVELS])

    return jax.lax.scan(step, state, x)


def start(module, **choices):
    return module.init(CONFIGS[module](**choices))


def some(seed: int, n: int = N) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).beta(0.5, 2, n), jnp.float32)


@pytest.mark.parametrize("population", [None, 20])
@pytest.mark.parametrize("module", MODULES)
def test_batches_equal_single_updates_and_padding_is_skipped(module, population):
    x = some(1)
    single, _ = path(module, start(module, population=population), x)
    padded = jnp.full(24, jnp.nan).at[jnp.array([*range(0, 10), *range(13, 20)])].set(x)
    state = update_batch(module, start(module, population=population), padded[:12], ~jnp.isnan(padded[:12]))
    batch = update_batch(module, state, padded[12:], ~jnp.isnan(padded[12:]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=3e-5, atol=3e-5), single, batch)
    assert not batch.moments.invalid and batch.moments.count == N


@pytest.mark.parametrize("module", MODULES)
@given(x=SAMPLES)
@settings(max_examples=10)
def test_bounds_narrow_with_time_and_widen_with_confidence(module, x):
    """At the configured level; L and U never cross but where the set is empty."""
    _, bounds = path(module, start(module), jnp.asarray(x))
    bounds = np.asarray(bounds)
    assert ((bounds >= 0) & (bounds <= 1)).all()
    assert (np.diff(bounds[:, 1, 0]) >= 0).all() and (np.diff(bounds[:, 1, 1]) <= 0).all()
    assert (np.diff(bounds[:, :, 0], axis=1) <= 1e-6).all() and (np.diff(bounds[:, :, 1], axis=1) >= -1e-6).all()


@pytest.mark.parametrize("module", MODULES)
@given(x=SAMPLES)
@settings(max_examples=10)
def test_reflection(module, x):
    """1 - x has the reflected interval. Steps of 1/64, so that 1 - x is exact."""
    x = jnp.round(jnp.asarray(x) * 64) / 64
    bounds, mirrored = (np.asarray(path(module, start(module), v)[1]) for v in (x, 1 - x))
    np.testing.assert_allclose(1 - mirrored[..., ::-1], bounds, atol=1 / 50 + 1e-6 if module is betting else 2e-5)


@pytest.mark.parametrize("module", MODULES)
def test_one_sided_bounds_are_tighter_and_leave_the_other_side_open(module):
    x = some(3, 300)
    after = lambda share: update_batch(module, start(module, lower_share=share), x)
    both, lower, upper = (bound(module, after(share), 0.05) for share in (0.5, 1.0, 0.0))
    assert lower[1] == 1 and upper[0] == 0
    assert lower[0] >= both[0] > 0 and upper[1] <= both[1] < 1


@pytest.mark.parametrize("module", MODULES)
def test_an_exhausted_population_is_known(module):
    x = some(5, 31)
    got = bound(module, update_batch(module, start(module, population=31), x), 1e-6)
    np.testing.assert_allclose(got, np.mean(np.asarray(x, np.float64)), atol=2e-6)
    assert got[0] <= np.mean(np.asarray(x, np.float64)) <= got[1]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_constants_at_the_ends(module, constant):
    state = update_batch(module, start(module), jnp.full(200, constant))
    lower, upper = bound(module, state, 0.05)
    assert lower <= constant <= upper and upper - lower < 0.3


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -1e-3, 1.001])
def test_bad_observations_void_the_bounds_for_good(module, bad):
    state = update_batch(module, start(module), some(1).at[4].set(bad))
    state = update_batch(module, state, some(2))
    assert state.moments.invalid
    assert bound(module, state, 0.05).tolist() == [0, 1]
    assert not any(np.isnan(leaf).any() for leaf in jax.tree.leaves(state))
    with pytest.raises(ValueError, match=r"the observation is .*lies in \[0, 1\]"):
        module.update(start(module), bad)


@pytest.mark.parametrize("module", MODULES)
def test_more_draws_than_the_population_void_the_bounds(module):
    state = update_batch(module, start(module, population=N), some(1))
    assert not state.moments.invalid
    after, info = jax.jit(module.update)(state, 0.5)
    assert after.moments.invalid and info.invalid and (int(info.used), int(info.ignored)) == (0, 1)
    with pytest.raises(ValueError, match=r"0\.5, but .* no more of them than items"):
        module.update(state, 0.5)


@pytest.mark.parametrize("module", MODULES)
def test_alpha_that_is_no_probability(module):
    state = update_batch(module, start(module), some(1, 60))
    for alpha in (0.0, 1.0, -0.1, float("nan")):
        for level in (alpha, np.float32(alpha), np.asarray(alpha), jnp.float32(alpha)):
            with pytest.raises(ValueError, match="alpha is"):
                module.bound(state, level)
        assert bound(module, state, alpha).tolist() == [0, 1]


@pytest.mark.parametrize("module", MODULES)
def test_alphas_in_a_list_are_refused_also_inside_jit(module):
    state = start(module)
    for alphas in (np.array([2.0]), np.array([0.05, 0.01]), np.full((1, 3), 0.1)):
        for bound_of in (module.bound, jax.jit(module.bound)):
            with unchecked(), pytest.raises(ValueError, match=r"alpha has shape \(.*\), but it is one number"):
                bound_of(state, np.float32(alphas))


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("flags", [0, 1, 4, 6, (5, 1)])
def test_another_number_of_flags_than_observations_is_refused_also_inside_jit(module, flags):
    state, x, valid = start(module), some(1, 5), np.ones(flags, bool)
    for update in (module.update_batch, jax.jit(module.update_batch)):
        with unchecked(), pytest.raises(ValueError, match=r"x has shape \(5,\) and valid \(.*\), but .*\."):
            update(state, x, valid)
    with unchecked(), pytest.raises(ValueError, match=r"x has shape \(1, 5\)"):
        module.update(state, x)


@pytest.mark.parametrize("module", MODULES)
def test_one_flag_stands_for_all(module):
    state, x = start(module), some(1, 5)
    equal = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    equal(module.update_batch(state, x, True), module.update_batch(state, x))
    after, info = module.update_batch(state, x * np.nan, False)
    equal(module.bound(after, 0.05), module.bound(state, 0.05))
    assert (int(info.used), int(after.moments.count), bool(info.invalid)) == (0, 0, False)


@pytest.mark.parametrize("module", MODULES)
def test_no_observations_change_nothing(module):
    state = update_batch(module, start(module), some(1))
    for update in (module.update_batch, jax.jit(module.update_batch)):
        after, info = update(state, jnp.zeros(0))
        jax.tree.map(np.testing.assert_array_equal, after, state)
        assert (int(info.used), int(info.ignored), bool(info.invalid)) == (0, 0, False)


@pytest.mark.parametrize("module", MODULES)
def test_vmap_and_float64(module):
    xs = jnp.stack([some(seed) for seed in range(3)])
    after = lambda state, x: jnp.stack(module.bound(module.update_batch(state, x)[0], 0.05))
    many = jax.jit(jax.vmap(after, (None, 0)))(start(module), xs)
    with jax.enable_x64(True):
        state, one = module.init(CONFIGS[module](), jnp.float64), jax.jit(after)
        for x, row in zip(np.asarray(xs, np.float64), many, strict=True):
            bounds = one(state, x)
            assert bounds.dtype == jnp.float64
            np.testing.assert_allclose(row, bounds, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("module", MODULES)
def test_jit_equals_eager(module):
    x, state = some(4, 9), start(module)
    eager, jitted = module.update_batch(state, x)[0], update_batch(module, state, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), eager, jitted)
    np.testing.assert_allclose(module.bound(eager, 0.05), bound(module, eager, 0.05), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: HoeffdingConfig(alpha=1.0), "alpha is 1.0"),
        (lambda: HoeffdingConfig(lower_share=1.5), "lower_share is 1.5"),
        (lambda: HoeffdingConfig(alpha=np.float32(2)), "alpha is 2.0"),  # pyright: ignore[reportArgumentType]
        (lambda: HoeffdingConfig(population=0), "population is 0"),
        (lambda: BettingConfig(population=math.nan), "population is nan"),  # pyright: ignore[reportArgumentType]
        (lambda: HoeffdingConfig(population=math.inf), "population is inf"),  # pyright: ignore[reportArgumentType]
        (lambda: HoeffdingConfig(population=1.5), "population is 1.5"),  # pyright: ignore[reportArgumentType]
        (lambda: HoeffdingConfig(truncation=0.0), "truncation is 0.0"),
        (lambda: EmpiricalBernsteinConfig(truncation=1.0), "truncation is 1.0"),
        (lambda: EmpiricalBernsteinConfig(first_mean=2.0), "first_mean is 2.0"),
        (lambda: BettingConfig(breaks=0), "breaks is 0"),
        (lambda: BettingConfig(cap=1.0), "cap is 1.0"),
        (lambda: ConjugateMixtureConfig(v_opt=-1.0), "v_opt is -1.0"),
        (lambda: ConjugateMixtureConfig(first_mean=-1.0), "first_mean is -1.0"),
        (lambda: VaryingMeansConfig(population=3), "population is 3"),
    ],
)
def test_refusals(make, words):
    with unchecked(), pytest.raises(ValueError, match=words):
        make()


def test_varying_means_use_predictions_and_refuse_wild_ones():
    x = some(7, 80)
    state = varying_means.init()
    after = jax.jit(lambda *seen: varying_means.bound(varying_means.update_batch(state, *seen)[0], 0.05))
    plain, told = after(x), after(x, None, jnp.clip(x + 0.02, 0, 1))
    assert told[1] - told[0] < plain[1] - plain[0]
    wild, info = jax.jit(varying_means.update)(state, 0.5, 1.5)
    assert info.invalid
    with pytest.raises(ValueError, match=r"the prediction is 1\.5"):
        varying_means.update(state, 0.5, 1.5)
    assert np.array(varying_means.bound(wild, 0.05)).tolist() == [0, 1]


@pytest.mark.parametrize("boundary", ["gamma_exponential", "normal", "stitching"])
def test_varying_means_batches_equal_single_updates(boundary):
    config = VaryingMeansConfig(boundary=boundary)
    state = varying_means.init(config)
    x = some(8)
    single = jax.jit(lambda x: jax.lax.scan(lambda s, v: (varying_means.update(s, v)[0], None), state, x)[0])(x)
    batch, info = jax.jit(varying_means.update_batch)(state, x)
    assert (int(info.used), int(info.ignored), bool(info.invalid)) == (N, 0, False)
    np.testing.assert_allclose(single.variation, batch.variation, rtol=1e-5)
    bound_of = jax.jit(lambda state: varying_means.bound(state, 0.05, config))
    bounds = bound_of(batch)
    np.testing.assert_allclose(bound_of(single), bounds, rtol=1e-5)
    assert 0 <= bounds[0] <= x.mean() <= bounds[1] <= 1
