"""Fixed budgets: exact counts under ties and at every edge of the budget, the best pages, forced pages, one trace."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.pallas.select import LOG_FLOOR
from skg_jax.selectors import topk
from tests.selectors.contexts import context, jitted, listed, share_of

B, K, G, M = 2, 3, 2, 37
select = jitted(topk())


def budget(*values: float):
    return jnp.asarray(values, jnp.float32)


def estimates(seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, K, G, M)) * scale


TIES = {
    "all equal": np.full((B, K, G, M), 3.25),
    "all zero mass": np.where(np.arange(M) == 36, 0.0, np.full((B, K, G, M), -1e4)),
    "two values": np.where(estimates() > 0.5, 1.0, 0.0),
    "unknown": np.full((B, K, G, M), -np.inf),
    "distinct": estimates(),
}


@pytest.mark.parametrize("name", TIES)
@pytest.mark.parametrize("total", [(M, 1), (M - 1, 20)])
def test_exactly_the_pages_that_the_budget_buys(name, total):
    ctx = context(TIES[name], total)
    for k in (0, 1, 2, 19, 20, 21, M - 1, M, M + 1, np.inf):
        rows = listed(select(ctx, budget(k, k)))
        for row, n in zip(rows, total, strict=True):
            for pages in row:
                assert len(pages) == min(max(k, 1), n)  # at least one: attention over nothing is undefined
                assert max(pages) < n


def test_a_hundred_winners_and_thousands_of_equals():
    """As many ties at the threshold as broke the radix selection of another engine."""
    estimate = np.full((1, 1, 1, 8320), -2.0)
    winners = np.random.default_rng(0).choice(8320, 100, replace=False)
    estimate[..., winners] = 1 + np.arange(100) / 50
    pages = listed(jitted(topk())(context(estimate, [8320]), budget(2048)))[0][0]
    assert len(pages) == 2048 and set(winners) <= set(pages)
    assert pages[:3] == sorted({0, 1, 2} | set(winners[winners < 3]))[:3]  # ties go to the lowest ids


@pytest.mark.parametrize("scale", [0.01, 2.0, 40.0])
def test_no_dropped_page_has_a_larger_share_than_a_kept_one(scale):
    for seed in range(5):
        ctx = context(estimates(seed, scale), (M, 30))
        share, kept = share_of(ctx), np.asarray(select(ctx, budget(7, 13)).read, bool)
        share[1, :, 30:] = np.nan
        worst_kept, best_dropped = np.where(kept, share, np.inf).min(-1), np.nanmax(np.where(kept, -1, share), -1)
        assert (worst_kept >= best_dropped * (1 - 1e-5) - np.exp(LOG_FLOOR)).all()  # what lies below has no share


@pytest.mark.parametrize(
    ("fraction", "total", "expected"), [(0.1, 30, 3), (0.1, 31, 4), (0.7, 10, 7), (0.999, 37, 37), (0.01, 5, 1)]
)
def test_a_budget_below_one_is_a_fraction_rounded_up(fraction, total, expected):
    rows = listed(select(context(estimates(), (total, M)), budget(fraction, 1.0)))
    assert {len(pages) for pages in rows[0]} == {expected} and {len(pages) for pages in rows[1]} == {1}


def test_a_broken_number_of_pages_is_rounded_down():
    assert {len(pages) for pages in listed(select(context(estimates(), (M, M)), budget(4.9, 5)))[0]} == {4}


def test_forced_pages_are_kept_and_count_towards_the_budget():
    must = np.zeros((B, M), bool)
    must[0, [0, 5, 36]], must[1, 10:22] = True, True
    ctx = context(estimates() - 50 * must[:, None, None], (M, 30), must)
    rows = listed(select(ctx, budget(6, 4)))
    for pages in rows[0]:
        assert len(pages) == 6 and {0, 5, 36} <= set(pages)
    for pages in rows[1]:
        assert pages == list(range(10, 22))  # more than the budget: all of them, and nothing else


def test_query_heads_of_a_group_are_heard_equally():
    estimate = np.full((1, 1, 2, M), -20.0)
    estimate[0, 0, 0, 4], estimate[0, 0, 0, 9] = 10.0, 9.0  # large logits of one head do not drown the other
    estimate[0, 0, 1, 30], estimate[0, 0, 1, 31] = -10.0, -10.5
    pages = listed(jitted(topk())(context(estimate, [M]), budget(3)))[0][0]
    assert pages == [4, 30, 31]


def test_heads_and_rows_choose_by_themselves():
    together = listed(select(context(estimates(), (M, 20)), budget(5, 8)))
    swapped = listed(select(context(estimates()[::-1, ::-1], (20, M)), budget(8, 5)))
    assert together == [row[::-1] for row in swapped[::-1]]


def test_another_budget_traces_nothing_anew():
    traces = []

    @jax.jit
    def counted(ctx, amount):
        traces.append(1)
        return topk().select(ctx, (), amount)[0]

    for amounts in ((3, 5), (0.1, 0.5), (np.inf, 0), (M, M + 1)):
        counted(context(estimates(), (M, M)), budget(*amounts))
    assert len(traces) == 1
