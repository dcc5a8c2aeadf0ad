"""From which context on is guarded decoding faster than dense? Both continue the same prompts, in turns, on the CPU.

    python -m eval.studies.crossover --json docs/studies/crossover_cpu.json

In every round each mode decodes one dispatch from a copy of the same cache, in alternating order, so that what else the
machine does weighs on both. A time is that of a token that stands: repeated and exact attempts of the guard are in it,
compiling, prefill and the copy are not. The crossover is where the ratio of the two comes down to 1 for good.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import skg_jax
from eval.studies.prefilled import Prefilled, prefill_prompt
from eval.studies.prompts import HELD_OUT, prompt_ids
from skg_jax.bench.environment import environment
from skg_jax.decode import Mode, decode_loop
from skg_jax.decode.state import NO_TOKEN
from skg_jax.engine import Engine, Options

MODES: tuple[Mode, Mode] = ("dense", "guarded")
STEPS = 16  # of one dispatch; contexts are multiples of 64, so that no block fills within


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 512, 1024, 2048, 3072, 4096, 5952])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    facts = environment()
    engine = skg_jax.load(args.model)
    cells = [measure(engine, context, args) for context in args.contexts]
    found = {"study": "crossover", "settings": vars(args) | {"json": None}, "environment": facts}
    found |= {"device": jax.devices()[0].device_kind, "cells": cells, "crossover": summary(cells)}
    print(json.dumps(found["crossover"]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(engine: Engine, context: int, args) -> dict:
    """Milliseconds a token of both modes in every round, the first of which is not counted."""
    options = Options(max_tokens=STEPS + 1, pages=args.pages, page_size=args.page_size, dense_below=0)
    prompt = prompt_ids(engine.tokenizer, HELD_OUT, 0, context)
    begun = prefill_prompt(engine, prompt, options)
    load, times, books = os.getloadavg()[0], {mode: [] for mode in MODES}, []
    for turn in range(args.rounds + 1):
        for mode in MODES if turn % 2 else MODES[::-1]:
            chosen = dataclasses.replace(options, attention=mode, seed=turn)
            took, book = dispatch(engine, begun, prompt, chosen)
            if turn:
                times[mode].append(took)
                books += [book] if mode == "guarded" else []
    jax.clear_caches()
    ratios = [guarded / dense for dense, guarded in zip(*(times[mode] for mode in MODES), strict=True)]
    cell = {"context": context, "ms": times, "ratio": ratios, "tokens": sum(b["tokens"] for b in books)}
    cell |= {"attempts": sum(b["attempts"] for b in books), "exact": sum(b["exact"] for b in books)}
    cell |= {"load": [load, os.getloadavg()[0]]}
    middle = {mode: round(statistics.median(times[mode]), 1) for mode in MODES}
    print(f"{context} tokens: {middle} ms a token, ratio {statistics.median(ratios):.2f} of {ratios}", flush=True)
    return cell


def dispatch(engine: Engine, begun: Prefilled, prompt: list[int], options: Options) -> tuple[float, dict]:
    """Milliseconds a token of one dispatch on a copy of the cache, and what its attempts came to."""
    job = engine._job([prompt], options)
    cache, rows = jax.block_until_ready(jax.tree.map(jnp.copy, begun))
    began = time.perf_counter()
    log = jax.device_get(decode_loop(engine.model.params, cache, job.requests, rows, program=job.program)[2])
    seconds = time.perf_counter() - began
    stood = log.active & (log.token != NO_TOKEN)
    tokens = int(stood.sum())
    book = {"tokens": tokens, "attempts": int(log.active.sum()), "exact": int((stood & log.exact).sum())}
    return seconds / tokens * 1e3, book


def summary(cells: Sequence[dict]) -> dict:
    """Crossover of the median ratios, and least and largest of the single rounds; null: slower at every context."""
    contexts = [cell["context"] for cell in cells]
    middle = crossover(contexts, [statistics.median(cell["ratio"]) for cell in cells])
    rounds = [crossover(contexts, list(ratios)) for ratios in zip(*(cell["ratio"] for cell in cells), strict=True)]
    known = [tokens for tokens in rounds if tokens is not None]
    ends = {"least": min(known, default=None), "most": max(known) if len(known) == len(rounds) else None}
    return {"tokens": middle, **ends, "rounds": rounds}


def crossover(contexts: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The context from which on the ratio stays at or below 1, between neighbours on a logarithmic scale.

    Args:
      contexts: ascending tokens. ratios: time over dense time at each of them.

    Returns: tokens; 0 if the ratio is never above 1, None if it is at the last context.
    """
    above = [i for i, ratio in enumerate(ratios) if ratio > 1]
    if not above:
        return 0.0
    if (i := above[-1]) == len(contexts) - 1:
        return None
    share = (ratios[i] - 1) / (ratios[i] - ratios[i + 1])
    return contexts[i] * math.exp(share * math.log(contexts[i + 1] / contexts[i]))


if __name__ == "__main__":
    main()
