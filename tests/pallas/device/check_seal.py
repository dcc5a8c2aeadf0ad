"""Correctness and device time of the seal kernel on a Hopper GPU.

    python -m tests.pallas.device.check_seal [--output FILE]

Needs jax, numpy and jaxtyping. Times are CUPTI kernel times: `us` of the kernel alone, `all us` of everything that
`kv.seal` launches, the version update included; the twin beside it. The first call of a program copies the metadata,
which it does not own: `all us` and `launches` are the difference between programs of many and of few calls. The ceiling
is the speed of a read-only reduction in the same run. Sets of blocks alternate, so that nothing is found in L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from skg_jax.kv import cache as kv
from skg_jax.kv.cache import PagedKVCache
from skg_jax.kv.sealing import seal_xla
from skg_jax.pallas.dispatch import Implementation
from skg_jax.pallas.seal import seal
from skg_jax.pallas.shapes import SEAL_SHAPES, SealShape
from tests.pallas import seal_cases as cases

START = time.time()
SETS = 3  # of blocks, at least
POOL = 400 << 20  # bytes of keys and values that the sets have together, if a dozen sets come to that: eight times L2
FEW, MANY = 1, 2  # rounds over all sets


def say(*words) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


# --- correctness ----------------------------------------------------------------------------------------------------


def check(dim: int, dtype, heads: int, seed: int) -> dict:
    """Hard blocks, one of them open, one out of range, the rest of the pools NaN: float64, the twin, repeats."""
    full = np.array([True] * 11 + [False, True])
    case = cases.make(dim, dtype, heads, len(full), full, seed)
    case = case._replace(blocks=case.blocks.at[-1].set(case.k.shape[1]))
    run = jax.jit(seal)
    found, fits = run(*case)
    twins, fits_of_twin = jax.jit(seal_xla)(*case)
    row: dict = {"dim": dim, "dtype": jnp.dtype(dtype).name, "heads": heads, "seed": seed}
    row["units"] = len(cases.units(case, found)[1])
    row["faults"] = sorted(cases.faults(*cases.units(case, found)))
    row["faults_of_twin"] = sorted(cases.faults(*cases.units(case, twins)))
    row["same_fits"] = bool(jnp.array_equal(fits, fits_of_twin))
    row["untouched"] = cases.rest_is_untouched(case, found)
    bits = lambda x: np.asarray(x).view(f"u{x.dtype.itemsize}")
    row["repeats"] = all(
        np.array_equal(bits(a), bits(b)) for _ in range(3) for a, b in zip(run(*case)[0], found, strict=True)
    )
    ours, others = (cases.units(case, x)[0] for x in (found, twins))
    row["differ"] = {
        name: float((a != b).mean()) for name, a, b in zip(found._fields, ours, others, strict=True) if (a != b).any()
    }
    row["ok"] = not row["faults"] and all(row[name] for name in ("same_fits", "untouched", "repeats"))
    return row


def correctness() -> list[dict]:
    cells = [(128, jnp.bfloat16, 8), (128, jnp.float16, 3), (64, jnp.bfloat16, 3), (64, jnp.float16, 2)]
    return [check(*cell, seed) for seed in range(3) for cell in cells]


# --- speed ----------------------------------------------------------------------------------------------------------


def kernel_times(call, *args, iterations: int = 5) -> tuple[list[float], float, int]:
    """Microseconds of every seal kernel of a call (medians of the iterations), of all kernels, and their number."""
    _, runs = profiler.measure(call, aggregate=False, iterations=iterations)(*args)
    assert runs is not None, "CUPTI has seen no kernel."
    ours = [[ms for name, ms in run if "seal_blocks" in name] for run in runs]
    median = lambda numbers: 1e3 * statistics.median(numbers)
    return [median(x) for x in zip(*ours, strict=True)], median(sum(ms for _, ms in run) for run in runs), len(runs[0])


def ceiling() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    x = jnp.zeros(1 << 30, jnp.float32)
    _, micros, _ = kernel_times(jax.jit(jnp.max), x)
    return x.nbytes / micros * 1e6


@functools.partial(jax.jit, static_argnames=("rounds", "implementation"))
def seal_all(cache: PagedKVCache, sets, full, rounds: int, implementation: Implementation):
    for _ in range(rounds):
        # Without it XLA would see that it sketches the same keys a second time, and not do so.
        k, v, _ = jax.lax.optimization_barrier((cache.k, cache.v, cache.sealed))
        cache = cache._replace(k=k, v=v)
        for blocks in sets:
            cache = kv.seal(cache, blocks, full, implementation)
    return cache._replace(k=None, v=None)  # pyright: ignore[reportArgumentType]: not written, and not to be copied


def cache_of(shape: SealShape, blocks: int) -> PagedKVCache:
    empty = functools.partial(kv.init, shape.layers, shape.kv_heads, shape.head_dim, 1, blocks * 64, jnp.bfloat16)
    draw = jax.jit(lambda key, like: jax.random.normal(key, like.shape, jnp.bfloat16))
    cache = empty()
    return cache._replace(k=draw(jax.random.key(0), cache.k), v=draw(jax.random.key(1), cache.v))


def speed(name: str, shape: SealShape, peak: float) -> dict:
    count = max(SETS, -(-POOL // shape.bytes_read))
    count = min(count, 12)  # programs are unrolled
    cache = cache_of(shape, count * shape.blocks)
    order = np.random.default_rng(0).permutation(count * shape.blocks).astype(np.int32)
    sets = [jnp.asarray(x) for x in order.reshape(count, -1)]
    full = jnp.arange(shape.blocks) < (shape.blocks if shape.full is None else shape.full)
    row: dict = {"shape": name, "MB read": shape.bytes_read / 1e6, "MB written": shape.bytes_written / 1e6}
    for label, implementation in (("", "mosaic_gpu"), ("xla ", "xla")):
        run = lambda rounds, which=implementation: kernel_times(
            functools.partial(seal_all, rounds=rounds, implementation=which), cache, sets, full, iterations=3
        )
        (_, few, fewer), (ours, many, more) = run(FEW), run(MANY)
        calls = (MANY - FEW) * count
        if ours:
            row["us"] = statistics.median(ours)
        row |= {f"{label}all us": (many - few) / calls, f"{label}launches": (more - fewer) / calls}
    assert "us" in row, "no kernel by the name of seal_blocks was launched"
    row["TB/s"] = (shape.bytes_read + shape.bytes_written) / row["us"] / 1e6
    row["of ceiling"] = row["TB/s"] * 1e12 / peak
    say(" ".join(f"{k} {f'{v:.4g}' if isinstance(v, float) else v}" for k, v in row.items()))
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", help="where to write the record, as JSON")
    parser.add_argument("--shapes", nargs="+", default=list(SEAL_SHAPES), choices=list(SEAL_SHAPES), help="to time")
    args = parser.parse_args()
    record: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    record["correctness"] = correctness()
    record["ok"] = all(row["ok"] for row in record["correctness"])
    for row in record["correctness"]:
        say("right" if row["ok"] else "WRONG", row)
    peak = record["ceiling"] = ceiling()
    say(f"ceiling {peak / 1e12:.3f} TB/s")
    record["speed"] = [speed(name, SEAL_SHAPES[name], peak) for name in args.shapes]
    if args.output:
        with open(args.output, "w") as file:
            json.dump(record, file, indent=1)
    print("PASS" if record["ok"] else "FAIL")
    return 0 if record["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
