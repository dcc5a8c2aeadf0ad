"""`python -m skg_jax.bench stats`: one pooled audit of a large population, decided, and with its bound inverted."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.conf import FlagCreatePairsOff as Flag

from skg_jax.bench.environment import environment, limit_threads

TARGETS_MS = {"decide": 4.0, "invert": 10.0}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Time one pooled audit from the bounds of all units to the decision: sums, law, draws, reads, wealth.

    Unknowns are lognormal, bounds 1.5 to 20 times loose. "decide" stops at the decision, "invert" also bounds the sum.
    The budget is one that the audit certifies. Bounds and values lie in memory: what it costs to compute the bounds or
    to read a unit is not part of any time, nor is compiling. On a busy machine "cpu min", the least time that the
    process itself was running, says more than the others.
    """

    units: int = 500_000
    """Units of the population."""
    draws: int = 10_000
    """Draws, in one round."""
    alpha: float = 1e-5
    """Error probability of the decision."""
    trials: int = 30
    """Measured audits of each kind, each with a new key."""
    threads: int = 1
    """Bind the process to this many cores."""
    seed: int = 0
    """Of population and keys."""
    json: Flag[bool] = False
    """Print one JSON object, with every trial, instead of the table."""

    def __post_init__(self):
        for name in ("units", "draws", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must lie strictly between 0 and 1, not {self.alpha}.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in [0, 2**31), not {self.seed}.")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; returns the exit code. Raises ValueError with one sentence."""
    args = tyro.cli(Arguments, prog="python -m skg_jax.bench stats", args=argv)
    limit_threads(args.threads)
    facts = environment()
    found = {kind: measure(args, kind == "invert") for kind in TARGETS_MS}
    for kind, target in TARGETS_MS.items():
        found[kind]["target_ms"] = target
    report = {"benchmark": "stats", "settings": dataclasses.asdict(args), "environment": facts, "audits": found}
    print(json.dumps(report) if args.json else table(found))
    return 0


def measure(args: Arguments, invert: bool) -> dict[str, Any]:
    """Times of the audits, and what the last one found."""
    import jax

    audit = _audit(args, invert)
    keys = jax.random.split(jax.random.key(args.seed), args.trials)
    jax.block_until_ready(audit(keys[0]))
    times, cpu, report = [], [], None
    for key in keys:
        began, worked = time.perf_counter(), time.process_time()
        report = jax.block_until_ready(audit(key))
        cpu.append(1e3 * (time.process_time() - worked))
        times.append(1e3 * (time.perf_counter() - began))
    assert report is not None
    ordered = sorted(times)
    return {
        "ms": {"median": ordered[len(ordered) // 2], "min": ordered[0], "max": ordered[-1], "n": len(ordered)},
        "cpu_ms": {"median": sorted(cpu)[len(cpu) // 2], "min": min(cpu)},
        "load": os.getloadavg()[0],
        "accepted": bool(report.accepted),
        "upper": float(report.upper),
        "cap": float(report.cap),
        "reads": int(report.reads),
        "trials_ms": times,
    }


def _audit(args: Arguments, invert: bool) -> Callable:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from skg_jax.stats import pooled

    rng = np.random.default_rng(args.seed)
    x = rng.lognormal(0, 2, args.units)
    x /= x.sum() * 10  # a tenth of the attention
    cap = x * rng.uniform(1.5, 20, args.units)
    budget = jnp.float32(x.sum() + 0.1 * (cap - x).sum())  # a tenth of what the bounds leave open
    lower, upper, values = (jnp.asarray(v, jnp.float32) for v in (0 * x, np.maximum(cap, x), x))
    config = pooled.PooledConfig(rounds=(args.draws,), invert=invert)
    level = jnp.float32(-math.log(args.alpha))
    run = jax.jit(lambda key, lo, hi, x: pooled.audit(key, lo, hi, x, budget, level, config=config))
    return lambda key: run(key, lower, upper, values)


def table(found: dict[str, dict[str, Any]]) -> str:
    """One line a kind of audit."""
    lines = [f"{'':<8}{'median ms':>11}{'min':>8}{'max':>8}{'cpu min':>9}{'target':>8}{'n':>5}{'load':>6}  accepted"]
    for kind, row in found.items():
        ms = row["ms"]
        lines.append(
            f"{kind:<8}{ms['median']:>11.2f}{ms['min']:>8.2f}{ms['max']:>8.2f}{row['cpu_ms']['min']:>9.2f}"
            f"{row['target_ms']:>8.0f}{ms['n']:>5}{row['load']:>6.1f}  {'yes' if row['accepted'] else 'no'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
