"""Coverage under adaptive stopping: every population, every rule, every alpha, by independent draws and without
replacement.

A rule looks at all data so far and decides when to stop. It fails when the bound at that time excludes the truth, or,
where the rule only stops at acceptance, when a false budget is accepted. Failures are compared with the 0.999 quantile
of what alpha allows, and their Clopper-Pearson limit is printed (`pytest -rP`).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from skg_jax.stats.fixed_sample import clopper_pearson
from tests.stats.oracle import ALPHAS, POPULATIONS, UNITS, population
from tests.stats.simulate import EPS, sizes

FIRST, MORE, CERTAIN = 20, 30, 3  # draws before an expansion, after it, and units it reads for certain
REPS, SLOW_REPS = 20_000, 200_000
BATCH = 4000
RULES = (
    "stop when excluded",
    "stop at the first acceptance",
    "go on until accepted",
    "expand, then accept",
    "stop at random",
    "stop by the outcome",
)


def _draws(key, law, n, wor):
    """(n units, probabilities or weights of the order)."""
    cum, exact = sampling.integer_law(law)
    index = jnp.where(wor, sampling.draw_wor(key, law, n), sampling.draw_iid(key, cum, n))
    return index, jnp.where(wor, law, exact)[index]


def _seen(slack, p, valid, removed, wor):
    of = kw.observe_wor(slack, p, valid, 1.0, removed), kw.observe_iid(slack, p, valid, removed)
    return jax.tree.map(lambda a, b: jnp.where(wor, a, b), *of)


def _paths(state, budgets, cap, config):
    eta = kw.rounding_guard(cap)
    return jax.lax.map(lambda m: jax.lax.cummax(kw.wealth_path(state, cap, m, eta, config)), budgets)


def _long(key, pop, wor, budgets, cap):
    """One run of UNITS draws: running log wealth at each budget."""
    law = sampling.pps_probs(pop.cap - pop.lo, pop.valid, EPS)
    index, p = _draws(key, law, UNITS, wor)
    config = kw.KWConfig(capacity=UNITS)
    state, _ = kw.update_batch(kw.init(config), _seen((pop.cap - pop.x)[index], p, p > 0, 0.0, wor))
    return _paths(state, budgets, cap, config)


def _expanded(key, pop, wor, budgets, cap):
    """FIRST draws; then the loosest unread units are read for certain, and MORE are drawn from the others."""
    gap, one, two = pop.cap - pop.lo, *jax.random.split(key)
    law = sampling.pps_probs(gap, pop.valid, EPS)
    index, p = _draws(one, law, FIRST, wor)
    slack = pop.cap - pop.x
    config = kw.KWConfig(capacity=FIRST + MORE)
    state, _ = kw.update_batch(kw.init(config), _seen(slack[index], p, p > 0, 0.0, wor))
    gone = jnp.zeros(UNITS, bool).at[index].max(p > 0) | ~pop.valid
    gone = gone.at[jax.lax.top_k(jnp.where(gone, -1, gap), CERTAIN)[1]].set(True)
    removed = jnp.where(gone & pop.valid, slack, 0).sum()
    index, p = _draws(two, sampling.pps_probs(gap, ~gone, EPS), MORE, wor)
    state, _ = kw.update_batch(state, _seen(slack[index], p, p > 0, removed, wor))
    return _paths(state, budgets, cap, config)


@functools.partial(jax.jit, static_argnames="expand")
def _batch(seed, pop, wor, budgets, cap, expand):
    keys = jax.random.split(jax.random.key(seed), BATCH)
    return jax.vmap(lambda key: (_expanded if expand else _long)(key, pop, wor, budgets, cap))(keys)


def running_wealth(name, sampler, reps, expand):
    """Running maximum of log K at the truth, at a budget that holds, and at one that does not: three [reps, draws]."""
    pop = population(name)
    cap, truth = sizes(pop)
    room = cap - truth
    budgets = np.array([truth, truth + 0.1 * room, truth - 0.02 * (room + 0.02 * cap)], np.float32)
    found = [_batch(seed, pop, sampler == "wor", budgets, cap, expand) for seed in range(reps // BATCH)]
    return np.concatenate(found).swapaxes(0, 1)


def failures(alpha, plain, expanded):
    """Failures of every rule at a level."""
    level = -np.log(alpha)
    misses, accepts, false = (paths >= level for paths in plain)
    reps, draws = misses.shape
    rng = np.random.default_rng(3)
    at = lambda stop, path: path[np.arange(reps), stop].sum()
    first = lambda path: np.where(path.any(1), path.argmax(1), path.shape[1] - 1)
    growing = plain[1][:, 1:] > plain[1][:, :-1]  # the last draw brought evidence for the budget that holds
    in_two = np.where(expanded[1][:, FIRST - 1] >= level, FIRST - 1, first(expanded[1] >= level))
    return {
        "stop when excluded": misses[:, -1].sum(),
        "stop at the first acceptance": at(first(accepts), misses),
        "go on until accepted": false[:, -1].sum(),
        "expand, then accept": at(in_two, expanded[0] >= level),
        "stop at random": at(rng.integers(0, draws, reps), misses),
        "stop by the outcome": at(first(~growing), misses),
    }


def check(name, sampler, reps):
    plain, expanded = (running_wealth(name, sampler, reps, expand) for expand in (False, True))
    assert not np.isnan(plain).any() and not np.isnan(expanded).any()
    beyond = []
    for alpha in ALPHAS:
        found = failures(alpha, plain, expanded)
        assert tuple(found) == RULES
        for rule, count in found.items():
            limit = clopper_pearson(int(count), reps, 0.001, "less").high
            line = f"{name}, {sampler}, {rule}, alpha {alpha}: {count} of {reps}, at most {limit:.5f} (99.9%)"
            print(line)
            beyond += [line] if count > binom.ppf(0.999, reps, alpha) else []
    assert not beyond, "\n".join(beyond)


@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_truth_is_rarely_excluded_whenever_one_stops(name, sampler):
    check(name, sampler, REPS)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_truth_is_rarely_excluded_whenever_one_stops_in_many_replications(name, sampler):
    check(name, sampler, SLOW_REPS)


def test_restarting_the_wealth_at_will_is_noticed():
    """Control: whoever starts afresh at the same level until the truth is excluded, twenty times, excludes it."""
    peaks = running_wealth("half at bound", "wor", REPS, False)[0][:, -1].reshape(-1, 20)
    missed = lambda peak: (peak >= -np.log(0.05)).sum() > binom.ppf(0.999, len(peak), 0.05)
    assert missed(peaks.max(1)) and not missed(peaks[:, 0])
