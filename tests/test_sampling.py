"""Greedy edges, filters and the distribution that is drawn from, against numpy and scipy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from skg_jax import sampling
from skg_jax.sampling import SamplingParams

V = 11
DRAWS = 20_000
P_VALUE = 1e-4  # of each chi-square test; draws are the same in every run

sample = jax.jit(sampling.sample)


def params(batch: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> SamplingParams:
    fill = lambda value, dtype=jnp.float32: jnp.full(batch, value, dtype)
    return SamplingParams(fill(temperature), fill(top_k, jnp.int32), fill(top_p), fill(min_p))


def keys(batch: int, seed: int = 0):
    return jax.random.split(jax.random.key(seed), batch)


def reference(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities after temperature, top-k, top-p and min-p, in this order and normalised after each; float64."""
    scaled = logits.astype(np.float64) / temperature
    normal = lambda prob, kept: np.where(kept, prob, 0) / prob[kept].sum()
    prob = normal(np.exp(scaled - scaled.max()), np.ones(V, bool))
    order = np.lexsort((np.arange(V), -logits))
    if top_k:
        prob = normal(prob, np.isin(np.arange(V), order[:top_k]))
    smallest = next(n for n in range(1, V + 1) if prob[order[:n]].sum() >= top_p - 1e-12)
    prob = normal(prob, np.isin(np.arange(V), order[:smallest]))
    return normal(prob, prob >= min_p * prob.max())


def logits_of(seed: int = 1) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=V) * 1.7).astype(np.float32)


def counts(logits: np.ndarray, **filters) -> np.ndarray:
    many = jnp.broadcast_to(jnp.asarray(logits), (DRAWS, V))
    return np.bincount(np.asarray(sample(keys(DRAWS), many, params(DRAWS, **filters))), minlength=V)


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.4},
        {"temperature": 3.0, "top_k": 5},
        {"top_k": 6, "top_p": 0.93},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
        {"top_k": V + 5},
    ],
)
def test_draws_follow_the_filtered_distribution(filters):
    seen, expected = counts(logits_of(), **filters), reference(logits_of(), **filters)
    possible = expected > 0
    assert seen[~possible].sum() == 0
    assert stats.chisquare(seen[possible], expected[possible] * DRAWS).pvalue > P_VALUE
    wrong = expected[possible] ** 0.6  # the same test rejects another temperature
    assert stats.chisquare(seen[possible], wrong / wrong.sum() * DRAWS).pvalue < P_VALUE


GREEDY = [
    {"temperature": 0.0},
    {"temperature": 1e-6},
    {"temperature": 1e-38},
    {"top_k": 1},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"min_p": 1.0, "top_k": 1, "temperature": 5.0},
]


@pytest.mark.parametrize("filters", GREEDY)
@pytest.mark.parametrize("best", [[4], [3, 7, 9], list(range(V))])
def test_what_must_be_greedy_takes_the_lowest_of_equals(filters, best):
    logits = np.full(V, -3.0, np.float32)
    logits[best] = 12.5
    rows = jnp.broadcast_to(jnp.asarray(logits), (200, V))
    np.testing.assert_array_equal(sample(keys(200), rows, params(200, **filters)), min(best))
    np.testing.assert_array_equal(sampling.greedy(rows), min(best))


def test_greedy_edges_hold_for_values_that_scaling_makes_equal():
    logits = jnp.asarray([[1.0, 1.0000001, 0.5] + [0.0] * (V - 3)] * 200)
    np.testing.assert_array_equal(sample(keys(200), logits, params(200, temperature=1e30, top_k=1)), 1)


def test_zero_and_minus_zero_are_equal():
    logits = jnp.asarray([[-1.0, -0.0, 0.0] + [-2.0] * (V - 3)] * 200)
    np.testing.assert_array_equal(sampling.greedy(logits), sample(keys(200), logits, params(200, top_k=1)))


def test_tokens_of_minus_infinity_are_never_drawn():
    logits = np.where(np.arange(V) % 2, logits_of(), -np.inf).astype(np.float32)
    assert counts(logits, temperature=100.0)[::2].sum() == 0


def test_filters_that_are_off_leave_every_token_possible():
    """Of 40,000 equal tokens any may be drawn, whatever the float32 sum of their probabilities comes to."""
    wide = jnp.zeros((64, 40_000))
    drawn = np.asarray(sample(keys(64), wide, params(64)))
    assert len(set(drawn)) == 64 and drawn.max() > 36_000 and drawn.min() < 4_000
    tail = wide.at[:, :-1].set(-30.0)
    np.testing.assert_array_equal(sample(keys(64), tail, params(64)), 39_999)


def test_each_row_has_its_own_parameters():
    rows = jnp.broadcast_to(jnp.asarray(logits_of()), (200, V))
    every = lambda *values: jnp.tile(jnp.asarray(values), 50)
    mixed = SamplingParams(every(0.0, 1.0, 1.0, 1.0), every(0, 1, 0, 0), every(1.0, 1.0, 0.0, 1.0), jnp.zeros(200))
    drawn = np.asarray(sample(keys(200), rows, mixed)).reshape(50, 4)
    assert (drawn[:, :3] == logits_of().argmax()).all() and len(set(drawn[:, 3])) > 3


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.7, "top_k": 6, "top_p": 0.95, "min_p": 0.01}])
def test_a_row_draws_the_same_token_in_any_slot_of_any_batch(filters):
    """The seed of a request decides, not who stands beside it."""
    rng = np.random.default_rng(2)
    rows, own = rng.normal(size=(200, V)).astype(np.float32) * 2, keys(200, 3)
    together = np.asarray(sample(own, rows, params(200, **filters)))
    order = rng.permutation(200)
    np.testing.assert_array_equal(sample(own[order], rows[order], params(200, **filters)), together[order])
    alone = [int(sample(own[i : i + 1], rows[i : i + 1], params(1, **filters))[0]) for i in range(10)]
    assert alone == together[:10].tolist()
    assert (np.asarray(sample(keys(200, 4), rows, params(200, **filters))) != together).any()
