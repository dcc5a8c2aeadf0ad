"""The jit boundaries: `prefill` of a chunk and `decode_loop` over several attempts. The cache is donated to both."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import decoder
from skg_jax.decode import layers
from skg_jax.decode.attempt import attempt, next_token
from skg_jax.decode.state import NO_TOKEN, Program, Requests, Rows, StepInfo, empty_log
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas.dispatch import Implementation
from skg_jax.types import BLOCK, Params


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def prefill(
    params: Params,
    cache: PagedKVCache,
    requests: Requests,
    tokens: Int[Array, "1 T"],
    row: Int[Array, ""],
    start: Int[Array, ""],
    count: Int[Array, ""],
    program: Program,
) -> tuple[PagedKVCache, Int[Array, ""], Float[Array, " V"]]:
    """Run one chunk of one row's prompt, exactly; seal the blocks that it fills.

    Args:
      tokens: T = program.prefill_chunk ids, of which the first `count` are real.
      start: their first position, a multiple of T.

    Returns: the cache, and of the last real token the next token and its logits (of use after the last chunk).
    """
    n = tokens.shape[1] // BLOCK
    blocks = jax.lax.dynamic_slice(cache.page_table, (row, start // BLOCK), (1, n))[0]
    filled = jnp.clip(count - jnp.arange(n) * BLOCK, 0, BLOCK)
    cache = cache._replace(written=cache.written.at[blocks].add(filled > 0))
    positions = start + jnp.arange(tokens.shape[1])[None]
    attend = layers.prefill_attend(row, blocks, start, filled)
    x, cache, _ = decoder.hidden_states(params, program.model, tokens, positions, attend, cache)
    if program.mode != "dense":
        cache = kv.seal(cache, blocks, filled == BLOCK, program.implementation)
    last = jax.lax.dynamic_index_in_dim(x[0], count - 1, keepdims=False)
    logits = decoder.unembed(params, program.model, last)
    token = next_token(program, _row_of(requests, row), logits[None], (start + count)[None])
    return cache, token[0], logits


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "rows", "log"), keep_unused=True)
def decode_loop(
    params: Params,
    cache: PagedKVCache,
    requests: Requests,
    rows: Rows,
    log: StepInfo | None = None,
    *,
    program: Program,
) -> tuple[PagedKVCache, Rows, StepInfo]:
    """Attempts until all rows are done, a block is full, or the dispatch is used up; then full blocks are sealed.

    Cache, rows and log are donated. `log` is that of the last dispatch, fetched before, and given for its memory alone:
    where buffers have moved between dispatches, XLA writes the loop's CUDA graph anew while the GPU waits (ADR 0012).

    Returns: cache, rows, and a log of `program.attempts_per_dispatch` lines (those not reached are inactive).
    """
    del log

    def going(state):
        _, rows, log, i = state
        advanced = log.token[jnp.maximum(i - 1, 0)] != NO_TOKEN  # only these rows can just have filled a block
        full = ~rows.done & advanced & (rows.position % BLOCK == 0)
        return (i < program.attempts_per_dispatch) & jnp.any(~rows.done) & ~jnp.any(full)

    def body(state):
        cache, rows, log, i = state
        cache, rows, info = attempt(params, cache, requests, rows, program)
        log = jax.tree.map(lambda whole, line: whole.at[i].set(line), log, info)
        return cache, rows, log, i + 1

    log = empty_log(program.attempts_per_dispatch, rows.token.shape[0])
    cache, rows, log, _ = jax.lax.while_loop(going, body, (cache, rows, log, jnp.int32(0)))
    if program.mode != "dense":
        cache = seal_full(cache, rows, program.implementation)
    return cache, rows, log


def seal_full(cache: PagedKVCache, rows: Rows, implementation: Implementation | None = None) -> PagedKVCache:
    """Seal the block before each row's position when it has just been filled."""
    before = jnp.maximum(rows.position // BLOCK - 1, 0)
    blocks = jnp.take_along_axis(cache.page_table, before[:, None], axis=1)[:, 0]
    full = (rows.position % BLOCK == 0) & (cache.sealed[blocks] != cache.written[blocks])
    return kv.seal(cache, blocks, full, implementation)


def _row_of(requests: Requests, row) -> Requests:
    one = lambda tree: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), tree)
    return requests._replace(key=one(requests.key), sampling=one(requests.sampling))
