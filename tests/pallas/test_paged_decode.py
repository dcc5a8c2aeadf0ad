"""The decode kernel, interpreted with race detection, against its XLA twin; and lowered for sm_90 at real shapes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from skg_jax import attention
from skg_jax.pallas import dispatch
from skg_jax.pallas.decode_config import DEFAULT, PagedDecodeConfig, pick_splits, shared_memory
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.merge import merge_splits
from skg_jax.pallas.paged_decode import paged_decode
from skg_jax.pallas.shapes import PAGED_DECODE_SHAPES
from skg_jax.pallas.smem import LIMIT
from tests.pallas import decode_cases as cases
from tests.pallas.decode_cases import LAYER, Case


def run(case: Case, implementation: Implementation | None, page_size: int, **config):
    """Output and log-sum-exp of one call, as numpy arrays."""
    found = attention.sparse(
        case.q, case.cache, LAYER, case.selection, case.length, page_size, implementation=implementation,
        config=PagedDecodeConfig(**config),
    )  # fmt: skip
    return tuple(np.asarray(x) for x in found)


def assert_close(found, expected, error: float = 2e-3):
    """Rounding P to the cache's dtype is the only difference: the log-sum-exp does not see it."""
    assert np.isfinite(found[0]).all() and np.isfinite(found[1]).all()
    empty = expected[1] < -1e29
    np.testing.assert_array_equal(found[0][empty], 0)
    assert (found[1][empty] < -1e29).all()
    assert np.linalg.norm(found[0] - expected[0]) <= error * np.linalg.norm(expected[0])
    np.testing.assert_allclose(found[1][~empty], expected[1][~empty], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("page_size", "dim", "group", "dtype", "config"),
    [
        (16, 128, 4, jnp.bfloat16, {"splits": 1, "stages": 2}),
        (32, 64, 3, jnp.bfloat16, {"splits": 2, "stages": 1}),
        (64, 128, 7, jnp.bfloat16, {"splits": 3, "tile": 128, "stages": 1}),
        (16, 64, 16, jnp.float16, {"splits": 1, "tile": 128, "stages": 2}),
    ],
)
def test_listed_pages_are_attended_to_and_nothing_else_is_read(page_size, dim, group, dtype, config):
    case = cases.make(page_size, dim, group, dtype)
    found = run(case, "mosaic_gpu", page_size, **config)
    assert not cases.races_found()
    assert_close(found, run(case, "xla", page_size), 2e-3 if dtype == jnp.bfloat16 else 4e-4)


def test_without_lists_every_page_of_a_row_is_read():
    lengths = np.array([165, 0], np.int32)
    case = cases.make(64, 64, 1, jnp.float16, lengths=lengths, chosen=cases.every_page(lengths))
    config = PagedDecodeConfig(splits=2)
    run = lambda which: attention.dense(case.q, case.cache, LAYER, case.length, implementation=which, config=config)
    found, expected = ([np.asarray(x) for x in run(which)] for which in ("mosaic_gpu", "xla"))
    assert not cases.races_found()
    assert_close(found, expected)


def test_lists_that_are_all_empty_give_zeros_whatever_the_splits():
    chosen = cases.ragged_pages(64) & False
    out, lse = run(cases.make(64, 64, 3, chosen=chosen), "mosaic_gpu", 64, splits=2)
    assert not out.any() and ((-8e29 < lse) & (lse < -6e29)).all()


def test_many_splits_merge_by_their_mass_and_empty_ones_count_nothing():
    rng = np.random.default_rng(0)
    pairs, splits, dim, columns, group = 2, 11, 64, 8, 5
    out, mass = rng.normal(size=(pairs, splits, dim, columns)), rng.normal(size=(pairs, splits, columns)) * 9
    mass[0, ::2] = -1e30
    found = merge_splits(
        jnp.asarray(out, jnp.float32), jnp.asarray(mass, jnp.float32), group, jnp.float32, dispatch.interpret()
    )
    assert not cases.races_found()
    for pair, own in ((0, slice(0, 5)), (1, slice(3, 8))):  # ten query heads: the last eight begin at the third
        o, log_mass = out[pair, ..., own], mass[pair, :, own] * np.log(2)
        expected = np.einsum("sg,shg->gh", scipy.special.softmax(log_mass, axis=0), o)
        np.testing.assert_allclose(found[0][pair], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found[1][pair], scipy.special.logsumexp(log_mass, axis=0), rtol=1e-6)


def test_a_wrong_list_is_noticed():
    """Control of the tests above: one page more or less is a difference that they see."""
    case = cases.make(16, 128, 4)
    other = case._replace(selection=case.selection._replace(num_pages=jnp.maximum(case.selection.num_pages - 1, 0)))
    with pytest.raises(AssertionError):
        assert_close(run(other, "xla", 16), run(case, "xla", 16))


# --- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tile": 32}, "tile is 32"),
        ({"stages": 0}, "stages is 0"),
        ({"splits": 0}, "splits is 0"),
        ({"expected_pages": -1}, "expected_pages is -1"),
    ],
)
def test_configurations_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        PagedDecodeConfig(**fields)


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "config", "message"),
    [
        (128, 4, jnp.float32, {}, "bfloat16 or float16"),
        (32, 4, jnp.bfloat16, {}, "head dim of 64 or 128"),
        (128, 17, jnp.bfloat16, {}, "groups of 1 to 16"),
        (128, 4, jnp.bfloat16, {"tile": 128, "stages": 4}, "shared memory"),
    ],
)
def test_what_it_cannot_do_is_said(dim, group, dtype, config, message):
    case = cases.make(16, dim, group, dtype)
    with pytest.raises(NotImplementedError, match=message):
        run(case, "mosaic_gpu", 16, **config)


def test_queries_of_another_dtype_than_the_cache_are_refused():
    case = cases.make(16, 64, 1)
    with pytest.raises(NotImplementedError, match="one dtype"):
        run(case._replace(q=case.q.astype(jnp.float32)), "mosaic_gpu", 16)


# --- lowering for sm_90, without a GPU ----------------------------------------------------------------------------


@functools.cache  # names that differ only in what is listed are one kernel
def lower(shape, dtype=jnp.bfloat16, listed: bool = True, config=DEFAULT):
    """Mosaic lowering and layout inference, as on a GPU; ptxas does not run."""
    s, i32, blocks = jax.ShapeDtypeStruct, jnp.int32, -(-shape.context // 64)
    pool = s((2, shape.batch * blocks, shape.kv_heads, 64, shape.head_dim), dtype)
    pages = s((shape.batch, shape.kv_heads, shape.context // shape.page_size), i32)
    lists = (pages, s((shape.batch, shape.kv_heads), i32)) if listed else (None, None)
    q = s((shape.batch, shape.heads, shape.head_dim), dtype)
    rows = s((shape.batch, blocks), i32), *lists, s((shape.batch,), i32), s((), i32)
    call = lambda *args: paged_decode(*args, page_size=shape.page_size, config=config, interpret=False)
    return jax.jit(call).trace(q, pool, pool, *rows).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", PAGED_DECODE_SHAPES)
def test_real_shapes_lower(name):
    shape = PAGED_DECODE_SHAPES[name]
    tokens = shape.pages * shape.page_size
    splits = pick_splits(shape.batch, shape.kv_heads, tokens, PagedDecodeConfig())
    whole = dataclasses.replace(shape, share=1.0)
    assert "mosaic_gpu" in lower(whole, config=PagedDecodeConfig(splits=splits))


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama-8b-b8-32k-page64-100%", jnp.bfloat16), ("smollm2-135m-b1-8k", jnp.float16)]
)
def test_the_pass_over_everything_lowers(name, dtype):
    assert "mosaic_gpu" in lower(PAGED_DECODE_SHAPES[name], dtype, listed=False)


def test_what_fits_by_the_estimate_lowers_and_one_stage_more_does_not(monkeypatch):
    from skg_jax.pallas import paged_decode as module

    shape = PAGED_DECODE_SHAPES["llama-8b-b8-32k-page16-100%"]
    shape = dataclasses.replace(shape, heads=8 * 16)
    fits = lambda stages: (
        sum(shared_memory(PagedDecodeConfig(stages=stages), 128, 16, jnp.bfloat16, jnp.float32).values()) <= LIMIT
    )
    most = max(stages for stages in range(1, 20) if fits(stages))
    lower(shape, config=PagedDecodeConfig(stages=most, splits=1))
    monkeypatch.setattr(module, "require", lambda *args: None)
    with pytest.raises(Exception, match="exceeds available shared memory"):
        lower(shape, config=PagedDecodeConfig(stages=most + 1, splits=1))


# --- how lists are split ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "kv_heads", "tokens", "fields", "splits"),
    [
        (8, 8, 32768, {}, 4),
        (32, 8, 32768, {}, 1),
        (1, 8, 131072, {}, 16),
        (1, 3, 131072, {}, 44),
        (1, 8, 300, {}, 2),
        (1, 1, 16, {}, 1),
        (8, 8, 32768, {"uneven": True}, 16),
        (8, 8, 32768, {"splits": 5}, 5),
    ],
)
def test_blocks_fill_the_machine_and_have_two_tiles_each(batch, kv_heads, tokens, fields, splits):
    assert pick_splits(batch, kv_heads, tokens, PagedDecodeConfig(**fields)) == splits
