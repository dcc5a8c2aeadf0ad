"""How tight is the audited bound? Beside the exact residual: the bound without audit, and after a share is read.

    python -m eval.studies.audit_table --json out.json

Every step is compared with its exact residual in float64. With channel minima and maxima alone ("box") nothing can be
certified: that row is the reason for the key sketch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import skg_jax
from eval.studies.prefilled import prefill_prompt
from eval.studies.prompts import HELD_OUT, prompt_ids
from eval.studies.shadow import ShadowStep, shadow_run
from skg_jax.audit import Design
from skg_jax.engine import Options
from skg_jax.guard import GuardConfig
from skg_jax.kv.sketch import BoundKind

ALPHA_PER_STEP = 1e-5
COLUMNS = (
    "length", "page", "bounds", "draws", "read", "steps", "delta", "R", "bound alone", "audited bound", "bound/R",
    "worst head", "violations",
)  # fmt: skip


class Cell(NamedTuple):
    """One kind of audit."""

    bounds: BoundKind
    design: Design
    rate: float
    page: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 6000])
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.01, 0.02])
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[16])
    parser.add_argument("--residual", default="mass")
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--designs", nargs="+", default=["pps", "boundary"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    engine = skg_jax.load(args.model)
    cells = [Cell("sketch", d, r, p) for d in args.designs for r in args.rates for p in args.page_sizes]
    cells += [Cell("box", "pps", args.rates[-1], args.page_sizes[0])]
    print(_line(COLUMNS), "|---" * len(COLUMNS) + "|", sep="\n")
    table = []
    for length in args.lengths:
        begun = []
        for i in range(args.prompts):
            prompt = prompt_ids(engine.tokenizer, HELD_OUT, i, length)
            begun.append((prompt, prefill_prompt(engine, prompt, _options(args, cells[0]))))
        table += [_measure(args, engine, length, begun, cell) for cell in cells]
    if args.json:
        found = {"alpha_per_step": ALPHA_PER_STEP, "model": args.model, "rows": table}
        args.json.write_text(json.dumps(found, indent=1) + "\n")


def _options(args, cell: Cell) -> Options:
    guard = GuardConfig(
        tau=1e-9, tiers=(), on_reject="release", residual=args.residual, audit_rate=cell.rate, rounds=(1,),
        spare_attempts=8, alpha=ALPHA_PER_STEP * (args.steps + 8), bounds=cell.bounds, design=cell.design,
    )  # fmt: skip
    return Options(max_tokens=args.steps + 1, pages=args.pages, page_size=cell.page, guard=guard, dense_below=0, seed=0)


def _measure(args, engine, length: int, begun, cell: Cell) -> dict:
    options = _options(args, cell)
    steps: list[ShadowStep] = []
    for prompt, prefilled in begun:
        steps += shadow_run(engine, prefilled, prompt, options, args.steps)
    truth = np.array([s.output if args.residual == "output" else s.residual for s in steps])
    audited = np.array([s.attempt.bound for s in steps])
    row = {
        "length": length, "page": cell.page, "bounds": cell.bounds, "design": cell.design, "rate": cell.rate,
        "steps": len(steps), "delta": float(np.mean([s.delta for s in steps])), "R": float(truth.mean()),
        "cap": float(np.mean([s.attempt.cap for s in steps])), "bound": float(audited.mean()),
        "ratio": float(np.mean(audited / truth)), "worst_head": float(np.max([s.worst_head for s in steps])),
        "violations": int(sum(s.violations for s in steps)), "units": int(sum(s.units for s in steps)),
        "below_truth": int((audited < truth).sum()),
    }  # fmt: skip
    means = [f"{row[name]:.3f}" for name in ("delta", "R", "cap", "bound", "ratio")]
    audit = [str(length), str(cell.page), cell.bounds, cell.design, f"{cell.rate:.0%}", str(len(steps))]
    print(_line([*audit, *means, f"{row['worst_head']:.2f}", f"{row['violations']} of {row['units']}"]), flush=True)
    return row


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
