"""Correctness and device time of the decode and append kernels on a Hopper GPU, beside cuDNN on contiguous KV.

    python -m tests.pallas.device.check_decode [--json FILE] [--tune]

Needs jax, numpy and jaxtyping. Times are CUPTI kernel times of whole calls, padding of q and merge included, in rounds
that alternate with the baseline; medians. Bytes are those of the listed keys and values. Lists rotate over two layers,
so that nothing is found in L2.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax import attention
from skg_jax.kv import cache as kv
from skg_jax.pallas.append import append
from skg_jax.pallas.decode_config import PagedDecodeConfig
from skg_jax.pallas.paged_decode import paged_decode
from tests.pallas import decode_cases as cases

START = time.time()
KV_HEADS, HEADS, DIM, LAYERS = 8, 32, 128, 2
CONTEXT, POOL = 32768, 32 * 32768  # tokens of a row, and of a layer
rng = np.random.default_rng(0)


def say(*words) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


# --- correctness --------------------------------------------------------------------------------------------------


def correctness() -> list[dict]:
    """Small ragged cases whose unused pages, other layer and slots past the length are NaN."""
    grid = [
        (16, 128, 4, jnp.bfloat16, {}),
        (16, 128, 4, jnp.bfloat16, {"splits": 3, "stages": 2}),
        (16, 128, 8, jnp.float16, {"tile": 128, "splits": 2, "stages": 2}),
        (32, 64, 3, jnp.bfloat16, {"splits": 2}),
        (64, 128, 7, jnp.bfloat16, {"splits": 1}),
        (64, 64, 1, jnp.float16, {"splits": 4}),
        (16, 64, 16, jnp.bfloat16, {"splits": 2}),
        (32, 128, 16, jnp.float16, {"splits": 1}),
    ]
    return [_check(*cell) for cell in grid]


def _check(page: int, dim: int, group: int, dtype, fields: dict) -> dict:
    case, config = cases.make(page, dim, group, dtype), PagedDecodeConfig(**fields)
    args: Any = case.q, case.cache, cases.LAYER, case.selection, case.length, page
    listed = lambda: attention.sparse(*args, implementation="mosaic_gpu", config=config)
    error, lse_error = errors(listed(), attention.sparse(*args, implementation="xla"))
    same = all(equal(listed(), listed()) for _ in range(4))
    if page == 64:  # the pass without lists
        case = cases.make(64, dim, group, dtype, chosen=cases.every_page())
        args = case.q, case.cache, cases.LAYER, case.length
        kernel, twin = (attention.dense(*args, implementation=which) for which in ("mosaic_gpu", "xla"))
        error, lse_error = (max(pair) for pair in zip((error, lse_error), errors(kernel, twin), strict=True))
    row = {"page": page, "dim": dim, "group": group, "dtype": jnp.dtype(dtype).name, "error": error}
    row |= {"lse_error": lse_error, "repeats_equal": same}
    row["ok"] = error <= 2e-3 and lse_error <= 1e-5 and same
    say("correct" if row["ok"] else "WRONG", row)
    return row


def errors(found, expected) -> tuple[float, float]:
    """Relative Frobenius error of the output; largest error of the log-sum-exp, relative where it exceeds 1."""
    (o, lse), (o_ref, lse_ref) = ([np.asarray(x, np.float64) for x in pair] for pair in (found, expected))
    full = lse_ref > -1e29
    if o[~full].any() or (lse[~full] > -6e29).any():
        return float("inf"), float("inf")
    gap = np.abs(lse - lse_ref)[full] / np.maximum(1, np.abs(lse_ref[full]))
    return float(np.linalg.norm(o - o_ref) / np.linalg.norm(o_ref)), float(gap.max())


def equal(a, b) -> bool:
    return all(bool(jnp.array_equal(x, y)) for x, y in zip(a, b, strict=True))


# --- time ---------------------------------------------------------------------------------------------------------


def kernels(f, *args, iterations: int = 3) -> list[tuple[str, float]]:
    """(name, median microseconds) of every kernel that one call launches."""
    from jax.experimental.mosaic.gpu import profiler

    runs: Any = profiler.measure(f, aggregate=False, iterations=iterations)(*args)[1]
    return [(runs[0][i][0], 1e3 * statistics.median(run[i][1] for run in runs)) for i in range(len(runs[0]))]


def total(found: list[tuple[str, float]]) -> float:
    return sum(us for _, us in found)


@functools.cache
def pools() -> tuple[jax.Array, jax.Array]:
    """k and v [L, P, K, 64, H]."""
    shape = (LAYERS, POOL // 64, KV_HEADS, 64, DIM)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    return make(jax.random.key(1)), make(jax.random.key(2))


@functools.cache
def table(batch: int, context: int) -> jax.Array:
    """Blocks in random order."""
    blocks = context // 64
    return jnp.asarray(rng.permutation(POOL // 64)[: batch * blocks].reshape(batch, blocks), jnp.int32)


def pages_of(page: int, share: float, context: int) -> int:
    return max(1, round(context * share) // page)


def lists(batch: int, page: int, share: float, context: int, count: int) -> list[tuple[jax.Array, jax.Array]]:
    """Lists in random order but for the last page, without repeats."""
    pages, size = context // page, pages_of(page, share, context)

    def one():
        ids = np.argsort(rng.random((batch, KV_HEADS, pages)), axis=-1)[..., :size]
        ids = np.where(ids == pages - 1, ids[..., -1:], ids)
        ids[..., -1] = pages - 1
        full = np.zeros((batch, KV_HEADS, pages), np.int32)
        full[..., :size] = ids
        return jnp.asarray(full), jnp.full((batch, KV_HEADS), size, jnp.int32)

    return [one() for _ in range(count)]


def program(batch: int, page: int, share: float, *, context: int = CONTEXT, listed: bool = True, **fields):
    """A jitted function of several calls, and its arguments: lists and layers rotate."""
    count = max(2, round(CONTEXT / context / share / batch * 4))
    config = PagedDecodeConfig(expected_pages=pages_of(page, share, context), **fields)
    length = jnp.full(batch, context, jnp.int32)
    qs = [jax.random.normal(jax.random.key(i), (batch, HEADS, DIM), jnp.bfloat16) for i in range(count)]

    def run(qs, k, v, table, lists, length):
        call = functools.partial(paged_decode, page_size=page, config=config)
        return [
            call(q, k, v, table, ids, counts, length, jnp.int32(i % LAYERS))
            for i, (q, (ids, counts)) in enumerate(zip(qs, lists, strict=True))
        ]

    where = lists(batch, page, share, context, count) if listed else [(None, None)] * count
    args = (qs, *pools(), table(batch, context), where, length)
    return jax.jit(run), args, count


@functools.cache
def contiguous(batch: int):
    shape = (batch, CONTEXT, KV_HEADS, DIM)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    q = jax.random.normal(jax.random.key(3), (batch, 1, HEADS, DIM), jnp.bfloat16)
    return q, make(jax.random.key(4)), make(jax.random.key(5))


cudnn = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"))


def speed(rounds: int = 5) -> list[dict]:
    """Our kernel on pages in random order beside cuDNN's on contiguous keys and values."""
    rows = []
    for batch in (8, 32):
        cells = [(page, share, True) for share in (1.0, 0.1) for page in (64, 16)] + [(64, 1.0, False)]
        ours = [program(batch, page, share, listed=listed) for page, share, listed in cells]
        runs = [
            [total(kernels(cudnn, *contiguous(batch)))] + [total(kernels(f, *a)) / n for f, a, n in ours]
            for _ in range(rounds)
        ]
        dense, *times = (statistics.median(column) for column in zip(*runs, strict=True))
        nbytes = 4 * batch * KV_HEADS * CONTEXT * DIM
        rows.append({"what": "cudnn, contiguous", "batch": batch, "us": dense, "TB/s": nbytes / dense / 1e6})
        for (page, share, listed), us, (f, args, count) in zip(cells, times, ours, strict=True):
            read = 4 * batch * KV_HEADS * DIM * page * pages_of(page, share, CONTEXT)
            what = "ours, listed pages" if listed else "ours, every page"
            row = {"what": what, "batch": batch, "page": page, "share": share, "us": us}
            row |= {"TB/s": read / us / 1e6, "of cudnn's bandwidth": read / us / (nbytes / dense)} | one_call(
                f, args, count
            )
            rows.append(row | (at_scale(f, args, page) if listed else {}))
            say(rows[-1])
    return rows


def one_call(f, args, count: int) -> dict:
    found = kernels(f, *args)
    main = sum(us for name, us in found if "paged_decode" in name and "merge" not in name)
    row = {"decode us": main / count, "other us": (total(found) - main) / count, "launches": len(found) / count}
    return row | {"others": sorted({name for name, _ in found if "paged_decode_mosaic" not in name})}


def at_scale(f, args, page: int) -> dict:
    """Errors of the first call against the XLA twin; equality of two runs."""
    qs, k, v, blocks, ids, length = args
    cache = kv.init(1, KV_HEADS, DIM, 1, 64, jnp.bfloat16)._replace(k=k, v=v, page_table=blocks)
    page_ids, num_pages = ids[0]
    selection = cases.selection(page_ids, num_pages, jnp.zeros(page_ids.shape, bool))
    found = f(*args)
    expected = attention.sparse(qs[0], cache, jnp.int32(0), selection, length, page, implementation="xla")
    error, lse_error = errors(found[0], expected)
    return {"error": error, "lse_error": lse_error, "repeats_equal": equal(found[0], f(*args)[0])}


def ceiling() -> dict:
    bits = lambda x: jnp.max(jax.lax.bitcast_convert_type(x, jnp.uint16))
    us = total(kernels(jax.jit(bits), pools()[0]))
    return {"what": "read-only reduction", "us": us, "TB/s": pools()[0].nbytes / us / 1e6}


def tuning(rounds: int = 5) -> list[dict]:
    """Other configurations of the cells that decide, in alternating rounds."""
    few, many = [{"stages": 2}, {"stages": 3}, {"stages": 4}], [{"splits": splits} for splits in (2, 4, 6)]
    cells: list[tuple[int, int, float, list[dict]]] = [
        (8, 16, 1.0, few + many),
        (8, 64, 1.0, few),
        (8, 16, 0.1, few + many),
        (32, 16, 1.0, few),
        (32, 16, 0.1, few),
        (1, 16, 0.1, [{"splits": splits, "context": 4 * CONTEXT} for splits in (8, 16, 32)]),
    ]
    rows = []
    for batch, page, share, options in cells:
        programs = [program(batch, page, share, **option) for option in options]
        runs = [[total(kernels(f, *args)) / count for f, args, count in programs] for _ in range(rounds)]
        for option, times in zip(options, zip(*runs, strict=True), strict=True):
            row = {"batch": batch, "page": page, "share": share, **option, "us": statistics.median(times)}
            rows.append(row | {"least": min(times), "most": max(times)})
            say(rows[-1])
    return rows


# --- append -------------------------------------------------------------------------------------------------------


def appending(batch: int = 8, tokens: int = 4) -> dict:
    """In place? Kernels per token and layer and their time, of the kernel and of XLA's scatters."""
    blocks = CONTEXT // 64
    k, v = (jnp.zeros((LAYERS, batch * blocks, KV_HEADS, 64, DIM), jnp.bfloat16) for _ in "kv")
    norm = jnp.zeros((LAYERS, batch * blocks, KV_HEADS), jnp.float32)
    where = jnp.arange(batch * blocks, dtype=jnp.int32).reshape(batch, blocks)
    new = [tuple(jax.random.normal(jax.random.key(i), (2, batch, KV_HEADS, DIM), jnp.bfloat16)) for i in range(tokens)]
    position = [jnp.asarray(rng.integers(0, CONTEXT, batch), jnp.int32) for _ in new]

    def kernel(pools, layer, new, position):
        (k, v, norm), (new_k, new_v) = pools, new
        return append(k, v, norm, where, layer, new_k, new_v, position)

    def scatters(pools, layer, new, position):
        cache = kv.init(1, KV_HEADS, DIM, 1, 64, jnp.bfloat16)._replace(page_table=where)
        cache = cache._replace(k=pools[0], v=pools[1], key_norm=pools[2])
        cache = kv.append(cache, layer, new[0], new[1], position)
        return cache.k, cache.v, cache.key_norm

    def repeated(f, pools, new, position):
        for token, at in zip(new, position, strict=True):
            for layer in range(LAYERS):
                pools = f(pools, jnp.int32(layer), token, at)
        return pools

    row: dict = {}
    results = []
    for name, f in (("kernel", kernel), ("scatters", scatters)):
        run, args = functools.partial(repeated, f), ((k, v, norm), new, position)
        memory: Any = jax.jit(run, donate_argnums=0).lower(*args).compile().memory_analysis()
        found = kernels(jax.jit(run), *args)
        calls = LAYERS * tokens
        row[name] = {"temporary MB": memory.temp_size_in_bytes / 1e6, "us": total(found) / calls}
        row[name] |= {"launches": len(found) / calls, "kernels": sorted({kernel for kernel, _ in found})}
        results.append(jax.jit(run)(*args))
    one, other = results
    row["equal"] = equal(one[:2], other[:2]) and bool(jnp.allclose(one[2], other[2], rtol=1e-6))
    say(row)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="where to write the record")
    parser.add_argument("--tune", action="store_true", help="also time other configurations")
    args = parser.parse_args()
    device = jax.devices()[0]
    record: dict = {"device": device.device_kind, "jax": jax.__version__, "correctness": correctness()}
    record |= {"append": appending(), "ceiling": ceiling(), "speed": speed(), "tuning": tuning() if args.tune else []}
    record["ok"] = all(row["ok"] for row in record["correctness"]) and record["append"]["equal"]
    print(json.dumps(record))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(record, file, indent=1)
    say("read ceiling", f"{record['ceiling']['TB/s']:.2f} TB/s", "| correct:", record["ok"])
    for row in record["speed"]:
        print(" ".join(f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
