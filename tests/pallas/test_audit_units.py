"""The audit's unit kernel against float64, its twin, and its lowering."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from skg_jax.audit.units import UP
from skg_jax.pallas.audit_units import unit_bounds
from skg_jax.pallas.shapes import SELECT_SHAPES
from tests.kv.oracle import f64

CANCEL = 1e-6
LAYERS, BATCH, HEADS = 2, 1, 2


@functools.cache
def case(group: int, pages: int):
    """Bounds [L, B, K, 2, G, M] from tiny to huge, without bounds, and one that is no number; numbers of the heads."""
    rng = np.random.default_rng(group)
    shape = LAYERS, BATCH, HEADS, group, pages
    lower = rng.normal(size=shape) * 4
    upper = lower + rng.exponential(size=shape)
    lower[..., 3], upper[..., 3] = -np.inf, np.inf
    lower[..., 5], upper[..., 5] = 200.0, 300.0
    lower[..., 7], upper[..., 7] = -400.0, -300.0
    upper[1, 0, 1, 0, 9] = np.nan
    heads = LAYERS, BATCH, HEADS * group
    numbers = rng.normal(size=heads), 1 + rng.exponential(size=heads) * 30, rng.random((LAYERS, HEADS * group))
    to_float = lambda *arrays: [jnp.asarray(x, jnp.float32) for x in arrays]
    return to_float(np.stack([lower, upper], axis=3), *numbers)


def expected(bounds, log_selected, total, weights) -> tuple[np.ndarray, np.ndarray]:
    """In float64, from what the kernel is given."""
    lower, upper = np.moveaxis(f64(bounds), 3, 0)
    by_head = lambda x: f64(x).reshape(*lower.shape[:4], 1)
    selected, weight = by_head(log_selected), by_head(np.broadcast_to(weights[:, None], log_selected.shape))
    with np.errstate(over="ignore"):
        mass = np.exp(np.minimum(lower - selected, 60.0)) / UP
        rest = np.maximum(by_head(total) * (1 - CANCEL) - mass, 1.0)
        return (weight * mass / (rest + mass)).sum(3), (weight / (1 + rest * np.exp(selected - upper))).sum(3)


@pytest.mark.parametrize(("group", "pages"), [(3, 512), (1, 1024)])
def test_shares_are_within_their_rounding_of_float64(group, pages):
    found = jax.jit(functools.partial(unit_bounds, cancel=CANCEL, up=UP))(*case(group, pages))
    assert not gpu_callbacks.get_races().races_found
    for x, exact in zip(found, expected(*case(group, pages)), strict=True):
        np.testing.assert_array_equal(np.isnan(x), np.isnan(exact))
        known = ~np.isnan(exact)
        assert (np.abs(f64(x) - exact) <= (UP - 1) * np.abs(exact) + 1e-37)[known].all()
    assert np.isnan(f64(found[1])).sum() == 1


def test_wrong_totals_are_seen():
    """Negative control: the comparison above would notice a denominator that is off by a thousandth."""
    bounds, selected, total, weights = case(3, 512)
    found = jax.jit(functools.partial(unit_bounds, cancel=1e-3, up=UP))(bounds, selected, total, weights)
    exact = expected(bounds, selected, total, weights)[1]
    assert (np.abs(f64(found[1]) - exact) > (UP - 1) * np.abs(exact))[~np.isnan(exact)].mean() > 0.5


@pytest.mark.parametrize("name", SELECT_SHAPES)
def test_named_shapes_lower_for_hopper(name):
    shape = SELECT_SHAPES[name]
    pages, struct = shape.context // shape.page_size, jax.ShapeDtypeStruct
    of_heads = struct((2, shape.batch, shape.kv_heads * shape.groups), jnp.float32)
    bounds = struct((2, shape.batch, shape.kv_heads, 2, shape.groups, pages), jnp.float32)
    run = jax.jit(functools.partial(unit_bounds, cancel=CANCEL, up=UP, interpret=False))
    weights = struct((2, shape.kv_heads * shape.groups), jnp.float32)
    lowered = run.trace(bounds, of_heads, of_heads, weights).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


def test_what_the_kernel_cannot_do_is_said():
    bounds = jnp.zeros((1, 1, 1, 2, 1, 100))
    numbers = jnp.ones((1, 1, 1))
    with pytest.raises(NotImplementedError, match="multiple of 512 pages, not 100"):
        unit_bounds(bounds, numbers, numbers, numbers[0], cancel=CANCEL, up=UP)
