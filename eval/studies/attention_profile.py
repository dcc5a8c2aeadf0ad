"""What attention looks like to the guard, head by head, on real text: the profile that synthetic benchmarks reproduce.

    python -m eval.studies.attention_profile --model smollm2-135m-instruct --output skg_jax/bench/profiles/NAME.json

For the default selector and page budget: quantiles over (step, layer, query head) of the dropped attention mass, the
mean residual, and the bound without audit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

import skg_jax
from eval.studies.prefilled import prefill_prompt
from eval.studies.prompts import HELD_IN, prompt_ids
from eval.studies.shadow import heads
from skg_jax.decode import shadow_attempt
from skg_jax.engine import Options
from skg_jax.guard import GuardConfig

LEVELS = np.linspace(0, 1, 21)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.studies.attention_profile", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--length", type=int, default=6000)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pages", type=float, default=0.1)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    engine = skg_jax.load(args.model)
    guard = GuardConfig(tau=1e-9, tiers=(), on_reject="release", spare_attempts=8)
    options = Options(
        max_tokens=args.steps + 1, pages=args.pages, page_size=args.page_size, guard=guard, dense_below=0, seed=0
    )
    dropped, residuals, caps = [], [], []
    for i in range(args.prompts):
        prompt = prompt_ids(engine.tokenizer, HELD_IN, i, args.length)
        job = engine._job([prompt], options)
        cache, rows = prefill_prompt(engine, prompt, options)
        for _ in range(args.steps):
            length = int(rows.position[0]) + 1
            cache, rows, info, evidence = shadow_attempt(
                engine.model.params, cache, job.requests, rows, program=job.program
            )
            found = [lost[:2] for _, lost in heads(evidence, cache, job, length)]
            dropped += [delta for delta, _ in found]
            residuals.append(np.mean([x for _, x in found]))
            caps.append(float(info.cap[0]))
    record = {
        "model": args.model, "length": args.length, "pages": args.pages, "page_size": args.page_size,
        "prompts": args.prompts, "steps": len(caps), "heads": len(dropped),
        "levels": LEVELS.tolist(), "dropped_mass": np.quantile(dropped, LEVELS).tolist(),
        "residual": float(np.mean(residuals)), "bound_alone": float(np.mean(caps)),
    }  # fmt: skip
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
