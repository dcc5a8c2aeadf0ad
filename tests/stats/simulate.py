"""Repeated audits of one population, right or wrong on purpose, and the two detectors of the statistical tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from tests.stats.oracle import ALPHAS, Population

EPS = 0.05


def sizes(pop: Population) -> tuple[np.float32, np.float32]:
    """(sum of caps, true total) over the valid units."""
    as64 = lambda v: v.astype(np.float64)[pop.valid].sum()  # noqa: E731
    return np.float32(as64(pop.cap)), np.float32(as64(pop.x))


@functools.partial(jax.jit, static_argnames=("sampler", "n", "fault"))
def audit(key, x, lo, cap, valid, sampler: str, n: int, fault: str = ""):
    """n draws with probability proportional to the gap, booked correctly unless `fault` says otherwise.

    Returns the process and whether a read lay outside its bounds.
    """
    law = sampling.pps_probs(cap - lo, valid, EPS)
    flat = valid / valid.sum()
    cum, exact = sampling.integer_law(flat if fault == "drawn uniformly" else law)
    claim = {"claimed uniform": flat, "drawn uniformly": law}.get(fault, exact if sampler == "iid" else law)
    index = sampling.draw_iid(key, cum, n) if sampler == "iid" else sampling.draw_wor(key, law, n)
    slack, drawn = cap[index] - x[index], law[index] > 0
    if sampler == "iid":
        seen = kw.observe_iid(slack, claim[index], drawn)
    else:
        seen = kw.observe_wor(slack, claim[index], drawn)
    if fault == "mass not reduced":
        seen = seen._replace(probs=law[index])
    if fault == "slack never removed":
        seen = seen._replace(removed=jnp.zeros(n))
    if fault == "slack removed early":
        seen = seen._replace(removed=seen.removed + slack)
    outside = kw.violated(x[index], lo[index], cap[index], drawn)
    return kw.update_batch(kw.init(kw.KWConfig(capacity=n)), *seen), outside


def audits(pop: Population, sampler: str, n: int, reps: int, fault: str = "", seed: int = 0, with_flags: bool = False):
    keys = jax.random.split(jax.random.key(seed), reps)
    states, flags = jax.vmap(lambda key: audit(key, *pop, sampler=sampler, n=n, fault=fault))(keys)
    return (states, flags) if with_flags else states


def paths(states: kw.KWState, pop: Population, eta=None, config=kw.DEFAULT):
    """log K_t at the true total, [reps, n]."""
    cap, truth = sizes(pop)
    eta = kw.rounding_guard(cap) if eta is None else eta
    return np.asarray(_paths(states, cap, truth, eta, config))


@functools.partial(jax.jit, static_argnames="config")
def _paths(states, cap, truth, eta, config):
    return jax.vmap(lambda s: kw.wealth_path(s, cap, truth, eta, config))(states)


def undercovers(peaks: np.ndarray) -> bool:
    """Detector 1: the true total was excluded at some time, more often than the 0.999 quantile of what alpha allows."""
    return any((peaks >= -np.log(a)).sum() > binom.ppf(0.999, peaks.size, a) for a in ALPHAS)


def mean_is_off(log_wealth: np.ndarray) -> bool:
    """Detector 2: the mean of the wealth at the true total differs from 1 by more than 4 standard errors."""
    k = np.exp(log_wealth.astype(np.float64))
    return abs(k.mean() - 1) > 4 * k.std(ddof=1) / np.sqrt(k.size)
