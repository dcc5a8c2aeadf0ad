"""Paged attention: one query token against chosen pages, or prefill chunks against all before them.

Decoding returns its output with the log-sum-exp of the logits it read, so that partial results over disjoint pages
merge exactly (`merge`). The loops have dynamic trip counts: what is not selected is not read, and a larger budget
compiles nothing. `sparse` and `dense` run as a Mosaic GPU kernel where the machine and the case allow it
(`skg_jax.pallas.paged_decode`), and in XLA elsewhere.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas import dispatch
from skg_jax.pallas.decode_config import DEFAULT, PagedDecodeConfig
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.paged_decode import paged_decode
from skg_jax.selectors.base import Selection
from skg_jax.types import BLOCK

_CHUNK_TOKENS = 1024  # of one loop iteration: its scores and keys stay in a CPU's L2 cache
_EMPTY = -1e30  # finite "minus infinity": exp underflows to zero and differences stay finite


class Partial(NamedTuple):
    """Unnormalised attention over the keys read so far."""

    acc: Float[Array, "B K Q H"]
    top: Float[Array, "B K Q"]  # running maximum logit
    mass: Float[Array, "B K Q"]  # sum of exp(logit - top)


def sparse(
    q: Float[Array, "B N H"],
    cache: PagedKVCache,
    layer: Int[Array, ""],
    selection: Selection,
    length: Int[Array, " B"],
    page_size: int,
    *,
    out_dtype=jnp.float32,
    implementation: Implementation | None = None,
    config: PagedDecodeConfig = DEFAULT,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention of one token per sequence over the selected pages.

    Args:
      length: tokens in the cache, this one included; slots past it are never used, whatever they hold.
      implementation: "mosaic_gpu", "xla", or None for the first that can.
      config: of the kernel; `expected_pages` helps it to choose how many blocks share a list.

    Returns: output in `out_dtype`, and log-sum-exp, float32. A row without pages gives zeros and one below -1e29.

    Raises:
      NotImplementedError: if "mosaic_gpu" was asked for and cannot do the case.
    """
    where = cache.page_table, selection.page_ids, selection.num_pages, length, layer
    kernel = lambda: paged_decode(q, cache.k, cache.v, *where, page_size=page_size, config=config, out_dtype=out_dtype)
    twin = lambda: _rounded(_sparse_xla(q, cache, layer, selection, length, page_size), out_dtype)
    return dispatch.choose(implementation, kernel, twin)


def dense(
    q: Float[Array, "B N H"],
    cache: PagedKVCache,
    layer: Int[Array, ""],
    length: Int[Array, " B"],
    *,
    out_dtype=jnp.float32,
    implementation: Implementation | None = None,
    config: PagedDecodeConfig = DEFAULT,
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Attention of one token per sequence over everything in its cache; see `sparse`."""
    where = cache.page_table, None, None, length, layer
    kernel = lambda: paged_decode(q, cache.k, cache.v, *where, page_size=BLOCK, config=config, out_dtype=out_dtype)
    return dispatch.choose(implementation, kernel, lambda: _rounded(_dense_xla(q, cache, layer, length), out_dtype))


def prefill(
    q: Float[Array, "1 T N H"], cache: PagedKVCache, layer: Int[Array, ""], row: Int[Array, ""], start: Int[Array, ""]
) -> Float[Array, "1 T N H"]:
    """Causal attention of a chunk at positions start.. over the blocks of its row, up to its own (already written)."""
    _, width, heads, dim = q.shape
    kv_heads = cache.k.shape[2]
    grouped = q.reshape(1, width, kv_heads, -1, dim).swapaxes(1, 2).reshape(1, kv_heads, -1, dim)
    last = start + jnp.repeat(jnp.arange(width), heads // kv_heads)
    own = cache._replace(page_table=jax.lax.dynamic_slice_in_dim(cache.page_table, row, 1))
    visible = lambda token: token[:, None, None, :] <= last[None, None, :, None]
    part = _over_blocks(grouped.astype(jnp.float32), own, layer, (start + width)[None], visible)
    out = (part.acc / part.mass[..., None]).reshape(1, kv_heads, width, -1, dim)
    return out.swapaxes(1, 2).reshape(q.shape)


def merge(
    a: tuple[Float[Array, "B N H"], Float[Array, "B N"]], b: tuple[Float[Array, "B N H"], Float[Array, "B N"]]
) -> tuple[Float[Array, "B N H"], Float[Array, "B N"]]:
    """Combine attention over two disjoint sets of keys."""
    lse = jnp.logaddexp(a[1], b[1])
    share = lambda part: jnp.exp(part[1] - lse)[..., None] * part[0]
    return share(a) + share(b), lse


def _rounded(result: tuple[Array, Array], out_dtype) -> tuple[Array, Array]:
    return result[0].astype(out_dtype), result[1]


def gather_pages(pool, cache: PagedKVCache, layer, page_ids: Int[Array, "B K n"], page_size: int):
    """Pages of one layer, [B, K, n, C, H]. Only these are touched: each is one contiguous slab of the pool."""
    parts = BLOCK // page_size
    layers, blocks, heads, _, dim = pool.shape
    block = jnp.take_along_axis(cache.page_table[:, None], page_ids // parts, axis=2)
    head = jnp.arange(heads)[:, None]
    flat = ((layer * blocks + block) * heads + head) * parts + page_ids % parts
    return pool.reshape(layers * blocks * heads * parts, page_size, dim)[flat]


def _sparse_xla(q, cache: PagedKVCache, layer, selection: Selection, length, page_size: int):
    grouped = _group(q, cache.k.shape[2])
    width = _CHUNK_TOKENS // page_size
    padded = jnp.pad(selection.page_ids, ((0, 0), (0, 0), (0, width)))

    def body(i, part):
        ids = jax.lax.dynamic_slice_in_dim(padded, i * width, width, axis=2)
        listed = i * width + jnp.arange(width) < selection.num_pages[..., None]
        token = ids[..., None] * page_size + jnp.arange(page_size)
        ok = listed[..., None] & (token < length[:, None, None, None])
        k, v = (gather_pages(pool, cache, layer, ids, page_size) for pool in (cache.k, cache.v))
        flat = lambda x: x.reshape(*x.shape[:2], width * page_size, *x.shape[4:])
        return _absorb(part, grouped, flat(k), flat(v), flat(ok)[:, :, None])

    trips = -(-selection.num_pages.max() // width)
    return _finish(jax.lax.fori_loop(0, trips, body, _start(grouped)), q.shape)


def _dense_xla(q, cache: PagedKVCache, layer, length):
    grouped = _group(q, cache.k.shape[2])
    visible = lambda token: (token < length[:, None])[:, None, None]
    part = _over_blocks(grouped, cache, layer, length, visible)
    return _finish(part, q.shape)


def _over_blocks(grouped, cache, layer, length, visible) -> Partial:
    """Absorb the blocks of each row in order. `visible` turns positions [B, t] into a mask for [B, K, Q, t]."""
    width = _CHUNK_TOKENS // BLOCK
    table = jnp.pad(cache.page_table, ((0, 0), (0, width)))

    def body(i, part):
        ids = jax.lax.dynamic_slice_in_dim(table, i * width, width, axis=1)
        token = jnp.broadcast_to(i * _CHUNK_TOKENS + jnp.arange(_CHUNK_TOKENS), (ids.shape[0], _CHUNK_TOKENS))
        k, v = (_blocks_of(pool, layer, ids) for pool in (cache.k, cache.v))
        return _absorb(part, grouped, k, v, visible(token))

    trips = jnp.minimum(-(-length.max() // _CHUNK_TOKENS), -(-cache.max_blocks // width))
    return jax.lax.fori_loop(0, trips, body, _start(grouped))


def _blocks_of(pool, layer, ids: Int[Array, "B n"]) -> Float[Array, "B K t H"]:
    got = pool[layer, ids].swapaxes(1, 2)
    return got.reshape(*got.shape[:2], -1, pool.shape[-1])


def _group(q: Float[Array, "B N H"], kv_heads: int) -> Float[Array, "B K G H"]:
    batch, _, dim = q.shape
    return q.astype(jnp.float32).reshape(batch, kv_heads, -1, dim)


def _start(grouped: Float[Array, "B K Q H"]) -> Partial:
    return Partial(jnp.zeros_like(grouped), jnp.full(grouped.shape[:3], _EMPTY), jnp.zeros(grouped.shape[:3]))


def _absorb(part: Partial, q, k, v, ok: Bool[Array, "B #K #Q t"]) -> Partial:
    """One online-softmax step. Values of masked slots are replaced, not multiplied by zero: they may be NaN."""
    logits = jnp.einsum("bkqh,bkth->bkqt", q * q.shape[-1] ** -0.5, k.astype(jnp.float32), precision="highest")
    logits = jnp.where(ok, logits, _EMPTY)
    top = jnp.maximum(part.top, logits.max(-1))
    weight = jnp.where(ok, jnp.exp(logits - top[..., None]), 0.0)
    old = jnp.exp(part.top - top)
    v = jnp.where(ok.any(2)[..., None], v.astype(jnp.float32), 0.0)
    acc = part.acc * old[..., None] + jnp.einsum("bkqt,bkth->bkqh", weight, v, precision="highest")
    return Partial(acc, top, part.mass * old + weight.sum(-1))


def _finish(part: Partial, shape: tuple[int, ...]):
    mass = jnp.maximum(part.mass, jnp.finfo(jnp.float32).tiny)
    out = (part.acc / mass[..., None]).reshape(shape)
    return out, jnp.where(part.mass > 0, part.top + jnp.log(mass), _EMPTY).reshape(shape[:-1])
