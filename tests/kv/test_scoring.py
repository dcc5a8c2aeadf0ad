"""Scores of all pages through the page table, and the pages that must be read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.kv import cache as kv
from skg_jax.kv import scoring
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.sketch import BoundKind
from skg_jax.types import BLOCK, PAGE_SIZES
from tests.kv import oracle

L, K, G, H = 2, 2, 3, 10
BLOCKS = 19  # of each row: more than one step of the scoring loop, and not a multiple of it
LENGTHS = np.array([BLOCKS * BLOCK - 5, 100, 17 * BLOCK], np.int32)
UNFIT, STALE = (0, 7), (2, 16)  # (row, logical block) that is full but without metadata

seal = jax.jit(kv.seal)
forced_pages = jax.jit(scoring.forced_pages, static_argnames=("page_size", "sink_pages", "recent_pages"))


@functools.partial(jax.jit, static_argnames=("page_size", "kind"))
def score_layers(q, cache: PagedKVCache, page_size: int, kind: BoundKind):
    """Estimates and bounds of all layers, [L, B, K, G, M], the last layer first."""
    estimates, bounds = [], scoring.room_for_bounds(cache, K * G, page_size)
    for layer in reversed(range(L)):
        args = q, cache, jnp.int32(layer), jnp.asarray(LENGTHS), page_size, kind, bounds
        estimate, bounds = scoring.score_pages(*args)
        estimates.append(estimate)
    return jnp.stack(estimates[::-1]), bounds


@functools.cache
def scattered() -> PagedKVCache:
    """Three rows of ragged length whose blocks are spread over the pool; what is not written is NaN."""
    rng = np.random.default_rng(0)
    table = rng.permutation(len(LENGTHS) * BLOCKS).reshape(-1, BLOCKS)
    k = np.full((L, table.size, K, BLOCK, H), np.nan, np.float32)
    for row, length in enumerate(LENGTHS):
        for token in range(length):
            k[:, table[row, token // BLOCK], :, token % BLOCK] = rng.normal(size=(L, K, H)) * 2
    k[0, table[UNFIT], 0, 3, 4] = 1e7
    cache = kv.init(L, K, H, len(LENGTHS), BLOCKS * BLOCK)
    cache = cache._replace(page_table=jnp.asarray(table, jnp.int32), k=jnp.asarray(k), v=jnp.asarray(k))
    full = (np.arange(BLOCKS) + 1) * BLOCK <= LENGTHS[:, None]
    cache = seal(cache, jnp.asarray(table.ravel()), jnp.asarray(full.ravel()))
    return cache._replace(written=cache.written.at[table[STALE]].add(1))


def known_blocks() -> np.ndarray:
    full = (np.arange(BLOCKS) + 1) * BLOCK <= LENGTHS[:, None]
    full[UNFIT] = full[STALE] = False
    return full


@pytest.mark.parametrize(
    ("page_size", "kind"),
    [(32, "sketch"), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(16, "sketch"), (64, "box")])],
)
def test_scores_bound_the_mass_of_every_page_wherever_its_block_lies(page_size, kind):
    cache = scattered()
    q = np.random.default_rng(1).normal(size=(3, K * G, H)).astype(np.float32)
    estimates, bounds = score_layers(q, cache, page_size, kind)
    for layer in range(L):
        keys = np.asarray(cache.k)[layer, np.asarray(cache.page_table)]  # [B, Mb, K, 64, H]
        keys = keys.swapaxes(1, 2).reshape(3, K, BLOCKS * BLOCK, H)
        exact = oracle.log_mass(oracle.logits(q.reshape(3, K, G, H), keys), page_size)
        known = np.broadcast_to(known_blocks().repeat(BLOCK // page_size, axis=1)[:, None, None], exact.shape)
        lower, upper, estimate = (
            np.asarray(x) for x in (bounds[layer, :, :, 0], bounds[layer, :, :, 1], estimates[layer])
        )
        assert (lower[known] <= exact[known]).all() and (exact[known] <= upper[known]).all()
        assert np.isfinite(estimate[known]).all()
        in_use = np.arange(exact.shape[-1]) * page_size < LENGTHS[:, None, None, None]
        lost = in_use & ~known
        assert (lower[lost] == -np.inf).all() and (upper[lost] == np.inf).all() and lost.any()
        assert (estimate[lost] == -np.inf).all()


def test_what_the_kernel_cannot_do_is_said_if_it_is_asked_for():
    cache, length = scattered(), jnp.asarray(LENGTHS)
    q = jnp.ones((3, K * G, H))
    refused: dict[BoundKind, str] = {"sketch": "head dim of 64 or 128, not 10", "box": "no box bounds"}
    for kind, sentence in refused.items():
        with pytest.raises(NotImplementedError, match=sentence):
            scoring.score_pages(q, cache, jnp.int32(0), length, 16, kind, implementation="mosaic_gpu")


def expected_forced(length: int, page_size: int, sink: int, recent: int, known: np.ndarray) -> list[bool]:
    pages = range(BLOCKS * BLOCK // page_size)
    used = [page for page in pages if page * page_size < length]
    must = {page for page in used if not known[page * page_size // BLOCK]}
    return [page in must | set(used[:sink]) | set(used[len(used) - min(recent, len(used)) :]) for page in pages]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_sinks_recent_and_unknown_pages_are_forced_and_no_others(page_size):
    cache = scattered()
    for sink, recent in ((0, 1), (1, 4), (3, 2)):
        for lengths in ([1, 0, 16], [17, 64, 65], [15, 33, 1088], LENGTHS):
            length = jnp.asarray(lengths, jnp.int32)
            found = forced_pages(cache, length, page_size=page_size, sink_pages=sink, recent_pages=recent)
            expected = [
                expected_forced(n, page_size, sink, recent, known)
                for n, known in zip(lengths, known_blocks(), strict=True)
            ]
            np.testing.assert_array_equal(found, expected)
