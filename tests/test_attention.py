"""Paged attention against float64, with everything that must not be read poisoned with NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax import attention
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.selectors import Selection
from skg_jax.types import BLOCK

L, B, K, H = 2, 2, 3, 10
BLOCKS = 20  # of a row: more than the 1024 tokens that are absorbed at once
LENGTHS = np.array([1193, 77], np.int32)
LAYER = np.int32(1)

# query heads per KV head and page size; never K query heads to a group alone, so that no mapping is right by chance
GROUPS = [(1, 16), (3, 32), (4, 64), (8, 16)]

sparse = jax.jit(attention.sparse, static_argnames="page_size")
dense = jax.jit(attention.dense)
prefill = jax.jit(attention.prefill)
merge = jax.jit(attention.merge)


def tokens(seed: int = 0, dtype=jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """k and v [L,B,K,S,H], NaN past each row's length."""
    rng = np.random.default_rng(seed)
    k, v = rng.normal(size=(2, L, B, K, BLOCKS * BLOCK, H))
    for row, length in enumerate(LENGTHS):
        k[:, row, :, length:] = v[:, row, :, length:] = np.nan
    return np.array(jnp.asarray(k, dtype)), np.array(jnp.asarray(v, dtype))


def paged(k: np.ndarray, v: np.ndarray, seed: int = 1) -> PagedKVCache:
    """The same tokens in blocks scattered over a pool that is NaN elsewhere; seed None: in order."""
    spare = 3
    order = np.arange(B * BLOCKS + spare)
    table = (np.random.default_rng(seed).permutation(order) if seed else order)[: B * BLOCKS].reshape(B, BLOCKS)
    by_block = lambda x: x.reshape(L, B, K, BLOCKS, BLOCK, H).transpose(0, 1, 3, 2, 4, 5).reshape(L, -1, K, BLOCK, H)

    def pool(x):
        whole = np.full((L, order.size, K, BLOCK, H), np.nan, x.dtype)
        whole[:, table.ravel()] = by_block(x)
        return jnp.asarray(whole)

    cache = kv.init(L, K, H, 1, BLOCK, k.dtype)
    return cache._replace(k=pool(k), v=pool(v), page_table=jnp.asarray(table, jnp.int32))


def queries(groups: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(B, K * groups, H)).astype(np.float32) * 2


def reference(q, k, v, allowed) -> tuple[np.ndarray, np.ndarray]:
    """Softmax over the allowed tokens [B,K,S] of one layer, k and v [B,K,S,H], head by head."""
    out, lse = np.zeros(q.shape), np.full(q.shape[:2], -np.inf)
    for b, n in np.ndindex(*q.shape[:2]):
        head = n // (q.shape[1] // k.shape[1])
        mine = allowed[b, head]
        if mine.any():
            logit = k[b, head, mine].astype(np.float64) @ q[b, n].astype(np.float64) / np.sqrt(q.shape[2])
            weight = np.exp(logit - logit.max())
            out[b, n] = weight @ v[b, head, mine].astype(np.float64) / weight.sum()
            lse[b, n] = logit.max() + np.log(weight.sum())
    return out, lse


def within_length() -> np.ndarray:
    return np.broadcast_to((np.arange(BLOCKS * BLOCK) < LENGTHS[:, None])[:, None], (B, K, BLOCKS * BLOCK))


def random_pages(page_size: int, seed: int = 3, density: float = 0.3) -> np.ndarray:
    """Chosen pages [B,K,M] of each head, the last (partial) one of each row included."""
    chosen = np.random.default_rng(seed).random((B, K, BLOCKS * BLOCK // page_size)) < density
    last = (LENGTHS - 1) // page_size
    chosen[np.arange(B), :, last] = True
    return chosen & (np.arange(chosen.shape[2]) <= last[:, None])[:, None]


def as_selection(chosen: np.ndarray, seed: int = 4) -> Selection:
    """Ascending lists; entries past the count are arbitrary numbers."""
    ids = np.random.default_rng(seed).integers(-(10**9), 10**9, size=chosen.shape).astype(np.int32)
    for at in np.ndindex(*chosen.shape[:2]):
        pages = np.flatnonzero(chosen[at])
        ids[at][: pages.size] = pages
    return Selection(
        page_ids=jnp.asarray(ids), num_pages=jnp.asarray(chosen.sum(-1), jnp.int32), read=jnp.asarray(chosen)
    )


def check(found, expected, rtol: float = 2e-5):
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found[1], expected[1], rtol=rtol, atol=rtol)


@pytest.mark.parametrize(("groups", "page_size"), GROUPS)
def test_sparse_attends_to_the_chosen_pages_and_reads_no_other(groups, page_size):
    k, v = tokens()
    chosen = random_pages(page_size)
    allowed = chosen.repeat(page_size, axis=-1) & within_length()
    expected = reference(queries(groups), k[LAYER], v[LAYER], allowed)
    poison = lambda x: np.where(allowed[None, ..., None], x, np.nan)
    found = sparse(queries(groups), paged(poison(k), poison(v)), LAYER, as_selection(chosen), LENGTHS, page_size)
    check(found, expected)


@pytest.mark.parametrize("groups", [1, 3, 4, 8])
def test_dense_attends_to_everything_in_the_cache(groups):
    k, v = tokens()
    found = dense(queries(groups), paged(k, v), LAYER, LENGTHS)
    check(found, reference(queries(groups), k[LAYER], v[LAYER], within_length()))


@pytest.mark.parametrize(("groups", "page_size"), GROUPS)
def test_sparse_over_all_pages_is_dense(groups, page_size):
    cache = paged(*tokens())
    found = sparse(queries(groups), cache, LAYER, as_selection(random_pages(page_size, density=2)), LENGTHS, page_size)
    check(found, dense(queries(groups), cache, LAYER, LENGTHS), rtol=3e-6)


def test_bfloat16_caches_lose_nothing_but_the_rounding_of_what_they_store():
    k, v = tokens(dtype=jnp.bfloat16)
    k64, v64 = (x.astype(np.float64) for x in (k, v))
    check(
        dense(queries(3), paged(k, v), LAYER, LENGTHS), reference(queries(3), k64[LAYER], v64[LAYER], within_length())
    )


def test_where_the_blocks_lie_changes_nothing():
    k, v = tokens()
    selection = as_selection(random_pages(16))
    for one, other in zip(
        sparse(queries(8), paged(k, v), LAYER, selection, LENGTHS, 16),
        sparse(queries(8), paged(k, v, seed=0), LAYER, selection, LENGTHS, 16),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("groups", [1, 4])
def test_query_head_n_reads_kv_head_n_over_group(groups):
    k, v = tokens()
    v[:] = np.arange(K)[:, None, None]
    expected = np.broadcast_to(np.arange(K).repeat(groups)[:, None], (B, K * groups, H))
    page_size = dict(GROUPS)[groups]
    selection = as_selection(random_pages(page_size))
    np.testing.assert_allclose(dense(queries(groups), paged(k, v), LAYER, LENGTHS)[0], expected, atol=1e-5)
    np.testing.assert_allclose(
        sparse(queries(groups), paged(k, v), LAYER, selection, LENGTHS, page_size)[0], expected, atol=1e-5
    )


# --- nothing to read ----------------------------------------------------------------------------------------------


def is_empty(out, lse) -> None:
    """Zeros, and the finite stand-in for a log-sum-exp of minus infinity."""
    np.testing.assert_array_equal(out, np.zeros_like(out))
    assert (np.asarray(lse) < -1e29).all() and np.isfinite(np.asarray(lse)).all()


def test_heads_without_pages_give_zeros_and_leave_the_others_alone():
    k, v = tokens()
    chosen = random_pages(16)
    chosen[0, 1] = chosen[1, 2] = False
    out, lse = sparse(queries(8), paged(k, v), LAYER, as_selection(chosen), LENGTHS, 16)
    by_head = lambda x: np.asarray(x).reshape(B, K, 8, -1)
    for b, head in ((0, 1), (1, 2)):
        is_empty(by_head(out)[b, head], by_head(lse)[b, head])
    expected = reference(queries(8), k[LAYER], v[LAYER], chosen.repeat(16, axis=-1) & within_length())
    full = chosen.any(-1).repeat(8, axis=1)
    check((np.asarray(out)[full], np.asarray(lse)[full]), (expected[0][full], expected[1][full]))


def test_no_pages_at_all():
    is_empty(*sparse(queries(8), paged(*tokens()), LAYER, as_selection(random_pages(16) & False), LENGTHS, 16))


def test_pages_past_the_length_are_masked_even_when_they_fill_the_first_thousand_tokens():
    k, v = tokens()
    chosen = random_pages(16)
    selection = as_selection(chosen)
    ids, count = (np.array(x) for x in (selection.page_ids, selection.num_pages))
    pages = chosen.shape[2]
    ahead = np.broadcast_to(np.int32(pages - 1), (B, K, pages))  # the last page of the table: both rows end before it
    longer = Selection(
        page_ids=jnp.asarray(np.concatenate([ahead, ids], axis=2)),
        num_pages=jnp.asarray(count + pages),
        read=jnp.asarray(np.pad(chosen, ((0, 0), (0, 0), (pages, 0)))),
    )
    found = sparse(queries(8), paged(k, v), LAYER, longer, LENGTHS, 16)
    check(found, sparse(queries(8), paged(k, v), LAYER, selection, LENGTHS, 16), rtol=1e-6)


def test_an_unused_row_is_empty_and_an_all_unused_batch_too():
    k, v = tokens()
    out, lse = dense(queries(3), paged(k, v), LAYER, np.array([0, 77], np.int32))
    is_empty(out[0], lse[0])
    expected = reference(queries(3), k[LAYER], v[LAYER], within_length())
    check((out[1], lse[1]), (expected[0][1], expected[1][1]))
    is_empty(*dense(queries(3), paged(k, v), LAYER, np.zeros(B, np.int32)))


# --- logits far from zero -----------------------------------------------------------------------------------------


def whole_number_query() -> np.float32:
    """q such that q / sqrt(H) is 1 to the last bit: logits are then the key's first channel, without rounding."""
    near = np.float32(H**0.5) * (1 + np.arange(-4, 5) * 2.0**-23)
    return next(q for q in near.astype(np.float32) if q * np.float32(H**-0.5) == 1)


@pytest.mark.parametrize("level", [-245_000, -100_000, 100_000, 245_000])
def test_softmax_of_logits_that_are_all_huge(level):
    k, v = tokens()
    k[..., 1:] = np.where(np.isnan(k[..., 1:]), np.nan, 0)
    k[..., 0] = level + np.where(np.isnan(k[..., 0]), np.nan, np.random.default_rng(5).integers(6, size=k.shape[:-1]))
    q = np.zeros((B, K * 8, H))
    q[..., 0] = np.sqrt(H)
    exact = reference(q, k[LAYER], v[LAYER], within_length())
    q = np.where(q > 0, whole_number_query(), np.float32(0))
    for found in (
        dense(q, paged(k, v), LAYER, LENGTHS),
        sparse(q, paged(k, v), LAYER, as_selection(random_pages(16, density=2)), LENGTHS, 16),
    ):
        np.testing.assert_allclose(found[0], exact[0], rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(found[1], exact[1], rtol=2**-23)


# --- merging ------------------------------------------------------------------------------------------------------


def test_disjoint_parts_merge_to_the_whole_and_empty_parts_change_nothing():
    cache, whole = paged(*tokens()), random_pages(16, density=0.5)
    part = whole & (np.random.default_rng(6).random(whole.shape) < 0.4)
    over = lambda chosen: sparse(queries(8), cache, LAYER, as_selection(chosen), LENGTHS, 16)
    check(merge(over(part), over(whole & ~part)), over(whole))
    check(merge(over(whole & False), over(whole)), over(whole), rtol=1e-6)
    is_empty(*merge(over(whole & False), over(whole & False)))


# --- prefill ------------------------------------------------------------------------------------------------------


@functools.cache
def long_row() -> tuple[np.ndarray, np.ndarray]:
    """Row 0 filled to its capacity; row 1 is NaN throughout: nothing of it may be read."""
    rng = np.random.default_rng(7)
    k, v = rng.normal(size=(2, L, B, K, BLOCKS * BLOCK, H)).astype(np.float32)
    k[:, 1] = v[:, 1] = np.nan
    return k, v


@pytest.mark.parametrize("start", [0, 128, 960, 1152])
def test_prefill_is_causal_attention_over_all_tokens_before(start):
    k, v = (x.copy() for x in long_row())
    k[:, :, :, start + 128 :] = v[:, :, :, start + 128 :] = np.nan
    q = np.random.default_rng(8).normal(size=(1, 128, K * 4, H)).astype(np.float32)
    found = prefill(q, paged(k, v), LAYER, np.int32(0), np.int32(start))
    token = np.arange(BLOCKS * BLOCK)
    for t in (0, 1, 63, 64, 126, 127):
        allowed = np.broadcast_to(token <= start + t, (1, K, token.size))
        expected, _ = reference(q[:, t], k[LAYER, :1], v[LAYER, :1], allowed)
        np.testing.assert_allclose(np.asarray(found)[:, t], expected, rtol=2e-5, atol=2e-5)


def test_prefill_of_the_second_row_uses_its_own_blocks():
    k, v = (x[:, ::-1].copy() for x in long_row())
    q = np.random.default_rng(8).normal(size=(1, 128, K * 4, H)).astype(np.float32)
    found = prefill(q, paged(k, v), LAYER, np.int32(1), np.int32(0))
    ones = np.broadcast_to(np.arange(BLOCKS * BLOCK) <= 100, (1, K, BLOCKS * BLOCK))
    expected, _ = reference(q[:, 100], k[LAYER, 1:], v[LAYER, 1:], ones)
    np.testing.assert_allclose(np.asarray(found)[:, 100], expected, rtol=2e-5, atol=2e-5)


def test_padding_at_the_end_of_a_prefill_chunk_does_not_reach_the_tokens_before_it():
    k, v = (x.copy() for x in long_row())
    q = np.random.default_rng(8).normal(size=(1, 128, K * 4, H)).astype(np.float32)
    clean = prefill(q, paged(k, v), LAYER, np.int32(0), np.int32(128))
    k[:, 0, :, 128 + 50 : 256] = v[:, 0, :, 128 + 50 : 256] = 1e6
    padded = prefill(q, paged(k, v), LAYER, np.int32(0), np.int32(128))
    np.testing.assert_array_equal(clean[:, :50], padded[:, :50])


# --- one compilation ----------------------------------------------------------------------------------------------


def test_neither_length_nor_the_number_of_pages_traces_anew():
    traces = []

    @jax.jit
    def counted(q, cache, selection, length):
        traces.append(1)
        return attention.sparse(q, cache, jnp.int32(0), selection, length, 16)

    cache = paged(*tokens())
    for density, length in ((0.1, [1193, 77]), (2, [1, 1280]), (0, [16, 17])):
        counted(queries(8), cache, as_selection(random_pages(16, density=density)), np.array(length, np.int32))
    assert len(traces) == 1
