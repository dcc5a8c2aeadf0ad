"""Sets the default tau of a built-in model: the level that lets at least 95% of held-in steps through.

    python -m eval.studies.operating_point --model smollm2-135m-instruct

For every held-in prompt the sparse run is audited in full (all rounds, no early stop, every step released) at error
1e-5 a step. A step is accepted at tau exactly when its bound is at or below tau, so tau is a quantile of the bounds:
the 97.5% one, rounded up, which leaves room for the 95% to hold on other text. The result goes to
skg_jax/guard/operating_points.json with its sample. It is an operating point and says nothing about the quality of the
text.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

import skg_jax
from eval.studies.prefilled import continue_with, prefill_prompt
from eval.studies.prompts import HELD_IN, prompt_ids
from skg_jax.audit import Residual
from skg_jax.engine import Options
from skg_jax.guard import GuardConfig

TARGET = Path(skg_jax.__file__).parent / "guard" / "operating_points.json"
ALPHA_PER_STEP = 1e-5
QUANTILE = 0.975


class Variant(NamedTuple):
    """Settings that have an operating point of their own."""

    residual: Residual
    weights: str
    pages: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2000, 3000, 4000, 6000])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--pages", type=float, nargs="+", default=[0.1])
    args = parser.parse_args()
    engine = skg_jax.load(args.model)
    residuals: tuple[Residual, ...] = ("mass", "output")
    variants = [Variant(r, w, p) for r in residuals for w in ("uniform", "gain") for p in args.pages]
    bounds: dict[Variant, list[float]] = {v: [] for v in variants}
    for i in range(args.prompts):
        length = args.lengths[i % len(args.lengths)]
        prompt = prompt_ids(engine.tokenizer, HELD_IN, i, length)
        begun = prefill_prompt(engine, prompt, _options(variants[0], args.steps))
        for variant in variants:
            steps = continue_with(engine, begun, prompt, _options(variant, args.steps), args.steps)
            found = [a.bound for a in steps if not a.exact]
            bounds[variant] += found
            print(f"prompt {i} ({length} tokens) {tuple(variant)}: median bound {np.median(found):.3f}", flush=True)
    _write(args, [_point(args, variant, np.array(found)) for variant, found in bounds.items()])


def _options(variant: Variant, steps: int) -> Options:
    guard = GuardConfig(
        tau=1e-9, tiers=(), on_reject="release", residual=variant.residual, weights=variant.weights, spare_attempts=8,
        alpha=ALPHA_PER_STEP * (steps + 8),
    )  # fmt: skip
    return Options(max_tokens=steps + 1, pages=variant.pages, guard=guard, dense_below=0, seed=0)


def _point(args, variant: Variant, bounds: np.ndarray) -> dict:
    tau = math.ceil(np.quantile(bounds, QUANTILE) * 100) / 100
    share = float((bounds <= tau).mean())
    quantiles = " ".join(f"{q:g}:{np.quantile(bounds, q):.3f}" for q in (0.5, 0.9, 0.95, 0.99))
    print(f"{tuple(variant)}: tau {tau:.2f} accepts {share:.1%} of {bounds.size} steps; quantiles {quantiles}")
    return {"model": args.model} | variant._asdict() | {
        "tau": tau, "accepted": round(share, 4), "steps": int(bounds.size), "prompts": args.prompts,
        "lengths": args.lengths,
    }  # fmt: skip


def _write(args, points: list[dict]) -> None:
    table = json.loads(TARGET.read_text())
    settings = lambda point: [point[name] for name in ("model", *Variant._fields)]
    made = [settings(point) for point in points]
    kept = [point for point in table["points"] if settings(point) not in made]
    table |= {"alpha_per_step": ALPHA_PER_STEP, "quantile": QUANTILE, "points": kept + points}
    TARGET.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
