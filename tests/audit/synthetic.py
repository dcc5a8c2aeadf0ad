"""A small decode step made by the real functions: blocks written and sealed, a few tokens appended, layers attended.

Whatever nothing may read is NaN: slots past a row's length, blocks that no row owns.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax import attention, audit
from skg_jax.audit import AuditConfig, HeadWeights, StepEvidence
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.scoring import forced_pages, room_for_bounds, score_pages
from skg_jax.selectors import SelectContext, Selection, topk
from skg_jax.types import BLOCK
from tests.audit.lies import HONEST, Lies, told

L, K, G, H = 3, 2, 3, 16
N = K * G
LENGTHS = np.array([700, 345], np.int32)
APPENDED = 3  # tokens of each row that are written one by one
BLOCKS = 12  # of a row; more than either uses
SPARE = 2  # blocks of the pool that no row owns


class Step(NamedTuple):
    """One decode step and what it left behind; [L, ...] where a layer is."""

    cache: PagedKVCache
    q: jax.Array
    out: jax.Array
    lse: jax.Array
    selection: Selection
    evidence: StepEvidence
    weights: HeadWeights


@functools.cache
def tensors(seed: int = 0) -> tuple[np.ndarray, ...]:
    """q [L,B,N,H], k and v [L,B,K,S,H] of a step that is as hard to audit as its bounds allow.

    Keys wander along the text, so that pages differ. What the sketch misses of them points along the query of the
    group, or against it, as one coin for each 16 tokens says: every page lies near one end of its bounds.
    """
    rng = np.random.default_rng(seed)
    lead, tokens = (L, len(LENGTHS), K), BLOCKS * BLOCK
    base = rng.normal(size=(*lead, 1, H)) * 1.5
    q = base + 0.05 * rng.normal(size=(*lead, G, H))
    low, step = np.where(np.arange(H) == 5, 26.0, -4.0), 0.5
    raw = rng.normal(size=(*lead, tokens, H)) + rng.normal(size=(*lead, tokens // 32, H)).repeat(32, axis=3)
    code = np.clip(np.round(raw / step + 8), 1, 14)
    code[..., ::BLOCK, :], code[..., 1::BLOCK, :] = 0, 15  # the ends of the grid of each block
    along = base / np.abs(base).max(-1, keepdims=True) * rng.choice([-0.22, 0.22], size=(*lead, tokens // 16, 1))
    missed = np.where((code > 0) & (code < 15), along.repeat(16, axis=3), 0)
    v = rng.normal(size=raw.shape) * rng.uniform(0.2, 3.0, size=(*lead, tokens, 1))
    return tuple(x.astype(np.float32) for x in (q.reshape(L, -1, N, H), low + code * step + missed, v))


@functools.cache
def page_table(seed: int = 0) -> np.ndarray:
    rows = len(LENGTHS)
    return np.random.default_rng(seed).permutation(rows * BLOCKS + SPARE)[: rows * BLOCKS].reshape(rows, BLOCKS)


@functools.cache
def filled(seed: int = 0) -> PagedKVCache:
    """A sealed cache of `tensors(seed)`, by prefill of whole blocks and APPENDED single tokens."""
    _, k, v = tensors(seed)
    cache = kv.init(L, K, H, 1, (len(LENGTHS) * BLOCKS + SPARE) * BLOCK)
    nan = jnp.full_like(cache.k, jnp.nan)
    cache = cache._replace(page_table=jnp.asarray(page_table(), jnp.int32), k=nan, v=nan)
    prompt = LENGTHS - APPENDED
    counts = np.clip(prompt[:, None] - np.arange(BLOCKS) * BLOCK, 0, BLOCK).astype(np.int32)
    hide = lambda x: np.where((np.arange(BLOCKS * BLOCK) < prompt[:, None])[None, :, None, :, None], x, np.nan)
    cache = _prompt(cache, hide(k), hide(v), counts)
    for position in np.arange(APPENDED)[:, None] + prompt:
        at = lambda x: x[:, np.arange(len(LENGTHS)), :, position].swapaxes(0, 1)  # noqa: B023
        cache = _token(cache, at(k), at(v), position)
    return cache


@jax.jit
def _prompt(cache: PagedKVCache, k, v, counts) -> PagedKVCache:
    blocks, counts = cache.page_table.ravel(), counts.ravel()
    by_block = lambda x: x.reshape(L, -1, K, BLOCKS, BLOCK, H).swapaxes(2, 3).reshape(L, -1, K, BLOCK, H)
    cache = cache._replace(written=cache.written.at[blocks].add(counts > 0))
    write = lambda layer, cache: kv.write_blocks(cache, layer, blocks, by_block(k)[layer], by_block(v)[layer], counts)
    return kv.seal(jax.lax.fori_loop(0, L, write, cache), blocks, counts == BLOCK)


@jax.jit
def _token(cache: PagedKVCache, k, v, position) -> PagedKVCache:
    write = lambda layer, cache: kv.append(cache, layer, k[layer], v[layer], position)
    return jax.lax.fori_loop(0, L, write, kv.touch(cache, position))


def head_weights(seed: int = 1, uncovered: float = 0.0) -> HeadWeights:
    """Uneven weights that sum to one together with `uncovered`."""
    omega = np.random.default_rng(seed).gamma(1.0, size=(L, N))
    return HeadWeights(jnp.float32(omega / omega.sum() * (1 - uncovered)), jnp.float32(uncovered))


@functools.partial(jax.jit, static_argnames="config")
def attend(q, cache: PagedKVCache, budget, omega, obedient, lies: Lies, config: AuditConfig):
    """All layers of one step, on given queries. In rows [B] that are not `obedient` the selector forgets its duties."""
    selector, length = topk(), jnp.asarray(LENGTHS)
    room = room_for_bounds(cache, N, config.page_size)

    def one(args):
        layer, q = args
        estimate, bounds = score_pages(q, cache, layer, length, config.page_size, config.bounds, room)
        must = forced_pages(cache, length, config.page_size, config.sink_pages, config.recent_pages)
        ctx = SelectContext(estimate, must & obedient[:, None], -(-length // config.page_size), layer)
        selection, _ = selector.select(ctx, (), budget)
        out, lse = attention.sparse(q, cache, layer, selection, length, config.page_size)
        assert bounds is not None
        return out, lse, selection, bounds[layer], audit.layer_evidence(q, out, lse, selection)

    with told(lies):
        out, lse, selection, bounds, layers = jax.lax.map(one, (jnp.arange(L), q))
        return out, lse, selection, audit.step_evidence(layers, bounds, cache, omega, length, config)


def step(
    config: AuditConfig,
    budget: float = 0.4,
    seed: int = 0,
    weights: HeadWeights | None = None,
    cache: PagedKVCache | None = None,
    q: np.ndarray | None = None,
    obedient: tuple[bool, ...] = (True, True),
    lies: Lies = HONEST,
) -> Step:
    """The step of `filled(seed)`, or of another cache or other queries."""
    cache = filled(seed) if cache is None else cache
    queries = jnp.asarray(tensors(seed)[0] if q is None else q)
    weights = head_weights() if weights is None else weights
    pages = jnp.full(len(LENGTHS), budget, jnp.float32)
    out, lse, selection, evidence = attend(queries, cache, pages, weights.omega, jnp.asarray(obedient), lies, config)
    return Step(cache, queries, out, lse, selection, evidence, weights)
