"""One prefill, many continuations: the cache is copied, so that variants of the audit see the same prompt."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

from skg_jax.decode import Rows, decode_loop, first_rows, prefill
from skg_jax.engine import Engine, Options
from skg_jax.engine.run import Run, attempt_of
from skg_jax.guard import Attempt
from skg_jax.kv.cache import PagedKVCache


class Prefilled(NamedTuple):
    """A prompt in the cache, and the token that follows it."""

    cache: PagedKVCache
    rows: Rows


def prefill_prompt(engine: Engine, prompt: list[int], options: Options) -> Prefilled:
    """Run the exact prefill of one prompt."""
    job = engine._job([prompt], options)
    step = functools.partial(prefill, program=job.program)
    cache, token = Run(engine, job).prefill_row(step, engine.new_cache(job, engine.shape(job)), 0, job.prompts[0])
    one = lambda value: jnp.full(1, value, jnp.int32)
    return Prefilled(cache, first_rows(job.requests.policy, one(token), one(len(prompt)), jnp.zeros(1, bool)))


def continue_with(
    engine: Engine, begun: Prefilled, prompt: list[int], options: Options, attempts: int
) -> Iterator[Attempt]:
    """Decode from a copy of the cache; the original stays as it is."""
    job = engine._job([prompt], options)
    cache, rows = jax.tree.map(jnp.copy, begun)
    while attempts > 0:
        cache, rows, log = decode_loop(engine.model.params, cache, job.requests, rows, program=job.program)
        log = jax.device_get(log)
        for line in range(min(int(log.active.sum()), attempts)):
            yield attempt_of(log, line, 0)
        attempts -= int(log.active.sum())
