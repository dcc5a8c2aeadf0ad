"""Lists of pages and their boolean form; the dense selector; names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax import selectors
from skg_jax.pallas.select import LOG_FLOOR
from skg_jax.selectors import dense
from skg_jax.selectors.base import estimated_share, take
from tests.selectors.contexts import context, jitted, listed, share_of

B, K, G, M = 2, 3, 2, 19


def random_mask(seed: int, density: float) -> np.ndarray:
    return np.random.default_rng(seed).random((B, K, M)) < density


@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_a_mask_and_its_list_are_the_same_set(density):
    wanted = random_mask(1, density)
    selection = jax.jit(take)(context(np.zeros((B, K, G, M)), (M, M)), wanted)
    np.testing.assert_array_equal(selection.read, wanted)
    assert listed(selection) == [[np.flatnonzero(head).tolist() for head in row] for row in wanted]


def test_wanted_pages_past_the_end_are_dropped_and_the_partial_page_comes_last():
    selection = take(context(np.zeros((B, K, G, M)), (7, 1)), jnp.ones((B, K, M), bool))
    assert listed(selection) == [[list(range(7))] * K, [[0]] * K]


def test_an_unused_row_reads_nothing():
    selection = take(context(np.zeros((B, K, G, M)), (0, 3)), jnp.ones((B, K, M), bool))
    np.testing.assert_array_equal(selection.num_pages, [[0] * K, [3] * K])


def test_estimated_shares_are_those_of_a_softmax_over_pages_in_use():
    estimate = np.random.default_rng(2).normal(size=(B, K, G, M)) * 5 + 300
    estimate[1, ..., 9:] = 1e4  # past the end
    ctx = context(estimate, (M, 9))
    np.testing.assert_allclose(estimated_share(ctx), share_of(ctx), rtol=3e-5, atol=1e-9)
    np.testing.assert_allclose(np.asarray(estimated_share(ctx)).sum(-1), 1, rtol=1e-5)


def test_a_head_without_a_usable_estimate_has_no_say():
    estimate = np.random.default_rng(4).normal(size=(B, K, G, M))
    for nothing in (
        np.full(M, -np.inf),
        np.where(np.arange(M) == 3, np.nan, 0.0),
        np.where(np.arange(M) < 2, np.inf, 0),
    ):
        estimate[0, 1, 1] = nothing
        share = np.asarray(estimated_share(context(estimate, (M, M))))
        alone = context(estimate[:, :, :1], (M, M))
        np.testing.assert_allclose(share[0, 1], np.asarray(estimated_share(alone))[0, 1] / G, rtol=1e-6)


def test_pages_far_below_the_best_have_no_share_and_no_denormal_number_remains():
    estimate = np.arange(M) * LOG_FLOOR / (M - 2)  # the last page but one lies at the floor, the last below it
    share = np.asarray(estimated_share(context(np.broadcast_to(estimate, (B, K, G, M)), (M, M))))
    assert share[..., -1].max() == 0 and share[..., :-1].min() > np.finfo(np.float32).tiny


def test_dense_reads_every_page_whatever_the_budget():
    rows = listed(jitted(dense())(context(np.zeros((B, K, G, M)), (M, 4)), jnp.array([1.0, 0.1])))
    assert rows == [[list(range(M))] * K, [list(range(4))] * K]


def test_selectors_are_found_by_name():
    assert {selectors.get(name).name for name in selectors.SELECTORS} == set(selectors.SELECTORS)
    with pytest.raises(ValueError, match="unknown selector 'best'; choose one of dense, "):
        selectors.get("best")
