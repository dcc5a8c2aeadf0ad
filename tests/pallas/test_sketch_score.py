"""The sketch scorer: its lane code on hard keys against float64, its ring under the interpreter, its lowering."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from skg_jax.kv import sketch
from skg_jax.pallas.shapes import SKETCH_SCORE_SHAPES
from skg_jax.pallas.sketch_plan import SketchScoreConfig
from skg_jax.pallas.sketch_query import Column, operands, prepare_columns
from skg_jax.pallas.sketch_score import sketch_score
from skg_jax.pallas.sketch_stage import UNKNOWN, gathered, words
from skg_jax.pallas.sketch_unit import GRID, UnitShape, score_unit
from skg_jax.pallas.warp import ArrayWarp
from skg_jax.types import BLOCK
from tests.kv import oracle
from tests.kv.hard_keys import hard_keys, hard_queries
from tests.kv.oracle import f64
from tests.pallas import sketch_cases

FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiles twice as fast

# --- lane code ------------------------------------------------------------------------------------------------------


def lanes(q, record, unit: UnitShape) -> dict[str, jax.Array]:
    """One warp for each query group [R, G, H] and record [R, ...]; [R, G, pages] by name."""
    count = q.shape[0]
    memory = record._asdict() | dict(zip(("query", "columns"), operands(q, unit), strict=True))
    results = score_unit(ArrayWarp({name: words(x, count) for name, x in memory.items()}), unit)
    return gathered(results, unit, (count,))


score_lanes = jax.jit(lanes, static_argnames="unit", compiler_options=FAST)


@functools.cache
def hard_cases(head_dim: int, group: int, dtype):
    """Names [R], keys [R, 64, H], records and queries in `dtype`: every hard block with every hard query."""
    names, blocks = zip(*hard_keys(head_dim).items(), strict=True)
    keys = np.stack(blocks)
    record, fits = jax.jit(sketch.build)(keys)
    assert np.asarray(fits).all()
    missed = f64(keys) - oracle.decode(record)
    queries = np.concatenate([hard_queries(k, m, group) for k, m in zip(keys, missed, strict=True)])
    times = len(queries) // len(keys)
    many = lambda x: np.repeat(np.asarray(x), times, axis=0)
    q = jnp.clip(queries, -6e4, 6e4).astype(dtype)
    return np.repeat(names, times), many(keys), jax.tree.map(many, record), q


CASES = [(128, 4, 16, "token", jnp.bfloat16), (64, 7, 32, "group", jnp.float32), (64, 3, 64, "group", jnp.float16)]
SLOW = [(128, 8, 64, "token", jnp.float16), (64, 3, 16, "token", jnp.float32), (128, 1, 32, "group", jnp.bfloat16)]
cases = pytest.mark.parametrize(
    ("head_dim", "group", "page_size", "bound", "dtype"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)


@cases
def test_bounds_hold_for_hard_keys_and_queries(head_dim, group, page_size, bound, dtype):
    names, keys, record, q = hard_cases(head_dim, group, dtype)
    unit = UnitShape(head_dim=head_dim, group=group, page_size=page_size, bound=bound)
    found = {name: f64(x) for name, x in score_lanes(q, record, unit).items()}
    exact = oracle.log_mass(oracle.logits(f64(q), keys), page_size)
    inside = (found["lower"] <= exact) & (exact <= found["upper"])  # false for NaN
    assert set(names[~inside.all((1, 2))]) == set()
    assert not np.isnan(found["estimate"]).any()


def test_what_float16_cannot_hold_gives_no_bound_and_no_nan():
    _, _, record, q = hard_cases(128, 4, jnp.bfloat16)
    unit = UnitShape(head_dim=128, group=4, page_size=16, bound="token")
    for lost in (jnp.inf, jnp.nan, 3e38):
        found = score_lanes(q.at[:, 1, 5].set(lost), record, unit)
        assert not any(np.isnan(x).any() for x in found.values())
        where = np.asarray(record.low)[:, 5] != 0  # elsewhere the channel counts for nothing, if it is a number
        assert (np.asarray(found["upper"])[where, 1] == np.inf).all()
        assert (np.asarray(found["lower"])[where, 1] == -np.inf).all()


def rounded_one_way(step: np.ndarray, group: int) -> np.ndarray:
    """Queries [G, H] in bfloat16 whose float16 products with the steps all round up, and by much."""
    tries = np.asarray(jnp.asarray(np.random.default_rng(0).uniform(4, 8, (200, group, len(step))), jnp.bfloat16))
    product = f64(tries) * f64(step)
    error = product.astype(np.float16).astype(np.float64) / product - 1
    return np.take_along_axis(tries, error.argmax(0)[None], 0)[0]


def test_bounds_that_leave_out_the_rounding_of_the_grid_are_violated(monkeypatch):
    """Negative control: keys on the grid miss nothing, so that the products of queries and steps are all that errs."""
    step = np.random.default_rng(1).uniform(0.05, 0.1, 64).astype(np.float16)
    codes = np.full((1, 64, 64), 15, np.uint32)
    norms = jnp.array([[0.0, np.linalg.norm(15 * f64(step)) * 1.0001, 0.0, 0.0]], jnp.float32)
    zero = jnp.zeros((1, 64), jnp.float16)
    record = sketch.Sketch(sketch.pack(jnp.asarray(codes)), zero, jnp.asarray(step)[None], zero, norms)
    q = jnp.asarray(rounded_one_way(step, 4))[None]
    exact = oracle.log_mass(oracle.logits(f64(q), oracle.decode(record)), 16)
    unit = UnitShape(head_dim=64, group=4, page_size=16, bound="group")
    for grid, holds in ((GRID, True), (0.0, False)):
        monkeypatch.setattr("skg_jax.pallas.sketch_unit.GRID", grid)
        run = jax.jit(lambda q, record: lanes(q, record, unit), compiler_options=FAST)
        found = {name: f64(x) for name, x in run(q, record).items()}
        assert ((found["lower"] <= exact) & (exact <= found["upper"])).all() == holds


@pytest.mark.parametrize(
    ("dim", "group", "dtype"),
    [
        (64, 7, jnp.bfloat16),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(128, 4, jnp.float32), (64, 1, jnp.float16)]),
    ],
)
def test_lanes_prepare_the_same_query_operands_as_arrays(dim, group, dtype):
    rng = np.random.default_rng(0)
    q = rng.normal(size=(6, group, dim)) * 10.0 ** rng.integers(-30, 30, size=(6, 1, 1))
    q = jnp.clip(jnp.asarray(q.astype(np.float32)), -6e4, 6e4).astype(dtype).at[5].set(0)
    unit = UnitShape(head_dim=dim, group=group, page_size=16, bound="token")

    @functools.partial(jax.jit, compiler_options=FAST)
    def by_lanes(q, numbers):
        memory = {"query": jnp.zeros((6, dim * 4), jnp.uint32), "columns": jnp.zeros((6, 32), jnp.uint32)}
        of_head = 4 if unit.doubled else 8
        zero = jnp.zeros(32, jnp.uint32)
        raw = lambda number: jnp.minimum(number, group - 1) * (dim * q.dtype.itemsize) + zero
        columns = [Column(numbers[i] + zero, raw(numbers[i]), zero, zero) for i in range(of_head)]
        memory["raw"] = words(q, 6)
        prepare_columns(ArrayWarp(memory), unit, dtype, columns)
        return memory["query"], jax.lax.bitcast_convert_type(memory["columns"], jnp.float32)

    fragments, numbers = operands(q, unit)
    found = by_lanes(q, jnp.arange(8, dtype=jnp.uint32))
    np.testing.assert_array_equal(found[0], words(fragments, 6))
    np.testing.assert_allclose(found[1], numbers, rtol=1e-5)


# --- the kernel -----------------------------------------------------------------------------------------------------

LENGTHS = [5 * 64 - 7, 0, 64]
RING = [
    (4, 4, 128, 16, "token", jnp.bfloat16, SketchScoreConfig(groups=2, stages=2, splits=2)),
    (3, 1, 64, 32, "group", jnp.float32, SketchScoreConfig(groups=1, stages=1, splits=1)),
    (8, 1, 64, 64, "group", jnp.bfloat16, SketchScoreConfig(groups=2, splits=1, run=2)),
]
RING_SLOW = [
    (1, 8, 64, 64, "none", jnp.float16, SketchScoreConfig(groups=2, splits=2)),
    (2, 3, 128, 16, "group", jnp.bfloat16, SketchScoreConfig(groups=2, splits=3, together=4)),
]  # a warpgroup that waits keeps a thread of the host: the interpreter of a small machine hangs with many groups


@pytest.mark.parametrize(
    ("heads", "group", "dim", "page_size", "bound", "dtype", "config"),
    [*RING, *(pytest.param(*case, marks=pytest.mark.slow) for case in RING_SLOW)],
)
def test_ragged_rows_are_scored_and_nothing_else_is_read(heads, group, dim, page_size, bound, dtype, config):
    case = sketch_cases.make(heads, group, dim, LENGTHS, 5, dtype)
    run = functools.partial(sketch_score, page_size=page_size, bound=bound, config=config)
    found = sketch_cases.named(*jax.jit(run, compiler_options=FAST)(*case.arguments(page_size)))
    assert not gpu_callbacks.get_races().races_found
    expected, use = sketch_cases.expected(case, page_size, bound), case.scored(page_size)
    for name in found:
        assert (f64(found[name])[~use] == UNKNOWN[name]).all()
    expected = {name: x[use] for name, x in expected.items()}
    allowance = GRID * expected["grid"] + 1e-4 * expected["size"] + 5e-4
    estimate = f64(found["estimate"])[use]
    assert (np.abs(estimate - expected["estimate"]) <= allowance).all()
    if bound == "none":
        assert list(found) == ["estimate"]
        return
    lower, upper = (f64(found[name])[use] for name in ("lower", "upper"))
    assert ((lower <= expected["exact"]) & (expected["exact"] <= upper)).all()
    slack = np.stack([expected["lower"] - lower, upper - expected["upper"]])
    most = 2**-11 * expected["size"] if dtype == jnp.float32 else 0.0
    assert (slack > 0).all() and (slack <= 3 * allowance + 1.1 * most).all()


# --- shapes ---------------------------------------------------------------------------------------------------------


def arguments(shape, dtype=jnp.bfloat16, layers: int = 2):
    """Arrays of a named shape that are never made."""
    lead = layers, shape.batch * shape.blocks, shape.kv_heads
    array = jax.ShapeDtypeStruct
    record = jax.eval_shape(lambda: sketch.empty(lead, shape.head_dim))
    q = array((shape.batch, shape.kv_heads, shape.group, shape.head_dim), dtype)
    table = shape.batch, shape.blocks
    where = array(table, jnp.int32), array(table, jnp.bool), array((shape.batch,), jnp.int32), array((), jnp.int32)
    of_head = 2, shape.group, shape.blocks * (BLOCK // shape.page_size)
    return q, *record, *where, array((layers, *q.shape[:2], *of_head), jnp.float32)


@pytest.mark.parametrize("name", SKETCH_SCORE_SHAPES)
def test_named_shapes_lower_for_hopper(name):
    shape = SKETCH_SCORE_SHAPES[name]
    bound = "group" if shape.page_size == 64 else "token"
    run = functools.partial(sketch_score, page_size=shape.page_size, bound=bound, interpret=False)
    lowered = jax.jit(run).trace(*arguments(shape)).lower(lowering_platforms=("cuda",))
    assert "sketch_score" in lowered.as_text()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"head_dim": 96}, "head dim of 64 or 128, not 96"),
        ({"group": 9}, "up to 8 query heads per KV head, not 9"),
        ({"page_size": 8}, "pages of 16, 32 or 64 tokens, not 8"),
    ],
)
def test_what_the_kernel_cannot_do_is_said(changed, sentence):
    shape = dataclasses.replace(SKETCH_SCORE_SHAPES["smollm2-135m-b8-8k"], **changed)
    run = functools.partial(sketch_score, page_size=shape.page_size, interpret=False)
    with pytest.raises(NotImplementedError, match=sentence):
        jax.eval_shape(run, *arguments(shape))


def test_a_ring_that_does_not_fit_is_refused_with_its_items():
    shape = SKETCH_SCORE_SHAPES["llama-8b-b8-64k-page16"]
    run = functools.partial(sketch_score, page_size=16, interpret=False, config=SketchScoreConfig(stages=16))
    with pytest.raises(NotImplementedError, match="of 232448 bytes of shared memory .*codes 262144.*fewer stages"):
        jax.eval_shape(run, *arguments(shape))


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"together": 3}, "together is 3"),
        ({"groups": 7}, "groups is 7"),
        ({"stages": 6}, "stages is 6"),
        ({"splits": 0}, "splits is 0"),
        ({"run": 3}, "run is 3"),
    ],
)
def test_configurations_are_checked(field, sentence):
    with pytest.raises(ValueError, match=sentence):
        SketchScoreConfig(**field)
