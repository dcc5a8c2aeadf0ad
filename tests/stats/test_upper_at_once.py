"""The bound of a long process from one set of candidates, beside its fine inversion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.stats import blocked
from skg_jax.stats import kaplan_wald as kw

CONFIG = kw.KWConfig(capacity=5000, grid=16)
FINE = kw.KWConfig(capacity=5000, grid=32, levels=4)
CAP, LEVEL, ETA = 1.0, 9.2, 1e-5


def process(y: np.ndarray) -> kw.KWState:
    """Draws with replacement whose slack over probability is y: the estimate of R is CAP - mean(y)."""
    count = len(y)
    draws = kw.observe_iid(jnp.asarray(y, jnp.float32), jnp.ones(count), jnp.ones(count, bool), 0.0, 0.0)
    return kw.update_batch(kw.init(CONFIG), draws)[0]


bound = jax.jit(lambda state: blocked.upper_at_once(state, CAP, 0.0, LEVEL, ETA, CONFIG))
fine = jax.jit(lambda state: blocked.upper(state, CAP, 0.0, LEVEL, ETA, FINE))


@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("count", [1500, 4999])
def test_it_is_the_fine_bound_rounded_up_to_the_next_candidate(sigma, count):
    rng = np.random.default_rng(count)
    y = 0.7 * rng.lognormal(-(sigma**2) / 2, sigma, count)
    state, estimate = process(y), CAP - y.mean()
    found, exact = float(bound(state)), float(fine(state))
    assert exact - 1e-4 <= found < CAP
    assert found - estimate <= blocked.NEXT * (exact - estimate) + 1e-4


def test_the_least_rejected_candidate_is_taken_and_every_candidate_above_it_is_rejected():
    y = 0.7 * np.random.default_rng(0).lognormal(-0.125, 0.5, 3000)
    state = process(y)
    found = float(bound(state))
    wealth = lambda m: float(blocked.log_wealth(state, CAP, m, ETA, CONFIG))
    assert all(wealth(m) >= LEVEL for m in np.linspace(found, CAP, 9))
    below = CAP - y.mean() + (found - CAP + y.mean()) / blocked.NEXT**1.01
    assert wealth(below) < LEVEL


@pytest.mark.parametrize("y", [np.zeros(0), np.zeros(2000), np.r_[np.zeros(1999), 1400.0]])
def test_without_evidence_the_cap_stays(y):
    assert float(bound(process(y))) == CAP


def test_a_state_that_is_no_number_proves_nothing():
    state = process(np.full(100, 0.5))
    assert float(bound(state._replace(y=state.y.at[3].set(jnp.nan)))) == CAP


def test_it_never_falls_below_the_floor():
    y = np.full(4999, 0.9999)
    low = blocked.upper_at_once(process(y), CAP, 0.3, LEVEL, ETA, CONFIG)
    assert float(low) == pytest.approx(0.3)
