"""Adaptive budgets: the smallest set of pages that holds a share p, found by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.selectors import topp
from tests.selectors.contexts import context, jitted, listed, share_of

B, K, G, M = 2, 3, 2, 23
select = jitted(topp())


def estimates(seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, K, G, M)) * scale


def smallest_set(share: np.ndarray, must: np.ndarray, p: float) -> int:
    """Pages of the smallest set that contains `must` and holds at least p."""
    kept, count = share[must].sum(), int(must.sum())
    for value in sorted(share[~must], reverse=True):
        if kept >= p:
            break
        kept, count = kept + value, count + 1
    return count


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("scale", [0.1, 2.0, 8.0])
def test_the_smallest_set_that_holds_the_share(p, scale):
    must = np.zeros((B, M), bool)
    must[:, [0, 11]] = True
    ctx = context(estimates(3, scale), (M, 12), must)
    share, kept = share_of(ctx), np.asarray(select(ctx, jnp.full(2, p, jnp.float32)).read, bool)
    for b, k in np.ndindex(B, K):
        assert kept[b, k].sum() == smallest_set(share[b, k], must[b], p)
        assert share[b, k][kept[b, k]].sum() >= p - 1e-6
        assert kept[b, k][must[b]].all()


@pytest.mark.parametrize("p", [1.0, 2.0, np.inf])
def test_a_share_of_one_is_every_page(p):
    rows = listed(select(context(estimates(scale=60.0), (M, 9)), jnp.full(2, p, jnp.float32)))
    assert rows == [[list(range(M))] * K, [list(range(9))] * K]


def test_a_flat_distribution_is_cut_by_count_and_ties_go_to_the_lowest_ids():
    rows = listed(select(context(np.zeros((B, K, G, M)), (20, 8)), jnp.full(2, 0.49, jnp.float32)))
    assert rows == [[list(range(10))] * K, [list(range(4))] * K]


def test_one_dominant_page_is_enough():
    estimate = np.zeros((B, K, G, M))
    estimate[..., 7] = 30.0
    assert listed(select(context(estimate, (M, M)), jnp.full(2, 0.999, jnp.float32))) == [[[7]] * K] * B


def test_where_nothing_is_known_everything_is_read():
    rows = listed(select(context(np.full((B, K, G, M), -np.inf), (M, 5)), jnp.full(2, 0.2, jnp.float32)))
    assert rows == [[list(range(M))] * K, [list(range(5))] * K]


def test_no_share_is_the_forced_pages_alone():
    must = np.zeros((B, M), bool)
    must[0, 3] = must[1, [1, 2]] = True
    rows = listed(select(context(estimates(), (M, M), must), jnp.zeros(2)))
    assert rows == [[[3]] * K, [[1, 2]] * K]


def test_another_share_traces_nothing_anew():
    traces = []

    @jax.jit
    def counted(ctx, p):
        traces.append(1)
        return topp().select(ctx, (), p)[0]

    for p in (0.1, 0.9, 1.0, np.inf):
        counted(context(estimates(), (M, M)), jnp.full(2, p, jnp.float32))
    assert len(traces) == 1
