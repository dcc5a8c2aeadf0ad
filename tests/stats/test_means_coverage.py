"""Coverage of the mean under several stopping rules, and what must be noticed when an assumption is broken.

"ever" stops as soon as the truth is excluded, which is the worst rule; the others ask about the interval at their own
stopping time only. Each count is compared with the 0.999 quantile of what alpha allows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom, norm

from skg_jax.stats import betting, conjugate_mixture, empirical_bernstein, hoeffding, varying_means
from tests.stats.test_means import CONFIGS, MODULES

ALPHA, DRAWS, REPS = 0.1, 40, 1000
RULES = ("ever", "first narrow", "first above a half", "random", "last")
LAWS = ("coin", "rare", "uniform", "half at the end")


def observations(law: str, reps: int, seed: int) -> tuple[np.ndarray, float]:
    """([reps, DRAWS] independent draws, their mean)."""
    rng = np.random.default_rng(seed)
    u = rng.random((reps, DRAWS))
    match law:
        case "coin":
            return (u < 0.5).astype(np.float32), 0.5
        case "rare":
            return (u < 0.05).astype(np.float32), 0.05
        case "uniform":
            return u.astype(np.float32), 0.5
        case _:
            return np.where(rng.random(u.shape) < 0.5, 1.0, u).astype(np.float32), 0.75


def shuffled(name: str, reps: int, seed: int) -> tuple[np.ndarray, float]:
    """([reps, DRAWS] orders of a population of DRAWS items, its mean)."""
    rng = np.random.default_rng(seed)
    items = {
        "needle": np.r_[1.0, np.full(DRAWS - 1, 1 / 64)],
        "half at the end": np.r_[np.ones(DRAWS // 2), np.zeros(DRAWS - DRAWS // 2)],
        "all zero": np.zeros(DRAWS),
    }[name].astype(np.float32)
    return rng.permuted(np.tile(items, (reps, 1)), axis=1), float(items.astype(np.float64).mean())


@functools.partial(jax.jit, static_argnums=(0, 1))
def _paths(module, config, xs):
    def step(states, x):
        states, _ = jax.vmap(module.update)(states, x)
        return states, jnp.stack(jax.vmap(lambda s: module.bound(s, config.alpha))(states))

    states = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (xs.shape[0], *leaf.shape)), module.init(config))
    return jax.lax.scan(step, states, xs.T)[1]


def excluded(module, xs: np.ndarray, truth: float, population: int | None = None, alpha=ALPHA) -> dict[str, int]:
    """How many replications exclude the truth at the stopping time of each rule."""
    config = CONFIGS[module](alpha=alpha, population=population)
    lower, upper = np.asarray(_paths(module, config, jnp.asarray(xs)), np.float64).swapaxes(0, 1)
    return by_rule(lower, upper, truth)


def by_rule(lower: np.ndarray, upper: np.ndarray, truth: float) -> dict[str, int]:
    """The same from bounds [DRAWS, reps]; a rule that never fires stops at the last draw."""
    miss = (lower > truth) | (upper < truth)
    first = lambda when: np.where(when.any(0), when.argmax(0), len(when) - 1)
    stops = {
        "ever": first(miss),
        "first narrow": first(upper - lower < 0.4),
        "first above a half": first(lower > 0.5),
        "random": np.random.default_rng(1).integers(0, len(miss), miss.shape[1]),
        "last": np.full(miss.shape[1], len(miss) - 1),
    }
    assert tuple(stops) == RULES
    return {rule: int(miss[at, np.arange(miss.shape[1])].sum()) for rule, at in stops.items()}


def allowed(reps: int, alpha: float = ALPHA) -> float:
    return float(binom.ppf(0.999, reps, alpha))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("module", MODULES)
def test_independent_draws(module, law):
    assert max(excluded(module, *observations(law, REPS, 0)).values()) <= allowed(REPS)


@pytest.mark.parametrize("name", ["needle", "half at the end", "all zero"])
@pytest.mark.parametrize("module", MODULES)
def test_draws_without_replacement_to_exhaustion(module, name):
    assert max(excluded(module, *shuffled(name, REPS, 0), DRAWS).values()) <= allowed(REPS)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.1, 0.05, 0.01])
@pytest.mark.parametrize("module", MODULES)
def test_many_replications(module, alpha):
    counts: dict[str, int] = dict.fromkeys((*LAWS, "needle", "half, shuffled"), 0)
    for seed in range(20):
        for law in LAWS:
            counts[law] += excluded(module, *observations(law, REPS, seed), alpha=alpha)["ever"]
        for key, name in (("needle", "needle"), ("half, shuffled", "half at the end")):
            counts[key] += excluded(module, *shuffled(name, REPS, seed), DRAWS, alpha)["ever"]
    assert max(counts.values()) <= allowed(20 * REPS, alpha), counts


def drifting(reps: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """([reps, DRAWS] observations whose mean jumps, and falls after a success; the averages of those means so far)."""
    rng = np.random.default_rng(seed)
    x, means = np.zeros((reps, DRAWS)), np.zeros((reps, DRAWS))
    for t in range(DRAWS):
        last = x[:, t - 1] if t else 0.5
        means[:, t] = (0.05 if t < DRAWS // 2 else 0.85) + 0.1 * (1 - last)
        x[:, t] = rng.random(reps) < means[:, t]
    return x.astype(np.float32), np.cumsum(means, 1) / np.arange(1, DRAWS + 1)


@functools.partial(jax.jit, static_argnums=0)
def _drift_paths(config, xs):
    def one(row):
        def step(state, x):
            state, _ = varying_means.update(state, x)
            return state, jnp.stack(varying_means.bound(state, ALPHA, config))

        return jax.lax.scan(step, varying_means.init(config), row)[1]

    return jax.vmap(one)(xs)


@pytest.mark.parametrize("boundary", ["gamma_exponential", "normal", "stitching"])
def test_means_that_vary(boundary):
    xs, truth = drifting(REPS, 0)
    config = varying_means.VaryingMeansConfig(alpha=ALPHA, boundary=boundary)
    low, high = np.moveaxis(np.asarray(_drift_paths(config, jnp.asarray(xs)), np.float64), -1, 0)
    assert ((low > truth) | (high < truth)).any(1).sum() <= allowed(REPS)


def test_a_common_mean_claimed_for_means_that_vary_is_noticed():
    xs, truth = drifting(REPS, 0)
    bounds = np.asarray(_paths(betting, CONFIGS[betting](alpha=ALPHA), jnp.asarray(xs)), np.float64)
    low, high = bounds.swapaxes(0, 1)
    assert ((low > truth.T) | (high < truth.T)).any(0).sum() > allowed(REPS)


@pytest.mark.parametrize("module", MODULES)
def test_claiming_a_population_that_was_drawn_with_replacement_is_noticed(module):
    xs, truth = observations("coin", REPS, 0)
    assert excluded(module, xs, truth, DRAWS)["ever"] > allowed(REPS)


@pytest.mark.parametrize("module", MODULES)
def test_clipping_values_above_one_is_noticed(module):
    """What the flag is for: clipped, the draws exclude their mean; as they are, they end with an open interval."""
    xs, truth = 2 * observations("coin", REPS, 0)[0], 1.0
    assert excluded(module, np.minimum(xs, 1), truth)["ever"] > allowed(REPS)
    assert excluded(module, xs, truth)["last"] == 0


@pytest.mark.parametrize("module", MODULES)
def test_large_items_first_is_noticed(module):
    xs, truth = shuffled("half at the end", REPS, 0)
    assert excluded(module, -np.sort(-xs, axis=1), truth, DRAWS)["ever"] > allowed(REPS)


def test_repeated_looks_at_a_fixed_time_interval_are_noticed():
    """The normal interval, right at one time, is not at all of them; the same detector says so."""
    xs, truth = observations("uniform", REPS, 0)
    time = np.arange(1, DRAWS + 1)[:, None]
    mean, margin = np.cumsum(xs.T, 0) / time, norm.ppf(1 - ALPHA / 2) / np.sqrt(12 * time)
    counts = by_rule(mean - margin, mean + margin, truth)
    assert counts["ever"] > allowed(REPS) and counts["last"] <= allowed(REPS)


@pytest.mark.slow
def test_widths_are_ordered_as_published():
    """Betting is narrowest and, where the variance is small, empirical Bernstein beats Hoeffding."""
    x = jnp.asarray(np.random.default_rng(2).beta(10, 30, 2000), jnp.float32)
    widths = []
    for module in (betting, empirical_bernstein, hoeffding):
        lower, upper = module.bound(module.update_batch(module.init(), x)[0], 0.05)
        widths.append(float(upper - lower))
    assert widths == sorted(widths) and widths[1] < widths[2] / 2
    lower, upper = conjugate_mixture.bound(conjugate_mixture.update_batch(conjugate_mixture.init(), x)[0], 0.05)
    assert upper - lower < widths[2] / 2
