"""Samples of timed dispatches, and what a mode's latency is: percentiles with their sample sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from skg_jax.guard import Verdict


class Sample(NamedTuple):
    """One dispatch of A attempts of B rows: times of attempts [A] and of the whole, and what the guard said [A, B]."""

    step_ms: np.ndarray
    wall_ms: float
    verdict: np.ndarray
    forced: np.ndarray
    bound: np.ndarray
    cap: np.ndarray
    read: np.ndarray  # share of pages that attention read
    audited: np.ndarray  # share of the unread units that the audit read
    broken: np.ndarray  # a unit lay outside of its bounds, or keys did not match their checksum


def summary(samples: Sequence[Sample], begun: Sequence[Sample] = ()) -> dict[str, Any]:
    """Latencies of a mode over all attempts and over those in which every row was accepted.

    Args:
      begun: dispatches right after another program has run; of each the first attempt is summed up by itself.
    """
    fields: list[Any] = [np.concatenate([np.atleast_1d(x) for x in field]) for field in zip(*samples, strict=True)]
    joined: Any = Sample(*fields)
    accepted = (joined.verdict == Verdict.ACCEPT).all(1)
    audited = ~joined.forced & (joined.bound > 0)
    mean = lambda x: float(x[audited].mean()) if audited.any() else None
    attempts = len(joined.step_ms) // len(samples)
    return {
        "step_ms": percentiles(joined.step_ms),
        "each_step_us": [round(1e3 * float(x)) for x in joined.step_ms],
        "first_step_of_a_turn_ms": percentiles([float(sample.step_ms[0]) for sample in begun]),
        "accepted_step_ms": percentiles(joined.step_ms[accepted]),
        "wall_ms_per_step": percentiles(joined.wall_ms / attempts),
        "rows": {verdict.name.lower(): int((joined.verdict == verdict).sum()) for verdict in Verdict},
        "bound": mean(joined.bound), "bound_alone": mean(joined.cap), "audited_share": mean(joined.audited),
        "pages_read": float(joined.read.mean()), "broken_audits": int(joined.broken.sum()),
    }  # fmt: skip


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float | int]:
    """P50, P95, P99, mean and extremes, with the sample size; the size alone if there is none."""
    x = np.asarray(values, np.float64)
    if not x.size:
        return {"n": 0}
    points = {f"p{p}": float(value) for p, value in zip((50, 95, 99), np.percentile(x, (50, 95, 99)), strict=True)}
    return points | {"mean": float(x.mean()), "min": float(x.min()), "max": float(x.max()), "n": int(x.size)}


def line(name: str, found: dict[str, Any]) -> str:
    """The summary of a mode in one line."""
    step, ok = found["step_ms"], found["accepted_step_ms"]
    return (
        f"{name:<20} P50 {step['p50']:7.3f}  P99 {step['p99']:7.3f} ms (n={step['n']})  "
        f"accepted P99 {ok.get('p99', float('nan')):7.3f} (n={ok['n']})  "
        f"wall/step {found['wall_ms_per_step']['p50']:7.3f}  pages {found['pages_read']:.3f}  "
        f"bound {found['bound']}  alone {found['bound_alone']}  {found['rows']}"
    )
