"""The mean of the wealth at the truth, and the faults that must be noticed; `test_stopping_rules` has the coverage.

A fault counts as noticed when the detector named for it fires: exclusion of the truth too often, a mean wealth other
than 1, or a read outside its bounds. Two of them widen the bound instead of breaking it: only the mean sees those.
"""

import numpy as np
import pytest
from scipy.stats import binom, norm

from skg_jax.stats import kaplan_wald as kw
from tests.stats.oracle import population
from tests.stats.simulate import REPS, audits, audits_and_flags, many_paths, mean_is_off, paths, sizes, undercovers

SMALL_BETS = kw.KWConfig(betas=(0.3, 0.15, 0.05), weights=(0.4, 0.3, 0.3))
LATE = 39  # the draw at which means are taken: before exhaustion, where the rounding guard starts to lower them


@pytest.mark.parametrize("sampler", ["iid", "wor"])
@pytest.mark.parametrize("name", ["flat", "lognormal", "zipf", "needle", "loose needle"])
def test_mean_wealth_at_the_truth_is_one(name, sampler):
    """Two-sided, 20,000 replications, bets at most .3: it sees evidence that is lost as well as evidence made up."""
    assert not mean_is_off(many_paths(population(name), sampler, config=SMALL_BETS)[:, LATE])


@pytest.mark.parametrize(
    ("sampler", "fault"),
    [("iid", "claimed uniform"), ("wor", "mass not reduced"), ("wor", "slack removed early")],
)
def test_faults_that_exclude_the_truth(sampler, fault):
    pop = population("lognormal")
    assert undercovers(paths(audits(pop, sampler, fault), pop).max(1))


@pytest.mark.parametrize(("sampler", "fault"), [("iid", "drawn uniformly"), ("wor", "slack never removed")])
def test_faults_that_only_the_mean_sees(sampler, fault):
    pop = population("lognormal")
    assert not undercovers(paths(audits(pop, sampler, fault), pop).max(1))
    assert mean_is_off(many_paths(pop, sampler, fault, config=SMALL_BETS)[:, LATE])


def test_bet_chosen_after_its_draw_excludes_the_truth():
    pop = population("lognormal")
    state, (cap, truth) = audits(pop, "wor"), sizes(pop)
    v = np.asarray(state.y) / (cap - truth - np.asarray(state.spent) + kw.GUARD * cap)
    beta = np.where(v > 1, 1.0, 0.05)
    assert undercovers(np.cumsum(np.log1p(beta * (v - 1)), axis=1).max(1))


def test_halved_caps_exclude_the_truth_and_are_flagged():
    pop = population("half at bound")
    broken = pop._replace(cap=pop.cap / 2)
    states, flags = audits_and_flags(broken, "wor")
    deaf = states._replace(invalid=np.zeros_like(states.invalid))
    assert undercovers(paths(deaf, broken).max(1))
    assert np.asarray(flags).all() and np.asarray(states.invalid).all()
    assert np.all(paths(states, broken) == 0)  # the flag in the state takes all evidence away
    fine, flags = audits_and_flags(pop, "wor")
    assert not np.asarray(flags).any() and not np.asarray(fine.invalid).any()


def test_float32_without_guard_excludes_the_truth():
    pop = population("half at bound")
    assert undercovers(paths(audits(pop, "wor"), pop, guard=0.0).max(1))


def test_a_normal_interval_misses_the_needle():
    """Control: uniform draws and the normal quantile, right for most samples that saw no needle, are wrong with it."""
    pop = population("loose needle")
    rng, draws = np.random.default_rng(0), 40
    index = rng.permuted(np.tile(np.arange(pop.x.size), (REPS, 1)), axis=1)[:, :draws]
    x = pop.x.astype(np.float64)[index]
    margin = norm.isf(0.05) * x.std(1, ddof=1) * np.sqrt((1 - draws / pop.x.size) / draws)
    missed = pop.x.size * (x.mean(1) + margin) < pop.x.astype(np.float64).sum()
    assert missed.sum() > binom.ppf(0.999, REPS, 0.05)
    assert not undercovers(paths(audits(pop, "wor"), pop).max(1))
