"""Coverage under the worst stopping rule (stop as soon as the truth is excluded), and the faults that must be noticed.

A fault counts as noticed when the detector named for it fires: exclusion of the truth too often, a mean wealth other
than 1, or a read outside its bounds. Two of them widen the bound instead of breaking it: only the mean sees those.
"""

import numpy as np
import pytest

from skg_jax.stats import kaplan_wald as kw
from tests.stats.oracle import POPULATIONS, UNITS, population
from tests.stats.simulate import audits, mean_is_off, paths, sizes, undercovers

SMALL_BETS = kw.KWConfig(betas=(0.3, 0.15, 0.05), weights=(0.4, 0.3, 0.3))
REPS = 2000
LATE = 39  # before exhaustion, where the rounding guard starts to lower the mean


@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_truth_is_rarely_excluded(name, sampler):
    pop = population(name)
    states = audits(pop, sampler, UNITS, REPS)  # without replacement: to exhaustion
    log_wealth = paths(states, pop)
    assert not np.isnan(log_wealth).any()
    assert not undercovers(log_wealth.max(1))
    if name in ("all at bound", "one unit"):
        assert np.all(np.isfinite(log_wealth))


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", POPULATIONS)
def test_truth_is_rarely_excluded_many_replications(name, sampler):
    pop = population(name)
    peaks = [paths(audits(pop, sampler, UNITS, REPS, seed=seed), pop).max(1) for seed in range(1, 11)]
    assert not undercovers(np.concatenate(peaks))


@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", ["lognormal", "needle"])
def test_mean_wealth_at_the_truth_is_one(name, sampler):
    pop = population(name)
    states = audits(pop, sampler, UNITS, 10 * REPS)
    assert not mean_is_off(paths(states, pop, config=SMALL_BETS)[:, LATE])


@pytest.mark.parametrize(
    ("sampler", "fault"),
    [("iid", "claimed uniform"), ("wor", "mass not reduced"), ("wor", "slack removed early")],
)
def test_faults_that_exclude_the_truth(sampler, fault):
    pop = population("lognormal")
    assert undercovers(paths(audits(pop, sampler, UNITS, REPS, fault), pop).max(1))
    assert not undercovers(paths(audits(pop, sampler, UNITS, REPS), pop).max(1))


@pytest.mark.parametrize(("sampler", "fault"), [("iid", "drawn uniformly"), ("wor", "slack never removed")])
def test_faults_that_only_the_mean_sees(sampler, fault):
    pop = population("lognormal")
    states = audits(pop, sampler, UNITS, 10 * REPS, fault)
    assert not undercovers(paths(states, pop).max(1))
    assert mean_is_off(paths(states, pop, config=SMALL_BETS)[:, LATE])


def test_bet_chosen_after_its_draw_excludes_the_truth():
    pop = population("lognormal")
    states = audits(pop, "wor", UNITS, REPS)
    cap, truth = sizes(pop)
    v = np.asarray(states.y) / (cap - truth - np.asarray(states.spent) + kw.rounding_guard(cap))
    beta = np.where(v > 1, 1.0, 0.05)
    assert undercovers(np.cumsum(np.log1p(beta * (v - 1)), axis=1).max(1))


def test_halved_caps_exclude_the_truth_and_are_flagged():
    pop = population("half at bound")
    broken = pop._replace(cap=pop.cap / 2)
    states, flags = audits(broken, "wor", UNITS, REPS, with_flags=True)
    assert undercovers(paths(states, broken).max(1))
    assert np.asarray(flags).all()
    assert not np.asarray(audits(pop, "wor", UNITS, REPS, with_flags=True)[1]).any()


def test_float32_without_guard_excludes_the_truth():
    pop = population("half at bound")
    peaks = [paths(audits(pop, "wor", UNITS, REPS, seed=s), pop, eta=0.0).max(1) for s in range(3)]
    assert undercovers(np.concatenate(peaks))
