"""Units of a step against the definitions: bounds, dropped mass, output residual."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.audit import AuditConfig, HeadWeights
from skg_jax.audit.reads import read_units
from skg_jax.audit.units import UP, log_denominator, pack_flags, unpack_flags
from tests.audit import synthetic
from tests.audit.oracle import truth
from tests.audit.synthetic import LENGTHS, G, H, K, L, N, Step
from tests.kv.oracle import f64

PAGES = [16, pytest.param(32, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)]
ROUNDING = 2e-3  # of a share of mass: the slack of logits of this size, from both sides

read = jax.jit(read_units, static_argnames="config")


class Reads(NamedTuple):
    """Fields of `UnitReads` as [L,B,K,M]."""

    x: np.ndarray
    violated: np.ndarray
    corrupt: np.ndarray
    layer: np.ndarray
    block: np.ndarray


def read_all(step: Step, config: AuditConfig) -> Reads:
    """Every unit; x is 0 where a page is not a unit, whose slots may hold NaN."""
    shape = step.evidence.upper.shape
    index = jnp.broadcast_to(jnp.arange(shape[0] * shape[2] * shape[3]), (shape[1], shape[0] * shape[2] * shape[3]))
    reads = read(index, step.evidence, step.cache, step.weights.omega, config)
    found = Reads(*(np.moveaxis(np.asarray(x).reshape(shape[1], shape[0], *shape[2:]), 0, 1) for x in reads))
    return found._replace(x=np.where(np.asarray(step.evidence.upper) > 0, found.x, 0).astype(np.float64))


def grouped(x: np.ndarray) -> np.ndarray:
    """[L,B,N,...] -> [L,B,K,G,...]"""
    return x.reshape(*x.shape[:2], K, G, *x.shape[3:])


@functools.cache
def case(page_size: int):
    config = AuditConfig(page_size=page_size)
    step = synthetic.step(config)
    return config, step, truth(step, page_size), read_all(step, config)


@pytest.mark.parametrize("page_size", PAGES)
def test_units_are_the_unread_pages_and_no_others(page_size):
    _, step, true, _ = case(page_size)
    unread = grouped(true.unread)[:, :, :, 0]
    np.testing.assert_array_equal(np.asarray(step.evidence.upper) > 0, unread)
    np.testing.assert_array_equal(np.asarray(step.evidence.lower) > 0, unread)
    assert 0.3 < unread.sum() / (L * K * (-(-LENGTHS // page_size)).sum()) < 0.7
    assert not np.asarray(step.evidence.unbounded).any()


@pytest.mark.parametrize("page_size", PAGES)
def test_every_unit_lies_within_its_bounds(page_size):
    _, step, true, reads = case(page_size)
    omega = grouped(np.broadcast_to(f64(step.weights.omega)[:, None], (L, len(LENGTHS), N)))
    x = (omega[..., None] * grouped(true.x)).sum(3)
    unread = grouped(true.unread)[:, :, :, 0]
    assert (f64(step.evidence.lower) <= x).all() and (x <= f64(step.evidence.upper)).all()
    assert not reads.violated[unread].any() and not reads.corrupt[unread].any()
    # a read is the unit's value, rounded up
    np.testing.assert_allclose(reads.x[unread], x[unread], rtol=ROUNDING)
    assert (reads.x[unread] >= x[unread]).all()
    # and the bounds leave something to find out
    assert np.median(f64(step.evidence.upper)[unread] / f64(step.evidence.lower)[unread]) > 1.3


@pytest.mark.parametrize("page_size", PAGES)
def test_the_sum_of_a_heads_units_lies_between_its_dropped_mass_and_the_odds_of_it(page_size):
    config, step, true, _ = case(page_size)
    for head in range(N):
        omega = np.zeros((L, N), np.float32)
        omega[:, head] = 1
        alone = HeadWeights(jnp.asarray(omega), jnp.float32(0))
        total = read_all(synthetic.step(config, weights=alone), config).x.sum((2, 3))
        delta = true.delta[:, :, head]
        assert (delta <= total).all()
        assert (total <= delta / (1 - delta) * (1 + ROUNDING)).all()
        assert (total >= 1.01 * delta).any()


def test_lost_attention_is_not_small_here():
    _, _, true, _ = case(16)
    assert 0.05 < np.median(true.delta) < 0.4 and true.delta.max() > 0.3


@pytest.mark.parametrize("page_size", PAGES)
def test_layers_blocks_and_log_masses_of_reads_are_those_of_their_units(page_size):
    config, step, _, reads = case(page_size)
    layer, row, _, page = np.indices(reads.x.shape)
    np.testing.assert_array_equal(reads.layer, layer)
    np.testing.assert_array_equal(reads.block, np.asarray(step.cache.page_table)[row, page // config.parts])


# --- the output residual ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [1.0, 1e-4])
def test_the_output_residual_bounds_the_change_of_every_heads_output(shrink):
    """Values 10,000 times smaller make outputs smaller than the floor, which then divides instead."""
    config = AuditConfig(residual="output")
    honest = synthetic.filled()
    cache = honest._replace(v=honest.v * shrink, value_norm=honest.value_norm * shrink)
    for head in range(N):
        omega = np.zeros((L, N), np.float32)
        omega[:, head] = 1
        step = synthetic.step(config, cache=cache, weights=HeadWeights(jnp.asarray(omega), jnp.float32(0)))
        true, reads = truth(step, 16), read_all(step, config)
        change = np.linalg.norm(true.dense - true.out, axis=-1)[:, :, head]
        size = np.maximum(np.linalg.norm(true.out, axis=-1)[:, :, head], config.output_floor)
        assert ((size == config.output_floor) == (shrink < 1)).all()
        assert (change / size <= reads.x.sum((2, 3))).all()
        assert (f64(step.evidence.lower) <= f64(step.evidence.upper)).all() and not reads.violated[reads.x > 0].any()
        factor = reads.x.sum((2, 3)) * size / np.maximum(np.linalg.norm(true.out, axis=-1)[:, :, head], 1e-30)
        assert (factor > true.delta[:, :, head]).all()  # (max |v| + |o|) / |o| is above one


def test_the_output_residual_is_attained_by_unread_values_opposite_to_the_output():
    """Values +e where a page was read and -e where not: the output e changes by exactly twice the dropped mass."""
    config = AuditConfig(residual="output")
    read = ~np.asarray(synthetic.step(config).evidence.unread)
    cache, e = synthetic.filled(), np.eye(H)[3]
    v = np.array(cache.v)
    for (layer, row, head, page), was_read in np.ndenumerate(read):
        block, part = synthetic.page_table()[row, page // config.parts], page % config.parts
        slots = v[layer, block, head, 16 * part : 16 * part + 16]
        slots[~np.isnan(slots[:, 0])] = e if was_read else -e
    step = synthetic.step(config, cache=cache._replace(v=jnp.asarray(v), value_norm=jnp.ones_like(cache.value_norm)))
    true, reads = truth(step, 16), read_all(step, config)
    change = np.linalg.norm(true.dense - true.out, axis=-1) / np.linalg.norm(true.out, axis=-1)
    np.testing.assert_allclose(change, 2 * true.delta, rtol=1e-9)
    omega = f64(step.weights.omega)[:, None]
    lost, bound = (omega * change).sum((0, 2)), reads.x.sum((0, 2, 3))
    assert (lost <= bound).all() and (bound <= 1.5 * lost).all()


def test_outputs_and_sums_of_the_step_are_exact():
    _, step, true, _ = case(16)
    np.testing.assert_allclose(step.out, true.out, rtol=2e-5, atol=2e-5)
    selected = np.log(np.where(true.unread, 0, np.exp(true.log_mass)).sum(-1))
    np.testing.assert_allclose(step.lse, selected, rtol=1e-6, atol=1e-5)
    assert (f64(step.evidence.log_selected) <= selected).all()
    np.testing.assert_allclose(step.evidence.log_selected, selected, atol=ROUNDING)


# --- the denominator ----------------------------------------------------------------------------------------------


def test_the_denominator_is_never_above_the_mass_outside_the_unit():
    rng = np.random.default_rng(0)
    log_lower = rng.normal(size=(500, 40)) * rng.uniform(0.1, 12, size=(500, 1))
    log_lower[:100, 0] = rng.uniform(10, 50, size=100)  # one page holds nearly everything: the difference cancels
    log_lower = log_lower.astype(np.float32)
    lower = np.exp(log_lower.astype(np.float64))
    total = (1 + lower.sum(1, keepdims=True) / UP).astype(np.float32)  # of masses rounded down, as in a step
    rest = f64(log_denominator(jnp.asarray(log_lower), jnp.asarray(total)))
    exact = np.log(np.maximum(1 + lower.sum(1, keepdims=True) - lower, 1))
    assert (rest <= exact * (1 + 2.0**-23)).all() and (rest >= 0).all()  # but for the last place of the logarithm
    whole = 1 + lower.sum(1, keepdims=True)
    assert (rest >= np.log(np.maximum(whole - lower - 2.5 * (UP - 1) * whole, 1)) - 1e-6).all()  # nor far below it
    plain = np.abs(total - lower) > 1e-2 * total  # the subtraction may lose 2e-5 of the total
    np.testing.assert_allclose(rest[plain], exact[plain], atol=5e-3)


@pytest.mark.parametrize("log_lower", [-np.inf, -1e5, 80.0, 1e5])
def test_the_denominator_stays_finite(log_lower):
    found = log_denominator(jnp.full((3,), log_lower), jnp.float32(4.0))
    assert np.isfinite(np.asarray(found)).all() and (np.asarray(found) >= 0).all()


@pytest.mark.parametrize("size", [1, 7, 8, 77])
def test_packed_flags_come_back(size):
    flags = np.random.default_rng(size).random((3, 2, size)) < 0.5
    words = pack_flags(jnp.asarray(flags, jnp.uint8))
    assert words.shape == (3, 2, -(-size // 4)) and words.dtype == jnp.uint32
    np.testing.assert_array_equal(unpack_flags(words, size), flags)
