"""The jit boundaries: `prefill` of a chunk and `decode_loop` over several attempts. The cache is donated to both.

One iteration of the loop is an attempt. Every row tries its next token at its own tier; after the audit accepted rows advance and
the others stay and retry beside their neighbours' next tokens. The one `lax.switch` stands at the head: exact for all, or sparse.
A batch of mixed tiers takes the sparse branch, where an exact row simply lists all of its pages (docs/adr/0003).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import decoder
from skg_jax import audit, sampling
from skg_jax.audit import AuditReport, StepEvidence
from skg_jax.decode import layers
from skg_jax.decode.state import (
    AUDIT_STREAM,
    NO_TOKEN,
    SAMPLE_STREAM,
    Program,
    Requests,
    Rows,
    StepInfo,
    empty_log,
    stream,
)
from skg_jax.guard import policy as guard
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.types import BLOCK, Params


class Attention(NamedTuple):
    """Result of the layers of one attempt, by either branch."""

    hidden: Float[Array, "B D"]
    cache: PagedKVCache
    report: AuditReport
    selected: Int[Array, " B"]
    unbounded: Int[Array, " B"]


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
      tokens: T = program.prefill_chunk ids, of which the first `count` are real. start: their first position, a multiple of T.

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
        cache = kv.seal(cache, blocks, filled == BLOCK)
    last = jax.lax.dynamic_index_in_dim(x[0], count - 1, keepdims=False)
    logits = decoder.unembed(params, program.model, last)
    token = next_token(program, _row_of(requests, row), logits[None], (start + count)[None])
    return cache, token[0], logits


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def decode_loop(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[PagedKVCache, Rows, StepInfo]:
    """Attempts until all rows are done, a block is full, or the dispatch is used up; then full blocks are sealed.

    Returns: cache, rows, and a log of `program.attempts_per_dispatch` lines (those not reached are inactive).
    """

    def going(state):
        _, rows, _, i = state
        full = ~rows.done & (rows.position % BLOCK == 0) & (i > 0)
        return (i < program.attempts_per_dispatch) & jnp.any(~rows.done) & ~jnp.any(full & _advanced(state))

    def body(state):
        cache, rows, log, i = state
        cache, rows, info = attempt(params, cache, requests, rows, program)
        log = jax.tree.map(lambda whole, line: whole.at[i].set(line), log, info)
        return cache, rows, log, i + 1

    log = empty_log(program.attempts_per_dispatch, rows.token.shape[0])
    cache, rows, log, _ = jax.lax.while_loop(going, body, (cache, rows, log, jnp.int32(0)))
    if program.mode != "dense":
        cache = seal_full(cache, rows)
    return cache, rows, log


def attempt(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[PagedKVCache, Rows, StepInfo]:
    """One try at the next token of every row."""
    cache = kv.touch(cache, rows.position)
    got = _attend(params, cache, requests, rows, program)
    logits = decoder.unembed(params, program.model, got.hidden)
    token = next_token(program, requests, logits, rows.position + 1)
    return settle(requests, rows, program, got, token)


def sparse_step(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[Attention, StepEvidence | None]:
    """The sparse branch alone, with the evidence that its audit used: for shadow execution and tests.

    The caller has `touch`ed the cache.
    """
    budget = jnp.take_along_axis(requests.policy.budgets, rows.tier[:, None], axis=1)[:, 0]
    attend = layers.sparse_attend(program, requests.weights, rows.position, jnp.where(rows.done, 1.0, budget))
    carry = (cache, program.selector.init())
    x, (cache, _), trace = _layers(params, program, rows, attend, carry)
    if trace.evidence is None:
        return Attention(x, cache, _no_report(rows), trace.selected.sum(0), rows.tier * 0), None
    key = stream(requests.key, AUDIT_STREAM, rows.attempt)
    limit = guard.budget(requests.policy, rows.guard)
    report = audit.run(key, trace.evidence, cache, requests.weights, limit, program.audit)
    return Attention(x, cache, report, trace.selected.sum(0), trace.evidence.unbounded.sum(0)), trace.evidence


def _attend(params, cache, requests, rows, program: Program) -> Attention:
    if program.mode == "dense":
        return _exact_step(params, cache, rows, program)
    sparse = lambda cache: sparse_step(params, cache, requests, rows, program)[0]
    if program.mode == "sparse":
        return sparse(cache)
    exact = rows.done | (rows.tier >= requests.policy.budgets.shape[1] - 1)
    branches = [sparse, lambda cache: _exact_step(params, cache, rows, program)]
    return jax.lax.switch(jnp.all(exact).astype(jnp.int32), branches, cache)


def _exact_step(params, cache, rows: Rows, program: Program) -> Attention:
    x, cache, _ = _layers(params, program, rows, layers.exact_attend(rows.position), cache)
    return Attention(x, cache, _no_report(rows), layers.pages_in_use(program, rows.position), rows.tier * 0)


def _layers(params, program: Program, rows: Rows, attend, carry):
    x, carry, trace = decoder.hidden_states(
        params, program.model, rows.token[:, None], rows.position[:, None], attend, carry
    )
    return x[:, 0], carry, trace


def settle(requests: Requests, rows: Rows, program: Program, got: Attention, token):
    """Decide, advance the rows that stand, and write the log line."""
    active = ~rows.done
    last_tier = requests.policy.budgets.shape[1] - 1
    tier = rows.tier if program.guarded else jnp.full_like(rows.tier, last_tier)  # unguarded: everything stands
    decision, state = guard.decide(requests.policy, rows.guard, got.report, tier, rows.attempt, active)
    stands = active & ((decision.verdict == guard.Verdict.ACCEPT) | (decision.verdict == guard.Verdict.RELEASE))
    position = rows.position + stands
    over = stands & (jnp.any(token[:, None] == requests.stop, axis=1) | (position >= requests.last))
    info = StepInfo(
        active=active, token=jnp.where(stands, token, NO_TOKEN), position=rows.position, verdict=decision.verdict,
        exact=got.selected >= layers.pages_in_use(program, rows.position), bound=got.report.bound, cap=got.report.cap,
        units=got.report.units, drawn=got.report.drawn, audited=got.report.pages_read, selected=got.selected,
        total=layers.pages_in_use(program, rows.position), violated=got.report.violated, unbounded=got.unbounded,
        key_reused=decision.key_reused, uncovered=decision.uncovered, corrupt=got.report.corrupt,
    )  # fmt: skip
    rows = Rows(
        token=jnp.where(stands, token, rows.token),
        position=position,
        tier=decision.next_tier if program.guarded else rows.tier,
        attempt=rows.attempt + active,
        done=rows.done | over | (active & (decision.verdict == guard.Verdict.STOP)),
        guard=state if program.guarded else rows.guard,
    )
    return got.cache, rows, info


def _no_report(rows: Rows) -> AuditReport:
    """Of a step that dropped nothing, or was not audited."""
    zero, count, no = jnp.zeros(rows.token.shape), rows.token * 0, jnp.zeros(rows.token.shape, bool)
    nowhere = jnp.full((rows.token.shape[0], 2), -1)
    return AuditReport(~no, zero, zero, zero, no, nowhere, count, count, count)


def next_token(program: Program, requests: Requests, logits: Float[Array, "B V"], position) -> Int[Array, " B"]:
    if program.greedy:
        return sampling.greedy(logits)
    return sampling.sample(stream(requests.key, SAMPLE_STREAM, position), logits, requests.sampling)


def _row_of(requests: Requests, row) -> Requests:
    one = lambda tree: jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1), tree)
    return requests._replace(key=one(requests.key), sampling=one(requests.sampling))


def _advanced(state) -> Array:
    """Rows whose latest attempt stood: only these can have filled a block."""
    _, _, log, i = state
    return log.token[jnp.maximum(i - 1, 0)] != NO_TOKEN


def seal_full(cache: PagedKVCache, rows: Rows) -> PagedKVCache:
    """Seal the block before each row's position when it has just been filled."""
    before = jnp.maximum(rows.position // BLOCK - 1, 0)
    blocks = jnp.take_along_axis(cache.page_table, before[:, None], axis=1)[:, 0]
    full = (rows.position % BLOCK == 0) & (cache.sealed[blocks] != cache.written[blocks])
    return kv.seal(cache, blocks, full)
