"""From single runs to numbers with their sample sizes, and to a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from skg_jax.bench.latency import percentiles
from skg_jax.engine import Result


def record(mode: str, trial: int, seconds: float, results: Sequence[Result]) -> dict[str, Any]:
    """One run of a batch. `seconds`: from the request to its last token, without compiling."""
    ttft = results[0].timing.ttft_s or 0.0
    tokens = sum(r.generated_tokens for r in results)
    steps = max(r.generated_tokens for r in results) - 1
    return {
        "mode": mode,
        "trial": trial,
        "ttft_s": ttft,
        "e2e_s": seconds,
        "tpot_s": (seconds - ttft) / steps,
        "decode_tok_s": (tokens - len(results)) / (seconds - ttft),
        "prefill_tok_s": results[0].timing.prefill_tok_s,
        "itl_s": list(results[0].timing.itl_s),
        "bytes": {name: sum(r.bytes[name] for r in results) for name in results[0].bytes},
        "read_fraction": statistics.fmean(r.pages["read_fraction"] for r in results),
        "verdicts": {
            name: sum(getattr(r.certificate, name) for r in results)
            for name in ("accepted", "expanded", "fallback", "uncertified")
        },
    }


def summarize(trials: Sequence[dict[str, Any]], mode: str) -> dict[str, Any]:
    """Medians over the trials of a mode, percentiles over its tokens, and the speed-up over dense, paired by trial."""
    mine = [t for t in trials if t["mode"] == mode]
    dense = {t["trial"]: t for t in trials if t["mode"] == "dense"}
    speedup = [dense[t["trial"]]["tpot_s"] / t["tpot_s"] for t in mine]
    named = ("ttft_s", "e2e_s", "tpot_s", "decode_tok_s", "prefill_tok_s", "read_fraction")
    return {name: _spread([t[name] for t in mine]) for name in named} | {
        "itl_s": percentiles([itl for t in mine for itl in t["itl_s"]]),
        "speedup_over_dense": _spread(speedup),
        "bytes": {name: round(statistics.fmean(t["bytes"][name] for t in mine)) for name in mine[0]["bytes"]},
        "verdicts": {name: sum(t["verdicts"][name] for t in mine) for name in mine[0]["verdicts"]},
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """Modes as columns. n: number of samples behind a row, of one mode."""
    first = next(iter(summaries.values()))
    lines = [f"{'':<22}" + "".join(f"{mode:>12}" for mode in summaries) + f"{'n':>8}"]
    row = lambda label, form, get, n: f"{label:<22}" + "".join(f"{form(get(s)):>12}" for s in summaries.values()) + n
    number = lambda digits, factor=1.0: lambda value: f"{value * factor:.{digits}f}"
    count = lambda name: f"{first[name]['n']:>8}"
    for label, name, key, form in (
        ("TTFT ms", "ttft_s", "median", number(1, 1e3)),
        ("TPOT ms", "tpot_s", "median", number(2, 1e3)),
        ("ITL P50 ms", "itl_s", "p50", number(2, 1e3)),
        ("ITL P95 ms", "itl_s", "p95", number(2, 1e3)),
        ("ITL P99 ms", "itl_s", "p99", number(2, 1e3)),
        ("prefill tok/s", "prefill_tok_s", "median", number(1)),
        ("decode tok/s", "decode_tok_s", "median", number(1)),
        ("speed-up over dense", "speedup_over_dense", "median", number(3)),
        ("pages read / dense", "read_fraction", "median", number(3)),
    ):
        lines.append(row(label, form, lambda s, name=name, key=key: s[name][key], count(name)))
    for name in first["bytes"]:
        lines.append(row(f"MB {name}", number(1, 1e-6), lambda s, name=name: s["bytes"][name], count("tpot_s")))
    for name in first["verdicts"]:
        lines.append(row(name, str, lambda s, name=name: s["verdicts"][name], count("tpot_s")))
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> dict[str, float | int]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}
