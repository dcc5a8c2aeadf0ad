"""Many audits of one step at once: the rows of a batch that differ in nothing but their key."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binom

from skg_jax import audit
from skg_jax.audit import AuditConfig, AuditReport, Budget, HeadWeights
from tests.audit.lies import HONEST, Lies, told
from tests.audit.synthetic import Step

REPS = 128


@functools.partial(jax.jit, static_argnames="config")
def run(key, evidence, cache, weights: HeadWeights, budget: Budget, lies: Lies, config: AuditConfig) -> AuditReport:
    with told(lies):
        return audit.run(key, evidence, cache, weights, budget, config)


def keys(seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), REPS)


def budget(tau, alpha) -> Budget:
    row = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.float32), (REPS,))
    return Budget(row(tau), -jnp.log(row(alpha)))


class Report(NamedTuple):
    """`AuditReport` in numpy."""

    accepted: np.ndarray
    bound: np.ndarray
    cap: np.ndarray
    log_wealth: np.ndarray
    violated: np.ndarray
    corrupt: np.ndarray
    units: np.ndarray
    drawn: np.ndarray
    pages_read: np.ndarray


def audits(
    step: Step,
    config: AuditConfig,
    tau: float = 0.1,
    alpha: float = 0.1,
    row: int | np.ndarray = 0,
    seed: int = 0,
    lies: Lies = HONEST,
    key: jax.Array | None = None,
) -> Report:
    """REPS audits; `row`: which row of the step each of them audits."""
    rows = np.broadcast_to(row, REPS)
    evidence = jax.tree.map(lambda x: x[:, rows], step.evidence)
    cache = step.cache._replace(page_table=step.cache.page_table[rows])
    found = run(keys(seed) if key is None else key, evidence, cache, step.weights, budget(tau, alpha), lies, config)
    return Report(*(np.asarray(x) for x in found))


def misses_too_often(missed: np.ndarray, alpha: float) -> bool:
    """More often than the 0.999 quantile of what alpha allows."""
    return missed.sum() > binom.ppf(0.999, missed.size, alpha)
