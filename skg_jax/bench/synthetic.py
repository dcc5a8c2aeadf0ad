"""`python -m skg_jax.bench decode --config llama-3.1-8b`: whole decode steps at the size of a published model.

Imports only what a bare GPU machine has (jax, flax, numpy, scipy). Weights are random, attention is not (`synthesis`).
In every cell the modes take turns dispatch by dispatch from the same positions; each attempt is timed by the GPU's own
clock inside the dispatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder, published
from models.config import ModelConfig
from skg_jax.bench import cudnn, steps, synthesis
from skg_jax.decode import Program, compiled
from skg_jax.guard import GuardConfig, Verdict
from skg_jax.pallas import clock
from skg_jax.selectors import get

ATTEMPTS = 16  # of one dispatch
BASELINE, EXACT, SPARSE, GUARDED = "cudnn", "exact", "sparse", "guarded"
TIERS = 3  # first budget, wider budget, exact


class Mode(NamedTuple):
    """One way to decode. `forced`: (tier, share of the rows' attempts) imposed by the schedule."""

    name: str
    program: Program
    guard: GuardConfig
    forced: tuple[int, float] | None = None


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m skg_jax.bench decode", description="Decode steps at a published size."
    )
    parser.add_argument("--config", required=True, help="a published model's name")
    parser.add_argument("--cells", nargs="+", default=["8x65536", "1x131072"], help="batch x context tokens")
    parser.add_argument("--modes", nargs="+", default=[BASELINE, SPARSE, GUARDED], help="see docs/benchmarks")
    parser.add_argument("--steps", type=int, default=1008, help="timed attempts of each mode in a cell")
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--bounds", default="sketch")
    parser.add_argument("--tau", type=float, default=0.27)
    parser.add_argument("--profile", default="smollm2-135m-instruct", help="recorded attention to reproduce")
    parser.add_argument("--dense-layers", type=int, default=8, help="contiguous caches that all layers share in turn")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a trial")
    parser.add_argument("--trace", action="store_true", help="time the kernels of one dispatch of each mode with CUPTI")
    parser.add_argument("--output", type=Path, help="write the JSON to this file")
    args = parser.parse_args(argv)
    if args.steps < ATTEMPTS:
        raise ValueError(f"steps must be at least {ATTEMPTS}, one dispatch, not {args.steps}.")
    return args


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code. Raises ValueError with one sentence."""
    args = arguments(argv)
    config = published.get(args.config)
    config = synthesis.synthetic_config(dataclasses.replace(config, num_layers=args.layers or config.num_layers))
    spreads = synthesis.head_spreads(synthesis.profile(args.profile), config)
    directions = synthesis.directions(config, jax.random.key(1))
    params = decoder.unstack(synthesis.synthetic_params(config, spreads, directions, jax.random.key(0)))
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    record = {"benchmark": "decode, synthetic", "settings": settings, "environment": _facts(), "cells": []}
    save = lambda: args.output and args.output.write_text(json.dumps(record, indent=1) + "\n")
    for name in args.cells:
        batch, context = (int(part) for part in name.split("x"))
        record["cells"].append({"batch": batch, "context": context, "modes": {}})
        measure(args, config, params, directions, record["cells"][-1], save)
    return 0


def measure(args, config: ModelConfig, params, directions, cell: dict[str, Any], save) -> None:
    """All modes of one cell in turns, then their kernels if asked for. A run that is cut short keeps what was saved."""
    batch, context = cell["batch"], cell["context"]
    timed = -(-args.steps // ATTEMPTS) * ATTEMPTS
    first = context - timed - 4 * ATTEMPTS
    first -= first % 64
    began = time.perf_counter()
    cache = synthesis.synthetic_cache(config, directions, batch, context, first, jax.random.key(2))
    cell["cache_gb"] = _gigabytes(jax.block_until_ready(cache))
    say(f"{batch} x {context}: cache of {cell['cache_gb']:.1f} GB made in {time.perf_counter() - began:.1f} s")
    cell["read_tb_s"] = read_ceiling(cache.k)
    wanted = [mode for mode in modes(args, config) if mode.name in args.modes]
    runs = [_baseline(args, config, params, batch, context)] if BASELINE in args.modes else []
    programs: dict[Program, Any] = {}  # compiled once: forced modes run the guarded program
    runs += [_paged(mode, config, params, batch, args, timed, programs) for mode in wanted]
    samples = {run.name: [] for run in runs}
    cache = _turns(runs, cache, first, timed, samples, cell)
    for run in runs:
        cell["modes"][run.name] |= summary(samples[run.name])
        say(_line(run.name, cell["modes"][run.name]))
    save()
    for run in runs if args.trace else []:
        table, cache = run.kernels(cache, first)
        cell["modes"][run.name]["kernels"] = table
        say(
            f"{run.name}: "
            + ", ".join(f"{k} {v['us']:.0f} us/{v['launches']:.0f}" for k, v in list(table.items())[:16])
        )
        save()


def read_ceiling(pool: jax.Array, trials: int = 5) -> float:
    """Terabytes a second at which XLA reads the pool once, layer by layer, into one maximum."""
    largest = jax.jit(
        lambda x: jax.lax.fori_loop(0, len(x), lambda i, top: jnp.maximum(top, x[i].max()), x.dtype.type(0))
    )
    seconds = []
    for _ in range(trials + 1):
        began = time.perf_counter()
        np.asarray(largest(pool))
        seconds.append(time.perf_counter() - began)
    return pool.nbytes / float(np.median(seconds[1:])) / 1e12


class Sample(NamedTuple):
    """One dispatch: times of its attempts [A] in ms, wall time of the whole, and what the guard said [A, B]."""

    step_ms: np.ndarray
    wall_ms: float
    verdict: np.ndarray
    forced: np.ndarray
    bound: np.ndarray
    cap: np.ndarray
    read: np.ndarray  # share of pages that attention read
    audited: np.ndarray  # share of the unread units that the audit read
    broken: np.ndarray  # a unit lay outside of its bounds, or keys did not match their checksum


def modes(args, config: ModelConfig) -> list[Mode]:
    """Everything that `--modes` can name beside the baseline."""
    guard = GuardConfig(rounds=(1,), alpha=0.01, bounds=args.bounds)
    wide = dataclasses.replace(guard, audit_rate=0.05)
    program = lambda mode, guard: Program(
        model=config, mode=mode, selector=get("topk"), audit=guard.audit(args.page_size), attempts_per_dispatch=ATTEMPTS
    )
    guarded = program("guarded", guard)
    return [
        Mode(EXACT, program("dense", guard), guard),
        Mode(SPARSE, program("sparse", guard), guard),
        Mode(GUARDED, guarded, guard),
        Mode("guarded-5%-audit", program("guarded", wide), wide),
        Mode("forced-1%-fallback", guarded, guard, (TIERS - 1, 0.01)),
        Mode("forced-5%-fallback", guarded, guard, (TIERS - 1, 0.05)),
        Mode("forced-expand", guarded, guard, (1, 1.0)),
        Mode("forced-fallback", guarded, guard, (TIERS - 1, 1.0)),
    ]


class Run(NamedTuple):
    """A compiled mode: `dispatch(cache, position) -> (cache, Sample)`, `kernels(cache, position) -> (dict, cache)`."""

    name: str
    dispatch: Any
    kernels: Any
    every: int = 1  # takes every so manieth turn


def _paged(mode: Mode, config: ModelConfig, params, batch: int, args, timed: int, programs: dict) -> Run:
    asked = steps.requests(config, batch, mode.guard, args.tau, args.pages, timed)
    rng = np.random.default_rng(0)

    def schedule():
        tier, share = mode.forced or (0, 0.0)
        return steps.forced_schedule(ATTEMPTS, batch, share, tier, rng)

    def dispatch(cache, position: int):
        rows, plan = steps.start(batch, position), schedule()
        asked_now = asked._replace(key=jax.vmap(jax.random.fold_in, (0, None))(asked.key, position))
        if mode.program not in programs:
            began = time.perf_counter()
            call = (params, cache, asked_now, rows, plan)
            programs[mode.program] = compiled(steps.loop.lower(*call, program=mode.program))
            say(f"{mode.name}: compiled in {time.perf_counter() - began:.1f} s")
        began = time.perf_counter()
        cache, _, timed = programs[mode.program](params, cache, asked_now, rows, plan)
        stamps = clock.nanoseconds(np.asarray(timed.stamps))
        wall = (time.perf_counter() - began) * 1e3
        return cache, _sample(timed.log, stamps, wall, plan)

    every = 1 if not mode.forced else 16 if mode.forced[1] == 1 else 4  # forced ones are many alike
    return Run(mode.name, dispatch, functools.partial(_kernels, dispatch), every)


def _sample(log, stamps: np.ndarray, wall: float, plan: np.ndarray) -> Sample:
    log = jax.tree.map(np.asarray, log)
    share = lambda part, whole: part / np.maximum(whole, 1)
    return Sample(
        np.diff(stamps) / 1e6, wall, log.verdict, plan != steps.FREE, log.bound, log.cap,
        share(log.selected, log.total), share(log.audited, log.units), log.violated | (log.corrupt[..., 0] >= 0),
    )  # fmt: skip


def _baseline(args, config: ModelConfig, params, batch: int, context: int) -> Run:
    held = [cudnn.init(config, batch, context, min(args.dense_layers, config.num_layers), jax.random.key(3))]
    implementation = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def dispatch(cache, position: int):
        rows = cudnn.DenseRows(jnp.zeros(batch, jnp.int32), jnp.full(batch, position, jnp.int32))
        began = time.perf_counter()
        held[0], _, stamps = cudnn.loop(params, held[0], rows, config, ATTEMPTS, implementation)
        stamps = clock.nanoseconds(np.asarray(stamps))
        wall = (time.perf_counter() - began) * 1e3
        none = np.zeros((ATTEMPTS, batch))
        accept = np.full(none.shape, int(Verdict.ACCEPT))
        return cache, Sample(np.diff(stamps) / 1e6, wall, accept, none > 0, none, none, none + 1, none, none > 0)

    return Run(BASELINE, dispatch, functools.partial(_kernels, dispatch))


def _turns(runs: list[Run], cache, first: int, timed: int, samples, cell) -> Any:
    """One warm-up dispatch of each mode, then all modes from the same positions, in an order that rotates."""
    for run in runs:
        began = time.perf_counter()
        cache, _ = run.dispatch(cache, first)
        cell["modes"][run.name] = {"first_dispatch_s": time.perf_counter() - began}
        say(f"{run.name}: first dispatch {time.perf_counter() - began:.1f} s")
    for i in range(timed // ATTEMPTS):
        position = first + ATTEMPTS * (i + 1)
        turn = [run for run in runs if i % run.every == 0]
        for run in turn[i % len(turn) :] + turn[: i % len(turn)]:
            cache, sample = run.dispatch(cache, position)
            samples[run.name].append(sample)
    return cache


def summary(samples: list[Sample]) -> dict[str, Any]:
    """Latencies of a mode over all attempts and over those in which every row was accepted."""
    fields: list[Any] = [np.concatenate([np.atleast_1d(x) for x in field]) for field in zip(*samples, strict=True)]
    joined: Any = Sample(*fields)
    accepted = (joined.verdict == Verdict.ACCEPT).all(1)
    audited = ~joined.forced & (joined.bound > 0)
    mean = lambda x: float(x[audited].mean()) if audited.any() else None
    names = {verdict.name.lower(): int((joined.verdict == verdict).sum()) for verdict in Verdict}
    return {
        "step_ms": percentiles(joined.step_ms),
        "accepted_step_ms": percentiles(joined.step_ms[accepted]),
        "wall_ms_per_step": percentiles(joined.wall_ms / ATTEMPTS),
        "rows": names,
        "bound": mean(joined.bound), "bound_alone": mean(joined.cap), "audited_share": mean(joined.audited),
        "pages_read": float(joined.read.mean()), "broken_audits": int(joined.broken.sum()),
    }  # fmt: skip


def percentiles(x: np.ndarray) -> dict[str, float | int]:
    """P50, P99, mean and extremes, with the sample size."""
    if not x.size:
        return {"n": 0}
    p50, p99 = np.percentile(x, [50, 99])
    return {
        "p50": float(p50), "p99": float(p99), "mean": float(x.mean()), "min": float(x.min()), "max": float(x.max()),
        "n": int(x.size),
    }  # fmt: skip


def _kernels(dispatch, cache, position: int) -> tuple[dict[str, Any], Any]:
    """Microseconds and launches of every kernel in one step, by name, from one dispatch under CUPTI."""
    from jax.experimental.mosaic.gpu import profiler

    # `profiler.measure` calls its function twice, which a donated cache does not survive.
    cupti: Any = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # type: ignore[union-attr]
    cupti._cupti_init()
    try:
        cache, _ = dispatch(cache, position)
    finally:
        found = cupti._cupti_get_timings(True)
    table: dict[str, Any] = {}
    for name, ms in found or []:
        row = table.setdefault(name.split("(")[0][:60], {"us": 0.0, "launches": 0.0})
        row["us"] += ms * 1e3 / ATTEMPTS
        row["launches"] += 1 / ATTEMPTS
    return dict(sorted(table.items(), key=lambda item: -item[1]["us"])), cache


def _line(name: str, found: dict[str, Any]) -> str:
    step, ok = found["step_ms"], found["accepted_step_ms"]
    return (
        f"{name:<20} P50 {step['p50']:7.3f}  P99 {step['p99']:7.3f} ms (n={step['n']})  "
        f"accepted P99 {ok.get('p99', float('nan')):7.3f} (n={ok['n']})  "
        f"wall/step {found['wall_ms_per_step']['p50']:7.3f}  pages {found['pages_read']:.3f}  "
        f"bound {found['bound']}  alone {found['bound_alone']}  {found['rows']}"
    )


def _gigabytes(tree) -> float:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / 1e9


def _facts() -> dict[str, Any]:
    from skg_jax.bench.environment import environment

    return environment()


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
