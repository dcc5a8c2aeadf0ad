"""One attempt: every layer, the audit, the decision.

The one `lax.switch` stands at its head: exact for all rows, or sparse. A batch of mixed tiers takes the sparse branch,
where an exact row simply lists all of its pages (docs/adr/0003).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from models import decoder
from skg_jax import audit, sampling
from skg_jax.audit import AuditReport, StepEvidence
from skg_jax.decode import layers
from skg_jax.decode.packing import pack, unpack
from skg_jax.decode.state import AUDIT_STREAM, NO_TOKEN, SAMPLE_STREAM, Program, Requests, Rows, StepInfo, stream
from skg_jax.guard import policy as guard
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.scoring import room_for_bounds
from skg_jax.types import Params


class Attention(NamedTuple):
    """What the layers of one attempt give, by either branch."""

    hidden: Float[Array, "B D"]
    cache: PagedKVCache
    report: AuditReport
    selected: Int[Array, " B"]  # pages read, over layers and KV heads
    unbounded: Int[Array, " B"]  # unread pages without bounds, over layers and KV heads


def attempt(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[PagedKVCache, Rows, StepInfo]:
    """One try at the next token of every row.

    Every row tries at its own tier. After the audit accepted rows advance; the others stay, and retry beside their
    neighbours' next tokens.
    """
    cache = kv.touch(cache, rows.position)
    return settle(params, requests, rows, program, _attend(params, cache, requests, rows, program))


def sparse_step(
    params: Params, cache: PagedKVCache, requests: Requests, rows: Rows, program: Program
) -> tuple[Attention, StepEvidence | None]:
    """The sparse branch alone, with the evidence that its audit used: for shadow execution and tests.

    The caller has `touch`ed the cache.
    """
    budget = jnp.take_along_axis(requests.policy.budgets, rows.tier[:, None], axis=1)[:, 0]
    attend = layers.sparse_attend(program, rows.position, jnp.where(rows.done, 1.0, budget))
    room = room_for_bounds(cache, program.model.num_heads, program.audit.page_size) if program.guarded else None
    carry = (cache, program.selector.init(), room)
    x, (cache, _, bounds), trace = _layers(params, program, rows, attend, carry)
    if trace.evidence is None:
        return Attention(x, cache, _no_report(rows), trace.selected.sum(0), jnp.zeros_like(rows.tier)), None
    key = stream(requests.key, AUDIT_STREAM, rows.attempt)
    limit = guard.budget(requests.policy, rows.guard)
    omega, length = requests.weights.omega, rows.position + 1
    evidence = audit.step_evidence(trace.evidence, bounds, cache, omega, length, program.audit, program.implementation)
    report = audit.run(key, evidence, cache, requests.weights, limit, program.audit, program.implementation)
    return Attention(x, cache, report, trace.selected.sum(0), evidence.unbounded.sum(0)), evidence


def settle(
    params: Params, requests: Requests, rows: Rows, program: Program, got: Attention
) -> tuple[PagedKVCache, Rows, StepInfo]:
    """Choose the next tokens, decide, advance the rows that stand, and write the log line."""
    logits = decoder.unembed(params, program.model, got.hidden)
    token = next_token(program, requests, logits, rows.position + 1)
    active = ~rows.done
    last_tier = requests.policy.budgets.shape[1] - 1
    tier = rows.tier if program.guarded else jnp.full_like(rows.tier, last_tier)  # unguarded: everything stands
    length = rows.position + 1
    decision, state = guard.decide(requests.policy, rows.guard, got.report, tier, rows.attempt, active, length)
    stands = active & ((decision.verdict == guard.Verdict.ACCEPT) | (decision.verdict == guard.Verdict.RELEASE))
    position = rows.position + stands
    over = stands & (jnp.any(token[:, None] == requests.stop, axis=1) | (position >= requests.last))
    after = Rows(
        token=jnp.where(stands, token, rows.token),
        position=position,
        tier=decision.next_tier if program.guarded else rows.tier,
        attempt=rows.attempt + active,
        done=rows.done | over | (active & (decision.verdict == guard.Verdict.STOP)),
        guard=state if program.guarded else rows.guard,
    )
    return got.cache, after, _log_line(rows, program, got, decision, jnp.where(stands, token, NO_TOKEN))


def next_token(
    program: Program, requests: Requests, logits: Float[Array, "B V"], position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """The token that will stand at `position`; its key depends on request and position alone, not on the attempt."""
    if program.greedy:
        return sampling.greedy(logits)
    return sampling.sample(stream(requests.key, SAMPLE_STREAM, position), logits, requests.sampling)


def _attend(params, cache, requests, rows, program: Program) -> Attention:
    if program.mode == "dense":
        return _exact_step(params, cache, rows, program)
    sparse = lambda cache: sparse_step(params, cache, requests, rows, program)[0]
    if program.mode == "sparse":
        return sparse(cache)
    exact = rows.done | (rows.tier >= requests.policy.budgets.shape[1] - 1)
    packed = lambda got: (got.hidden, got.cache, pack(got[2:]))
    branches = [lambda cache: packed(sparse(cache)), lambda cache: packed(_exact_step(params, cache, rows, program))]
    hidden, cache, numbers = jax.lax.switch(jnp.all(exact).astype(jnp.int32), branches, cache)
    return Attention(hidden, cache, *unpack(numbers, (_no_report(rows), rows.tier, rows.tier)))


def _exact_step(params, cache, rows: Rows, program: Program) -> Attention:
    x, cache, _ = _layers(params, program, rows, layers.exact_attend(program, rows.position), cache)
    everything = layers.pages_in_use(program, rows.position)
    return Attention(x, cache, _no_report(rows), everything, jnp.zeros_like(rows.tier))


def _layers(params, program: Program, rows: Rows, attend, carry):
    x, carry, trace = decoder.hidden_states(
        params, program.model, rows.token[:, None], rows.position[:, None], attend, carry
    )
    return x[:, 0], carry, trace


def _log_line(rows: Rows, program: Program, got: Attention, decision: guard.Decision, token) -> StepInfo:
    total = layers.pages_in_use(program, rows.position)
    return StepInfo(
        active=~rows.done, token=token, position=rows.position, verdict=decision.verdict, exact=got.selected >= total,
        bound=got.report.bound, cap=got.report.cap, units=got.report.units, drawn=got.report.drawn,
        audited=got.report.pages_read, selected=got.selected, total=total, violated=got.report.violated,
        unbounded=got.unbounded, key_reused=decision.key_reused, uncovered=decision.uncovered,
        corrupt=got.report.corrupt,
    )  # fmt: skip


def _no_report(rows: Rows) -> AuditReport:
    """Of a step that dropped nothing, or was not audited."""
    batch = rows.token.shape[0]
    real, count, no = jnp.zeros(batch), jnp.zeros_like(rows.token), jnp.zeros(batch, bool)
    return AuditReport(
        accepted=~no, bound=real, cap=real, log_wealth=real, violated=no, corrupt=jnp.full((batch, 2), -1), units=count,
        drawn=count, pages_read=count,
    )  # fmt: skip
