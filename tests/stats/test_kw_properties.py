"""The process as a program: bounds against bisection, batch against single draws, edges, monotonicity, compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling
from tests.stats import oracle
from tests.stats.oracle import POPULATIONS, UNITS, population
from tests.stats.simulate import audit, sizes

CONFIG = kw.KWConfig(capacity=UNITS)
TAILS = np.float32([2.3, 4.6, 11.5])
RESOLUTION = 33.0**-3


update, update_batch, wealth_path = (jax.jit(f) for f in (kw.update, kw.update_batch, kw.wealth_path))
upper, lower, decide = (jax.jit(f) for f in (kw.upper, kw.lower, kw.decide))
upper_at_tails = jax.jit(jax.vmap(kw.upper, (None, None, None, 0, None)))


@jax.jit
def upper_after(state, knowns, cap, eta):
    """[UNITS + 1, 3]: the bound after 0, 1, ... draws, at the three levels."""
    first = lambda count, known: state._replace(count=count, known=known)  # noqa: E731
    return jax.vmap(lambda count, known: upper_at_tails(first(count, known), cap, 0.0, TAILS, eta))(
        jnp.arange(UNITS + 1, dtype=jnp.int32), knowns
    )


def run(name: str, seed: int, sampler: str = "wor"):
    """(process of all UNITS draws, cap, truth, slack and probabilities in draw order)."""
    pop = population(name)
    state, _ = audit(jax.random.key(seed), *pop, sampler=sampler, n=UNITS)
    return (state, *sizes(pop))


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize("sampler", ["iid", "wor"])
def test_upper_is_at_least_a_float64_bisection_and_near_it(name, sampler):
    state, cap, _ = run(name, 3, sampler)
    count, y, spent = int(state.count), *(np.asarray(v, np.float64) for v in (state.y, state.spent))
    count = min(count, 25)  # before exhaustion, where the unguarded reference has no slack left to divide by
    first = state._replace(count=jnp.int32(count), known=jnp.float32(spent[count - 1]))
    eta = float(kw.rounding_guard(cap))
    got = np.asarray(upper_at_tails(first, cap, 0.0, TAILS, eta))
    for tail, bound in zip(TAILS, got, strict=True):
        inputs = y[:count], np.ones(count), spent[:count]
        exact = oracle.upper(*inputs, float(cap), 0.0, spent[count - 1], np.exp(-float(tail)))
        assert exact <= bound <= exact + (RESOLUTION + 1e-6) * cap + 3 * eta


@given(st.sampled_from(POPULATIONS), st.integers(0, 99))
@settings(max_examples=20)
def test_bound_falls_with_draws_and_with_alpha(name, seed):
    state, cap, truth = run(name, seed)
    knowns = jnp.concatenate([state.spent, state.known[None]])
    knowns = jnp.where(jnp.arange(UNITS + 1) < state.count, knowns, state.known)
    eta = kw.rounding_guard(cap)
    u = np.asarray(upper_after(state, knowns, cap, eta))
    assert np.all(np.isfinite(u)) and np.all(u[0] == cap)
    assert np.all(np.diff(u, axis=0) <= RESOLUTION * cap + 2e-7 * cap)
    assert np.all(u[:, 0] <= u[:, 1]) and np.all(u[:, 1] <= u[:, 2])  # smaller alpha, larger bound
    ceiling = np.minimum(cap, cap - np.asarray(knowns) + np.asarray(eta))
    assert np.all(u <= ceiling[:, None])
    np.testing.assert_allclose(u[-1], truth, atol=3 * float(eta))  # all read


@given(st.sampled_from(POPULATIONS), st.integers(0, 99), st.integers(-30, 30))
@settings(max_examples=20)
def test_scaling_by_a_power_of_two_scales_the_bound_exactly(name, seed, power):
    if name == "range":
        power = abs(power)  # its smallest values would underflow
    state, cap, _ = run(name, seed)
    scale = np.float32(2.0**power)
    scaled = state._replace(y=state.y * scale, spent=state.spent * scale, known=state.known * scale)
    eta = kw.rounding_guard(cap)
    one, other = (
        upper_at_tails(state, cap, 0.0, TAILS, eta),
        upper_at_tails(scaled, cap * scale, 0.0, TAILS, eta * scale),
    )
    np.testing.assert_allclose(other, one * scale, rtol=1e-6)


@given(st.integers(0, 99), st.floats(1.0, 100.0))
@settings(max_examples=20)
def test_larger_bound_on_an_unread_unit_never_lowers_the_bound(seed, more):
    """For the same reads and probabilities."""
    state, cap, _ = run("lognormal", seed)
    first = state._replace(count=jnp.int32(20), known=state.spent[20])
    eta = kw.rounding_guard(cap + more)
    before, after = (upper_at_tails(first, c, 0.0, TAILS, eta) for c in (cap, cap + np.float32(more)))
    assert np.all(np.asarray(after) >= np.asarray(before) - RESOLUTION * (cap + more))


def test_lower_mirrors_upper_and_brackets_the_truth():
    pop = population("lognormal")
    top, truth = sizes(pop)
    law = sampling.pps_probs(jnp.asarray(pop.cap - pop.lo), jnp.asarray(pop.valid), 0.05)
    index = sampling.draw_wor(jax.random.key(1), law, UNITS)
    seen = kw.observe_wor(jnp.asarray(pop.x - pop.lo)[index], law[index], jnp.arange(UNITS) < 30)
    state, eta = update_batch(kw.init(CONFIG), *seen), kw.rounding_guard(top)
    bound = lower(state, 0.0, top, 4.6, eta)
    assert seen.distinct_known - eta <= bound <= truth
    assert bound == -upper(state, 0.0, -top, 4.6, eta)
    assert lower(kw.init(CONFIG), 0.25, top, 4.6, eta) == 0.25


def draws(seed: int, n: int, hole: float = 0.3):
    rng = np.random.default_rng(seed)
    slack, prob = np.float32(rng.random(n)), np.float32(rng.uniform(0.01, 1, n))
    removed, valid = np.float32(np.sort(rng.random(n))), rng.random(n) > hole
    for column in (slack, prob, removed):
        column[~valid] = np.nan
    return jnp.asarray(slack), jnp.asarray(prob), jnp.asarray(valid), jnp.asarray(removed)


@functools.partial(jax.jit, static_argnames="config")
def _one_by_one(slack, prob, valid, removed, known, config):
    step = lambda state, d: (kw.update(state, *d), None)  # noqa: E731
    knowns = jnp.full(slack.shape, known)
    return jax.lax.scan(step, kw.init(config), (slack, prob, removed, knowns, valid))[0]


@pytest.mark.parametrize("capacity", [17, 5])
def test_batch_equals_single_draws_equals_parts(capacity):
    """Empty slots hold NaN; with the smaller capacity the later draws are ignored in the same way."""
    slack, prob, valid, removed = draws(0, 17)
    config = kw.KWConfig(capacity=capacity)
    batch = update_batch(kw.init(config), slack, prob, valid, removed, 2.5)
    single = _one_by_one(slack, prob, valid, removed, 2.5, config)
    parts = update_batch(kw.init(config), slack[:4], prob[:4], valid[:4], removed[:4])
    parts = update_batch(parts, slack[4:], prob[4:], valid[4:], removed[4:], 2.5)
    for other in (single, parts):
        for got, want in zip(other, batch, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    count = int(np.asarray(valid).sum())
    assert batch.count == count and np.asarray(batch.valid).sum() == min(count, capacity) and batch.known == 2.5
    assert np.all(np.isfinite(batch.y)) and np.all(np.isfinite(wealth_path(batch, 3.0, 1.0, 1e-4)))


def test_vmap_equals_loop_and_traces_once():
    traced = []

    @jax.jit
    def bound(slack, prob, valid, removed):
        traced.append(1)
        state = kw.update_batch(kw.init(kw.KWConfig(capacity=9)), slack, prob, valid, removed, removed[0])
        return kw.upper(state, 20.0, 0.0, 3.0, 4e-4), kw.log_wealth(state, 20.0, 15.0, 4e-4)

    rows = [draws(seed, 9, hole=0.0) for seed in range(7)]
    loop = np.array([bound(*row) for row in rows])
    assert len(traced) == 1
    together = jax.vmap(bound)(*(jnp.stack(column) for column in zip(*rows, strict=True)))
    np.testing.assert_allclose(np.stack(together, 1), loop, rtol=1e-5, atol=1e-5)


def test_state_fits_both_branches_of_a_cond():
    slack, prob, valid, removed = draws(1, 9)
    go = jax.jit(
        lambda go: jax.lax.cond(
            go,
            lambda s: kw.update_batch(s, slack, prob, valid, removed, jnp.float32(1)),
            lambda s: s,
            kw.init(kw.KWConfig(capacity=9)),
        )
    )
    assert go(False).count == 0 and go(True).count == np.asarray(valid).sum()


def test_float64_is_honoured_and_float32_is_the_default():
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in kw.init(CONFIG))
    with jax.enable_x64(True):
        state = update(kw.init(CONFIG, jnp.float64), 0.5, 0.25, 0.0, 0.5)
        assert state.y.dtype == state.known.dtype == jnp.float64 and state.count.dtype == jnp.int32
        assert upper(state, 3.0, 0.0, 1.0, 1e-9).dtype == jnp.float64
        small = update(kw.init(CONFIG), 0.5, 0.25)
        assert small.y.dtype == small.known.dtype == upper(small, 3.0, 0.0, 1.0, 1e-5).dtype == jnp.float32


@pytest.mark.parametrize(
    ("slack", "prob", "cap"),
    [(0.0, 0.5, 1.0), (0.0, 0.0, 1.0), (0.7, 0.0, 1.0), (1.0, 1.0, 1.0), (1e-12, 1.0, 1.0), (0.0, 1.0, 0.0)],
    ids=["no slack", "no mass", "slack without mass", "the only unit", "tiny", "empty population"],
)
def test_edges_stay_finite(slack, prob, cap):
    state = update(kw.init(CONFIG), slack, prob, 0.0, slack)
    for eta in (0.0, 2e-5 * cap):
        path = np.asarray(wealth_path(state, cap, cap - slack, eta))
        assert np.all(np.isfinite(path)) and np.all(np.exp(path) <= 1 + 1e-5)
        u = float(upper(state, cap, 0.0, 3.0, eta))
        assert cap - slack <= u * (1 + 1e-6) and u <= cap


def test_decide_agrees_with_the_bound():
    state, cap, truth = run("lognormal", 5, "iid")
    eta, tail = kw.rounding_guard(cap), 4.6
    u = float(upper(state, cap, 0.0, tail, eta))
    assert truth < u < cap
    assert decide(state, cap, u, tail, eta)
    assert not decide(state, cap, u - 2 * RESOLUTION * float(cap), tail, eta)
    assert not decide(state, cap, np.nan, tail, eta)
    assert decide(kw.init(CONFIG), 0.2, 0.2, 1e30, eta)  # by the caps alone, at alpha = 0
    assert not decide(kw.init(CONFIG), 0.2, 0.1999, 1e30, eta)
    assert upper(state, cap, 0.0, 1e30, eta) >= float(cap) * 0.5  # alpha = 0: only what is certain


def test_unbounded_cap_is_never_certified():
    state = update(kw.init(CONFIG), 0.5, 0.5)
    assert upper(state, np.inf, 0.0, 3.0, 1e-5) == np.inf and not decide(state, np.inf, 1.0, 3.0, 1e-5)


@pytest.mark.parametrize(
    ("x", "bad"), [(0.5, False), (0.2, False), (0.9, False), (0.91, True), (0.1, True), (np.nan, True)]
)
def test_values_outside_their_bounds_are_flagged(x, bad):
    lo, cap = jnp.full(3, 0.2), jnp.full(3, 0.9)
    values = jnp.array([0.5, x, 0.5])
    assert bool(kw.violated(values, lo, cap)) is bad
    assert not kw.violated(values, lo, cap, jnp.array([True, False, True]))


def test_nan_slack_is_no_evidence():
    state = update_batch(kw.init(CONFIG), jnp.array([jnp.nan, -1.0]), jnp.ones(2), jnp.ones(2, bool), 0.0, 0.0)
    assert np.all(np.asarray(state.y) == 0) and state.count == 2


def test_planned_draws_certify_when_slack_is_proportional():
    cap, truth, budget, tail = 1.0, 0.1, 0.3, 11.5
    n = int(np.ceil(kw.planned_draws(cap, truth, budget, tail)))
    for count, enough in ((n, True), (n - 2, False)):
        state = update_batch(kw.init(CONFIG), jnp.full(UNITS, 0.9), jnp.ones(UNITS), jnp.arange(UNITS) < count)
        assert decide(state, cap, budget, tail, 1e-7) == enough


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (1.5,)),
        ("betas", ()),
        ("weights", (1.0,)),
        ("guard", -1.0),
        ("log_floor", -200.0),
        ("capacity", 0),
    ],
)
def test_bad_configs_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        kw.KWConfig(**{field: value})
