"""Correctness and device time of the sketch scorer on a Hopper GPU.

    python -m tests.pallas.device.check_sketch [--json FILE] [--tune]

Needs jax, numpy and jaxtyping. Times are medians of CUPTI kernel times; `all` counts every kernel of a call. The
ceiling is the speed of a read-only reduction in the same run. Blocks lie at random in a pool of a gigabyte, and sets of
them alternate, so that nothing is found in L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from skg_jax.kv.sketch import Sketch
from skg_jax.pallas.shapes import SKETCH_SCORE_SHAPES, SketchScoreShape
from skg_jax.pallas.sketch_plan import SketchScoreConfig
from skg_jax.pallas.sketch_score import sketch_score
from skg_jax.pallas.sketch_stage import UNKNOWN
from skg_jax.pallas.sketch_unit import GRID
from tests.pallas import sketch_cases

START = time.time()
BOUNDS = ("token", "group", "none")
POOL = 5 << 28  # bytes of sketches
LAYERS = 2


def say(*words) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def kernel_times(call, *args, iterations: int = 5) -> tuple[float, float, int]:
    """Microseconds of the Pallas kernel and of all kernels of a call, and their number."""
    _, runs = profiler.measure(call, aggregate=False, iterations=iterations)(*args)
    assert runs is not None, "CUPTI has seen no kernel."
    ours = lambda run: sum(ms for name, ms in run if "sketch_score" in name)
    median = lambda f: 1e3 * statistics.median(f(run) for run in runs)
    return median(ours), median(lambda run: sum(ms for _, ms in run)), len(runs[0])


def ceiling() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    x = jnp.zeros(1 << 30, jnp.float32)
    _, micros, _ = kernel_times(jax.jit(jnp.max), x)
    return x.nbytes / micros * 1e6


# --- correctness ----------------------------------------------------------------------------------------------------


def check(heads: int, group: int, dim: int, page: int, bound: str, dtype, **options) -> dict:
    """Ragged rows, one of them empty, everything unread NaN: float64 masses, bounds, repeats."""
    case = sketch_cases.make(heads, group, dim, [37 * 64 - 5, 0, 64, 11 * 64], 37, dtype)
    config = SketchScoreConfig(**options)
    run = functools.partial(sketch_score, *case.arguments(page), page_size=page, bound=bound, config=config)
    numbers = lambda: {name: np.asarray(x, np.float64) for name, x in sketch_cases.named(*run()).items()}
    found, exact, use = numbers(), sketch_cases.expected(case, page, bound), case.scored(page)
    allowance = (GRID * exact["grid"] + 1e-4 * exact["size"] + 5e-4)[use]
    row = {"heads": heads, "group": group, "dim": dim, "page": page, "bound": bound, "dtype": dtype.__name__}
    row["error"] = float((np.abs(found["estimate"] - exact["estimate"])[use] / allowance).max())
    ok = row["error"] < 1 and all((x[~use] == UNKNOWN[name]).all() for name, x in found.items())
    if bound != "none":
        ok &= bool(((found["lower"] <= exact["exact"]) & (exact["exact"] <= found["upper"]))[use].all())
        loose = np.stack([exact["lower"] - found["lower"], found["upper"] - exact["upper"]])[:, use] / allowance
        row |= {"slack": [float(loose.min()), float(loose.max())]}
        ok &= 0 < loose.min() and loose.max() < (6 if dtype == jnp.float32 else 3)
    for _ in range(3):
        ok &= all(np.array_equal(x, found[name]) for name, x in numbers().items())
    row["ok"] = bool(ok)
    return row


def correctness() -> list[dict]:
    bf16, f16, f32 = jnp.bfloat16, jnp.float16, jnp.float32
    cells = [(8, 4, 128, bf16), (3, 3, 64, bf16), (2, 7, 64, f16), (1, 8, 128, bf16), (4, 1, 128, f32)]
    pages = [(16, 64), (32, 16), (64, 32), (16, 64), (32, 16)]
    grid = [
        (heads, group, dim, page, bound, dtype)
        for (heads, group, dim, dtype), both in zip(cells, pages, strict=True)
        for page in both
        for bound in BOUNDS
    ]
    wide, narrow = (8, 4, 128), (4, 1, 128)
    others = [
        check(*wide, 16, "token", bf16, splits=5, groups=2, together=4),
        check(*wide, 16, "token", bf16, splits=1, run=8),
        check(*wide, 16, "group", bf16, splits=1, run=8),
        check(*wide, 16, "none", bf16, splits=2, run=4),
        check(*wide, 64, "group", bf16, splits=1, run=2),
        check(*narrow, 32, "token", f32, splits=1, run=8),
    ]
    return [check(*cell) for cell in grid] + others


# --- speed ----------------------------------------------------------------------------------------------------------


@functools.cache
def pool(kv_heads: int, dim: int) -> Sketch:
    """Random records, two layers of them."""
    blocks = POOL // LAYERS // (kv_heads * (32 * dim + 4 * dim + 144))
    lead = LAYERS, blocks, kv_heads

    @jax.jit
    def make(key):
        keys = jax.random.split(key, 4)
        near = lambda key, mean, spread, *shape: (mean + spread * jax.random.normal(key, (*lead, *shape))).astype(
            jnp.float16
        )
        codes = jax.random.bits(keys[0], (*lead, 64, dim // 8), jnp.uint32)
        norms = jnp.broadcast_to(jnp.array([3.0, 20.0, 0.0, 0.0], jnp.float32), (*lead, 4))
        step = jnp.abs(near(keys[2], 0.1, 0.02, dim))
        return Sketch(codes, near(keys[1], -0.7, 1.0, dim), step, near(keys[3], 0.3, 0.01, 64), norms)

    return jax.block_until_ready(make(jax.random.key(0)))


def speed(name: str, shape: SketchScoreShape, bound: str, peak: float, **config) -> dict:
    records = pool(shape.kv_heads, shape.head_dim)
    there = records.low.shape[1]
    rng = np.random.default_rng(0)
    size = shape.batch * shape.blocks
    sets = max(2, min(8, (400 << 20) // shape.sketch_bytes(bound)))
    table = lambda: rng.permutation(there)[:size] if size <= there else rng.integers(there, size=size)
    tables = [jnp.asarray(table().reshape(shape.batch, -1), jnp.int32) for _ in range(sets)]
    length = jnp.full(shape.batch, shape.context, jnp.int32)
    q = jax.random.normal(jax.random.key(1), (shape.batch, shape.kv_heads, shape.group, shape.head_dim), jnp.bfloat16)
    options: dict = {"page_size": shape.page_size, "bound": bound, "config": SketchScoreConfig(**config)}
    score = functools.partial(sketch_score, **options)
    pages = shape.blocks * (64 // shape.page_size)

    @jax.jit
    def run(records, q, tables):
        known, estimates = jnp.ones(tables[0].shape, bool), []
        bounds = jax.lax.empty((LAYERS, *q.shape[:2], 2, shape.group, pages), jnp.float32)
        for i, table in enumerate(tables):
            where = table, known, length, jnp.int32(i % LAYERS)
            estimate, bounds = score(q, *records, *where, bounds)
            estimates.append(estimate)
        return estimates, bounds

    ours, every, launches = kernel_times(run, records, q, tables)
    micros, read = ours / sets, shape.sketch_bytes(bound)
    row = {
        "shape": name, "bound": bound, "MB": read / 1e6, "us": micros, "all us": every / sets,
        "launches": launches / sets, "TB/s": read / micros / 1e6, "of ceiling": read / micros * 1e6 / peak, **config,
    }  # fmt: skip
    say(" ".join(f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in row.items()))
    return row


TUNING = [{"together": 1}, {"together": 4}, {"groups": 3}, {"groups": 5}, {"splits": 33}, {"run": 1}, {"run": 2}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the record")
    parser.add_argument("--tune", action="store_true", help="also time other configurations")
    args = parser.parse_args()
    record: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    peak = record["ceiling"] = ceiling()
    say(f"ceiling {peak / 1e12:.3f} TB/s")
    if args.tune:
        names = "llama-8b-b8-64k-page16", "llama-8b-b1-128k-page16"
        record["tuning"] = [
            speed(name, SKETCH_SCORE_SHAPES[name], bound, peak, **options)
            for options in TUNING
            for name in names
            for bound in ("token", "group")
        ]
    record["speed"] = [
        speed(name, shape, bound, peak)
        for name, shape in SKETCH_SCORE_SHAPES.items()
        for bound in (BOUNDS if name.startswith(("llama-8b-b8", "llama-8b-b1")) else BOUNDS[:2])
    ]
    record["correctness"] = correctness()
    record["ok"] = all(row["ok"] for row in record["correctness"])
    for row in record["correctness"]:
        if not row["ok"]:
            say("WRONG", row)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    print(json.dumps(record["correctness"]))
    say("correct:", record["ok"], "worst error, of the allowance:", max(row["error"] for row in record["correctness"]))


if __name__ == "__main__":
    main()
