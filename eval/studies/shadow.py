"""Step by step sparse decoding with exact residuals beside every bound: what the audit says against what is true.

The residuals are recomputed here in float64 from the step's queries and the cache, by code that shares nothing with the
audit.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.studies.prefilled import Prefilled
from skg_jax.decode import seal_full, shadow_attempt
from skg_jax.engine import Engine, Options
from skg_jax.engine.run import attempt_of
from skg_jax.guard import Attempt
from skg_jax.kv.scoring import layer_scores
from skg_jax.types import BLOCK


class ShadowStep(NamedTuple):
    """One attempt with the truth beside it."""

    attempt: Attempt
    delta: float  # weighted mean dropped mass
    residual: float  # R, the additive surrogate that the audit bounds
    output: float  # weighted mean relative change of the attention output
    violations: int  # (layer, query head, unread page) triples whose exact mass lies outside its bounds
    units: int  # triples checked
    worst_head: float  # largest dropped mass of any head


def shadow_run(
    engine: Engine, begun: Prefilled, prompt: list[int], options: Options, steps: int
) -> Iterator[ShadowStep]:
    """Decode `steps` attempts from a copy of a prefilled prompt, comparing each with the truth."""
    job = engine._job([prompt], options)
    cache, rows = jax.tree.map(jnp.copy, begun)
    for _ in range(steps):
        cache, rows, info, evidence = shadow_attempt(
            engine.model.params, cache, job.requests, rows, program=job.program
        )
        log = jax.tree.map(lambda x: np.asarray(x)[None], info)
        yield compare(attempt_of(log, 0, 0), evidence, cache, job, int(info.position[0]) + 1)
        cache = _seal(cache, rows)


def compare(attempt: Attempt, evidence, cache, job, length: int) -> ShadowStep:
    """Exact residuals and bound checks of one step of row 0, in float64."""
    omega = np.asarray(job.requests.weights.omega, np.float64)
    totals, worst, violations, units = np.zeros(3), 0.0, 0, 0
    for (layer, head), lost in heads(evidence, cache, job, length):
        totals += omega[layer, head] * np.array(lost[:3])
        worst = max(worst, lost[0])
        violations, units = violations + lost[3], units + lost[4]
    delta, residual, output = totals.tolist()
    return ShadowStep(attempt, delta, residual, output, violations, units, worst)


def heads(evidence, cache, job, length: int) -> Iterator[tuple[tuple[int, int], tuple]]:
    """((layer, query head), what `head_truth` says of it) of row 0."""
    scores = jax.device_get(_scores(evidence.q, cache, jnp.asarray([length]), job.program.audit))
    page = job.program.audit.page_size
    read, queries = ~np.asarray(evidence.unread)[:, 0], np.asarray(evidence.q, np.float64)[:, 0]
    table = np.asarray(cache.page_table)[0, : -(-length // BLOCK)]
    for layer in range(queries.shape[0]):
        k, v = (_tokens(pool, layer, table, length) for pool in (cache.k, cache.v))
        group = queries.shape[1] // k.shape[0]
        for head in range(queries.shape[1]):
            kv_head, member = head // group, head % group
            bounds = tuple(x[layer, 0, kv_head, member] for x in scores)
            found = head_truth(queries[layer, head], k[kv_head], v[kv_head], read[layer, kv_head], bounds, page)
            yield (layer, head), found


def head_truth(q, k, v, read, bounds, page: int) -> tuple[float, float, float, int, int]:
    """Dropped mass, surrogate X, relative output change, violated bounds and pages checked, of one head.

    Args: q [H], k and v [T, H], read [M] bool, bounds (lower, upper) log-masses [M]; all float64.
    """
    logits = k @ q / np.sqrt(q.size)
    shift = logits.max()
    weight = np.exp(logits - shift)
    pages = -(-len(weight) // page)
    mass = np.add.reduceat(weight, np.arange(0, len(weight), page))
    read = read[:pages]
    if read.all():
        return 0.0, 0.0, 0.0, 0, 0
    lower, upper = (np.asarray(x, np.float64)[:pages][~read] - shift for x in bounds)
    unread, selected = mass[~read], mass[read].sum()
    with np.errstate(divide="ignore"):
        log_mass = np.log(unread)
    violations = int(np.sum((log_mass < lower) | (log_mass > upper)))
    floor = np.exp(lower)
    others = selected + floor.sum() - floor
    kept = np.repeat(read, page)[: len(weight)]
    sparse, dense = (weight * kept) @ v / selected, weight @ v / weight.sum()
    change = np.linalg.norm(dense - sparse) / np.linalg.norm(sparse)
    dropped = unread.sum() / mass.sum()
    return dropped, float(np.sum(unread / (others + unread))), float(change), violations, len(unread)


def _tokens(pool, layer: int, table: np.ndarray, length: int) -> np.ndarray:
    """Cached vectors of a row in order, [K, T, H] float64."""
    got = np.asarray(pool[layer, table], np.float64).swapaxes(0, 1)
    return got.reshape(got.shape[0], -1, got.shape[-1])[:, :length]


@functools.partial(jax.jit, static_argnames="audit")
def _scores(q, cache, length, audit):
    def layer(args):
        found = layer_scores(args[1], cache, args[0], length, audit.page_size, audit.bounds)
        return found.lower, found.upper

    return jax.lax.map(layer, (jnp.arange(q.shape[0]), q))


@functools.partial(jax.jit, donate_argnums=0)
def _seal(cache, rows):
    return seal_full(cache, rows)
