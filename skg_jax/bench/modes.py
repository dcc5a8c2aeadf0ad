"""The ways to decode that `bench decode --config` compares, each as a program to compile and a dispatch to time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.config import ModelConfig
from skg_jax.bench import cudnn, steps
from skg_jax.bench.latency import Sample
from skg_jax.decode import Program, empty_log
from skg_jax.guard import GuardConfig, Verdict
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas import clock
from skg_jax.selectors import get

ATTEMPTS = 16  # of one dispatch
TIMED = 3  # dispatches of a turn
BASELINE, EXACT, SPARSE, GUARDED = "cudnn", "exact", "sparse", "guarded"
TIERS = 3  # first budget, wider budget, exact


class Mode(NamedTuple):
    """One way to decode pages. `forced`: (tier, share of the rows' attempts) imposed by the schedule."""

    program: Program
    guard: GuardConfig
    forced: tuple[int, float] | None = None


class Run(NamedTuple):
    """A mode at one batch size and capacity.

    Runs of equal `key` share an executable, made of what `lower()` returns. `call(executable, cache, position)` starts
    a dispatch and returns (cache, what it computed); `sample` fetches that. The baseline hands the paged cache through.
    """

    name: str
    key: Any
    lower: Callable[[], Any]
    call: Callable[[Any, PagedKVCache, int], tuple[PagedKVCache, Any]]
    sample: Callable[[Any, float], Sample]
    every: int = 1  # takes every so manieth turn


def modes(config: ModelConfig, page_size: int, bounds: Any) -> dict[str, Mode]:
    """Everything that `--modes` can name beside the baseline."""
    guard = GuardConfig(rounds=(1,), alpha=0.01, bounds=bounds)
    wide = dataclasses.replace(guard, audit_rate=0.05)
    program = lambda mode, guard: Program(
        model=config, mode=mode, selector=get("topk"), audit=guard.audit(page_size), attempts_per_dispatch=ATTEMPTS
    )
    guarded = program("guarded", guard)
    return {
        EXACT: Mode(program("dense", guard), guard),
        SPARSE: Mode(program("sparse", guard), guard),
        GUARDED: Mode(guarded, guard),
        "guarded-5%-audit": Mode(program("guarded", wide), wide),
        "forced-1%-fallback": Mode(guarded, guard, (TIERS - 1, 0.01)),
        "forced-5%-fallback": Mode(guarded, guard, (TIERS - 1, 0.05)),
        "forced-expand": Mode(guarded, guard, (1, 1.0)),
        "forced-fallback": Mode(guarded, guard, (TIERS - 1, 1.0)),
    }


def paged(name: str, mode: Mode, params, cache: Any, tau: float, pages: float, timed: int) -> Run:
    """A run over a paged cache. cache: its shapes are enough. timed: attempts that a request must last."""
    batch, model = len(cache.page_table), mode.program.model
    asked = steps.requests(model, batch, mode.guard, tau, pages, timed)
    rng = np.random.default_rng(0)
    tier, share = mode.forced or (0, 0.0)
    free = jnp.full((ATTEMPTS, batch), steps.FREE, jnp.int32)
    schedule = lambda: steps.forced_schedule(ATTEMPTS, batch, share, tier, rng) if mode.forced else free
    held = [empty_log(ATTEMPTS, batch)]

    def lower():
        return steps.loop.lower(params, cache, asked, jnp.int32(0), free, held[0], program=mode.program)

    def call(executable, cache, position):
        plan = schedule()
        cache, timed = executable(params, cache, asked, jnp.int32(position), plan, held.pop())
        held.append(timed.log)
        return cache, (timed, plan)

    def sample(found, wall_ms: float) -> Sample:
        (log, stamps), plan = jax.device_get(found)
        part = lambda some, whole: some / np.maximum(whole, 1)
        return Sample(
            np.diff(clock.nanoseconds(stamps)) / 1e6, wall_ms, log.verdict, plan != steps.FREE, log.bound, log.cap,
            part(log.selected, log.total), part(log.audited, log.units), log.violated | (log.corrupt[..., 0] >= 0),
        )  # fmt: skip

    every = 1 if not mode.forced else 16 if share == 1 else 4  # forced ones are many alike
    return Run(name, (mode.program, batch, cache.max_blocks), lower, call, sample, every)


def baseline(params, config: ModelConfig, batch: int, context: int, layers: int) -> Run:
    """Exact attention by cuDNN over contiguous caches, of which `layers` are shared by all layers in turn.

    They are made at the first call and stay until the run is dropped.
    """
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"
    make = lambda: cudnn.init(config, batch, context, min(layers, config.num_layers), jax.random.key(3))
    at = lambda position: jnp.full(batch, position, jnp.int32)
    held: list[cudnn.DenseCache] = []

    def lower():
        return cudnn.loop.lower(params, jax.eval_shape(make), at(0), config, ATTEMPTS, implementation)

    def call(executable, cache, position):
        dense, stamps = executable(params, held.pop() if held else make(), at(position))
        held.append(dense)
        return cache, stamps

    def sample(stamps, wall_ms: float) -> Sample:
        none = np.zeros((ATTEMPTS, batch))
        accept = np.full(none.shape, int(Verdict.ACCEPT))
        times = np.diff(clock.nanoseconds(np.asarray(stamps))) / 1e6
        return Sample(times, wall_ms, accept, none > 0, none, none, none + 1, none, none > 0)

    return Run(BASELINE, (BASELINE, batch, context), lower, call, sample)


def timed_call(run: Run, executable, cache: PagedKVCache, position: int) -> tuple[PagedKVCache, Sample]:
    """One dispatch, and what it took until its results lay on the host."""
    began = time.perf_counter()
    cache, found = run.call(executable, cache, position)
    jax.block_until_ready(found)
    return cache, run.sample(found, (time.perf_counter() - began) * 1e3)


def take_turns(
    runs: Sequence[Run], programs: dict[Any, Any], cache: PagedKVCache, first: int, turns: int
) -> tuple[PagedKVCache, dict[str, list[Sample]], dict[str, list[Sample]]]:
    """Every run dispatches from the same positions, in an order that rotates.

    After another program has run, the buffers of one lie elsewhere, and XLA writes its CUDA graph anew while the first
    attempt waits. So a turn begins with a dispatch that counts by itself.

    Returns: cache, timed dispatches of each run, and the first ones of its turns.
    """
    timed: dict[str, list[Sample]] = {run.name: [] for run in runs}
    begun: dict[str, list[Sample]] = {run.name: [] for run in runs}
    for i in range(turns):
        turn = [run for run in runs if i % run.every == 0]
        for run in turn[i % len(turn) :] + turn[: i % len(turn)]:
            for k in (None, *range(TIMED)):
                position = first + ATTEMPTS * (TIMED * i + (k or 0) + 1)
                cache, sample = timed_call(run, programs[run.key], cache, position)
                (begun if k is None else timed)[run.name].append(sample)
    return cache, timed, begun
