"""One step of `scan_less`: pages selected by given scores, the audit with the bounds of these scores, and the truth."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from eval.studies.cheap_scores import shrunk
from models import rope
from skg_jax import attention, audit
from skg_jax.audit import Budget, LayerEvidence, layer_evidence
from skg_jax.decode.state import AUDIT_STREAM, stream
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.scoring import forced_pages
from skg_jax.kv.sketch import PageScores
from skg_jax.pallas.sketch_score import Bounds
from skg_jax.selectors import SelectContext
from skg_jax.types import BLOCK

ALPHA = 1e-5
RATES = (0.01, 0.02, 0.08)
SHRUNK = (0.5, 0.2, 0.05)  # controls: bounds drawn towards the estimate


class Step(NamedTuple):
    """A step of the run with full scans."""

    number: int
    q: Float[Array, "L 1 N H"]
    scores: PageScores  # of the full scan, [L, 1, K, G, M]
    exact: np.ndarray  # float64 log-mass of every page in use, [L, K, G, pages]
    known: Bool[Array, "1 Mb"]  # blocks that the scan had a record of
    length: Int[Array, " 1"]
    attempt: Int[Array, " 1"]


class Found(NamedTuple):
    """What one variant came to at one step."""

    delta: float  # dropped mass, mean over the heads
    residual: float  # R, what the audit bounds, in float64
    cap: float  # bound on R without reading
    bounds: list[float]  # and after each of RATES is read
    reach: float  # median over unread pages and heads of half the distance between the bounds, nats
    violations: int  # exact log-masses outside of the bounds
    units: int  # unread (layer, query head, page) triples
    flagged: bool  # an audit read a unit outside of its bounds
    shrunk: list[tuple[float, bool]] | None  # for each of SHRUNK the share of units outside, and whether it was flagged


def judge(scores: PageScores, step: Step, scanned: Bool[Array, "1 Mb"], cache: PagedKVCache, job, control) -> Found:
    """Select by these scores, audit with their bounds, compare with the truth.

    Args:
      scanned: blocks that had a record when the scores were made; all others are read.
      control: whether to try the bounds shrunk, too.
    """
    layers = _attend(scores, scanned, step, cache, job.requests.policy.budgets[:, 0], program=job.program)
    reports = [_audit(layers, step, cache, job, rate) for rate in RATES]
    evidence = reports[0][0]
    found = _truth(step.exact, evidence, np.asarray(job.requests.weights.omega, np.float64))
    tried = [_shrunk(scores, layers, step, cache, job, factor) for factor in SHRUNK] if control else None
    return Found(
        **found,
        cap=float(reports[0][1].cap[0]),
        bounds=[float(report.bound[0]) for _, report in reports],
        flagged=any(bool(report.violated[0]) for _, report in reports),
        shrunk=tried,
    )


def exact_masses(q: Float[Array, "L 1 N H"], cache: PagedKVCache, length: int, page: int) -> np.ndarray:
    """Float64 log-mass of every page in use, [L, K, G, pages]."""
    table = np.asarray(cache.page_table)[0, : -(-length // BLOCK)]
    return np.stack([_masses(np.asarray(q[i, 0]), np.asarray(cache.k[i, table]), length, page) for i in range(len(q))])


def queries_apart(before: Float[Array, "L 1 N H"], now: Float[Array, "L 1 N H"], config) -> np.ndarray:
    """|q' - q| / |q| of consecutive steps, mean over the heads, [2, L]: as they are, and with the new one turned back
    by the one position that RoPE has moved it on."""
    cos, sin = rope.rotation(config, jnp.array([[1]]))
    back = rope.rotate(now, cos, -sin)
    size = np.linalg.norm(before, axis=-1)
    return np.stack([(np.linalg.norm(x - before, axis=-1) / size).mean((1, 2)) for x in (now, back)])


def _masses(q: np.ndarray, k: np.ndarray, length: int, page: int) -> np.ndarray:
    """q [N, H], k [blocks, K, 64, H] to [K, G, pages]."""
    keys = k.astype(np.float64).swapaxes(0, 1).reshape(k.shape[1], -1, k.shape[-1])[:, :length]
    grouped = q.astype(np.float64).reshape(len(keys), -1, q.shape[-1])
    logits = np.einsum("kgh,kth->kgt", grouped, keys) / math.sqrt(q.shape[-1])
    top = logits.max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return np.log(np.add.reduceat(np.exp(logits - top), np.arange(0, length, page), axis=-1)) + top


@functools.partial(jax.jit, static_argnames="program")
def _attend(
    scores: PageScores, scanned, step: Step, cache: PagedKVCache, budget, program
) -> tuple[LayerEvidence, Bounds]:
    config, length = program.audit, step.length
    must = forced_pages(cache, length, config.page_size, config.sink_pages, config.recent_pages)
    must |= ~jnp.repeat(scanned, config.parts, axis=1)
    total = -(-length // config.page_size)

    def layer(args):
        index, q, estimate = args
        selection, _ = program.selector.select(SelectContext(estimate, must, total, index), (), budget)
        out, lse = attention.sparse(q, cache, index, selection, length, config.page_size)
        return layer_evidence(q, out, lse, selection)

    layers = jax.lax.map(layer, (jnp.arange(len(step.q)), step.q, scores.estimate))
    return layers, _bounds(scores)


def _bounds(scores: PageScores) -> Bounds:
    return jnp.stack([scores.lower, scores.upper], axis=3)


def _audit(layers: tuple[LayerEvidence, Bounds], step: Step, cache: PagedKVCache, job, rate: float):
    config = dataclasses.replace(job.program.audit, rate=rate, rounds=(1,))
    return _run_audit(layers, step, cache, job.requests, config=config)


@functools.partial(jax.jit, static_argnames="config")
def _run_audit(layers, step: Step, cache: PagedKVCache, requests, config):
    left, bounds = layers
    evidence = audit.step_evidence(left, bounds, cache, requests.weights.omega, step.length, config)
    key = stream(requests.key, AUDIT_STREAM, step.attempt)
    budget = Budget(jnp.array([1e-9]), jnp.array([-math.log(ALPHA)]))
    return evidence, audit.run(key, evidence, cache, requests.weights, budget, config)


def _truth(exact: np.ndarray, evidence, omega: np.ndarray) -> dict:
    """Weighted dropped mass and residual; the bounds of every unread page beside its exact mass. [L, K, G, M] each."""
    pages = exact.shape[-1]
    lower, upper = (np.asarray(x, np.float64)[:, 0, ..., :pages] for x in (evidence.log_lower, evidence.log_upper))
    unread = np.broadcast_to(np.asarray(evidence.unread)[:, 0, :, None, :pages], exact.shape)
    top = exact.max(-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):  # a lower bound that was shrunk may be far above the truth
        mass, floor = np.exp(exact - top), np.where(unread, np.exp(lower - top), 0.0)
        others = np.where(unread, 0.0, mass).sum(-1, keepdims=True) + floor.sum(-1, keepdims=True) - floor
    weight = omega.reshape(exact.shape[:3])
    head = lambda share: float((weight * np.where(unread, share, 0.0).sum(-1)).sum())
    outside = unread & ~((lower <= exact) & (exact <= upper))
    return {
        "delta": head(mass / mass.sum(-1, keepdims=True)), "residual": head(mass / (others + mass)),
        "reach": float(np.median(upper[unread] - lower[unread]) / 2), "violations": int(outside.sum()),
        "units": int(unread.sum()),
    }  # fmt: skip


def _shrunk(scores: PageScores, layers, step: Step, cache, job, factor: float) -> tuple[float, bool]:
    less = shrunk(scores, factor)
    evidence, report = _audit((layers[0], _bounds(less)), step, cache, job, RATES[1])
    found = _truth(step.exact, evidence, np.asarray(job.requests.weights.omega, np.float64))
    return found["violations"] / found["units"], bool(report.violated[0])
