"""The report of an audit: coverage of the bound, rounds, keys, weights that are not audited."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.audit import AuditConfig
from skg_jax.audit.draws import Population, draw
from tests.audit import synthetic
from tests.audit.lies import HONEST, lies
from tests.audit.oracle import truth
from tests.audit.reports import REPS, audits, keys, misses_too_often
from tests.audit.synthetic import LENGTHS, Step, head_weights
from tests.audit.test_units import read_all
from tests.kv.oracle import f64

CONFIG = AuditConfig(rate=0.05)
PARTS = np.cumsum(CONFIG.rounds)
ALPHA = 0.1


@functools.cache
def step_of(config: AuditConfig = CONFIG) -> Step:
    return synthetic.step(config)


def residual(step: Step, config: AuditConfig = CONFIG, row: int = 0) -> float:
    """R: the sum of all units, each as a read would find it."""
    return float(read_all(step, config).x[:, row].sum())


def is_below(bound: np.ndarray, total: float) -> np.ndarray:
    return f64(bound) < total


# --- the bound ----------------------------------------------------------------------------------------------------


OTHERS = [
    AuditConfig(rate=0.05, design="wor"),
    AuditConfig(rate=0.05, design="boundary"),
    AuditConfig(rate=0.05, residual="output"),
    AuditConfig(rate=0.05, page_size=32),
    AuditConfig(rate=0.1, page_size=64, design="wor"),
    AuditConfig(rate=0.05, rounds=(1,), uniform_share=1.0),
    AuditConfig(rate=1.0),  # every unit is read several times
]


@pytest.mark.parametrize("config", [CONFIG, *(pytest.param(config, marks=pytest.mark.slow) for config in OTHERS)])
def test_the_bound_holds_for_all_but_alpha_of_the_keys(config):
    step, tight = step_of(config), []
    for row in range(len(LENGTHS)):
        total = residual(step, config, row)
        for alpha in (ALPHA, 0.5):
            report = audits(step, config, alpha=alpha, row=row, seed=row)
            assert not report.violated.any() and (report.corrupt == -1).all()
            assert not misses_too_often(is_below(report.bound, total), alpha)
            assert (report.bound <= report.cap).all()
        tight.append(np.median(report.bound) / report.cap[0])
    # At alpha = 1/2 even a few draws say something: four of the last row where they follow the gaps, and eight of the
    # first where every unit has the same chance.
    assert tight[0 if config.uniform_share == 1 else -1] < 0.96


@pytest.mark.slow
@pytest.mark.parametrize("config", [CONFIG, OTHERS[0]])
def test_the_bound_holds_for_many_more_keys(config):
    step, missed = step_of(config), []
    total = residual(step, config)
    for seed in range(100, 160):
        missed.append(is_below(audits(step, config, alpha=ALPHA, seed=seed).bound, total))
    assert not misses_too_often(np.concatenate(missed), ALPHA)
    assert np.concatenate(missed).mean() > ALPHA / 20  # nor is it trivially wide


def test_a_law_that_is_not_the_one_drawn_from_breaks_the_bound():
    step = step_of()
    bounds = [audits(step, CONFIG, alpha=ALPHA, seed=seed, lies=lies(flat=1.0)).bound for seed in range(4)]
    assert misses_too_often(is_below(np.concatenate(bounds), residual(step)), ALPHA)


def test_acceptance_is_rare_when_the_residual_is_above_tau():
    step = step_of()
    tau = residual(step) * (1 - 1e-4)
    accepted = np.concatenate([audits(step, CONFIG, tau=tau, alpha=ALPHA, seed=seed).accepted for seed in range(4)])
    assert not misses_too_often(accepted, ALPHA)
    assert misses_too_often(audits(step, CONFIG, tau=1.5 * tau, alpha=ALPHA).accepted, ALPHA)


def test_the_cap_is_the_sum_of_the_upper_bounds_rounded_up():
    step = step_of()
    for row in range(len(LENGTHS)):
        report, upper = audits(step, CONFIG, row=row), f64(step.evidence.upper)[:, row]
        assert (report.cap >= upper.sum()).all() and (report.cap <= upper.sum() * (1 + 1e-5)).all()
        np.testing.assert_array_equal(report.units, (upper > 0).sum())


def test_the_bound_is_above_the_dropped_mass_it_stands_for():
    step, true = step_of(), truth(step_of(), CONFIG.page_size)
    lost = (f64(step.weights.omega)[:, None] * true.delta).sum((0, 2))
    for row in range(len(LENGTHS)):
        assert lost[row] < residual(step, row=row) < 1.6 * lost[row]


# --- keys and rows ------------------------------------------------------------------------------------------------


def same(one, other) -> None:
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_the_same_key_draws_the_same_pages_and_another_key_others():
    step = step_of()
    one, again, other = (audits(step, CONFIG, seed=seed) for seed in (3, 3, 4))
    same(one, again)
    assert (one.bound != other.bound).mean() > 0.99
    assert len(set(one.bound.tolist())) > 0.9 * REPS


def test_rows_are_audited_by_themselves_wherever_they_stand():
    step, rows = step_of(), np.arange(REPS) % len(LENGTHS)
    order = np.random.default_rng(0).permutation(REPS)
    straight = audits(step, CONFIG, row=rows)
    same(jax.tree.map(lambda x: x[order], straight), audits(step, CONFIG, row=rows[order], key=keys()[order]))
    assert set(straight.units.tolist()) == {int(n) for n in (f64(step.evidence.upper) > 0).sum((0, 2, 3))}


# --- rounds -------------------------------------------------------------------------------------------------------


def draws_of_round(report) -> int:
    return int(np.ceil(CONFIG.rate * report.units[0]))


def test_a_loose_budget_is_met_in_the_first_round():
    report = audits(step_of(), CONFIG, tau=1.01 * audits(step_of(), CONFIG).cap[0], alpha=1e-9)
    assert report.accepted.all() and (report.drawn == draws_of_round(report)).all()


def test_a_budget_that_cannot_be_met_takes_every_round():
    report = audits(step_of(), CONFIG, tau=residual(step_of()) / 2, alpha=1e-5)
    assert not report.accepted.any() and (report.drawn == draws_of_round(report) * PARTS[-1]).all()
    assert (report.pages_read <= report.drawn).all() and (report.pages_read > report.drawn / 2).all()


def test_rows_stop_at_the_end_of_the_round_that_accepts_them():
    step, alpha = step_of(), 0.02
    tau = np.quantile(audits(step, CONFIG, tau=0, alpha=alpha).bound, 0.6)
    report = audits(step, CONFIG, tau=tau, alpha=alpha)
    rounds = report.drawn / draws_of_round(report)
    assert set(rounds.tolist()) == set(PARTS.tolist())
    assert report.accepted[rounds < PARTS[-1]].all() and 0 < report.accepted[rounds == PARTS[-1]].mean() < 1
    assert (report.bound[report.accepted] <= tau * (1 + 1e-3)).all()  # the bound is rounded up to a grid
    assert (report.bound[~report.accepted] > tau).all()
    rich = report.log_wealth >= -np.log(alpha)
    assert report.accepted[rich].all()
    assert 0.9 < rich[report.accepted].mean() < 1  # some are accepted by their bounds and reads alone


def test_a_later_round_continues_the_first():
    """With the same key the first draws are the same, so that more of them can only narrow the bound (to its grid)."""
    step = step_of()
    cap = audits(step, CONFIG).cap[0]
    first, all_rounds = audits(step, CONFIG, tau=1.01 * cap, alpha=ALPHA), audits(step, CONFIG, tau=0, alpha=ALPHA)
    assert (first.drawn < all_rounds.drawn).all()
    assert (all_rounds.bound <= first.bound + cap / 33**3).all()
    assert all_rounds.bound.mean() < 0.98 * first.bound.mean()  # and they do


# --- weights ------------------------------------------------------------------------------------------------------


def test_weight_outside_the_audit_counts_as_lost():
    weights = head_weights(uncovered=0.07)
    plain, partly = step_of(), synthetic.step(CONFIG, weights=weights)
    whole, some = audits(plain, CONFIG), audits(partly, CONFIG)
    np.testing.assert_allclose(some.bound, whole.bound * 0.93 + 0.07, rtol=1e-3)
    np.testing.assert_allclose(some.cap, whole.cap * 0.93 + 0.07, rtol=1e-5)
    assert (some.bound >= residual(partly) + 0.07).mean() > 1 - ALPHA
    low = audits(partly, CONFIG, tau=0.069)
    assert not low.accepted.any()


@pytest.mark.parametrize("uncovered", [0.0, 0.25])
def test_where_nothing_was_left_unread_nothing_is_drawn(uncovered):
    step = synthetic.step(CONFIG, budget=np.inf, weights=head_weights(uncovered=uncovered))
    for tau, accepted in ((uncovered, True), (uncovered + 0.1, True), (uncovered - 0.01, False)):
        report = audits(step, CONFIG, tau=tau)
        assert (report.accepted == accepted).all()
        np.testing.assert_array_equal(report.bound, np.float32(uncovered))
        assert not report.drawn.any() and not report.units.any() and not report.pages_read.any()


def test_a_handful_of_units_is_audited_like_many():
    step = synthetic.step(CONFIG, budget=43.0)  # of 44 pages in row 0; more than row 1 has
    report, total = audits(step, CONFIG, tau=0, alpha=ALPHA), residual(step)
    assert (report.units == 6).all() and (report.drawn == PARTS[-1]).all()  # one draw a part, of six units
    assert not misses_too_often(is_below(report.bound, total), ALPHA)
    assert not audits(step, CONFIG, row=1).units.any()


@pytest.mark.slow
def test_reading_everything_without_replacement_finds_the_residual():
    config = AuditConfig(rate=1.0, rounds=(1, 1), design="wor")
    step = step_of(config)
    for row in range(len(LENGTHS)):
        report, total = audits(step, config, tau=0, alpha=1e-6, row=row), residual(step, config, row)
        assert (report.drawn == report.units).all() and (report.pages_read == report.units).all()
        assert (report.bound >= total).all() and (report.bound <= total + 1e-4 * report.cap).all()


# --- boxes --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_boxes_certify_nothing():
    """Channel minima and maxima bound the same units, validly, and so loosely that draws cannot make up for it."""
    config = AuditConfig(rate=0.05, bounds="box")
    step = step_of(config)
    report, sketch = audits(step, config, tau=0.9, alpha=1e-3), audits(step_of(), CONFIG, tau=0.9, alpha=1e-3)
    assert sketch.accepted.all() and not report.accepted.any()
    assert not report.violated.any() and not is_below(report.bound, residual(step, config)).any()
    assert (report.bound > 0.9).all()


# --- wealth -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("design", ["pps", "wor", "boundary"])
def test_mean_wealth_at_the_residual_is_one(design, monkeypatch):
    """The probabilities that are booked are those that were drawn with: any error of them would move the mean."""
    from skg_jax.audit import step as module

    class Process:
        """Small bets, whose wealth has little variance, and the wealth at the end instead of its peak."""

        def __getattr__(self, name):
            return getattr(original, name)

        @staticmethod
        def KWConfig(capacity: int, grid: int):
            return original.KWConfig(capacity=capacity, grid=grid, betas=(0.3, 0.15, 0.05), weights=(0.4, 0.3, 0.3))

        @staticmethod
        def log_wealth(state, cap, m, eta, config):
            return original.wealth_path(state, cap, m, eta, config)[-1]

    original = module.kw
    monkeypatch.setattr(module, "kw", Process())
    config = AuditConfig(rate=0.1, rounds=(1, 1), design=design)
    step = step_of(config)
    total = residual(step, config)

    def mean_is_off(told=HONEST) -> bool:
        wealth = [audits(step, config, tau=total, alpha=1e-30, seed=seed, lies=told).log_wealth for seed in range(32)]
        wealth = np.exp(np.concatenate(wealth).astype(np.float64))
        return abs(wealth.mean() - 1) > 4 * wealth.std(ddof=1) / np.sqrt(wealth.size)

    assert not mean_is_off()
    if design != "wor":  # whose law does not pass through the integers
        assert mean_is_off(lies(flat=0.2))


def test_past_the_end_of_an_order_there_is_nothing_to_draw():
    weights = jnp.array([[0.1, 0.2, 0.3, 0.4]])
    none = jnp.zeros((1, 4))
    pop = Population(none, none, None, weights, jnp.zeros(1, jnp.int32), *[jnp.zeros(1)] * 3)
    order = jnp.array([[3, 1, 2, 0]])
    index, law = draw(jax.random.split(jax.random.key(0), 1), pop, order, jnp.int32(1), jnp.array([3]), 3)
    assert int(index[0, 0]) == 0
    np.testing.assert_allclose(law[0], [0.1, 0, 0])
