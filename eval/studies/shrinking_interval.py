"""Watch an interval shrink: bound a sum of a thousand unknowns from a few reads, looking after every one.

    python -m eval.studies.shrinking_interval docs/studies/shrinking_interval.png

Each unknown has known bounds, here up to 20 times too wide, so that the bounds alone say little about their sum. Units
are read one after another, those with wide bounds more often. The interval holds at every time at once, with
probability 95%: one may stop whenever it is tight enough, for example as soon as it lies below a budget.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from skg_jax.stats import sampling, weighted_sum
from skg_jax.stats.kaplan_wald import KWConfig
from skg_jax.stats.weighted_sum import WeightedSumConfig

matplotlib.use("Agg")
import matplotlib.pyplot as plt

UNITS, READS, ALPHA = 1000, 256, 0.05
BLUE, RED, GREY = "#4c78a8", "#e45756", "#888888"


class Unknowns(NamedTuple):
    """Values, which only reading reveals, and their known upper bounds; the lower bounds are 0."""

    x: np.ndarray
    cap: np.ndarray


def unknowns(seed: int = 0) -> Unknowns:
    """Lognormal values whose sum is 1, with bounds up to 20 times as large."""
    rng = np.random.default_rng(seed)
    x = rng.lognormal(0, 2, UNITS)
    x = (x / x.sum()).astype(np.float32)
    return Unknowns(x, x * rng.uniform(1, 20, UNITS).astype(np.float32))


def intervals(key: jax.Array, data: Unknowns) -> tuple[np.ndarray, np.ndarray]:
    """(lower, upper) bounds after 0, 1, ..., READS reads, [READS + 1] each."""
    lower, upper, x = (jnp.asarray(v) for v in (0 * data.cap, data.cap, data.x))
    law = sampling.pps_probs(upper - lower, jnp.ones(UNITS, bool))  # wide bounds are read more often
    order = sampling.draw_wor(key, law, READS)
    config = WeightedSumConfig(betting=KWConfig(capacity=READS))

    def look(state, draw):
        state, _ = weighted_sum.update(state, draw, config)
        return state, jnp.stack(weighted_sum.bound(state, ALPHA, config))

    start = weighted_sum.init(config, lower, upper)
    _, path = jax.lax.scan(look, start, weighted_sum.Draw(x[order], lower[order], upper[order], law[order], order >= 0))
    low, high = np.vstack([jnp.stack(weighted_sum.bound(start, ALPHA, config)), path]).T
    return low, high


def plot(low: np.ndarray, high: np.ndarray, truth: float, budget: float) -> Figure:
    figure, axis = plt.subplots(figsize=(7, 3.8))
    reads = np.arange(low.size)
    axis.fill_between(reads, low, high, step="post", color=BLUE, alpha=0.25, label="95% interval, at all times at once")
    axis.step(reads, high, where="post", color=BLUE)
    axis.step(reads, low, where="post", color=BLUE)
    axis.axhline(truth, color=RED, label=f"the sum: {truth:.2f}")
    axis.axhline(budget, color=GREY, linestyle="--", label=f"budget: {budget:g}")
    if (below := np.flatnonzero(high <= budget)).size:
        axis.axvline(below[0], color=GREY, linewidth=0.8)
        axis.text(below[0], high[0], f" certified after {below[0]} reads", va="top", color=GREY)
    axis.set(xlabel=f"units read, of {UNITS}", ylabel="sum of all units", xlim=(0, low.size - 1), ylim=(0, None))
    axis.legend(frameon=False)
    figure.tight_layout()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=3.0)
    args = parser.parse_args()
    data = unknowns(args.seed)
    low, high = intervals(jax.random.key(args.seed), data)
    for reads in (0, 16, 32, 64, 128, READS):
        print(f"{reads:>4} reads: the sum lies between {low[reads]:.3f} and {high[reads]:.3f}")
    plot(low, high, float(data.x.sum()), args.budget).savefig(args.picture, dpi=130)


if __name__ == "__main__":
    main()
