"""The audit's unit kernel against float64, its twin, and its lowering."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from skg_jax.audit import AuditConfig, LayerEvidence, step_evidence
from skg_jax.audit.units import UP, pack_flags
from skg_jax.kv import cache as kv
from skg_jax.pallas.audit_units import Units, audit_units
from skg_jax.pallas.shapes import AUDIT_MASS_SHAPES
from tests.kv.oracle import f64

CANCEL = 2e-5
DOWN = 1 - (UP - 1) - 1e-5  # of a total: masses by UP, their sum by 6e-6
LAYERS, BATCH, HEADS = 2, 3, 2
BROKEN = (1, 0, 1)  # a row whose first head has a page without a number for its upper bound
BLIND = (0, 1, 1)  # and one with such a lower bound
PAGE = 9  # the page: unread
CASES = [(3, 384), (1, 1024), (4, 1152), (16, 256)]


class Call(NamedTuple):
    """Arguments of the kernel."""

    bounds: np.ndarray
    log_selected: np.ndarray
    read: np.ndarray
    used: np.ndarray
    weights: np.ndarray


@functools.cache
def case(group: int, pages: int) -> Call:
    """Bounds from tiny to huge, without bounds, and NaN: in two units, and wherever nothing may be read.

    Of the rows one is full, one ends inside a chunk, and one is new; of its heads all pages were read in one layer, and
    none in another.
    """
    rng = np.random.default_rng(group)
    shape = LAYERS, BATCH, HEADS, group, pages
    lower = rng.normal(size=shape) * 3
    upper = lower + rng.exponential(size=shape)
    lower[..., 3], upper[..., 3] = -np.inf, np.inf
    lower[..., 7], upper[..., 7] = -400.0, -300.0
    lower[0, 0, 0, :, 5], upper[0, 0, 0, :, 5] = 200.0, 300.0
    read = rng.random((LAYERS, BATCH, HEADS, pages)) < 0.3
    read[..., [3, 5, 7, PAGE]] = False
    read[1, 0, 0], read[0, 0, 1] = True, False
    used = np.array([pages, pages - 131, 11])
    closed = ~unread_of(read, used)[:, :, :, None]
    lower, upper = (np.where(closed, np.nan, x) for x in (lower, upper))
    upper[(*BROKEN, 0, PAGE)] = lower[(*BLIND, 0, PAGE)] = np.nan
    real = lambda x: x.astype(np.float32)
    selected = rng.normal(size=(LAYERS, BATCH, HEADS * group))
    weights = rng.random((LAYERS, HEADS * group))
    return Call(real(np.stack([lower, upper], axis=3)), real(selected), read.astype(np.uint8), used, real(weights))


def unread_of(read, used) -> np.ndarray:
    return ~read.astype(bool) & (np.arange(read.shape[-1]) < used[:, None])[:, None]


@functools.cache
def found(group: int, pages: int, cancel: float = CANCEL) -> Units:
    units = jax.jit(functools.partial(audit_units, cancel=cancel, up=UP))(*case(group, pages))
    assert not gpu_callbacks.get_races().races_found
    return jax.tree.map(np.asarray, units)


class Exact(NamedTuple):
    """In float64, [L, B, K, G, M] of unread pages, NaN elsewhere; masses in units of the selected one."""

    unread: np.ndarray
    lower: np.ndarray  # not rounded down, but cut
    opposite: np.ndarray  # selected / upper
    weight: np.ndarray


def exactly(call: Call) -> Exact:
    lower, upper = np.moveaxis(call.bounds, 3, 0)
    by_head = lambda x: x.reshape(*lower.shape[:4], 1)
    selected, unread = by_head(call.log_selected), unread_of(call.read, call.used)[:, :, :, None]
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = f64(lower - selected), f64(selected - upper)  # the differences are those of float32
        lower, opposite = np.exp(np.minimum(low, 60.0)), np.exp(high)
    weight = f64(by_head(np.broadcast_to(call.weights[:, None], call.log_selected.shape)))
    return Exact(np.broadcast_to(unread, lower.shape), lower, opposite, weight)


def shares(exact: Exact, total: jax.typing.ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Units [L, B, K, M], not rounded, of given totals [L, B, N]."""
    total = f64(total).reshape(*exact.lower.shape[:4], 1)
    mass = exact.lower / UP
    rest = np.maximum(total * (1 - CANCEL) - mass, 1.0)
    with np.errstate(over="ignore"):
        parts = exact.weight * mass / (rest + mass), exact.weight / (1 + rest * exact.opposite)
    lower, upper = (np.where(exact.unread, x, 0.0).sum(3) for x in parts)
    return lower, upper


def assert_between(x, low, high):
    """Where the limits are numbers; NaN where they are not."""
    assert (np.isnan(x) == np.isnan(low)).all() and (np.isnan(low) == np.isnan(high)).all()
    known = ~np.isnan(low)
    assert (low[known] <= x[known]).all() and (x[known] <= high[known]).all()


@pytest.mark.parametrize(("group", "pages"), CASES)
def test_totals_are_rounded_down(group, pages):
    exact, total = exactly(case(group, pages)), f64(found(group, pages).total)
    true = 1 + np.where(exact.unread, exact.lower, 0).sum(-1).reshape(total.shape)
    assert_between(total, np.maximum(true * DOWN, 1.0), true)
    assert np.isnan(true).sum() == 1  # the head with a lower bound that is no number
    assert (total[1, 0, :group] == 1).all()  # everything read
    assert (true > 2).any()


@pytest.mark.parametrize(("group", "pages"), CASES)
def test_units_are_rounded_outward(group, pages):
    units, exact = found(group, pages), exactly(case(group, pages))
    lower, upper = shares(exact, units.total)
    assert_between(f64(units.lower), lower * (1 - 3 * (UP - 1)) - 1e-37, lower)
    assert_between(f64(units.upper), upper - 1e-37, upper * (1 + 3 * (UP - 1)) + 1e-37)


@pytest.mark.parametrize(("group", "pages"), CASES)
def test_what_is_no_number_stays_none_and_what_was_read_is_nothing(group, pages):
    units, unread = found(group, pages), exactly(case(group, pages)).unread[:, :, :, 0]
    broken = np.zeros(unread.shape, bool)
    broken[BLIND] = unread[BLIND]  # a total that is no number breaks every unit of its row
    np.testing.assert_array_equal(np.isnan(units.lower), broken)
    broken[(*BROKEN, PAGE)] = True
    np.testing.assert_array_equal(np.isnan(units.upper), broken)
    assert (units.lower[~unread] == 0).all() and (units.upper[~unread] == 0).all()
    there = unread & (units.upper != 0)
    assert there.sum() > 0.9 * unread.sum() and (units.upper[there & ~broken] > 0).all()


@pytest.mark.parametrize(("group", "pages"), CASES)
def test_sums_of_rows_are_rounded_outward(group, pages):
    units = found(group, pages)
    np.testing.assert_array_equal(units.count, (~(units.upper <= 0)).sum(-1))
    floor, cap = f64(units.lower).sum(-1), f64(units.upper).sum(-1)
    assert_between(f64(units.floor), floor * (1 - 1.2e-5), floor)
    assert_between(f64(units.cap), cap, cap * (1 + 1.2e-5))
    assert np.isnan(cap[BROKEN]) and np.isnan(cap[BLIND]) and np.isnan(cap).sum() == 2
    assert cap[1, 0, 0] == 0 and units.count[1, 0, 0] == 0  # everything read
    assert units.count[0, 0, 1] == pages - (units.upper[0, 0, 1] == 0).sum()  # nothing read


def test_wrong_denominators_are_seen():
    """Negative control: the comparison above would notice a denominator that is off by a thousandth."""
    exact = exactly(case(3, 384))
    wrong = found(3, 384, cancel=1e-3)
    upper = shares(exact, wrong.total)[1]
    off = np.abs(f64(wrong.upper) - upper) > 3 * (UP - 1) * upper
    assert off[exact.unread[:, :, :, 0] & ~np.isnan(upper)].mean() > 0.5


def test_sums_of_equal_terms_do_not_gain():
    """The longest sums that the kernel takes, of numbers whose float32 sum in a row would be too large."""
    pages, term = 63 * 128, 1 / 3
    bounds = np.full((1, 1, 1, 2, 1, pages), np.log(term), np.float32)
    one = np.ones((1, 1, 1), np.float32)
    call = Call(bounds, 0 * one, np.zeros((1, 1, 1, pages), np.uint8), np.array([pages]), one[0])
    units = jax.jit(functools.partial(audit_units, cancel=CANCEL, up=UP))(*call)
    true = 1 + pages * np.exp(f64(bounds[0, 0, 0, 0, 0, 0]))
    assert true * DOWN <= float(units.total[0, 0, 0]) <= true
    cap = f64(units.upper).sum()
    assert cap <= float(units.cap[0, 0, 0]) <= cap * (1 + 1.2e-5)
    # a naive sum, one after the other in float32, is wrong by more than is allowed for
    naive = np.cumsum(np.full(pages, np.exp(bounds[0, 0, 0, 0, 0, 0]), np.float32), dtype=np.float32)[-1] + 1
    assert abs(float(naive) / true - 1) > 6e-6


# --- the whole step -----------------------------------------------------------------------------------------------


@functools.cache
def steps(group: int = 3):
    """One step's evidence by the kernel and by its twin: 128 pages, blocks without metadata among them."""
    call = case(group, 384)
    call = call._replace(bounds=call.bounds[..., :128], read=call.read[..., :128])
    tokens = np.array([128 * 16, 1000, 5])
    rng = np.random.default_rng(0)
    cache = kv.init(LAYERS, HEADS, 16, BATCH, 128 * 16)
    cache = cache._replace(sealed=jnp.where(jnp.arange(cache.sealed.size) % 3 == 0, cache.sealed, cache.written))
    q = jnp.asarray(rng.normal(size=(LAYERS, BATCH, HEADS * group, 16)), jnp.float32)
    norm = jnp.ones(q.shape[:3])
    layers = LayerEvidence(q, jnp.asarray(call.log_selected), norm, pack_flags(jnp.asarray(call.read)))
    run = jax.jit(step_evidence, static_argnames=("config", "implementation"))
    make = lambda how: run(layers, call.bounds, cache, call.weights, tokens, config=AuditConfig(), implementation=how)
    return make("mosaic_gpu"), make("xla")


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("total", 1.5e-5), ("lower", 2e-5), ("upper", 2e-5), ("floor", 3e-5), ("cap", 3e-5), ("count", 0), ("unread", 0),
     ("unbounded", 0)],
)  # fmt: skip
def test_the_step_is_that_of_the_twin(name, tolerance):
    ours, twins = (f64(getattr(x, name)) for x in steps())
    np.testing.assert_allclose(ours, twins, rtol=tolerance, atol=1e-37 if tolerance else 0)
    assert (np.nan_to_num(ours, nan=1.0) != 0).any()


@pytest.mark.parametrize("name", AUDIT_MASS_SHAPES)
def test_named_shapes_lower_for_hopper(name):
    shape = AUDIT_MASS_SHAPES[name]
    pages, struct = shape.context // shape.page_size, jax.ShapeDtypeStruct
    lead, group = (shape.layers, shape.batch, shape.kv_heads), shape.heads // shape.kv_heads
    run = jax.jit(functools.partial(audit_units, cancel=CANCEL, up=UP, interpret=False))
    lowered = run.trace(
        struct((*lead, 2, group, pages), jnp.float32),
        struct((*lead[:2], shape.heads), jnp.float32),
        struct((*lead, pages), jnp.uint8),
        struct((shape.batch,), jnp.int32),
        struct((shape.layers, shape.heads), jnp.float32),
    ).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize(
    ("pages", "reason"),
    [(100, "a multiple of 128 pages, not 100"), (127 * 128, "136 numbers in a row for 16256 pages")],
)
def test_what_the_kernel_cannot_do_is_said(pages, reason):
    numbers = jnp.ones((1, 1, 1))
    with pytest.raises(NotImplementedError, match=reason):
        audit_units(
            jnp.zeros((1, 1, 1, 2, 1, pages)), numbers, jnp.zeros((1, 1, 1, pages), jnp.uint8), jnp.array([pages]),
            numbers[0], cancel=CANCEL, up=UP,
        )  # fmt: skip
