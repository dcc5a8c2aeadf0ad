"""The process against stored vectors and against exact expectations over every order and every sequence, in float64."""

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.stats import kaplan_wald as kw
from tests.stats import oracle

GOLDEN = json.loads(pathlib.Path(__file__).with_name("confseq_reference.json").read_text())["kw_slack"]
SINGLE_BETS = [kw.KWConfig(betas=(b,), weights=(1.0,)) for b in oracle.BETAS]


@functools.partial(jax.jit, static_argnames="config")
def _wealth(slack, prob, spent, valid, room, eta, config):
    def one(slack, prob, spent):
        state = kw.init(kw.KWConfig(capacity=slack.size), slack.dtype)
        draws = kw.Observation(slack, prob, valid, spent, jnp.zeros((), slack.dtype))
        return jnp.exp(kw.wealth_path(kw.update_batch(state, draws)[0], room, 0.0, eta, config))

    return jax.vmap(one)(slack, prob, spent)


def wealth(slack, prob, spent, room, config=kw.DEFAULT, eta=0.0):
    """K_t for many sequences of draws, [S, n] -> [S, n] of numpy, padded so that few shapes are compiled."""
    rows, n = slack.shape
    block = (720, 6) if n <= 6 else (1, 24)
    pad = lambda v: np.pad(v, ((0, block[0] - rows), (0, block[1] - n)), constant_values=np.nan)
    scalar = slack.dtype.type
    valid = np.arange(block[1]) < n
    k = _wealth(pad(slack), pad(prob), pad(spent), valid, scalar(room), scalar(eta), config)
    return np.asarray(k, np.float64)[:rows, :n]


def units(seed: int, n: int):
    """(value, lower bound, cap, p) of n units."""
    rng = np.random.default_rng(seed)
    lo, x = np.sort(rng.random((2, n)) ** 3, axis=0)
    p = rng.random(n) + 0.05
    return x, lo, x + 0.05 + rng.random(n), p / p.sum()


def test_defaults_are_those_of_the_stored_vectors():
    assert kw.DEFAULT.betas == tuple(GOLDEN["beta_grid"]) == oracle.BETAS
    assert kw.DEFAULT.weights == tuple(GOLDEN["beta_weights"]) == oracle.WEIGHTS


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_wealth_equals_stored_vectors(case, side):
    slack, p, cap, floor = _case(case, side)
    rooms = {m: cap - float(m) if side == "upper" else float(m) - floor for m in case[f"log_wealth_{side}"]}
    with jax.enable_x64(True):
        prob, spent = oracle.wor_inputs(slack, p)
        for m, ref in case[f"log_wealth_{side}"].items():
            got = np.log(wealth(slack[None], prob[None], spent[None], rooms[m])[0])
            ref = np.array([float(v) for v in ref])
            settled = np.abs(rooms[m] - spent) > 1e-9  # else the room is zero but for rounding: neither side is right
            np.testing.assert_allclose(got[settled], ref[settled], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("side", ["upper", "lower"])
@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_float32_bounds_equal_stored_vectors(case, side):
    slack, p, cap, floor = _case(case, side)
    eta = 2e-5 * cap
    for alpha, ref in case[side].items():
        got = np.asarray(
            running_bounds(*(np.float32(pad(v)) for v in (slack, p)), cap, floor, -np.log(float(alpha)), side)
        )
        outward = (got[: case["n"]] - ref) * (1 if side == "upper" else -1)
        assert np.all(outward >= -1e-5 * np.abs(ref))
        assert np.all(outward <= 5 * eta + 1e-4 * np.abs(ref))


def _case(case, side):
    """Slack and p in draw order, cap and floor."""
    w, b, a = (np.array(case[k]) for k in ("w", "b", "a"))
    p = (1 - case["eps"]) * b / b.sum() + case["eps"] / b.size
    slack = b - w if side == "upper" else w - a
    return slack[case["draw_order"]], p[case["draw_order"]], b.sum(), a.sum()


def pad(v, size=24):
    return np.pad(v, (0, size - len(v)))


@functools.partial(jax.jit, static_argnames="side")
def running_bounds(slack, p, cap, floor, log_inv_alpha, side):
    """The bound after 1, 2, ... draws without replacement."""
    ends = (cap, floor) if side == "upper" else (floor, cap)

    def after(count):
        state = kw.init(kw.KWConfig(capacity=p.size))
        state, _ = kw.update_batch(state, kw.observe_wor(slack, p, jnp.arange(p.size) < count))
        return getattr(kw, side)(state, *ends, log_inv_alpha, kw.rounding_guard(cap))

    return jax.vmap(after)(jnp.arange(1, p.size + 1))


@pytest.mark.parametrize("config", SINGLE_BETS, ids=lambda config: f"beta={config.betas[0]}")
def test_all_orders_of_four_units_for_each_bet(config):
    _check_all_orders(4, config)


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_all_orders(n):
    _check_all_orders(n, kw.DEFAULT)


def _check_all_orders(n, config):
    """E K_t = 1 at the truth and at most 1 below it, for the upper process and its lower twin."""
    x, lo, cap, p = units(n, n)
    perms, chance = oracle.orders(p)
    prob = p[perms] / (1 - np.cumsum(p[perms], 1) + p[perms])
    for slack in (cap - x, x - lo):
        r = slack[perms]
        with jax.enable_x64(True):
            at_truth, below = (
                chance @ wealth(r, prob, np.cumsum(r, 1) - r, room, config) for room in (slack.sum(), 1.3 * slack.sum())
            )
        np.testing.assert_allclose(at_truth, 1, atol=1e-6)
        assert np.all(below < 1)


def test_all_sequences_with_replacement():
    x, lo, cap, p = units(3, 4)
    sequences = np.array(list(itertools.product(range(4), repeat=4)))
    chance = p[sequences].prod(1)
    for slack in (cap - x, x - lo):
        with jax.enable_x64(True):
            args = (slack[sequences], p[sequences], np.zeros(sequences.shape))
            at_truth = chance @ wealth(*args, slack.sum())
            below = chance @ wealth(*args, 1.3 * slack.sum())
        np.testing.assert_allclose(at_truth, 1, atol=1e-6)
        assert np.all(below < 1)


def test_two_rounds_with_units_dropped_between():
    """Two draws with replacement, what was read leaves the population, two more: the wealth is continued."""
    x, _, cap, p = units(4, 4)
    slack, rows = cap - x, []
    for first in itertools.product(range(4), repeat=2):
        keep = [u for u in range(4) if u not in first]
        left, removed = p[keep].sum(), slack[list(set(first))].sum()
        for second in itertools.product(keep, repeat=2):
            q = np.concatenate([p[list(first)], p[list(second)] / left])
            rows.append((slack[list(first + second)], q, [0, 0, removed, removed]))
    slacks, prob, spent = (np.array(column) for column in zip(*rows, strict=True))
    with jax.enable_x64(True):
        at_truth = prob.prod(1) @ wealth(slacks, prob, spent, slack.sum())
        restarted = prob.prod(1) @ wealth(slacks, prob, np.zeros_like(spent), slack.sum())
    np.testing.assert_allclose(at_truth, 1, atol=1e-6)
    assert restarted[-1] < 1 - 1e-2  # what was read stays in the denominator: valid, and seen to be wasteful


@pytest.mark.parametrize("slack", [[0.3, 0, 0.2, 0], [0, 0, 0, 0], [1e-6, 0, 0.5, 0]])
def test_units_at_their_bound_never_raise_the_mean(slack):
    slack, p = np.array(slack), np.array([0.4, 0.3, 0.2, 0.1])
    perms, chance = oracle.orders(p)
    prob = p[perms] / (1 - np.cumsum(p[perms], 1) + p[perms])
    spent = np.cumsum(slack[perms], 1) - slack[perms]
    slacks, prob, spent = (v.astype(np.float32) for v in (slack[perms], prob, spent))
    mean = chance @ wealth(slacks, prob, spent, slack.sum(), eta=2e-5)
    assert np.all(np.isfinite(mean)) and np.all(mean <= 1 + 1e-5)


def test_wrong_claims_move_the_exact_mean():
    """The detector's own check: claimed proportional while drawn uniformly, which coverage alone cannot see."""
    x, _, cap, p = units(5, 4)
    slack, sequences = cap - x, np.array(list(itertools.product(range(4), repeat=3)))
    with jax.enable_x64(True):
        k = wealth(slack[sequences], p[sequences], np.zeros(sequences.shape), slack.sum())
    assert abs(p[sequences].prod(1) @ k - 1).max() < 1e-6
    assert abs((0.25**3 * k).sum(0) - 1).max() > 0.05
