"""Writing, sealing and ageing of blocks, against a plain numpy mirror of the pool."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.types import BLOCK
from tests.kv.oracle import f64

L, K, H = 2, 3, 6
ROWS, BLOCKS = 3, 4
AT_ONCE = 3  # blocks of a write or a seal: one shape, compiled once

seal = jax.jit(kv.seal)


@jax.jit
def append(cache: PagedKVCache, k, v, position) -> PagedKVCache:
    """One token per row into all layers."""
    cache = kv.touch(cache, position)
    for layer in range(L):
        cache = kv.append(cache, jnp.int32(layer), k[layer], v[layer], position)
    return cache


@jax.jit
def write(cache: PagedKVCache, blocks, k, v, filled) -> PagedKVCache:
    """Blocks [n] of all layers, as a prefill does."""
    cache = cache._replace(written=cache.written.at[blocks].add(1))
    for layer in range(L):
        cache = kv.write_blocks(cache, jnp.int32(layer), blocks, k[layer], v[layer], filled)
    return cache


@functools.cache
def empty(dtype=jnp.float32) -> PagedKVCache:
    """A pool of NaN whose rows own scattered blocks."""
    cache = kv.init(L, K, H, ROWS, BLOCKS * BLOCK, dtype)
    table = np.random.default_rng(3).permutation(ROWS * BLOCKS).reshape(ROWS, BLOCKS)
    nan = jnp.full_like(cache.k, jnp.nan)
    return cache._replace(page_table=jnp.asarray(table, jnp.int32), k=nan, v=nan)


def blocks_of(row: int) -> np.ndarray:
    return np.asarray(empty().page_table)[row, :AT_ONCE]


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def whole(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return normal(seed, L, AT_ONCE, K, BLOCK, H), normal(seed + 100, L, AT_ONCE, K, BLOCK, H)


def prefill(row: int, k, v, *filled: int, cache: PagedKVCache | None = None, dtype=jnp.float32) -> PagedKVCache:
    """The first blocks of a row written and, where they are full, sealed."""
    counts, blocks = np.asarray(filled, np.int32), blocks_of(row)
    return seal(write(empty(dtype) if cache is None else cache, blocks, k, v, counts), blocks, counts == BLOCK)


def test_random_appends_land_where_the_page_table_says_and_nowhere_else():
    rng = np.random.default_rng(0)
    cache, table = empty(), np.asarray(empty().page_table)
    mirror = {name: np.array(getattr(cache, name)) for name in ("k", "v", "written")}
    for _ in range(25):
        position = rng.integers(BLOCKS * BLOCK, size=ROWS)
        token = {name: rng.normal(size=(L, ROWS, K, H)).astype(np.float32) for name in ("k", "v")}
        cache = append(cache, token["k"], token["v"], position.astype(np.int32))
        for row, at in enumerate(position):
            block = table[row, at // BLOCK]
            mirror["written"][block] += 1
            for name in ("k", "v"):
                mirror[name][:, block, :, at % BLOCK] = token[name][:, row]
    for name, expected in mirror.items():
        np.testing.assert_array_equal(getattr(cache, name), expected)
    assert not np.asarray(kv.current(cache)).any()


def test_a_token_past_the_capacity_is_written_nowhere():
    token = normal(1, L, ROWS, K, H)
    full = BLOCKS * BLOCK
    before = append(empty(), token, token, np.array([0, 1, 2], np.int32))
    after = append(before, -token, -token, np.array([full, full + 63, full + 64], np.int32))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_prefill_of_blocks_equals_appending_token_by_token():
    k, v = normal(1, L, K, 70, H), normal(2, L, K, 70, H)
    one_by_one = empty()
    for at in range(70):
        rows = lambda x: np.broadcast_to(x[:, None, :, at], (L, ROWS, K, H))  # noqa: B023
        one_by_one = append(one_by_one, rows(k), rows(v), np.full(ROWS, at, np.int32))
    pad = lambda x: np.pad(x, ((0, 0), (0, 0), (0, 122), (0, 0)), constant_values=np.nan)
    by_block = lambda x: pad(x).reshape(L, K, AT_ONCE, BLOCK, H).swapaxes(1, 2)
    blocks = blocks_of(2)
    at_once = write(empty(), blocks, by_block(k), by_block(v), np.array([64, 6, 0], np.int32))
    for name in ("k", "v", "key_norm"):
        one, other = (np.asarray(getattr(cache, name))[:, blocks] for cache in (at_once, one_by_one))
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_bound_every_key_and_value_from_above_and_closely(dtype):
    k, v = whole(5)
    cache = prefill(0, k * 7, v, 64, 64, 9, dtype=dtype)
    *full, open_block = blocks_of(0)
    open_norm = np.linalg.norm(f64(cache.k)[:, open_block, :, :9], axis=-1).max(-1)
    bounds_closely(np.asarray(cache.key_norm)[:, open_block], open_norm)
    bounds_closely(np.asarray(cache.value_norm)[:, full], np.linalg.norm(f64(cache.v)[:, full], axis=-1).max(-1))
    bounds_closely(np.asarray(cache.key_norm)[:, full], np.linalg.norm(f64(cache.k)[:, full], axis=-1).max(-1))
    # that of the sketch covers the decoded product as well: offset and range of every channel
    low, step = f64(cache.sketch.low)[:, full], f64(cache.sketch.step)[:, full]
    bounds_closely(np.asarray(cache.sketch.norm)[:, full], np.linalg.norm(np.abs(low) + 15 * step, axis=-1))


def bounds_closely(found: np.ndarray, true: np.ndarray) -> None:
    assert (found >= true).all() and (found <= 1.0001 * true).all()


def test_key_norm_starts_anew_with_the_first_token_of_a_reused_block():
    big, small = np.full((L, ROWS, K, H), 100.0, np.float32), np.ones((L, ROWS, K, H), np.float32)
    cache = append(empty(), big, big, np.array([5, 70, 0], np.int32))
    cache = append(cache, small, small, np.array([0, 71, 1], np.int32))
    norm = np.asarray(cache.key_norm)
    np.testing.assert_allclose(norm[:, blocks_of(0)[0]], np.sqrt(H), rtol=1e-4)
    np.testing.assert_allclose(norm[:, blocks_of(1)[1]], 100 * np.sqrt(H), rtol=1e-4)
    np.testing.assert_allclose(norm[:, blocks_of(2)[0]], 100 * np.sqrt(H), rtol=1e-4)


def test_only_full_blocks_are_sealed():
    cache = prefill(1, *whole(7), 64, 64, 63)
    np.testing.assert_array_equal(kv.current(cache), [[False] * 4, [True, True, False, False], [False] * 4])
    assert np.asarray(cache.sealed)[blocks_of(1)[2]] == kv.NEVER


def test_prefill_of_a_row_leaves_all_other_blocks_bitwise_alone():
    before = prefill(1, *whole(0), 64, 64, 64)
    after = prefill(0, *whole(8), 64, 64, 13, cache=before)
    others = np.delete(np.arange(ROWS * BLOCKS), blocks_of(0))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        by_block = (lambda x: np.asarray(x)[:, others]) if old.ndim > 2 else np.asarray
        by_block = (lambda x: np.asarray(x)[others]) if old.ndim == 1 else by_block
        np.testing.assert_array_equal(by_block(old), by_block(new))


def test_sealing_in_bulk_equals_sealing_one_by_one():
    blocks, every = blocks_of(2), np.full(AT_ONCE, BLOCK, np.int32)
    written = write(empty(), blocks, *whole(9), every)
    bulk, single = seal(written, blocks, every == BLOCK), written
    for full in np.eye(AT_ONCE, dtype=bool):
        single = seal(single, blocks, full)
    jax.tree.map(np.testing.assert_array_equal, bulk, single)


def test_a_write_after_sealing_makes_the_block_stale_until_it_is_sealed_again():
    cache = prefill(1, *whole(0), 64, 64, 0)
    token = normal(1, L, ROWS, K, H)
    stale = append(cache, token, token, np.array([200, 64 + 17, 200], np.int32))
    np.testing.assert_array_equal(kv.current(stale)[1], [True, False, False, False])
    again = seal(stale, blocks_of(1), np.array([False, True, False]))
    np.testing.assert_array_equal(kv.current(again)[1], [True, True, False, False])
    changed = (np.asarray(again.k_sum) != np.asarray(cache.k_sum))[:, blocks_of(1)[1]]
    np.testing.assert_array_equal(changed, np.broadcast_to([False, True, False, False], changed.shape))


@pytest.mark.parametrize("value", [1e6, -1e5, np.inf, np.nan])
def test_a_block_whose_keys_do_not_fit_the_sketch_is_never_sealed(value):
    k, v = whole(4)
    k[1, 0, 2, 33, 4] = value  # one layer, head, token and channel
    cache = prefill(0, k, v, 64, 64, 0)
    np.testing.assert_array_equal(kv.current(cache)[0], [False, True, False, False])
    assert np.asarray(cache.sealed)[blocks_of(0)[0]] == kv.NEVER
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in cache.sketch)


def test_the_largest_float16_still_fits():
    k, v = whole(4)
    k[0, 0, 0, 0, 0], k[0, 0, 0, 1, 1] = 65504.0, -65504.0
    assert np.asarray(kv.current(prefill(0, k, v, 64, 0, 0)))[0, 0]


@pytest.mark.parametrize("sizes", [(0, 1, 8, 1, 64), (1, 1, 7, 1, 64), (1, 1, 8, 1, 0), (1, -1, 8, 1, 64)])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="positive and head_dim even"):
        kv.init(*sizes)


def test_capacity_is_rounded_up_to_whole_blocks():
    assert kv.init(1, 1, 2, 2, 65).page_table.shape == (2, 2)
    assert kv.init(1, 1, 2, 2, 64).max_blocks == 1
