"""Repeated audits of one population, right or wrong on purpose, and the two detectors of the statistical tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from tests.stats.oracle import ALPHAS, UNITS, Population

EPS = 0.05
REPS = 2000  # of one batch: everything below is compiled once, for that size
FAULTS = (
    "none",
    "claimed uniform",
    "drawn uniformly",
    "mass not reduced",
    "slack never removed",
    "slack removed early",
)


def sizes(pop: Population) -> tuple[np.float32, np.float32]:
    """(sum of caps, true total) over the valid units."""
    as64 = lambda v: v.astype(np.float64)[pop.valid].sum()
    return np.float32(as64(pop.cap)), np.float32(as64(pop.x))


def _audit(key, pop, wor, fault) -> tuple[kw.KWState, jax.Array]:
    """UNITS draws with probability proportional to the gap, booked as they were made unless `fault` says otherwise."""
    is_fault = lambda name: fault == FAULTS.index(name)
    law = sampling.pps_probs(pop.cap - pop.lo, pop.valid, EPS)
    flat = pop.valid / pop.valid.sum()
    cum, exact = sampling.integer_law(jnp.where(is_fault("drawn uniformly"), flat, law))
    claim = jnp.where(wor | is_fault("drawn uniformly"), law, exact)
    claim = jnp.where(is_fault("claimed uniform"), flat, claim)
    index = jnp.where(wor, sampling.draw_wor(key, law, UNITS), sampling.draw_iid(key, cum, UNITS))
    slack, drawn = pop.cap[index] - pop.x[index], law[index] > 0
    iid_seen, wor_seen = kw.observe_iid(slack, claim[index], drawn), kw.observe_wor(slack, claim[index], drawn)
    seen = jax.tree.map(lambda a, b: jnp.where(wor, a, b), wor_seen, iid_seen)
    removed = seen.removed + jnp.where(is_fault("slack removed early"), slack, 0)
    seen = seen._replace(
        probs=jnp.where(is_fault("mass not reduced"), law[index], seen.probs),
        removed=jnp.where(is_fault("slack never removed"), 0, removed),
    )
    outside = kw.violated(pop.x[index], pop.lo[index], pop.cap[index], drawn)
    return kw.update_batch(kw.init(kw.KWConfig(capacity=UNITS)), seen)[0], outside


_audits = jax.jit(jax.vmap(_audit, (0, None, None, None)))


def audits_and_flags(pop: Population, sampler: str, fault: str = "none", seed: int = 0):
    """REPS audits by "iid" or "wor" draws, and which of them read a value outside its bounds."""
    keys = jax.random.split(jax.random.key(seed), REPS)
    return _audits(keys, pop, sampler == "wor", FAULTS.index(fault))


def audits(pop: Population, sampler: str, fault: str = "none", seed: int = 0) -> kw.KWState:
    return audits_and_flags(pop, sampler, fault, seed)[0]


@functools.partial(jax.jit, static_argnames="config")
def _paths(states, cap, truth, eta, config):
    return jax.vmap(lambda s: kw.wealth_path(s, cap, truth, eta, config))(states)


def paths(states: kw.KWState, pop: Population, guard: float = kw.GUARD, config=kw.DEFAULT) -> np.ndarray:
    """log K_t at the true total, [REPS, UNITS]."""
    cap, truth = sizes(pop)
    return np.asarray(_paths(states, cap, truth, guard * cap, config))


def many_paths(
    pop: Population, sampler: str, fault: str = "none", guard: float = kw.GUARD, config=kw.DEFAULT, times=10
):
    """`paths` of several batches."""
    return np.concatenate([paths(audits(pop, sampler, fault, s), pop, guard, config) for s in range(times)])


def undercovers(peaks: np.ndarray) -> bool:
    """Detector 1: the true total was excluded at some time, more often than the 0.999 quantile of what alpha allows."""
    return any((peaks >= -np.log(a)).sum() > binom.ppf(0.999, peaks.size, a) for a in ALPHAS)


def mean_is_off(log_wealth: np.ndarray) -> bool:
    """Detector 2: the mean of the wealth at the true total differs from 1 by more than 4 standard errors."""
    k = np.exp(log_wealth.astype(np.float64))
    return abs(k.mean() - 1) > 4 * k.std(ddof=1) / np.sqrt(k.size)
