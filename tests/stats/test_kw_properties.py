"""The process as a program: bounds against bisection, batch against single draws, edges, monotonicity, compilation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skg_jax.stats import kaplan_wald as kw
from tests.stats import oracle
from tests.stats.oracle import POPULATIONS, UNITS, population
from tests.stats.simulate import audits, sizes

CONFIG = kw.KWConfig(capacity=UNITS)
TAILS = np.array([2.3, 4.6, 11.5], np.float32)
RESOLUTION = 33.0**-3


@functools.partial(jax.jit, static_argnames="f")
def _jitted(f, *args):
    return f(*args)


def call(f, state, *args):
    """f of the process, compiled once: Python numbers and arrays alike become scalars of the state's dtype."""
    return _jitted(f, state, *(jnp.asarray(a, state.y.dtype) if isinstance(a, float) else a for a in args))


def upper_at_tails(state, cap, eta):
    return np.asarray(call(_upper_at_tails, state, float(cap), float(eta)))


def _upper_at_tails(state, cap, eta):
    return jax.vmap(lambda tail: kw.upper(state, cap, 0.0, tail, eta))(jnp.asarray(TAILS))


@jax.jit
def upper_after(state, knowns, cap, eta):
    """[UNITS + 1, 3]: the bound after 0, 1, ... draws, at the three levels."""
    first = lambda count, known: state._replace(count=count, known=known)
    counts = jnp.arange(UNITS + 1, dtype=jnp.int32)
    return jax.vmap(lambda count, known: _upper_at_tails(first(count, known), cap, eta))(counts, knowns)


@functools.cache
def run(name: str, sampler: str = "wor"):
    """(processes of all UNITS draws, cap, truth)."""
    pop = population(name)
    return (audits(pop, sampler), *sizes(pop))


def run_one(name: str, seed: int, sampler: str = "wor"):
    states, cap, truth = run(name, sampler)
    return jax.tree.map(lambda leaf: leaf[seed], states), cap, truth


@pytest.mark.parametrize("name", POPULATIONS)
@pytest.mark.parametrize("sampler", ["iid", "wor"])
def test_upper_is_at_least_a_float64_bisection_and_near_it(name, sampler):
    state, cap, _ = run_one(name, 3, sampler)
    y, spent = (np.asarray(v, np.float64) for v in (state.y, state.spent))
    count = min(int(state.count), 25)  # before exhaustion, where the unguarded reference has no slack left to divide by
    first = state._replace(count=jnp.int32(count), known=jnp.float32(spent[count - 1]))
    eta = float(kw.rounding_guard(cap))
    for tail, bound in zip(TAILS.tolist(), upper_at_tails(first, cap, eta).tolist(), strict=True):
        inputs = y[:count], np.ones(count), spent[:count]
        exact = oracle.upper(*inputs, float(cap), 0.0, spent[count - 1], np.exp(-tail))
        assert exact <= bound <= exact + (RESOLUTION + 1e-6) * cap + 3 * eta


@given(st.sampled_from(POPULATIONS), st.integers(0, 99))
@settings(max_examples=20)
def test_bound_falls_with_draws_and_with_alpha(name, seed):
    state, cap, truth = run_one(name, seed)
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
    state, cap, _ = run_one(name, seed)
    scale = np.float32(2.0**power)
    scaled = state._replace(y=state.y * scale, spent=state.spent * scale, known=state.known * scale)
    eta = kw.rounding_guard(cap)
    one, other = upper_at_tails(state, cap, eta), upper_at_tails(scaled, cap * scale, eta * scale)
    np.testing.assert_array_equal(other, one * scale)


@given(st.integers(0, 99), st.floats(1.0, 100.0))
@settings(max_examples=20)
def test_larger_bound_on_an_unread_unit_never_lowers_the_bound(seed, more):
    """For the same reads and probabilities."""
    state, cap, _ = run_one("lognormal", seed)
    first = state._replace(count=jnp.int32(20), known=state.spent[20])
    eta = kw.rounding_guard(cap + more)
    before, after = (upper_at_tails(first, c, eta) for c in (cap, cap + np.float32(more)))
    assert np.all(after >= before - RESOLUTION * (cap + more))


def test_lower_mirrors_upper_and_brackets_the_truth():
    """A reflected population has the slack x - l, which is what the lower bound is fed with."""
    pop = population("lognormal")
    top, truth = sizes(pop)
    states, eta = audits(pop._replace(x=pop.cap - pop.x), "wor"), kw.rounding_guard(top)
    for seed in range(9):
        state = jax.tree.map(lambda leaf, seed=seed: leaf[seed], states)
        state = state._replace(count=jnp.int32(30), known=state.spent[30])
        bound = call(kw.lower, state, 0.0, top, 4.6, eta)
        assert state.known - eta <= bound <= truth + 1e-6 * top
        assert bound == -call(kw.upper, state, 0.0, -top, 4.6, eta)
    assert call(kw.lower, kw.init(CONFIG), 0.25, top, 4.6, eta) == 0.25


def draws(seed: int, n: int, hole: float = 0.3):
    rng = np.random.default_rng(seed)
    slack, prob, removed = rng.random(n), rng.uniform(0.01, 1, n), np.sort(rng.random(n))
    valid = rng.random(n) > hole
    slack, prob, removed = (jnp.asarray(np.where(valid, v, np.nan), jnp.float32) for v in (slack, prob, removed))
    return slack, prob, jnp.asarray(valid), removed


@functools.partial(jax.jit, static_argnames="config")
def _one_by_one(slack, prob, valid, removed, known, config):
    step = lambda state, draw: (kw.update(state, draw)[0], None)
    knowns = jnp.full(slack.shape, known)
    return jax.lax.scan(step, kw.init(config), kw.Observation(slack, prob, valid, removed, knowns))[0]


@pytest.mark.parametrize("capacity", [17, 5])
def test_batch_equals_single_draws_equals_parts(capacity):
    """Empty slots hold NaN; with the smaller capacity the later draws are ignored in the same way."""
    slack, prob, valid, removed = draws(0, 17)
    config = kw.KWConfig(capacity=capacity)
    draws_of = lambda part, known: kw.Observation(
        slack[part], prob[part], valid[part], removed[part], jnp.float32(known)
    )
    append = lambda state, part, known: jax.jit(kw.update_batch)(state, draws_of(part, known))
    batch, info = append(kw.init(config), slice(None), 2.5)
    single = _one_by_one(slack, prob, valid, removed, 2.5, config)
    parts, _ = append(kw.init(config), slice(4), 0.0)
    parts, later = append(parts, slice(4, None), 2.5)
    for other in (single, parts):
        for got, want in zip(other, batch, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    count = int(np.asarray(valid).sum())
    assert (int(info.used), int(info.ignored)) == (min(count, capacity), max(0, count - capacity))
    assert not info.invalid and later.ignored == info.ignored
    assert batch.count == count and np.asarray(batch.valid).sum() == min(count, capacity) and batch.known == 2.5
    assert np.all(np.isfinite(batch.y)) and np.all(np.isfinite(call(kw.wealth_path, batch, 3.0, 1.0, 1e-4)))


def test_vmap_equals_loop_and_traces_once():
    traced = []

    @jax.jit
    def bound(slack, prob, valid, removed):
        traced.append(1)
        draws = kw.Observation(slack, prob, valid, removed, removed[0])
        state, _ = kw.update_batch(kw.init(kw.KWConfig(capacity=9)), draws)
        return kw.upper(state, 20.0, 0.0, 3.0, 4e-4), kw.log_wealth(state, 20.0, 15.0, 4e-4)

    rows = [draws(seed, 9, hole=0.0) for seed in range(7)]
    loop = np.array([bound(*row) for row in rows])
    assert len(traced) == 1
    together = jax.vmap(bound)(*(jnp.stack(column) for column in zip(*rows, strict=True)))
    np.testing.assert_allclose(np.stack(together, 1), loop, rtol=1e-5, atol=1e-5)


@given(st.integers(0, 99))
@settings(max_examples=5)
def test_jit_equals_eager(seed):
    slack, prob, valid, removed = draws(seed, 9)
    start, draw = kw.init(kw.KWConfig(capacity=9)), kw.Observation(slack, prob, valid, removed, jnp.float32(1))
    (eager, info), (jitted, same) = kw.update_batch(start, draw), jax.jit(kw.update_batch)(start, draw)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (eager, info), (jitted, same))
    np.testing.assert_allclose(
        kw.wealth_path(eager, 9.0, 2.0, 1e-4), call(kw.wealth_path, eager, 9.0, 2.0, 1e-4), rtol=1e-5
    )


def test_state_fits_both_branches_of_a_cond():
    slack, prob, valid, removed = draws(1, 9)
    go = jax.jit(
        lambda go: jax.lax.cond(
            go,
            lambda s: kw.update_batch(s, kw.Observation(slack, prob, valid, removed, jnp.float32(1)))[0],
            lambda s: s,
            kw.init(kw.KWConfig(capacity=9)),
        )
    )
    assert go(False).count == 0 and go(True).count == np.asarray(valid).sum()


def test_float64_is_honoured_and_float32_is_the_default():
    assert [str(leaf.dtype) for leaf in kw.init(CONFIG)] == ["float32", "float32", "int32", "float32", "bool"]
    with jax.enable_x64(True):
        state, _ = kw.update(kw.init(CONFIG, jnp.float64), kw.observe(0.5, 0.25, 0.0, 0.5))
        assert state.y.dtype == state.known.dtype == jnp.float64 and state.count.dtype == jnp.int32
        assert call(kw.upper, state, 3.0, 0.0, 1.0, 1e-9).dtype == jnp.float64
        small, _ = kw.update(kw.init(CONFIG), kw.observe(0.5, 0.25))
        assert small.y.dtype == small.known.dtype == call(kw.upper, small, 3.0, 0.0, 1.0, 1e-5).dtype == jnp.float32


@pytest.mark.parametrize(
    ("slack", "prob", "cap"),
    [(0.0, 0.5, 1.0), (0.0, 0.0, 1.0), (0.7, 0.0, 1.0), (1.0, 1.0, 1.0), (1e-12, 1.0, 1.0), (0.0, 1.0, 0.0)],
    ids=["no slack", "no mass", "slack without mass", "the only unit", "tiny", "empty population"],
)
def test_edges_stay_finite(slack, prob, cap):
    state, _ = kw.update(kw.init(CONFIG), kw.observe(slack, prob, 0.0, slack))
    for eta in (0.0, 2e-5 * cap):
        path = np.asarray(call(kw.wealth_path, state, cap, cap - slack, eta))
        assert np.all(np.isfinite(path)) and np.all(np.exp(path) <= 1 + 1e-5)
        u = float(call(kw.upper, state, cap, 0.0, 3.0, eta))
        assert cap - slack <= u * (1 + 1e-6) and u <= cap


def test_decide_agrees_with_the_bound():
    state, cap, truth = run_one("lognormal", 5, "iid")
    eta, tail = kw.rounding_guard(cap), 4.6
    u = float(call(kw.upper, state, cap, 0.0, tail, eta))
    assert truth < u < cap
    assert call(kw.decide, state, cap, u, tail, eta)
    assert not call(kw.decide, state, cap, u - 2 * RESOLUTION * float(cap), tail, eta)
    assert not call(kw.decide, state, cap, np.nan, tail, eta)
    assert call(kw.decide, kw.init(CONFIG), 0.2, 0.2, 1e30, eta)  # by the caps alone, at alpha = 0
    assert not call(kw.decide, kw.init(CONFIG), 0.2, 0.1999, 1e30, eta)
    assert call(kw.upper, state, cap, 0.0, 1e30, eta) == cap  # alpha = 0: only what is certain


def test_unbounded_cap_is_never_certified():
    state, _ = kw.update(kw.init(CONFIG), kw.observe(0.5, 0.5))
    assert call(kw.upper, state, np.inf, 0.0, 3.0, 1e-5) == np.inf
    assert not call(kw.decide, state, np.inf, 1.0, 3.0, 1e-5)


@pytest.mark.parametrize(
    ("x", "bad"), [(0.5, False), (0.2, False), (0.9, False), (0.91, True), (0.1, True), (np.nan, True)]
)
def test_values_outside_their_bounds_are_flagged(x, bad):
    lo, cap = jnp.full(3, 0.2), jnp.full(3, 0.9)
    values = jnp.array([0.5, x, 0.5])
    assert bool(kw.violated(values, lo, cap)) is bad
    assert not kw.violated(values, lo, cap, jnp.array([True, False, True]))


BAD_DRAWS = {
    "slack is -0.5": {"slack": -0.5},
    "slack is nan": {"slack": np.nan},
    "slack is inf": {"slack": np.inf},
    "prob is 1.5": {"prob": 1.5},
    "prob is -0.25": {"prob": -0.25},
    "prob is nan": {"prob": np.nan},
    "removed is -1.0": {"removed": -1.0},
    "distinct_known is nan": {"known": np.nan},
}


@pytest.mark.parametrize("words", BAD_DRAWS)
def test_a_draw_that_cannot_be_raises_outside_of_jit_and_voids_inside(words):
    change = BAD_DRAWS[words]
    get = lambda field, usual: float(change[field]) if field in change else usual
    draw = kw.observe(get("slack", 0.9), get("prob", 1.0), get("removed", 0.0), get("known", 0.0))
    with pytest.raises(ValueError, match=words + ", but .*"):
        kw.update(kw.init(CONFIG), draw)
    good = kw.observe_iid(jnp.full(40, 0.9), jnp.ones(40), jnp.ones(40, bool))
    state, info = jax.jit(kw.update_batch)(kw.init(CONFIG), good)
    assert call(kw.decide, state, 1.0, 0.5, 4.6, 1e-7) and not info.invalid
    for order in ((draw, good), (good, draw)):  # for good: what was certified before is not any more
        state = kw.init(CONFIG)
        for part in order:
            step = kw.update if part is draw else kw.update_batch
            state, info = jax.jit(step)(state, part)
        assert info.invalid
        assert not call(kw.decide, state, 1.0, 0.5, 4.6, 1e-7) and not call(kw.decide, state, 0.4, 0.5, 4.6, 1e-7)
        assert call(kw.upper, state, 1.0, 0.0, 4.6, 1e-7) == np.inf == -call(kw.lower, state, 0.0, 1.0, 4.6, 1e-7)
        assert call(kw.log_wealth, state, 1.0, 0.9, 1e-7) == 0


@pytest.mark.parametrize("level", [0.0, -1.0, np.nan])
def test_a_level_that_is_none_certifies_nothing(level):
    """log(1/alpha) <= 0 is an alpha of 1 or more, which any wealth would reach."""
    state, _ = kw.update(kw.init(CONFIG), kw.observe(0.9, 1.0))
    assert not call(kw.decide, state, 0.5, 0.4, level, 1e-7) and not call(kw.decide, state, 0.5, 0.6, level, 1e-7)
    assert call(kw.upper, state, 1.0, 0.0, level, 1e-7) == np.inf
    for bad in (lambda: kw.decide(state, 1.0, 0.5, level, 0.0), lambda: kw.upper(state, 1.0, 0.0, level, 0.0)):
        with pytest.raises(ValueError, match="log_inv_alpha is"):
            bad()


def test_planned_draws_certify_when_slack_is_proportional():
    cap, truth, budget, tail = 1.0, 0.1, 0.3, 11.5
    n = int(np.ceil(kw.planned_draws(cap, truth, budget, tail)))
    for count, enough in ((n, True), (n - 2, False)):
        draws = kw.observe_iid(jnp.full(UNITS, 0.9), jnp.ones(UNITS), jnp.arange(UNITS) < count)
        state, _ = kw.update_batch(kw.init(CONFIG), draws)
        assert call(kw.decide, state, cap, budget, tail, 1e-7) == enough


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("betas", (1.5,)),
        ("betas", ()),
        ("weights", (1.0,)),
        ("guard", -1.0),
        ("guard", np.nan),
        ("mass_guard", np.nan),
        ("guard", np.inf),
        ("log_floor", -200.0),
        ("capacity", 0),
    ],
)
def test_bad_configs_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=field):
        kw.KWConfig(**{field: value})


@pytest.mark.parametrize(
    ("p", "left", "words"),
    [
        ([0.5, 2.0], 1.0, r"all draws is 2\.5"),
        ([0.3, 0.3, 0.3, 0.3], 1.0, r"all draws is 1\.2"),
        ([0.3, 0.3], 0.5, r"all draws is 1\.1"),
        ([0.5, np.nan], 1.0, "all draws is nan"),
        ([0.5], np.nan, "p_left is nan"),
        ([0.5], 1.1, r"p_left is 1\.1"),
    ],
)
def test_draws_of_more_than_the_weight_left_cannot_be(p, left, words):
    slack, p = jnp.full(len(p), 0.1), jnp.asarray(p, jnp.float32)
    there = jnp.ones(len(p), bool)
    with pytest.raises(ValueError, match=rf"{words}.*, but .*\."):
        kw.observe_wor(slack, p, there, left)

    @jax.jit
    def after(valid):
        state, info = kw.update_batch(kw.init(CONFIG), kw.observe_wor(slack, p, valid, left))
        return kw.upper(state, 3.0, 0.0, 4.6, 1e-4), info.invalid

    assert [float(v) for v in after(there)] == [np.inf, 1]
    assert [float(v) for v in after(~there)] == [3, 0]  # padding may hold anything


def test_more_slack_than_there_is_bounds_nothing():
    cap = 11.0
    for known, fine in ((100.0, False), (11.01, False), (11.0005, True), (5.0, True)):
        state, _ = kw.update(kw.init(CONFIG), kw.observe(0.5, 0.5, 0.0, known))
        assert np.isfinite(call(kw.upper, state, cap, 0.0, 4.6, 1e-4)) == fine
        assert np.isfinite(call(kw.lower, state, 0.0, cap, 4.6, 1e-4)) == fine
        if not fine:
            for bound in (kw.upper, kw.lower):
                ends = (cap, 0.0) if bound is kw.upper else (0.0, cap)
                with pytest.raises(ValueError, match=r"the slack read is .*, but .*\."):
                    bound(state, *ends, 4.6, 1e-4)
