"""What a measurement must be read with: versions, machine, devices, commit; and how many threads it may use."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any


def limit_threads(count: int | None) -> None:
    """Bind the process to `count` of its cores: XLA takes as many threads. Only before jax starts.

    Raises ValueError with one sentence.
    """
    if count is None:
        return
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError("threads cannot be limited on this system; leave --threads out.")
    cores = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(cores):
        raise ValueError(f"threads must be between 1 and the {len(cores)} cores at hand, not {count}.")
    os.sched_setaffinity(0, cores[:count])


def environment() -> dict[str, Any]:
    """The facts of `python -m skg_jax.env`, and the name of the processor.

    In a process of its own, which reports the settings as they are before jax adds some.
    """
    command = [sys.executable, "-m", "skg_jax.env", "--json"]
    facts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    facts["machine"]["cpu"] = _cpu()
    return facts


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())
