"""What one dispatch does on the GPU: its kernels, and its copies to the host, each of which is a wait for it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def traced(run: Callable[..., Any], *args) -> tuple[Any, list[tuple[str, float]]]:
    """Result of `run(*args)`, and name and microseconds of every event of a GPU meanwhile, in no order."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = jax.block_until_ready(run(*args))
        (path,) = Path(folder).rglob("*.xplane.pb")
        planes = jax.profiler.ProfileData.from_file(str(path)).planes
        streams = [line for plane in planes if plane.name.startswith("/device:GPU") for line in plane.lines]
        events = [(event.name, event.duration_ns / 1e3) for s in streams if "Stream" in s.name for event in s.events]
    return result, events


def table(events: list[tuple[str, float]], steps: int) -> dict[str, dict[str, float]]:
    """Microseconds and launches of a step by the name of the kernel or copy, the longest first."""
    rows: dict[str, dict[str, float]] = {}
    for name, micros in events:
        row = rows.setdefault(name.partition("(")[0][:60], {"us": 0.0, "launches": 0.0})
        row["us"] += micros / steps
        row["launches"] += 1 / steps
    return dict(sorted(rows.items(), key=lambda item: -item[1]["us"]))


def copies_to_host(events: list[tuple[str, float]]) -> int:
    """Copies from the GPU's memory to the host's."""
    return sum("memcpyd2h" in name.lower().replace(" ", "") for name, _ in events)
