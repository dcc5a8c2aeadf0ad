"""The sketch's bounds hold for the exact mass, are no looser than rounding asks, and break where they should."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import sketch
from skg_jax.kv.sketch import PageScores
from skg_jax.types import BLOCK
from tests.kv import oracle
from tests.kv.hard_keys import hard_keys, hard_queries
from tests.kv.oracle import f64

build = jax.jit(sketch.build)
page_scores = jax.jit(sketch.page_scores, static_argnames=("page_size", "kind"))

# head dims, group sizes and page sizes, each at least twice but not crossed
SHAPES = [
    (8, 1, 16),
    *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(24, 7, 32), (64, 3, 64)]),
    (128, 7, 16),
]
BLOCKS = len(hard_keys(8))
ROWS = 170  # of a batch of scores: one shape for all tests of a head dim, compiled once


@functools.cache
def hard_cases(head_dim: int, groups: int):
    """Names [R], keys [R,64,H], their sketch, queries [R,G,H]: every block with every query."""
    names, blocks = zip(*hard_keys(head_dim).items(), strict=True)
    keys = np.stack(blocks)
    record, fits = build(keys)
    assert np.asarray(fits).all()
    missed = f64(keys) - oracle.decode(record)
    queries = [hard_queries(k, m, groups) for k, m in zip(keys, missed, strict=True)]
    times = ROWS // BLOCKS
    many = lambda x: np.repeat(np.asarray(x), times, axis=0)
    assert len(queries[0]) == times
    return np.repeat(names, times), many(keys), jax.tree.map(many, record), np.concatenate(queries)


def outside(scores: PageScores, exact: np.ndarray) -> np.ndarray:
    """Rows in which any exact log-mass is not within its bounds; NaN counts."""
    return ~((f64(scores.lower) <= exact) & (exact <= f64(scores.upper))).all((-2, -1))


@pytest.mark.parametrize("kind", ["sketch", "group", "box"])
@pytest.mark.parametrize(("head_dim", "groups", "page_size"), SHAPES)
def test_bounds_hold_for_hard_keys_and_queries(head_dim, groups, page_size, kind):
    names, keys, record, q = hard_cases(head_dim, groups)
    scores = page_scores(q, record, page_size=page_size, kind=kind)
    exact = oracle.log_mass(oracle.logits(q, keys), page_size)
    assert all(np.isfinite(np.asarray(x)).all() for x in scores)
    assert not names[outside(scores, exact)].tolist()
    assert (f64(scores.lower) <= f64(scores.estimate)).all() and (f64(scores.estimate) <= f64(scores.upper)).all()


@pytest.mark.parametrize("kind", ["sketch", "group"])
@pytest.mark.parametrize(("head_dim", "groups", "page_size"), SHAPES)
def test_bounds_are_those_of_exact_arithmetic_plus_the_slack(head_dim, groups, page_size, kind):
    _, _, record, q = hard_cases(head_dim, groups)
    scores = page_scores(q, record, page_size=page_size, kind=kind)
    slack = f64(sketch.rounding_slack(jnp.asarray(q) * head_dim**-0.5, jnp.asarray(record.norms)[:, 1:2]))[..., None]
    for found, expected in zip((scores.lower, scores.upper), oracle.bounds(q, record, page_size, kind), strict=True):
        assert (np.abs(f64(found) - expected) <= 1.6 * slack + 2e-5 + 2e-5 * np.abs(expected)).all()


@pytest.mark.parametrize("head_dim", [8, 64])
def test_records_hold_what_their_fields_say(head_dim):
    keys = np.stack(list(hard_keys(head_dim, seed=5).values()))
    record, fits = build(keys)
    low, step, residual = (f64(x) for x in (record.low, record.step, record.residual))
    missed = f64(keys) - oracle.decode(record)
    assert np.asarray(fits).all()
    assert (low <= keys.min(-2)).all() and (low + 15 * step >= keys.max(-2)).all()
    assert (np.abs(missed) <= step[:, None] / 2 * (1 + 1e-5)).all()
    # the norm of what is missed is itself a float32 result, good to the rounding of the decoded key
    rounding = 2.0**-22 * f64(record.norm)[:, None]
    assert (residual >= np.linalg.norm(missed, axis=-1) - rounding).all()
    assert (residual <= np.linalg.norm(missed, axis=-1) * (1 + 2.0**-9) + rounding + 2.0**-24).all()
    assert (f64(record.norm) >= np.linalg.norm(f64(keys), axis=-1).max(-1)).all()


def test_rho_is_the_largest_miss_in_steps_and_channels_of_step_0_do_not_count():
    keys = np.stack(list(hard_keys(64, seed=5).values()))
    record, _ = build(keys)
    step = f64(record.step)[:, None]
    missed = f64(keys) - oracle.decode(record)
    assert (missed[np.broadcast_to(step == 0, missed.shape)] == 0).all() and (step == 0).any()
    exact = np.linalg.norm(missed / np.where(step > 0, step, 1), axis=-1).max(-1)
    # a step may be far below the rounding of its decoded key, which is float32: there the bound has its slack
    rounding = 2.0**-23 * np.linalg.norm((np.abs(f64(keys)) / np.where(step > 0, step, 1)).max(-2), axis=-1)
    assert (f64(record.rho) >= exact - rounding).all()
    assert (f64(record.rho) <= exact * 1.0001 + rounding).all()


def test_words_hold_the_channels_of_a_matrix_operand():
    """Word j of the 16-byte chunk t: channels 32 j + 8 t + e, that of e = 2 i + odd at bit 4 i + 16 odd."""
    codes = np.random.default_rng(0).integers(0, 16, (3, 128)).astype(np.uint32)
    words = np.asarray(sketch.pack(jnp.asarray(codes)))
    assert words.shape == (3, 16)
    j, t, i, odd = 2, 3, 1, 1
    assert (words[:, 4 * t + j] >> (4 * i + 16 * odd) & 15 == codes[:, 32 * j + 8 * t + 2 * i + odd]).all()
    # a matrix instruction wants the channels of a pair in one register: both halves of a word, four bits each
    assert (words[:, 0] & 0x000F000F == codes[:, 0] | codes[:, 1] << 16).all()


def test_a_head_dim_that_32_does_not_divide_is_padded_with_code_0():
    codes = jnp.full((5, 40), 15, jnp.uint32)
    assert np.asarray(sketch.pack(codes)).shape == (5, 8)
    assert np.asarray(sketch.unpack(sketch.pack(codes))).sum() == 5 * 40 * 15


@pytest.mark.parametrize("value", [2e6, -65600.0, np.inf, -np.inf, np.nan])
def test_a_block_that_does_not_fit_gives_an_empty_record(value):
    keys = np.random.default_rng(0).normal(size=(BLOCKS, BLOCK, 8)).astype(np.float32)
    keys[1, 40, 3] = value
    record, fits = build(keys)
    np.testing.assert_array_equal(fits, np.arange(BLOCKS) != 1)
    assert not any(np.asarray(x)[1].any() for x in record)


def test_round16_goes_to_the_named_side_and_no_further():
    exact = np.float16(np.random.default_rng(0).normal(size=500) * 100).astype(np.float32)
    ulp = np.spacing(np.abs(exact).astype(np.float16)).astype(np.float32)
    special = np.array([0, -0.0, 1e-9, -1e-9, 3e-8, -3e-8, 6e-8, 65504, -65504, 65519, 1e6, -1e6], np.float32)
    values = np.concatenate([exact, exact + ulp / 2, exact - ulp / 2, exact + ulp / 3, special])
    for towards, side in ((np.inf, 1), (-np.inf, -1)):
        found = np.asarray(sketch._round16(jnp.asarray(values), towards))
        assert (side * (f64(found) - values) >= 0).all()
        with np.errstate(over="ignore"):
            inner = np.nextafter(found, np.float16(-towards))
        assert (side * (f64(inner) - values) < 0).all()


def test_four_bits_are_tight_where_the_box_is_not():
    rng = np.random.default_rng(7)
    keys, q = rng.normal(size=(ROWS, BLOCK, 128)), rng.normal(size=(ROWS, 7, 128))
    gap = {}
    for kind in ("sketch", "box"):
        scores = scores_of(keys, q, kind=kind)
        gap[kind] = f64(scores.upper) - f64(scores.lower)  # nats
    assert np.quantile(gap["sketch"], 0.99) < 3.0
    assert np.quantile(gap["box"], 0.01) > 20.0
    assert (gap["sketch"] < gap["box"] / 9).all()


# --- each safeguard is needed: without it a bound breaks ------------------------------------------------------------


def scores_of(keys, q, kind: sketch.BoundKind = "sketch", wrong: dict | None = None) -> PageScores:
    """Scores of pages of 16 tokens, with fields of the record replaced by functions of them."""
    keys, q = keys.astype(np.float32), q.astype(np.float32)
    record, _ = build(keys)
    record = record._replace(
        **{name: jnp.asarray(f(np.asarray(getattr(record, name)))) for name, f in (wrong or {}).items()}
    )
    return page_scores(q, record, page_size=16, kind=kind)


def exact_of(keys, q) -> np.ndarray:
    return oracle.log_mass(oracle.logits(q.astype(np.float32), keys.astype(np.float32)), 16)


def test_a_fixed_slack_is_broken_by_large_norms(monkeypatch):
    """One key of float16 numbers, repeated: nothing is missed, so only rounding lies between the two bounds."""
    rng = np.random.default_rng(1)
    keys = rng.integers(-2000, 2000, size=(ROWS, 1, 8)).repeat(BLOCK, axis=1)
    q = rng.normal(size=(ROWS, 1, 8)) * 50
    scores = scores_of(keys, q)
    assert not outside(scores, exact_of(keys, q)).any()
    assert (f64(scores.upper) - f64(scores.lower)).max() < 2.0  # of logits near 50,000
    monkeypatch.setattr(sketch, "rounding_slack", lambda q, key_norm: jnp.full(q.shape[:-1], 1e-4))
    narrow = jax.jit(lambda q, record: sketch.page_scores(q, record, 16))
    record, _ = build(keys.astype(np.float32))
    assert outside(narrow(q.astype(np.float32), record), exact_of(keys, q)).mean() > 0.5


def test_a_residual_rounded_down_or_to_nearest_is_broken():
    """Pages of one key, repeated; the query points along what its code misses: Cauchy-Schwarz is an equality."""
    keys = np.random.default_rng(2).normal(size=(ROWS, 4, 8)).astype(np.float32).repeat(16, axis=1)
    missed = f64(keys) - oracle.decode(build(keys)[0])
    length = np.linalg.norm(missed, axis=-1)
    q = (missed / length[..., None] * 100)[:, :1]
    nearest = length.astype(np.float16)
    down = np.where(nearest > length, np.nextafter(nearest, np.float16(0)), nearest)
    exact = exact_of(keys, q)
    assert not outside(scores_of(keys, q), exact).any()
    assert outside(scores_of(keys, q, wrong={"residual": lambda _: down}), exact).any()
    assert outside(scores_of(keys, q, wrong={"residual": lambda _: nearest}), exact).any()


def test_a_rho_that_is_too_small_by_a_hundredth_is_broken():
    """The same for the bound of a group: the query points along what the code misses, in steps twice over."""
    keys = np.random.default_rng(2).normal(size=(ROWS, 4, 8)).astype(np.float32).repeat(16, axis=1)
    record = build(keys)[0]
    missed = (f64(keys) - oracle.decode(record)) / f64(record.step)[:, None]
    worst = np.linalg.norm(missed, axis=-1).argmax(-1)
    aimed = missed[np.arange(ROWS), worst] / f64(record.step)
    q = (aimed / np.linalg.norm(aimed, axis=-1, keepdims=True) * 100)[:, None]
    exact = exact_of(keys, q)
    assert not outside(scores_of(keys, q, "group"), exact).any()
    less = lambda norms: norms * np.array([0.99, 1, 1, 1], np.float32)
    assert outside(scores_of(keys, q, "group", {"norms": less}), exact).mean() > 0.9


@pytest.mark.parametrize(("field", "towards", "sign"), [("low", np.inf, -1), ("step", 0, 1)])
def test_a_grid_that_does_not_reach_the_keys_is_broken(field, towards, sign):
    keys = np.random.default_rng(3).normal(size=(ROWS, BLOCK, 8))
    q = sign * 400 * np.eye(8)[np.arange(ROWS) % 8][:, None]
    exact = exact_of(keys, q)
    assert not outside(scores_of(keys, q), exact).any()
    inward = lambda x: np.nextafter(x, np.float16(towards))
    assert outside(scores_of(keys, q, wrong={field: inward}), exact).any()


def test_codes_of_another_page_are_broken():
    rng = np.random.default_rng(4)
    keys, q = rng.normal(size=(ROWS, BLOCK, 8)), rng.normal(size=(ROWS, 1, 8)) * 10
    exact = exact_of(keys, q)
    assert not outside(scores_of(keys, q), exact).any()
    assert outside(scores_of(keys, q, wrong={"codes": lambda codes: np.roll(codes, 16, axis=-2)}), exact).mean() > 0.9
