"""What an audit must notice: bounds that do not hold, memory that changed, selectors that forget, and NaN."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.audit.units import UP
from skg_jax.kv.cache import PagedKVCache
from tests.audit import synthetic
from tests.audit.lies import lies
from tests.audit.oracle import truth
from tests.audit.reports import REPS, audits
from tests.audit.synthetic import Step, page_table
from tests.audit.test_run import CONFIG, step_of
from tests.audit.test_units import grouped

LAYER = 1


@functools.cache
def unread_block(row: int = 0) -> int:
    """The pool block of which the heads of LAYER leave most pages unread."""
    unread = grouped(truth(step_of(), CONFIG.page_size).unread)[LAYER, row, :, 0]  # [K, M]
    return int(page_table()[row, unread.reshape(len(unread), -1, CONFIG.parts).sum((0, 2)).argmax()])


def with_keys(change, layer: int = LAYER, block: int | None = None) -> Step:
    """The step whose cache was changed behind the audit's back after attention had read it."""
    step = step_of()
    block = unread_block() if block is None else block
    k = np.array(step.cache.k)
    k[layer, block] = change(k[layer, block])
    return step._replace(cache=step.cache._replace(k=jnp.asarray(k)))


def reads_of_block(step: Step, layer: int, block: int) -> np.ndarray:
    """Which audits drew a unit of the block: those whose report changes when all of the block is NaN."""
    k = np.array(step.cache.k)
    k[layer, block] = np.nan
    return audits(step._replace(cache=step.cache._replace(k=jnp.asarray(k))), CONFIG, tau=0).violated


# --- bounds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("narrow", "rate"), [(np.log(2), 0.99), (0.01, 0.9)])
def test_upper_bounds_that_are_too_low_are_noticed(narrow, rate):
    """Half of the pages of this step lie at their upper bound, so that even a hundredth of a nat shows.

    Twice the reads of the other tests, about 15: those of a real step are thousands.
    """
    told, config = lies(narrow=narrow), dataclasses.replace(CONFIG, rate=2 * CONFIG.rate)
    step = synthetic.step(config, lies=told)
    report = audits(step, config, tau=0.5, lies=told)
    assert report.violated.mean() >= rate
    assert not report.accepted[report.violated].any() and (report.bound[report.violated] == np.inf).all()
    assert (report.corrupt == -1).all()


def test_honest_bounds_are_never_accused():
    for seed in range(4):
        for row in (0, 1):
            assert not audits(step_of(), CONFIG, tau=0, row=row, seed=seed).violated.any()


def test_lower_bounds_that_are_too_high_are_noticed():
    """Records of smaller residuals than the keys have: both bounds are too near the estimate."""
    step = step_of()
    record = step.cache.sketch
    cache = step.cache._replace(sketch=record._replace(residual=record.residual * jnp.float16(0.5)))
    report = audits(synthetic.step(CONFIG, cache=cache), CONFIG)
    assert report.violated.mean() > 0.99 and not report.accepted.any()


# --- memory -------------------------------------------------------------------------------------------------------


def nan(keys: np.ndarray) -> np.ndarray:
    return np.full_like(keys, np.nan)


def nudged(keys: np.ndarray) -> np.ndarray:
    """The last bit of every key: no bound can notice that."""
    return (keys.view(np.uint32) ^ 1).view(np.float32)


def test_keys_that_are_not_numbers_are_violations():
    step = with_keys(nan)
    report = audits(step, CONFIG, tau=0)
    assert 0.2 < report.violated.mean() < 1
    np.testing.assert_array_equal(report.violated, report.corrupt[:, 0] >= 0)
    assert not report.accepted.any() and not np.isnan(report.bound).any()
    assert (report.bound[report.violated] == np.inf).all() and np.isfinite(report.bound[~report.violated]).all()


def test_altered_keys_are_reported_with_their_layer_and_block_by_the_audits_that_read_them():
    block = unread_block()
    report = audits(with_keys(nudged), CONFIG, tau=0)
    drew = reads_of_block(step_of(), LAYER, block)
    np.testing.assert_array_equal(report.corrupt, np.where(drew[:, None], [LAYER, block], -1))
    assert not report.violated.any() and 0.2 < drew.mean() < 1
    assert (report.bound[drew] == np.inf).all() and np.isfinite(report.bound[~drew]).all()


def test_corrupt_keys_are_never_accepted_however_loose_the_budget():
    everywhere = step_of()
    for layer in range(synthetic.L):
        for block in page_table()[0]:
            everywhere = everywhere._replace(cache=altered(everywhere.cache, layer, block))
    report = audits(everywhere, CONFIG, tau=1e6)
    assert (report.corrupt >= 0).all() and not report.accepted.any() and (report.bound == np.inf).all()


def altered(cache: PagedKVCache, layer: int, block: int) -> PagedKVCache:
    k = np.array(cache.k)
    k[layer, block] = nudged(k[layer, block])
    return cache._replace(k=jnp.asarray(k))


def test_keys_of_other_layers_and_of_pages_that_were_read_do_not_matter():
    step = step_of()
    owned = set(page_table()[0].tolist())
    foreign = next(block for block in range(step.cache.k.shape[1]) if block not in owned)
    clean = audits(step, CONFIG, tau=0)
    for changed in (with_keys(nan, block=foreign), with_keys(nan, block=int(page_table()[0][10]))):
        report = audits(changed, CONFIG, tau=0)  # of another row; the open block, which is always read
        for one, other in zip(clean, report, strict=True):
            np.testing.assert_array_equal(one, other)


# --- metadata -----------------------------------------------------------------------------------------------------


def stale(logical: int = 2) -> PagedKVCache:
    """A block that was written after it was sealed."""
    cache = step_of().cache
    return cache._replace(written=cache.written.at[page_table()[0, logical]].add(1))


def test_a_selector_that_leaves_a_page_without_bounds_unread_is_never_accepted():
    step = synthetic.step(CONFIG, cache=stale(), obedient=(False, True))
    assert np.asarray(step.evidence.unbounded).sum(0)[0] > 0 and np.asarray(step.evidence.unbounded).sum(0)[1] == 0
    report = audits(step, CONFIG, tau=1e6)
    assert not report.accepted.any() and (report.bound == np.inf).all()
    # the selector is at fault, neither the bounds nor the memory
    assert not report.violated.any() and (report.corrupt == -1).all()
    assert audits(step, CONFIG, tau=1e6, row=1).accepted.all()


def test_the_same_page_read_costs_nothing():
    step = synthetic.step(CONFIG, cache=stale())
    assert not np.asarray(step.evidence.unbounded).any()
    read = ~np.asarray(step.evidence.unread)[:, 0]
    assert read[..., 2 * CONFIG.parts : 3 * CONFIG.parts].all()
    assert audits(step, CONFIG, tau=1e6).accepted.all()


def test_an_unread_page_without_bounds_may_hold_everything():
    step = synthetic.step(CONFIG, cache=stale(), obedient=(False, True))
    unknown = np.s_[:, 0, :, 2 * CONFIG.parts : 3 * CONFIG.parts]
    unread = np.asarray(step.evidence.unread)[unknown]
    omega = np.asarray(step.weights.omega).reshape(synthetic.L, synthetic.K, 1, -1).sum(-1)
    upper = np.asarray(step.evidence.upper)[unknown]
    np.testing.assert_allclose(upper[unread], UP * np.broadcast_to(omega, upper.shape)[unread], rtol=1e-5)
    assert not np.asarray(step.evidence.lower)[unknown].any()


# --- numbers that are not -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_queries_that_are_not_numbers_are_never_accepted(bad):
    q = synthetic.tensors()[0].copy()
    q[LAYER, 0] = bad
    step = synthetic.step(CONFIG, q=q)
    report = audits(step, CONFIG, tau=1e6)
    assert not report.accepted.any() and (report.bound == np.inf).all()
    other = audits(step, CONFIG, tau=1e6, row=1)
    assert other.accepted.all() and np.isfinite(other.bound).all()


def test_a_step_of_nothing_but_nan_is_not_taken_for_one_that_read_everything():
    step = synthetic.step(CONFIG, q=synthetic.tensors()[0] * np.nan)
    report = audits(step, CONFIG, tau=1e6)
    assert not report.accepted.any() and report.units.all() and (report.bound == np.inf).all()
    assert len(report.accepted) == REPS
