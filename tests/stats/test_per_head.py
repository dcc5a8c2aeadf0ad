"""Every head audited: expectations over all pairs of orders, what the claim excludes, where reads go, its edges."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import per_head, pooled
from tests.stats import oracle
from tests.stats.oracle import POPULATIONS, population
from tests.stats.unchecked import unchecked

EXACT = per_head.PerHeadConfig(
    rounds=(3, 2, 2), uniform_share=0.1, betting=kw.KWConfig(guard=0.0, mass_guard=0.0, capacity=8, grid=4, levels=2)
)
LEVEL = float(-np.log(0.05))
REPS = 1000
COARSE = per_head.PerHeadConfig(
    rounds=(40, 40, 80), uniform_share=0.05, betting=kw.KWConfig(capacity=60, grid=1, levels=10)
)


def heads(sizes=(4, 4), seed=3):
    """(lower, upper, value, valid) of heads of different sizes."""
    rng = np.random.default_rng(seed)
    lower, x = np.sort(rng.random((2, len(sizes), max(sizes))) ** 3, axis=0)
    valid = np.arange(max(sizes)) < np.array(sizes)[:, None]
    return lower, x + 0.05 + rng.random(x.shape) * np.array([0.6, 2.0])[: len(sizes), None], x, valid


def every_order(lower, upper, valid, eps):
    """All orders of both heads together, padding last, with their chance: [S, H, U], [S]."""
    rows = []
    for low, up, there in zip(lower, upper, valid, strict=True):
        n = there.sum()
        gap = (up - low)[:n]
        perms, chance = oracle.orders((1 - eps) * gap / gap.sum() + eps / n)
        tail = np.broadcast_to(np.arange(n, len(there)), (len(perms), len(there) - n))
        rows.append(list(zip(np.concatenate([perms, tail], 1), chance, strict=True)))
    pairs = list(itertools.product(*rows))
    order = np.array([[p for p, _ in pair] for pair in pairs], np.int32)
    return order, np.array([np.prod([c for _, c in pair]) for pair in pairs])


@functools.partial(jax.jit, static_argnames=("config", "peek"))
def stopped(order, lower, upper, x, valid, budgets, level, config=EXACT, peek=False):
    """(K of each head at its true sum when the audit stopped, the report)."""
    pop = per_head.population(lower, upper, valid, config)
    if peek:  # each head reads its loosest units first, though the law says otherwise
        order = jnp.argsort(jnp.where(valid, -(upper - x), jnp.inf), axis=1).astype(jnp.int32)
    report = per_head.audit_order(order, pop, x, budgets, level, config)
    slack = jnp.take_along_axis(upper - x, order, axis=1)
    run = per_head.start(order, pop)._replace(slack=slack, count=report.reads)
    states = per_head.processes(run, order, pop, config)
    total = lambda v: jnp.where(valid, v, 0).sum(1)
    paths = jax.vmap(lambda s, c, m: kw.wealth_path(s, c, m, 0.0, config.betting)[-1])
    return jnp.exp(paths(states, total(upper), total(x))), report


def enumerate_all(sizes, factor, alpha, peek=False):
    """(mean K of each head, P(accepted), mean reads) over all pairs of orders; budgets are `factor` times the truth."""
    lower, upper, x, valid = heads(sizes)
    order, chance = every_order(lower, upper, valid, 0.1)
    assert chance.sum() == pytest.approx(1)
    with jax.enable_x64(True):
        args = [jnp.asarray(v) for v in (lower, upper, x, valid, np.where(valid, x, 0).sum(1) * np.array(factor))]
        run = jax.vmap(lambda o: stopped(o, *args, -jnp.log(alpha), peek=peek))
        wealth, report = jax.tree.map(np.asarray, run(jnp.asarray(order)))
    return chance @ wealth, chance @ report.accepted, chance @ report.reads, report


@pytest.mark.parametrize("sizes", [(4, 4), (6, 2)])
@pytest.mark.parametrize("factor", [(1.0, 1.0), (1.3, 0.98), (1.3, 1.3)])
def test_wealth_has_mean_one_wherever_the_audit_stops(sizes, factor):
    """How many reads a head gets depends on all values read before: optional stopping over all pairs of orders."""
    wealth, _, _, report = enumerate_all(sizes, factor, 0.3)
    np.testing.assert_allclose(wealth, 1, atol=1e-6)
    assert len(np.unique(report.reads[:, 0])) > 1 or factor != (1.3, 1.3)


@pytest.mark.parametrize("factor", [(0.98, 1.4), (1.4, 0.98), (0.98, 0.98)])
def test_a_bad_head_is_accepted_with_at_most_alpha(factor):
    """The budget just below the truth of one head or both: the exact probability of a false claim."""
    for alpha in (0.5, 0.3, 0.1):
        assert enumerate_all((4, 4), factor, alpha)[1] <= alpha


def test_good_heads_are_accepted():
    assert enumerate_all((4, 4), (1.4, 1.4), 0.3)[1] > 0.5


def test_reads_chosen_by_their_content_are_noticed():
    wealth, _, _, _ = enumerate_all((4, 4), (1.05, 1.05), 0.3, peek=True)
    assert np.all(np.abs(wealth - 1) > 0.05)


@functools.partial(jax.jit, static_argnames="config")
def reports(lower, upper, x, valid, budgets, level, config=COARSE):
    one = lambda key: per_head.audit(key, lower, upper, x, budgets, level, valid, config)
    return jax.vmap(one)(jax.random.split(jax.random.key(4), REPS))


@pytest.mark.parametrize(
    "alpha", [pytest.param(0.1, marks=pytest.mark.slow), 0.05, pytest.param(0.01, marks=pytest.mark.slow)]
)
def test_one_bad_head_beside_good_ones_is_rarely_accepted(alpha):
    """Every population in turn is the bad head, just above its budget; two loose heads beside it pass easily."""
    good = [population("flat"), population("lognormal")]
    for name in POPULATIONS:
        pops = [*good, population(name)]
        lower, upper, x, valid = (np.stack([getattr(p, f) for p in pops]) for f in ("lo", "cap", "x", "valid"))
        truth, cap = (np.where(valid, v.astype(np.float64), 0).sum(1) for v in (x, upper))
        budgets = (truth + np.array([0.5, 0.5, 0]) * (cap - truth) - np.array([0, 0, 1e-3]) * cap).astype(np.float32)
        report = jax.tree.map(np.asarray, reports(lower, upper, x, valid, budgets, np.float32(-np.log(alpha))))
        limit = binom.ppf(0.999, REPS, alpha)
        assert report.accepted.sum() <= limit, name
        assert not report.violated.any() and np.all((report.upper < truth * (1 - 1e-5)).sum(0) <= limit), name
        if name in ("flat", "lognormal", "needle", "half at bound"):  # others are soon without hope, and reading ends
            assert np.all(report.passed[:, :2].mean(0) > 0.9)


@pytest.mark.slow
def test_a_correction_that_is_left_out_where_it_is_due_is_noticed():
    """Control: "some head is within its budget" is no conjunctive claim; twelve bad heads err too often."""
    pop = population("half at bound")
    lower, upper, x, valid = (np.stack([column] * 12) for column in (pop.lo, pop.cap, pop.x, pop.valid))
    budgets = (x.sum(1, dtype=np.float64) * (1 - 1e-3)).astype(np.float32)
    report = reports(
        lower,
        upper,
        x,
        valid,
        budgets,
        np.float32(LEVEL),
        per_head.PerHeadConfig(rounds=(480,), betting=COARSE.betting),
    )
    assert np.asarray(report.accepted).sum() <= binom.ppf(0.999, REPS, 0.05)
    assert np.asarray(report.passed).any(1).sum() > binom.ppf(0.999, REPS, 0.05)


def lost_head():
    """30 heads of 50 units with loose bounds; the last lost most of its mass, which the average hardly shows."""
    rng = np.random.default_rng(0)
    x = (rng.random((30, 50)) * 4e-4).astype(np.float32)
    x[-1] *= 60
    return jnp.zeros(x.shape), jnp.asarray(x + np.float32(0.004)), jnp.asarray(x)


def test_an_average_does_not_exclude_a_lost_head_and_this_audit_does():
    lower, upper, x = lost_head()
    budgets, key = jnp.full(30, 0.1), jax.random.key(1)
    assert x.sum() < 0.1 * 30 and x[-1].sum() > 0.5
    whole = jax.jit(lambda key: pooled.audit(key, lower.ravel(), upper.ravel(), x.ravel(), budgets.sum(), LEVEL))(key)
    config = per_head.PerHeadConfig(rounds=(512, 512))
    each = jax.jit(lambda valid: per_head.audit(key, lower, upper, x, budgets, LEVEL, valid, config))
    found = each(jnp.ones(x.shape, bool))
    assert bool(whole.accepted)
    assert not bool(found.accepted) and not bool(found.passed[-1])
    kept = each(jnp.ones(x.shape, bool).at[-1].set(False))  # without the lost head
    assert bool(kept.accepted) and np.all(np.asarray(kept.upper)[:-1] >= x[:-1].sum(1))


def test_reads_go_where_bounds_are_loose():
    _, _, x = lost_head()
    upper = (x + 0.001 * jnp.linspace(1, 4, 30)[:, None]).at[-1].set(x[-1])  # the last is known exactly
    budgets = jnp.asarray(np.append(np.full(29, 0.08), 1.5).astype(np.float32))
    config = per_head.PerHeadConfig(rounds=(290,))
    audit = jax.jit(lambda key: per_head.audit(key, 0 * x, upper, x, budgets, LEVEL, config=config))
    reads = np.asarray(audit(jax.random.key(0)).reads)
    tight = np.flatnonzero(np.asarray(upper.sum(1) <= budgets))
    assert tight.size >= 5 and np.all(reads[tight] == 0)
    loose = np.setdiff1d(np.arange(30), tight)
    assert reads[loose[-1]] > 2 * reads[loose[0]] > 0 and reads.sum() > 250


@given(st.lists(st.floats(0, 1e6), min_size=5, max_size=5), st.lists(st.integers(0, 9), min_size=5, max_size=5),
       st.integers(1, 40))  # fmt: skip
@settings(max_examples=60)
def test_allocation_keeps_within_its_limits(need, left, size):
    counts = np.asarray(per_head.allocate(jnp.asarray(need, jnp.float32), jnp.asarray(left, jnp.int32), size))
    assert counts.min() >= 0 and counts.sum() <= size
    assert np.all(counts <= np.array(left)) and np.all(counts[np.float32(need) == 0] == 0)


@pytest.mark.parametrize("changes", [{"rounds": ()}, {"rounds": (0,)}, {"uniform_share": 0.0}, {"uniform_share": 2.0}])
def test_impossible_settings_are_refused(changes):
    with pytest.raises(ValueError, match=r"\.$"):
        per_head.PerHeadConfig(**changes)


def small_heads(sizes=(4, 4)):
    return [jnp.asarray(v, bool if v.dtype == bool else jnp.float32) for v in heads(sizes)]


SHORT = per_head.PerHeadConfig(rounds=(16,))  # one round compiles in a third of the time of three
_audit = jax.jit(lambda *args: per_head.audit(jax.random.key(0), *args, config=SHORT))


def test_a_hopeless_head_ends_the_reading():
    """The lower bounds of one head already pass its budget: no read can lead to acceptance."""
    lower, upper, x, valid = small_heads()
    budgets = jnp.asarray([10.0, float(lower[1].sum()) * 0.5], jnp.float32)
    report = _audit(lower, upper, x, budgets, jnp.float32(LEVEL), valid)
    assert not bool(report.accepted) and np.asarray(report.reads).sum() == 0


@pytest.mark.parametrize("fault", ["above", "below", "nan", "bounds", "level", "budget"])
def test_what_makes_no_sense_raises_outside_of_jit_and_voids_inside(fault):
    lower, upper, x, valid = small_heads()
    budgets, level = jnp.asarray(upper.sum(1) * 0.8), jnp.float32(0 if fault == "level" else LEVEL)
    x = {"above": upper + 1, "below": lower - 1, "nan": x * np.nan}.get(fault, x)
    lower = jnp.where(jnp.arange(4) == 2, upper + 1, lower) if fault == "bounds" else lower
    budgets = budgets * np.nan if fault == "budget" else budgets
    report = _audit(lower, upper, x, budgets, level, valid)
    assert bool(report.violated) and not bool(report.accepted) and np.all(np.isinf(report.upper))
    with pytest.raises(ValueError, match=r"(bounds|violated|budgets|log_inv_alpha) is .*, but .*\.$"):
        per_head.audit(jax.random.key(0), lower, upper, x, budgets, level, valid, SHORT)


def test_padding_is_not_read():
    lower, upper, x, valid = heads((5, 3))
    poisoned = [jnp.asarray(np.where(valid, v, np.nan), jnp.float32) for v in (lower, upper, x)]
    budgets = jnp.asarray(np.where(valid, x, 0).sum(1) * 1.001, jnp.float32)
    report = _audit(*poisoned, budgets, jnp.float32(LEVEL), jnp.asarray(valid))
    assert not bool(report.violated) and np.asarray(report.reads).tolist() == [5, 3]
    np.testing.assert_allclose(report.upper, np.where(valid, x, 0).sum(1), rtol=1e-3)


SHAPES = {
    "read": {"read": np.ones((2, 3), np.float32)},
    "valid": {"valid": np.ones((2, 3), bool)},
    "upper": {"upper": np.ones((3, 4), np.float32)},
    "one head": {name: np.ones(4, np.float32) for name in ("lower", "upper", "read")},
    "no units": {name: np.ones((2, 0), np.float32) for name in ("lower", "upper", "read")},
    "scalar budget": {"budgets": np.float32(1)},
    "budgets": {"budgets": np.ones(3, np.float32)},
    "level": {"log_inv_alpha": np.ones(2, np.float32)},
}


@pytest.mark.parametrize("fault", SHAPES)
def test_shapes_that_do_not_fit_are_refused_also_inside_jit(fault):
    lower, upper, x, _ = (np.asarray(v) for v in small_heads())
    call = {"lower": lower, "upper": upper, "read": x, "budgets": np.ones(2, np.float32)}
    call |= {"log_inv_alpha": np.float32(LEVEL)} | SHAPES[fault]
    audit = lambda call: per_head.audit(jax.random.key(0), **call, config=SHORT)
    for run in (audit, jax.jit(audit)):
        with unchecked(), pytest.raises(ValueError, match=r"shapes? .*\(.*\), but .*\."):
            run(call)


def test_an_order_of_other_heads_is_refused():
    lower, upper, x, valid = small_heads()
    pop = per_head.population(lower, upper, valid, SHORT)
    order = jnp.zeros((3, 4), jnp.int32)
    with unchecked(), pytest.raises(ValueError, match=r"order \(3,\), but"):
        per_head.audit_order(order, pop, x, jnp.ones(2), LEVEL, SHORT)


def test_arrays_of_numpy_are_taken_outside_of_jit():
    lower, upper, x, valid = heads()  # float64
    args: list[Any] = [lower, upper, x, 0.99 * upper.sum(1), LEVEL, valid]
    with unchecked():
        found = per_head.audit(jax.random.key(0), *args, config=SHORT)
        want = per_head.audit(jax.random.key(0), *[jnp.asarray(v) for v in args], config=SHORT)
    jax.tree.map(np.testing.assert_array_equal, found, want)
    assert np.asarray(found.reads).sum() > 0
