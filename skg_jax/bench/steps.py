"""The guarded decode loop with a clock stamp after every attempt, and a schedule that can force tiers.

The attempts are those of the product (`skg_jax.decode.attempt`), and so is everything inside them. Only the loop around
them differs: it has a known number of attempts, so that every one can be timed on the device.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from models.config import ModelConfig
from skg_jax.audit import HeadWeights
from skg_jax.decode import Program, Requests, Rows, StepInfo
from skg_jax.decode.attempt import attempt
from skg_jax.decode.state import NO_TOKEN
from skg_jax.guard import GuardConfig
from skg_jax.guard.policy import init as guard_init
from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas import clock
from skg_jax.pallas.dispatch import Implementation
from skg_jax.sampling import SamplingParams
from skg_jax.types import BLOCK, Params

FREE = -1  # in a schedule: the tier that the guard chose


class Timed(NamedTuple):
    """Attempts of one dispatch: their log [A, B], and clock stamps before and after each (A + 1 of them)."""

    log: StepInfo
    stamps: Int[Array, "stamps 2"]


@functools.partial(jax.jit, static_argnames="program", donate_argnames=("cache", "log"), keep_unused=True)
def loop(
    params: Params,
    cache: PagedKVCache,
    requests: Requests,
    position: Int[Array, ""],
    schedule: Int[Array, "A B"],
    log: StepInfo,
    program: Program,
) -> tuple[PagedKVCache, Timed]:
    """A attempts of every row from one position; `schedule` holds a forced tier or FREE. Then blocks that were filled
    are sealed. log: any, given for its memory, see `decode_loop`."""
    del log
    rows = start(schedule.shape[1], position)
    requests = requests._replace(key=jax.vmap(jax.random.fold_in, (0, None))(requests.key, position))

    def one(state, forced):
        cache, rows = state
        rows = rows._replace(tier=jnp.where(forced == FREE, rows.tier, forced))
        cache, rows, info = attempt(params, cache, requests, rows, program)
        return (cache, rows), (info, clock.stamp(info.token))

    began = clock.stamp(rows.position)
    rows, began = jax.lax.optimization_barrier((rows, began))  # the stamp comes before the first step
    (cache, rows), (log, stamps) = jax.lax.scan(one, (cache, rows), schedule)
    if program.mode != "dense":
        cache = _seal_behind(cache, rows, program.implementation)
    return cache, Timed(log, jnp.concatenate([began[None], stamps]))


def _seal_behind(cache: PagedKVCache, rows: Rows, implementation: Implementation | None) -> PagedKVCache:
    """Seal the block before each row's own, if the row has left it since: attempts need not end at its end."""
    before = jnp.maximum(rows.position // BLOCK - 1, 0)
    blocks = jnp.take_along_axis(cache.page_table, before[:, None], axis=1)[:, 0]
    stale = (rows.position >= BLOCK) & (cache.sealed[blocks] != cache.written[blocks])
    return kv.seal(cache, blocks, stale, implementation)


def start(batch: int, position: int | Int[Array, ""]) -> Rows:
    """Rows that stand at one position, at the first budget: `requests` knows no crossover."""
    zero = jnp.zeros(batch, jnp.int32)
    return Rows(zero, zero + position, zero, zero, jnp.zeros(batch, bool), guard_init(batch))


def requests(config: ModelConfig, batch: int, guard: GuardConfig, tau: float, pages: float, steps: int) -> Requests:
    """Greedy requests that do not end within `steps`."""
    fill = lambda value, dtype: jnp.full(batch, value, dtype)
    heads = config.num_layers * config.num_heads
    return Requests(
        key=jax.random.split(jax.random.key(0), batch),
        last=fill(2**30, jnp.int32),
        stop=jnp.full((batch, 1), NO_TOKEN - 1, jnp.int32),
        sampling=SamplingParams(
            fill(0, jnp.float32), fill(0, jnp.int32), fill(1, jnp.float32), fill(0, jnp.float32)
        ),
        policy=guard.policy(tau, pages, [steps] * batch),
        weights=HeadWeights(jnp.full((config.num_layers, config.num_heads), 1 / heads), jnp.float32(0)),
    )  # fmt: skip


def forced_schedule(attempts: int, batch: int, share: float, tier: int, rng: np.random.Generator) -> np.ndarray:
    """A schedule in which each (attempt, row) is forced to `tier` with probability `share`."""
    return np.where(rng.random((attempts, batch)) < share, tier, FREE).astype(np.int32)
