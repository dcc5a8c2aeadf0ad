"""The audit of every head by itself: no head may have lost more than tau, where the step's audit bounds an average.

Every query head of every layer is a population of its own, its unread pages, with the same bounds and reads as in the
step's audit. "All heads are within tau" is claimed only if every head passes, each at the full level
(`stats.per_head`). The largest of the heads' bounds bounds the worst head: that head is fixed before the draws, and its
own bound fails with the stated probability.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from skg_jax.audit.config import AuditConfig
from skg_jax.audit.reads import ShareReads, first_corrupt, read_shares
from skg_jax.audit.report import AuditReport, Budget, HeadWeights
from skg_jax.audit.units import StepEvidence, head_shares
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas.dispatch import Implementation
from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import per_head

READS_OF_A_HEAD = 128  # at most, in one step


def run(
    key: Key[Array, " B"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    weights: HeadWeights,
    budget: Budget,
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> AuditReport:
    """Audit one step; arguments as in the step's audit. Weights say only which heads are covered: those above zero.

    Reads go through XLA whatever the implementation: rows stand under a vmap, in which the kernel was never tried.
    """
    del implementation
    layers, batch, kv_heads, pages = evidence.upper.shape
    lower, upper = (jnp.moveaxis(x, 1, 0).reshape(batch, -1, pages) for x in head_shares(evidence, cache, config))
    heads = weights.omega.ravel() > 0
    size = math.ceil(config.rate * layers * kv_heads * pages)
    settings = per_head.PerHeadConfig(
        rounds=tuple(size * n for n in config.rounds),
        uniform_share=config.uniform_share,
        betting=kw.KWConfig(capacity=READS_OF_A_HEAD),
    )
    read = functools.partial(_read, evidence=evidence, cache=cache, config=config)

    def row(key, row, lower, upper, tau, level):
        valid = heads[:, None] & ~(upper <= 0)  # a NaN is a unit of unknown size, not one that is absent
        pop = per_head.population(lower, upper, valid, settings)
        order = per_head.orders(key, pop, settings)
        value = lambda index: jnp.clip(read(row, index).share, lower.ravel()[index], upper.ravel()[index])
        found = per_head.audit_order(order, pop, value, jnp.full(heads.shape, tau), level, settings)
        index, used = _reads_of(order, found.reads, pages, sum(settings.rounds))
        return found, read(row, index), used

    found, reads, used = jax.vmap(row)(
        key, jnp.arange(batch), lower, upper, budget.tau - weights.uncovered, budget.log_inv_alpha
    )
    return _report(found, reads, used, evidence, weights, budget)


def _read(row, index: Int[Array, " n"], *, evidence, cache, config) -> ShareReads:
    """The units `head * M + page` of one row, each for its own query head."""
    layers, batch, kv_heads, pages = evidence.upper.shape
    group = evidence.q.shape[2] // kv_heads
    layer, kv_head, member, page = jnp.unravel_index(index, (layers, kv_heads, group, pages))
    alone = lambda x: jnp.broadcast_to(x, index.shape)[None]  # as a batch of one row
    place = alone(row), alone(layer), alone(kv_head), alone(page)
    found = read_shares(place[0], place[1], place[2], place[3], evidence, cache, config, "xla")
    share = jnp.take_along_axis(found.share[0], member[:, None], axis=1)[:, 0]
    return ShareReads(share, *(x[0] for x in found[1:]))


def _reads_of(order: Int[Array, "heads A"], counts: Int[Array, " heads"], pages: int, most: int):
    """Units that the audit read, in `most` slots, and which slots are in use: to check what was read."""
    ends, slot = jnp.cumsum(counts), jnp.arange(most)
    head = jnp.minimum(jnp.searchsorted(ends, slot, side="right"), counts.size - 1)
    place = jnp.clip(slot - (ends - counts)[head], 0, order.shape[1] - 1)
    return head * pages + order[head, place], slot < ends[-1]


def _report(
    found, reads: ShareReads, used, evidence: StepEvidence, weights: HeadWeights, budget: Budget
) -> AuditReport:
    violated = found.violated | (reads.violated & used).any(1)
    corrupt = first_corrupt(reads, used)
    there = ~(evidence.upper <= 0)
    nothing = ~there.any((0, 2, 3)) & (evidence.unbounded.sum(0) == 0)
    sound = (evidence.unbounded.sum(0) == 0) & ~violated & (corrupt[:, 0] < 0)
    worst = jnp.where(nothing, 0.0, found.upper.max(1)) + weights.uncovered
    count = there.sum((0, 2, 3), dtype=jnp.int32)
    return AuditReport(
        accepted=sound & jnp.where(nothing, budget.tau >= weights.uncovered, found.accepted),
        bound=jnp.where(sound, worst, jnp.inf),
        cap=found.cap.max(1) + weights.uncovered,
        log_wealth=found.log_wealth.min(1),
        violated=violated,
        corrupt=corrupt,
        units=count,
        drawn=used.sum(1, dtype=jnp.int32),
        pages_read=used.sum(1, dtype=jnp.int32),
    )
