"""Sums and samplers against brute force: the law that is claimed is the law that is drawn."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from skg_jax.stats import sampling, sums

DRAWS = 100_000
UINT32 = st.integers(0, 2**32 - 1)


@pytest.fixture(params=["as on a CPU", "as on a GPU"])
def jitted(request, monkeypatch):
    """jax.jit, compiling either form anew."""
    monkeypatch.setattr(sums, "on_cpu", lambda: request.param == "as on a CPU")
    return lambda f: jax.jit(lambda x: f(x))


@pytest.mark.parametrize("n", [0, 1, 7, 32, 97, 1025, 2111])
def test_sums_equal_exact_integers(jitted, n):
    x = np.random.default_rng(n).integers(-99, 99, (3, n)).astype(np.float32)
    np.testing.assert_array_equal(jitted(sums.tree_sum)(x), x.sum(1))
    np.testing.assert_array_equal(jitted(sums.prefix_sum)(x), x.cumsum(1))
    np.testing.assert_array_equal(jitted(jax.vmap(sums.prefix_sum))(x), x.cumsum(1))
    np.testing.assert_array_equal(jitted(sums.exclusive_prefix)(x), x.cumsum(1) - x)


@pytest.mark.parametrize("n", [0, 1, 33, 2111])
def test_ranks_count_what_comes_before(jitted, n):
    valid = np.random.default_rng(n).random((3, n)) < 0.3
    found = jitted(sums.ranks)(valid)
    assert found.dtype == jnp.int32
    np.testing.assert_array_equal(found, valid.cumsum(1) - valid)


def test_a_long_sum_is_cut_into_runs_on_a_gpu_alone(monkeypatch):
    for cpu, cuts in ((True, 0), (False, 3)):  # 17 folds, five of them together
        monkeypatch.setattr(sums, "on_cpu", lambda cpu=cpu: cpu)
        found = str(jax.make_jaxpr(lambda x: sums.tree_sum(x))(jnp.zeros(100_000)))
        assert found.count("optimization_barrier") == cuts


def test_sums_stay_accurate_at_a_million_terms(jitted):
    x = np.random.default_rng(0).random(1_000_003).astype(np.float32)
    exact = x.astype(np.float64).sum()
    assert abs(float(jitted(sums.tree_sum)(x)) / exact - 1) < 1e-6
    np.testing.assert_allclose(jitted(sums.prefix_sum)(x), x.astype(np.float64).cumsum(), rtol=2e-6)
    assert abs(float(functools.reduce(np.add, x, np.float32(0))) / exact - 1) > 1e-6  # what a serial loop does


def test_pps_equals_its_definition_and_ignores_what_is_masked():
    gap = jnp.array([1.0, 0, 3, jnp.nan, 4, jnp.inf, 1e-12])
    p = np.asarray(sampling.pps_probs(gap, jnp.array([1, 1, 1, 0, 1, 0, 1], bool), 0.1))
    np.testing.assert_allclose(p, [0.1375, 0, 0.3625, 0, 0.475, 0, 0.025], rtol=1e-6)


@pytest.mark.parametrize(("fraction", "near"), [(0.3, [2, 6]), (0.01, [6]), (1.0, [0, 2, 4, 5, 6])])
def test_boundary_law_equals_its_definition(fraction, near):
    gap = jnp.array([1.0, 0, 3, jnp.nan, 4, 2, 5])
    score = jnp.array([-1.0, 99, 5, jnp.nan, 1, 5, 7])  # units 2 and 5 tie: the lower index is nearer
    p = sampling.boundary_probs(gap, score, jnp.array([1, 1, 1, 0, 1, 1, 1], bool), 0.8, fraction)
    want = np.array([0.04, 0, 0.04, 0, 0.04, 0.04, 0.04])
    want[near] += 0.8 / len(near)
    np.testing.assert_allclose(p, want, rtol=1e-6)


@given(st.lists(st.floats(0, 2.0**40, width=32), min_size=1, max_size=9), st.integers(0, 2**9 - 1))
def test_every_unit_with_a_gap_can_be_drawn(gaps, mask):
    gap = np.zeros(9, np.float32)
    gap[: len(gaps)] = gaps
    gap[gap < 1e-3] = 0
    valid = (mask >> np.arange(9)) % 2 == 1
    for p in (_pps(gap, valid), _boundary(gap, valid)):
        cum, law = _law(p)
        np.testing.assert_array_equal(np.asarray(law) > 0, valid & (gap > 0))
        np.testing.assert_array_equal(np.asarray(p) > 0, valid & (gap > 0))
        assert abs(float(law.sum()) - float((valid & (gap > 0)).any())) < 1e-5
        assert np.all(np.isfinite(law)) and int(cum[-1]) < 2**31


_law = jax.jit(sampling.integer_law)
_pps = jax.jit(lambda gap, valid: sampling.pps_probs(gap, valid, 0.02))
_boundary = jax.jit(lambda gap, valid: sampling.boundary_probs(gap, -gap, valid, 0.8, 0.1))


def test_counts_do_not_overflow_at_four_million_units():
    p = np.full(4_000_000, 1e-13, np.float32)
    p[::2] = 2**-31 * 1.001  # half of the counts are rounded up from a half, the other half from nothing
    p[0] = 1
    cum, law = jax.jit(sampling.integer_law)(p)
    counts = np.diff(np.asarray(cum).astype(np.int64), prepend=0)
    assert counts.min() == 1 and counts.sum() == int(cum[-1]) < 2**31
    np.testing.assert_allclose(law, counts / counts.sum(), rtol=1e-6)
    index = np.asarray(jax.jit(sampling.draw_iid, static_argnums=2)(jax.random.key(0), cum, 4097))
    assert index.min() == 0 and index.max() < p.size


def test_too_many_units_are_refused():
    with pytest.raises(ValueError, match="holds at most 268435456; split"):
        jax.eval_shape(sampling.integer_law, jax.ShapeDtypeStruct((2**28 + 1,), jnp.float32))


@given(UINT32, UINT32, st.integers(1, 2**31 - 1))
def test_scaling_of_random_bits_is_exact(high, low, total):
    got = _scale(*(np.array([v], np.uint32) for v in (high, low)), np.uint32(total))
    assert int(got[0]) == ((high << 32 | low) * total) >> 64


_scale = jax.jit(lambda high, low, total: sampling._scale(high, low, total))


@functools.cache
def _drawn():
    """Law, and two draws of each sampler, many times; the last 4 of 40 units are masked; the gaps span six decades."""
    gap = jnp.logspace(-6, 0, 40)
    p = sampling.pps_probs(gap, jnp.arange(40) < 36, 0.01)
    cum, law = sampling.integer_law(p)
    keys = jax.random.split(jax.random.key(6), DRAWS)
    iid = jax.jit(jax.vmap(lambda key: sampling.draw_iid(key, cum, 2)))(keys)
    wor = jax.jit(jax.vmap(lambda key: sampling.draw_wor(key, p, 2)))(keys)
    return np.asarray(law, np.float64)[:36], np.asarray(iid), np.asarray(wor)


def _fits(index, law) -> bool:
    expected = DRAWS * law
    counts = np.bincount(index, minlength=40)
    return counts[36:].sum() == 0 and ((counts[:36] - expected) ** 2 / expected).sum() < chi2.ppf(0.9999, 35)


def test_draws_follow_their_law():
    law, iid, wor = _drawn()
    law = law / law.sum()
    pairs = law[:, None] * law / (1 - law[:, None])
    second = pairs.sum(0) - np.diag(pairs)
    assert _fits(iid[:, 0], law) and _fits(iid[:, 1], law)
    assert _fits(wor[:, 0], law) and _fits(wor[:, 1], second)
    assert not np.any(wor[:, 0] == wor[:, 1])
    both = ((wor == 35).any(1) & (wor == 30).any(1)).mean()  # inclusion of a pair
    chance = pairs[35, 30] + pairs[30, 35]
    assert abs(both - chance) < 4 * np.sqrt(chance / DRAWS)


def test_chi_square_notices_a_wrong_law():
    law, iid, wor = _drawn()
    assert not _fits(iid[:, 0], np.full(36, 1 / 36))
    assert not _fits(wor[:, 1], law / law.sum())  # the second draw is not distributed like the first


def test_small_probabilities_are_realised():
    """The law of 1e5 units: those of the uniform share, each near 2e-7, are drawn as often as it says."""
    p = sampling.pps_probs(jnp.where(jnp.arange(100_000) < 1000, 1.0, 1e-9), jnp.ones(100_000, bool), 0.02)
    cum, law = _law(p)
    small = np.asarray(jax.jit(sampling.draw_iid, static_argnums=2)(jax.random.key(1), cum, 300_000)) >= 1000
    chance = np.asarray(law, np.float64)[1000:].sum()
    assert abs(small.mean() - chance) < 4 * np.sqrt(chance / small.size)


def test_nothing_to_draw_gives_indices_in_range_and_no_evidence():
    cum, law = sampling.integer_law(sampling.pps_probs(jnp.zeros(5), jnp.ones(5, bool)))
    index = sampling.draw_iid(jax.random.key(0), cum, 3)
    assert np.all((index >= 0) & (index < 5)) and np.all(np.asarray(law) == 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=11, max_size=11))
def test_first_visits_equal_a_set(draws):
    index, valid = (np.array(column) for column in zip(*draws, strict=True))
    seen, want = set(), []
    for unit, ok in draws:
        want.append(ok and unit not in seen)
        seen |= {unit} if ok else set()
    np.testing.assert_array_equal(_first_visits(index.astype(np.int32), valid), want)


_first_visits = jax.jit(lambda index, valid: sampling.first_visits(index, valid))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: sampling.pps_probs(jnp.array([1.0, -1.0]), jnp.ones(2, bool)), "gap is -1.0"),
        (lambda: sampling.pps_probs(jnp.array([1.0, jnp.inf]), jnp.ones(2, bool)), "gap is inf"),
        (lambda: sampling.pps_probs(jnp.ones(2), jnp.ones(2, bool), 2.0), "eps is 2.0"),
        (lambda: sampling.boundary_probs(jnp.ones(2), jnp.ones(2), jnp.ones(2, bool), share=2.0), "share is 2.0"),
        (lambda: sampling.integer_law(jnp.array([0.5, -0.5])), "p is -0.5"),
        (lambda: sampling.integer_law(jnp.zeros(0)), "p has 0 units"),
        (lambda: sampling.draw_wor(jax.random.key(0), jnp.array([1.0, jnp.nan]), 1), "p is nan"),
        (lambda: sampling.draw_wor(jax.random.key(0), jnp.ones(3), 4), "only 3 units"),
    ],
)
def test_laws_of_what_cannot_be_are_refused(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_inside_of_jit_they_are_no_probabilities():
    gap, there = jnp.array([1.0, -1.0]), jnp.ones(2, bool)
    assert np.isnan(jax.jit(sampling.pps_probs)(gap, there)).all()
    assert np.isnan(jax.jit(lambda s: sampling.boundary_probs(jnp.ones(2), jnp.ones(2), there, share=s))(2.0)).all()
    assert np.isnan(jax.jit(sampling.integer_law)(gap)[1]).all()
    known = gap.at[1].set(jnp.nan)  # a unit that is not there may hold anything
    assert np.isfinite(sampling.pps_probs(known, jnp.array([True, False]))).all()
