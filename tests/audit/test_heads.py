"""The audit of every head by itself against the definition, and beside the average that hides a lost head."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.audit import AuditConfig, HeadWeights
from tests.audit import synthetic
from tests.audit.lies import lies
from tests.audit.oracle import truth
from tests.audit.reports import audits, misses_too_often
from tests.audit.synthetic import LENGTHS, L, N

HEADS = AuditConfig(scope="heads", rate=0.05, rounds=(1, 1))
STEP = AuditConfig(rate=0.05, rounds=(1, 1))
ALPHA = 0.1


@functools.cache
def step_of(config: AuditConfig = HEADS):
    return synthetic.step(config)


@functools.cache
def worst(row: int = 0) -> float:
    """The largest sum of shares of any head, in exact arithmetic."""
    return float(truth(step_of(), HEADS.page_size).x[:, row].sum(-1).max())


def test_the_bound_is_above_the_worst_head_and_below_what_the_bounds_say_alone():
    report = audits(step_of(), HEADS, tau=0.9 * worst(), alpha=ALPHA)
    assert not misses_too_often(report.bound < worst(), ALPHA)
    assert not report.violated.any() and (report.corrupt < 0).all()
    assert (report.bound <= report.cap).all()
    assert np.median(report.bound) < 0.95 * np.median(report.cap)


def test_acceptance_is_rare_when_one_head_is_above_tau_and_common_when_all_are_well_below():
    accepted = audits(step_of(), HEADS, tau=worst() * (1 - 1e-4), alpha=ALPHA).accepted
    assert not misses_too_often(accepted, ALPHA)
    assert audits(step_of(), HEADS, tau=3 * worst(), alpha=ALPHA).accepted.all()


def test_a_lost_head_that_the_average_hides_is_refused():
    """The budget lies between the average and the worst head: the step's audit accepts, the heads' audit never does."""
    true = truth(step_of(), HEADS.page_size)
    omega = np.asarray(step_of().weights.omega, np.float64)[:, None]
    mean = float((omega * true.x.sum(-1)).sum((0, 2))[0])
    tau = 0.9 * worst()
    assert mean < 0.6 * tau
    assert audits(step_of(STEP), STEP, tau=tau, alpha=ALPHA).accepted.mean() > 0.9
    assert audits(step_of(), HEADS, tau=tau, alpha=1e-3).accepted.mean() < 0.02


def test_a_head_without_weight_is_not_audited_and_its_weight_counts_as_lost():
    true = truth(step_of(), HEADS.page_size).x[:, 0].sum(-1)
    layer, head = np.unravel_index(true.argmax(), true.shape)
    omega = np.full((L, N), 1 / (L * N), np.float32)
    omega[layer, head] = 0
    step = synthetic.step(HEADS, weights=HeadWeights(jnp.asarray(omega), jnp.float32(0.01)))
    report = audits(step, HEADS, tau=1.0, alpha=ALPHA)
    rest = np.sort(true.ravel())[-2]
    assert not misses_too_often(report.bound < rest + 0.01, ALPHA)
    assert np.median(report.cap) < np.median(audits(step_of(), HEADS, tau=1.0, alpha=ALPHA).cap)


def test_broken_bounds_are_seen():
    """Upper bounds half as large as they should be: what is read lies above them."""
    told = lies(narrow=np.log(2))
    step = synthetic.step(HEADS, lies=told)
    assert audits(step, HEADS, tau=0.5 * worst(), alpha=ALPHA, lies=told).violated.mean() > 0.95


def test_altered_keys_are_named():
    honest = synthetic.filled()
    cache = honest._replace(k=honest.k.at[..., 3, 0].multiply(-1))
    step = step_of()._replace(cache=cache)
    report = audits(step, HEADS, tau=1.2 * worst(), alpha=ALPHA)
    assert (report.corrupt[:, 0] >= 0).mean() > 0.95 and not report.accepted[report.corrupt[:, 0] >= 0].any()


def test_queries_that_are_not_numbers_are_never_accepted():
    """In one layer of one row; and everywhere, which must not look like a step that read everything."""
    q = synthetic.tensors()[0].copy()
    q[1, 0] = np.nan
    for queries in (q, q * np.nan):
        report = audits(synthetic.step(HEADS, q=queries), HEADS, tau=1e6, alpha=ALPHA)
        assert not report.accepted.any() and (report.bound == np.inf).all() and report.units.all()
    assert audits(synthetic.step(HEADS, q=q), HEADS, tau=1e6, alpha=ALPHA, row=1).accepted.all()


def test_a_row_with_nothing_unread_is_accepted():
    step = synthetic.step(HEADS, budget=np.inf)
    report = audits(step, HEADS, tau=0.01, alpha=ALPHA)
    assert report.accepted.all() and (report.bound == 0).all() and (report.drawn == 0).all()


@pytest.mark.parametrize("change", [{"scope": "heads", "design": "boundary"}, {"scope": "heads", "design": "wor"}])
def test_what_cannot_be_is_refused(change):
    with pytest.raises(ValueError, match="scope"):
        AuditConfig(**change)


def test_rows_have_their_own_worst_head():
    assert len(LENGTHS) == 2 and worst(0) != worst(1)
    report = audits(step_of(), HEADS, tau=0.9 * worst(1), alpha=ALPHA, row=1)
    assert not misses_too_often(report.bound < worst(1), ALPHA)
    jax.block_until_ready(report.bound)
