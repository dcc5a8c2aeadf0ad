"""Can a decode step do with less than a full scan of the key sketch? Reused scores, fewer bits, a coarser first level.

    python -m eval.studies.scan_less --model smollm2-135m-instruct --json docs/studies/scan_less.json

Queries, cache and truth (float64) are those of one run with full scans. At every step each variant makes its page
scores from the bytes that it would read, pages are selected by them, and the same audit bounds what was dropped. A
variant "reuse r" scans in full at steps 0, r, 2r, and between them moves these scores to the new queries (after RoPE,
of the same row and head). Variants and their bytes: `scan_less_variants`; their bounds: `cheap_scores`.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

import skg_jax
from eval.studies import cheap_scores as cheap
from eval.studies.plot_scan_less import draw
from eval.studies.prefilled import prefill_prompt
from eval.studies.prompts import HELD_OUT, prompt_ids
from eval.studies.scan_less_step import ALPHA, RATES, SHRUNK, Found, Step, exact_masses, judge, queries_apart
from eval.studies.scan_less_variants import FULL, OPERATOR_US, VARIANTS, Variant, prediction
from skg_jax.decode import seal_full, shadow_attempt
from skg_jax.engine import Options
from skg_jax.guard import GuardConfig
from skg_jax.kv.cache import PagedKVCache, current
from skg_jax.kv.sketch import PageScores

TAUS = (0.15, 0.27)
HEADER = (
    "| variant | bytes | delta | R | reach | cap | bound 1% | bound 2% | bound 8% | accepted at 2% | violations "
    "| operator us |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 6000])
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--json", type=Path, help="other models in it are kept; a picture of the same name goes beside")
    args = parser.parse_args()
    if args.steps % max(variant.reuse for variant in VARIANTS):
        parser.error("--steps must be a multiple of 8, so that every cycle is whole.")
    engine = skg_jax.load(args.model)
    cells = []
    for length in args.lengths:
        runs = []
        for i in range(args.prompts):
            runs.append(_prompt(engine, args, prompt_ids(engine.tokenizer, HELD_OUT, i, length)))
            print(f"prompt {i + 1} of {args.prompts}, {length} tokens", flush=True)
        cells.append({"length": length} | _cell(engine.model.config, args, runs))
    if args.json:
        _write(args, engine.model.name, cells)


def _prompt(engine, args, prompt: list[int]) -> tuple[dict[str, list[Found]], np.ndarray]:
    """What every variant comes to at every step, and how far apart consecutive queries are, [2, L]."""
    guard = GuardConfig(tau=1e-9, tiers=(), on_reject="release", rounds=(1,), spare_attempts=8)
    options = Options(
        max_tokens=args.steps + 1, pages=args.pages, page_size=args.page_size, guard=guard, dense_below=0, seed=0
    )
    job = engine._job([prompt], options)
    cache, rows = prefill_prompt(engine, prompt, options)
    found: dict[str, list[Found]] = {variant.name: [] for variant in VARIANTS}
    scans: list[Step] = []
    for number in range(args.steps):
        length, attempt = rows.position + 1, rows.attempt
        cache, rows, _, evidence = shadow_attempt(engine.model.params, cache, job.requests, rows, program=job.program)
        q, page = evidence.q, args.page_size
        full, exact = _full(q, cache, length, page=page), exact_masses(q, cache, int(length[0]), page)
        scans.append(Step(number, q, full, exact, current(cache), length, attempt))
        for variant in VARIANTS:
            lag = number % variant.reuse
            if variant.reuse > 1 and lag == 0:
                found[variant.name].append(found[FULL][-1])
                continue
            scores = _scores(variant, scans[-1], scans[-1 - lag], cache, page)
            got = judge(scores, scans[-1], scans[-1 - lag].known, cache, job, number == args.steps - 1)
            found[variant.name].append(got)
        cache = _seal(cache, rows)
    apart = [queries_apart(a.q, b.q, job.program.model) for a, b in zip(scans, scans[1:], strict=False)]
    return found, np.mean(apart, axis=0)


def _scores(variant: Variant, now: Step, scan: Step, cache: PagedKVCache, page: int) -> PageScores:
    if variant.bits is None:
        return now.scores if scan is now else _moved(scan.scores, scan.q, now.q, cache, how=variant.how)
    coarse = _bits(now.q, cache, now.length, page=page, bits=variant.bits)
    rank = {"estimate": coarse.estimate, "upper": coarse.upper, "truth": now.scores.estimate}[variant.rank]
    return _refined(coarse, now.scores, rank, variant.refine, now.length, page=page)


_full = functools.partial(jax.jit, static_argnames="page")(cheap.full_scores)
_bits = functools.partial(jax.jit, static_argnames=("page", "bits"))(cheap.bit_scores)
_moved = functools.partial(jax.jit, static_argnames="how")(cheap.moved)
_refined = functools.partial(jax.jit, static_argnames="page")(cheap.refined)
_seal = functools.partial(jax.jit, donate_argnums=0)(seal_full)


def _cell(config, args, runs) -> dict:
    """Figures of one length; printed as a table."""
    group = config.num_heads // config.num_kv_heads
    print(HEADER)
    rows = []
    for variant in VARIANTS:
        steps = [x for found, _ in runs for x in found[variant.name]]
        base = [x for found, _ in runs for x in found[FULL]]
        row = {"variant": variant.name, "reuse": variant.reuse, "bytes": variant.mean_share(config.head_dim, group)}
        row |= _figures(steps, base) | prediction(variant)
        if variant.reuse > 1:
            row["by_lag"] = _by_lag(variant, runs)
        rows.append(row)
        mean = [
            f"{row[name]['mean']:.3f}" for name in ("delta", "R", "reach", "cap", "bound_1%", "bound_2%", "bound_8%")
        ]
        print("|", " | ".join([
            variant.name, f"{row['bytes']:.3f}", *mean, " ".join(f"{x:.0%}" for x in row["accepted_2%"].values()),
            f"{row['violations']} of {row['units']}", f"{row['operator_us']:.0f}",
        ]), "|", flush=True)  # fmt: skip
    apart = np.mean([apart for _, apart in runs], axis=0)
    print("|dq|/|q| after RoPE by layer:", " ".join(f"{x:.2f}" for x in apart[0]))
    print("the same, turned back:", " ".join(f"{x:.2f}" for x in apart[1]))
    return {
        "prompts": len(runs), "steps": args.steps * len(runs), "rows": rows,
        "queries_apart": {"after_rope": apart[0].tolist(), "turned_back": apart[1].tolist()},
    }  # fmt: skip


def _figures(steps: list[Found], base: list[Found]) -> dict:
    """Means with their spread, and what stands beside the full scan of the same steps."""
    bound = {f"bound_{rate:.0%}": [x.bounds[i] for x in steps] for i, rate in enumerate(RATES)}
    worse = [a.delta / b.delta for a, b in zip(steps, base, strict=True)]
    named = {
        "delta": [x.delta for x in steps], "delta_over_full": worse, "R": [x.residual for x in steps],
        "cap": [x.cap for x in steps], "reach": [x.reach for x in steps],
    } | bound  # fmt: skip
    tried = [x.shrunk for x in steps if x.shrunk]
    return {name: _spread(values) for name, values in named.items()} | {
        f"accepted_{rate:.0%}": {f"{tau:g}": float(np.mean([x.bounds[i] <= tau for x in steps])) for tau in TAUS}
        for i, rate in enumerate(RATES)
    } | {
        "violations": sum(x.violations for x in steps), "units": sum(x.units for x in steps),
        "flagged": sum(x.flagged for x in steps), "below_truth": sum(min(x.bounds) < x.residual for x in steps),
        "shrunk": {f"{factor:g}": _control([x[i] for x in tried]) for i, factor in enumerate(SHRUNK)},
    }  # fmt: skip


def _control(tried: list[tuple[float, bool]]) -> dict:
    """Of the last step of every prompt."""
    share, flagged = zip(*tried, strict=True)
    return {"outside": float(np.mean(share)), "flagged": sum(flagged), "of": len(tried)}


def _by_lag(variant: Variant, runs) -> list[dict]:
    """Means by the number of steps since the scan."""
    whole = [found[variant.name] for found, _ in runs]
    each = [[x for steps in whole for x in steps[lag :: variant.reuse]] for lag in range(variant.reuse)]
    mean = lambda steps, name: float(np.mean([getattr(x, name) for x in steps]))
    return [
        {"lag": lag, "steps": len(steps)} | {name: mean(steps, name) for name in ("delta", "residual", "reach", "cap")}
        for lag, steps in enumerate(each)
    ]


def _spread(values: list[float]) -> dict:
    found = {"mean": np.mean(values), "sd": np.std(values), "least": np.min(values), "most": np.max(values)}
    return {name: float(x) for name, x in found.items()}


def _write(args, model: str, cells: list[dict]) -> None:
    table: dict[str, Any] = json.loads(args.json.read_text()) if args.json.exists() else {"models": {}}
    table |= {"alpha_per_step": ALPHA, "pages": args.pages, "page": args.page_size, "operator_us": OPERATOR_US}
    table["models"][model] = cells
    args.json.write_text(json.dumps(table, indent=1) + "\n")
    draw(table, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
