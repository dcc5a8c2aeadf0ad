"""`python -m skg_jax.bench decode --config llama-3.1-8b`: whole decode steps at the size of a published model.

Imports only what a bare GPU machine has (jax, flax, numpy, scipy). Weights are random, attention is not (`synthesis`).
In every cell the modes take turns from the same positions; every attempt is timed by the GPU's own clock inside its
dispatch. All programs of all cells are compiled at once, before the first cache is made.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder, published
from models.config import ModelConfig
from skg_jax.bench import synthesis
from skg_jax.bench.cells import TURN, Cell, arguments
from skg_jax.bench.environment import environment
from skg_jax.bench.latency import line, summary
from skg_jax.bench.modes import ATTEMPTS, BASELINE, Run, baseline, modes, paged, take_turns, timed_call
from skg_jax.bench.trace import copies_to_host, table, traced
from skg_jax.decode import compiled
from skg_jax.kv import cache as kv
from skg_jax.types import BLOCK

COMPILATION = "/jax/core/compile/backend_compile_duration"  # an event of jax.monitoring


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code. Raises ValueError with one sentence."""
    args = arguments(argv)
    config = published.get(args.config)
    config = synthesis.synthetic_config(dataclasses.replace(config, num_layers=args.layers or config.num_layers))
    if jax.default_backend() == "cpu":
        say("There is no GPU here: everything runs through XLA on the CPU, for trials at small sizes.")
        check_room(args.config, config, environment()["machine"]["memory"])
    spreads = synthesis.head_spreads(synthesis.profile(args.profile), config)
    directions = synthesis.directions(config, jax.random.key(1))
    params = decoder.unstack(synthesis.synthetic_params(config, spreads, directions, jax.random.key(0)))
    plain = lambda value: value if isinstance(value, int | float | None) else str(value)
    settings = {name: plain(value) for name, value in vars(args).items() if name != "output"}
    record = {"benchmark": "decode, synthetic", "settings": settings, "environment": environment(), "cells": []}
    sizes = {cell.size: [other for other in args.cells if other.size == cell.size] for cell in args.cells}
    runs = {size: runs_of(args, config, params, cells) for size, cells in sizes.items()}
    programs, record["compile_s"] = compile_all([run for of_size in runs.values() for run in of_size.values()])
    save = lambda: args.output and args.output.write_text(_dump(record))
    for size, cells in sizes.items():
        of_size, cache = runs.pop(size), _cache(args, config, directions, *size)  # and let go of the last size's
        for cell in cells:
            record["cells"].append({"batch": cell.batch, "capacity": cell.capacity, "context": cell.context})
            chosen = [of_size[name] for name in cell.modes]
            cache = measure(args, chosen, programs, cache, cell, record["cells"][-1], save)
        del of_size, chosen, cache
    return 0


def check_room(name: str, config: ModelConfig, memory: int | None) -> None:
    """Raises ValueError where a CPU has no room to make the weights, drawn in float32 and kept in bfloat16."""
    numbers = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(config, jnp.bfloat16)))
    needed = 8 * numbers  # 4 bytes of float32 and as many of random bits
    if memory is not None and needed > memory:
        raise ValueError(
            f"Weights of {name} take about {needed / 1e9:.0f} GB to make, and this machine has {memory / 1e9:.0f}; use "
            "a GPU, or fewer layers by --layers."
        )


def runs_of(args, config: ModelConfig, params, cells: Sequence[Cell]) -> dict[str, Run]:
    """The wanted modes at one batch size and capacity, that of all `cells`."""
    batch, capacity = cells[0].size
    shape = jax.eval_shape(
        lambda: kv.init(config.num_layers, config.num_kv_heads, config.head_dim, batch, capacity, jnp.bfloat16)
    )
    known = modes(config, args.page_size, args.bounds)
    return {
        name: baseline(params, config, batch, capacity, args.dense_layers)
        if name == BASELINE
        else paged(name, known[name], params, shape, args.tau, args.pages, args.steps)
        for name in dict.fromkeys(itertools.chain(*(cell.modes for cell in cells)))
    }


def compile_all(runs: Sequence[Run]) -> tuple[dict[Any, Any], dict[str, Any]]:
    """Executables by key, made at the same time; seconds that each and all of them took."""
    distinct = {run.key: run for run in runs}
    seconds: dict[str, Any] = {}

    def make(run: Run):
        began = time.perf_counter()
        executable = compiled(run.lower())
        seconds[f"{run.name} {run.key[1]}x{run.key[2]}"] = time.perf_counter() - began
        return executable

    began = time.perf_counter()
    with ThreadPoolExecutor(len(distinct)) as pool:
        programs = dict(zip(distinct, pool.map(make, distinct.values()), strict=True))
    seconds["all, at the same time"] = time.perf_counter() - began
    say(f"compiled {len(distinct)} programs in {seconds['all, at the same time']:.1f} s: {seconds}")
    return programs, seconds


def _cache(args, config: ModelConfig, directions, batch: int, capacity: int) -> kv.PagedKVCache:
    """Filled up to where the first mode starts, so that what is decoded lies in its open blocks."""
    began = time.perf_counter()
    filled = _first(capacity, args.steps)
    cache = synthesis.synthetic_cache(config, directions, batch, capacity, filled, jax.random.key(2))
    gigabytes = sum(leaf.nbytes for leaf in jax.tree.leaves(jax.block_until_ready(cache))) / 1e9
    say(f"cache of {batch} x {capacity}: {gigabytes:.1f} GB, made in {time.perf_counter() - began:.1f} s")
    return cache


def _first(context: int, timed: int) -> int:
    """Position of the first attempt, at the start of a block: the last ones are near the context."""
    return max(context - timed - 4 * ATTEMPTS, BLOCK) // BLOCK * BLOCK


def measure(args, runs: Sequence[Run], programs, cache, cell: Cell, row: dict[str, Any], save) -> kv.PagedKVCache:
    """All modes of one cell in turns, then their kernels if asked for. A run that is cut short keeps what was saved."""
    say(f"{cell.batch} x {cell.context} of {cell.capacity}")
    steps = cell.steps(args)
    first, row["read_tb_s"] = _first(cell.context, steps), read_ceiling(cache.k)
    compilations = []
    for run in runs:
        cache, _ = timed_call(run, programs[run.key], cache, first)
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compilations.append(event) if event == COMPILATION else None
    )
    cache, samples, begun = take_turns(runs, programs, cache, first, steps // TURN)
    row["compilations_while_timed"] = len(compilations)
    jax.monitoring.clear_event_listeners()
    row["modes"] = {name: summary(of_mode, begun[name]) for name, of_mode in samples.items()}
    for name, found in row["modes"].items():
        say(line(name, found))
    save()
    for run in runs if args.trace else []:
        (cache, _), events = traced(run.call, programs[run.key], cache, first)
        found = row["modes"][run.name]
        found["kernels"], found["copies_to_host"] = table(events, ATTEMPTS), copies_to_host(events)
        longest = [f"{name} {k['us']:.0f} us/{k['launches']:.0f}" for name, k in list(found["kernels"].items())[:16]]
        say(f"{run.name}: {found['copies_to_host']} copies to the host in {ATTEMPTS} attempts; " + ", ".join(longest))
        save()
    return cache


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


def _dump(record: dict[str, Any]) -> str:
    """JSON for people to compare: a line for each entry, but one for a list of whole numbers."""
    in_line = lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]")
    return re.sub(r"\[[\d,\s]+\]", in_line, json.dumps(record, indent=1)) + "\n"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
