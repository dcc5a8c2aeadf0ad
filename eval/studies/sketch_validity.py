"""Do the sketch's bounds hold on real caches? Every page's exact log-mass, in float64, beside them.

    python -m eval.studies.sketch_validity --models smollm2-135m-instruct --json docs/studies/sketch_validity.json
    python -m eval.studies.sketch_validity --models smollm2-135m-instruct --record smollm2.npz
    python -m eval.studies.sketch_validity --check smollm2.npz

The first decodes with a model and checks all layers in float32: through XLA, by the lane code of the GPU kernel
emulated on arrays, and a few blocks of a few layers by the kernel itself under its interpreter. `--record` keeps keys
of some layers, rounded to bfloat16, and queries after RoPE; `--check` needs jax and this repository but no model and no
tokenizer, and on a Hopper GPU runs the kernel on everything. A control draws the bounds towards the estimate and counts
again: where that finds nothing, the check would not have found much either.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.kv import sketch
from skg_jax.kv.sketch import BoundKind, PageScores, Sketch
from skg_jax.pallas import dispatch
from skg_jax.pallas.sketch_plan import SketchScoreConfig
from skg_jax.pallas.sketch_query import operands
from skg_jax.pallas.sketch_score import sketch_score
from skg_jax.pallas.sketch_stage import gathered, words
from skg_jax.pallas.sketch_unit import Bound, UnitShape, score_unit
from skg_jax.pallas.warp import ArrayWarp
from skg_jax.types import BLOCK

SHRUNK = (0.5, 0.2, 0.05)
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # compiles twice as fast
BOUNDS: dict[Bound, BoundKind] = {"token": "sketch", "group": "group"}  # of the kernel, and what XLA calls them

type Score = Callable[[jax.Array, Sketch], PageScores]  # q [S, K, G, H], records [Mb, K, ...] -> [S, K, G, M]


class Cache(NamedTuple):
    """What some layers of a model hold, and the queries of a few decode steps."""

    name: str
    layers: np.ndarray  # [L]
    keys: np.ndarray  # [L, K, T, H], whole blocks
    q: np.ndarray  # [L, S, K, G, H] float32, after RoPE


class Way(NamedTuple):
    """One way to score."""

    name: str
    dtype: str  # of the query
    score: Score
    blocks: int | None = None  # only so many
    every: int = 1  # only one layer out of so many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--layers", type=int, default=6, help="of a recording, evenly spaced")
    parser.add_argument("--record", type=Path)
    parser.add_argument("--check", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.record:
        return _record(args)
    caches = map(load, args.check) if args.check else _decoded(args)
    rows = [row for cache in caches for row in check(cache, args.page_size)]
    if args.json:
        found = {"backend": jax.default_backend(), "device": jax.devices()[0].device_kind, "rows": rows}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if any(row["violations"] for row in rows):
        raise SystemExit("a page's mass lies outside its bounds; see the rows above.")
    return None


# --- the check ------------------------------------------------------------------------------------------------------


def check(cache: Cache, page: int) -> Iterator[dict]:
    """One row for every way to score, printed as it comes."""
    for way in ways(page, cache.q.shape[3], cache.q.shape[4], jnp.dtype(cache.keys.dtype)):
        kept = cache.keys[:: way.every, :, : None if way.blocks is None else way.blocks * BLOCK]
        found = [_layer(q, keys, way, page) for q, keys in zip(cache.q[:: way.every], kept, strict=True)]
        row = {
            "cache": cache.name, "tokens": int(kept.shape[2]), "layers": cache.layers[:: way.every].tolist(),
            "steps": int(cache.q.shape[1]), "way": way.name, "query": way.dtype, "keys": str(cache.keys.dtype),
        } | _summary(found)  # fmt: skip
        print(json.dumps(row), flush=True)
        yield row


def ways(page: int, group: int, dim: int, keys) -> Iterator[Way]:
    """What can run here."""
    low = [jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)] if keys != jnp.float32 else []
    for kind in BOUNDS.values():
        yield Way(f"xla {kind}", "float32", functools.partial(_by_xla, page=page, kind=kind))
    for bound in BOUNDS:
        for dtype in [jnp.dtype(jnp.float32), *low]:
            if dispatch.available():
                yield Way(f"kernel {bound}", str(dtype), functools.partial(_by_kernel, page=page, bound=bound))
                continue
            unit = UnitShape(head_dim=dim, group=group, page_size=page, bound=bound)
            yield Way(f"lanes {bound}", str(dtype), functools.partial(_by_lanes, unit=unit))
        if not dispatch.available():
            score = functools.partial(_by_kernel, page=page, bound=bound)
            yield Way(f"interpreted kernel {bound}", "bfloat16", score, blocks=4, every=10)


def _layer(q: np.ndarray, keys: np.ndarray, way: Way, page: int) -> dict[str, np.ndarray]:
    """Of each unit how far its exact log-mass lies inside its bounds, as they are and shrunk; and their distance."""
    query = jnp.asarray(q).astype(way.dtype)
    blocks = keys.reshape(keys.shape[0], -1, BLOCK, keys.shape[-1]).swapaxes(0, 1)
    record, fits = _build(blocks)
    if not bool(fits.all()):
        raise ValueError("a block does not fit the sketch's format and has no bounds; take other layers.")
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), way.score(query, record))
    exact = log_masses(np.asarray(query).astype(np.float64), keys.astype(np.float64), page)
    toward = lambda bound, factor: found.estimate + factor * (bound - found.estimate)
    inside = lambda factor: np.minimum(exact - toward(found.lower, factor), toward(found.upper, factor) - exact)
    return {"margin": inside(1.0), "reach": (found.upper - found.lower) / 2} | {f"{f:g}": inside(f) for f in SHRUNK}


def log_masses(q: np.ndarray, keys: np.ndarray, page: int) -> np.ndarray:
    """q [S, K, G, H], keys [K, T, H], float64 to [S, K, G, M]: log of the sum of exp(q.k / sqrt(H)) over each page."""
    logits = np.einsum("skgh,kth->skgt", q, keys) / math.sqrt(q.shape[-1])
    pages = logits.reshape(*logits.shape[:-1], -1, page)
    top = pages.max(-1)
    return top + np.log(np.exp(pages - top[..., None]).sum(-1))


def _summary(layers: list[dict]) -> dict:
    every = {name: np.concatenate([x[name].ravel() for x in layers]) for name in layers[0]}
    outside = lambda margin: ~(margin >= 0)  # a NaN is outside
    return {
        "units": int(every["margin"].size), "violations": int(outside(every["margin"]).sum()),
        "least_margin": float(every["margin"].min()), "median_margin": float(np.median(every["margin"])),
        "median_reach": float(np.median(every["reach"])),
        "outside_if_shrunk": {f"{f:g}": float(outside(every[f"{f:g}"]).mean()) for f in SHRUNK},
    }  # fmt: skip


# --- ways to score --------------------------------------------------------------------------------------------------


_build = jax.jit(sketch.build)


@functools.partial(jax.jit, static_argnames=("page", "kind"))
def _by_xla(q, record: Sketch, page: int, kind) -> PageScores:
    step = lambda q: sketch.page_scores(jnp.broadcast_to(q, (record.low.shape[0], *q.shape)), record, page, kind)
    return _by_page(jax.lax.map(step, q))


@functools.partial(jax.jit, static_argnames="unit", compiler_options=FAST)
def _by_lanes(q, record: Sketch, unit: UnitShape) -> PageScores:
    """One warp for every block and KV head."""
    lead = record.low.shape[:2]

    def step(q):
        query = dict(zip(("query", "columns"), operands(q, unit), strict=True))
        memory = {name: words(x, lead[1]) for name, x in query.items()}
        memory = {name: jnp.broadcast_to(x, (*lead, x.shape[-1])) for name, x in memory.items()}
        memory |= {name: words(x, *lead) for name, x in record._asdict().items()}
        results = score_unit(ArrayWarp(memory), unit)
        return PageScores(**gathered(results, unit, lead))

    return _by_page(jax.lax.map(step, q))


def _by_kernel(q, record: Sketch, page: int, bound: Bound) -> PageScores:
    """All blocks in order, known and full."""
    blocks = record.low.shape[0]
    table = jnp.broadcast_to(jnp.arange(blocks, dtype=jnp.int32), (len(q), blocks))
    where = table, jnp.ones_like(table, bool), jnp.full(len(q), blocks * BLOCK, jnp.int32), jnp.int32(0)
    room = jnp.zeros((1, *q.shape[:2], 2, q.shape[2], blocks * (BLOCK // page)))
    estimate, bounds = _kernel(page, bound)(q, *(x[None] for x in record), *where, room)
    return PageScores(estimate, bounds[0, :, :, 0], bounds[0, :, :, 1])


@functools.cache
def _kernel(page: int, bound: Bound):
    if dispatch.available():
        return jax.jit(functools.partial(sketch_score, page_size=page, bound=bound))
    config = SketchScoreConfig(groups=2, stages=2, splits=1)
    run = functools.partial(sketch_score, page_size=page, bound=bound, config=config, interpret=True)
    return jax.jit(run, compiler_options=FAST)


def _by_page(found: PageScores) -> PageScores:
    """[S, Mb, K, G, pages of a block] to [S, K, G, M]."""
    return jax.tree.map(lambda x: jnp.moveaxis(x, 1, 3).reshape(x.shape[0], *x.shape[2:4], -1), found)


# --- real caches ----------------------------------------------------------------------------------------------------


def load(path: Path) -> Cache:
    """A recording."""
    with np.load(path) as file:
        keys = file["keys"].view(jnp.bfloat16.dtype)
        return Cache(str(file["name"]), file["layers"], keys, file["q"])


def _record(args) -> None:
    cache = next(_decoded(args))
    some = np.unique(np.linspace(0, len(cache.layers) - 1, args.layers).round().astype(int))
    keys = np.asarray(jnp.asarray(cache.keys[some]).astype(jnp.bfloat16)).view(np.uint16)
    np.savez_compressed(args.record, name=cache.name, layers=cache.layers[some], keys=keys, q=cache.q[some])
    print(f"{args.record}: layers {some.tolist()}, {args.record.stat().st_size / 1e6:.1f} MB")


def _decoded(args) -> Iterator[Cache]:
    """All layers of every model after every prompt; the imports are here for machines that only check."""
    import skg_jax
    from eval.studies.prefilled import prefill_prompt
    from eval.studies.prompts import HELD_OUT, prompt_ids
    from skg_jax.decode import shadow_attempt
    from skg_jax.engine import Options
    from skg_jax.guard import GuardConfig

    guard = GuardConfig(tau=1e-9, tiers=(), on_reject="release", rounds=(1,), spare_attempts=8)
    options = Options(max_tokens=args.steps + 1, page_size=args.page_size, guard=guard, dense_below=0, seed=0)
    for model in args.models:
        engine = skg_jax.load(model)
        for i, length in enumerate(args.lengths):
            prompt = prompt_ids(engine.tokenizer, HELD_OUT, i, length)
            job = engine._job([prompt], options)
            cache, rows = prefill_prompt(engine, prompt, options)
            queries = []
            for _ in range(args.steps):
                step = cache, job.requests, rows
                cache, rows, _, evidence = shadow_attempt(engine.model.params, *step, program=job.program)
                queries.append(np.asarray(evidence.q)[:, 0])
            table = np.asarray(cache.page_table)[0, : length // BLOCK]
            keys = np.asarray(cache.k[:, table]).swapaxes(1, 2)  # [L, K, blocks, 64, H]
            keys = keys.reshape(*keys.shape[:2], -1, keys.shape[-1])
            q = np.stack(queries, axis=1)
            grouped = q.reshape(*q.shape[:2], keys.shape[1], -1, q.shape[-1])
            yield Cache(f"{engine.model.name}, {length} tokens", np.arange(len(keys)), keys, grouped)


if __name__ == "__main__":
    main()
