"""Correctness and device time of the page selection and audit mass kernels on a Hopper GPU.

    python -m tests.pallas.device.check_select_audit [--json FILE] [--tune]

Needs jax, numpy and jaxtyping. Times are medians of CUPTI kernel times; `launches` counts all kernels of a call. The
ceiling is the speed of a read-only reduction in the same run. Audited units lie all over a pool of gigabytes, and two
sets of them alternate, so that nothing is found in L2.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from skg_jax import selectors
from skg_jax.kv import integrity
from skg_jax.pallas import select
from skg_jax.pallas.audit_mass import AuditMassConfig, audit_mass, logit_error
from skg_jax.pallas.select import SelectConfig
from skg_jax.pallas.shapes import AUDIT_MASS_SHAPES, SELECT_SHAPES, AuditMassShape, SelectShape
from skg_jax.selectors import Selection
from tests.pallas import mass_cases, select_cases

START = time.time()
KERNELS = {"topk": select.topk, "topp": select.topp}
BESIDE_XLA = ("llama-8b-b8-64k", "llama-8b-b1-128k")
POOL = 4 << 30  # bytes of keys


def say(*words) -> None:
    print(f"[{time.time() - START:6.1f}]", *words, flush=True)


def kernel_times(call, *args, iterations: int = 5) -> tuple[float, float, int]:
    """Microseconds of the Pallas kernel and of all kernels of a call, and their number."""
    _, runs = profiler.measure(call, aggregate=False, iterations=iterations)(*args)
    assert runs is not None, "nothing was launched"
    ours = lambda run: sum(ms for name, ms in run if "select_pages" in name or "audit_mass" in name)
    every = lambda run: sum(ms for _, ms in run)
    median = lambda f: 1e3 * statistics.median(f(run) for run in runs)
    return median(ours), median(every), len(runs[0])


def ceiling() -> float:
    """Bytes per second of a reduction over 4 GiB."""
    x = jnp.zeros(POOL // 4, jnp.float32)
    total = jax.jit(jnp.max)
    _, micros, _ = kernel_times(total, x)
    return POOL / micros * 1e6


# --- selection ------------------------------------------------------------------------------------------------------


@functools.cache
def chooser(name: str, implementation: str, config: SelectConfig | None = None):
    """Jitted (ctx, budget) -> Selection."""
    if implementation == "xla":
        return jax.jit(lambda ctx, budget: selectors.SELECTORS[name]("xla").select(ctx, (), budget)[0])
    run = functools.partial(KERNELS[name], config=config)
    return jax.jit(lambda ctx, budget: Selection(*run(ctx.estimate, ctx.must_read, ctx.total_pages, budget)))


def check_selection(pages: int, groups: int, config: SelectConfig) -> list[dict]:
    """All kinds of estimates at all budgets; rows may differ from the twin by pages of equal share up to rounding."""
    rows = []
    for name, amounts in (("topk", (0.1, 7.0, np.inf)), ("topp", (0.5, 0.97, 1.0))):
        for kind in select_cases.KINDS:
            ctx = select_cases.make(kind, (3, 2, groups, pages), (pages, max(1, pages // 3), 1))
            for amount in amounts:
                budget = select_cases.budgets(amount, 3)
                found, twin = (chooser(name, w, config if w else None)(ctx, budget) for w in ("", "xla"))
                again = chooser(name, "", config)(ctx, budget)
                rows.append(_verdict(found, twin, again, ctx, name) | {"kind": kind, "budget": amount, "pages": pages})
    return rows


def _verdict(found, twin, again, ctx, name: str) -> dict:
    differ, apart = select_cases.misplaced(found, twin, ctx)
    repeats = all(bool(jnp.array_equal(a, b)) for a, b in zip(found, again, strict=True))
    counts = bool(jnp.array_equal(found.num_pages, twin.num_pages))
    near = apart <= select_cases.ROUNDING and (counts or name == "topp")
    ok = select_cases.consistent(found) and repeats and (differ == 0 or near)
    return {"name": name, "rows_differ": differ, "apart": apart, "ok": ok}


def time_selection(label: str, shape: SelectShape, config: SelectConfig | None = None, xla: bool = True) -> list[dict]:
    """Peaked estimates, a tenth of the pages, then 95% of the mass; the twin beside the kernel."""
    size = (shape.batch, shape.kv_heads, shape.groups, shape.pages)
    ctx = jax.device_put(select_cases.make("peaked", size, [shape.pages] * shape.batch, forced=0.002))
    rows = []
    for name, amount in (("topk", 0.1), ("topp", 0.95)):
        budget = select_cases.budgets(amount, shape.batch)
        ours, every, launches = kernel_times(chooser(name, "", config), ctx, budget)
        row = {"shape": label, "name": name, "us": ours, "all_us": every, "launches": launches}
        if xla:
            _, row["xla_us"], row["xla_launches"] = kernel_times(chooser(name, "xla"), ctx, budget, iterations=3)
        rows.append(row)
    return rows


# --- audit masses ---------------------------------------------------------------------------------------------------


def check_masses() -> list[dict]:
    """Small pools, everything unread NaN: float64 masses, checksums, padding, repeats; small and large norms."""
    bf16, f16 = jnp.bfloat16, jnp.float16
    cells = [(128, 4, bf16, 1.0), (128, 4, bf16, 30.0), (64, 3, bf16, 30.0), (128, 7, f16, 3.0), (64, 8, f16, 1.0)]
    grid = [(page, *cell) for page in (16, 32, 64) for cell in cells]
    return [_check_masses(*cell) for cell in grid]


@functools.cache
def masses_of(page_size: int, config: AuditMassConfig | None = None):
    """Jitted `audit_mass`."""
    return jax.jit(functools.partial(audit_mass, page_size=page_size, config=config))


def _check_masses(page: int, dim: int, groups: int, dtype, norm: float) -> dict:
    case = mass_cases.make((2, 3, 2 * groups, 2, 9, dim), 77, page, dtype, norm, padding=(1, 30, 31, 60, 76))
    run = masses_of(page)
    found, again = run(case.q, case.k, *case.units), run(case.q, case.k, *case.units)
    mass, reach = mass_cases.exact(case, page)
    error = np.abs(np.asarray(found.log_mass)[case.valid] - mass)
    keys, _ = mass_cases.keys_and_queries(case, page)
    sums = np.array_equal(np.asarray(found.checksum)[case.valid], integrity.checksum(jnp.asarray(keys)))
    same = all(bool(jnp.array_equal(a, b)) for a, b in zip(found, again, strict=True))
    of_bound = float((error / (logit_error(dim) * reach + 1e-5)).max())
    row = {"page": page, "dim": dim, "groups": groups, "dtype": jnp.dtype(dtype).name, "norm": norm}
    row |= {"error": float(error.max()), "of_bound": of_bound, "checksums": sums, "repeats": same}
    return row | {"ok": of_bound <= 1 and sums and same and mass_cases.padding_is_blank(found, case)}


@functools.cache
def pool(heads: int, dim: int) -> jax.Array:
    """Random bits as keys [1, P, heads, 64, dim]: gigabytes of them."""
    blocks = POOL // (2 * heads * 64 * dim)
    make = lambda key: jax.lax.map(
        lambda k: jax.random.normal(k, (blocks // 64, heads, 64, dim), jnp.bfloat16), jax.random.split(key, 64)
    )
    return jax.jit(lambda key: make(key).reshape(1, -1, heads, 64, dim))(jax.random.key(0))


def time_masses(label: str, s: AuditMassShape, config: AuditMassConfig | None = None) -> dict:
    """Units anywhere in the pool; its blocks stand for those of all layers."""
    k, rng = pool(s.kv_heads, s.head_dim), np.random.default_rng(1)
    q = jax.random.normal(jax.random.key(1), (1, s.batch, s.heads, s.head_dim), jnp.bfloat16)
    limits = (1, s.batch, s.kv_heads, k.shape[1], 64 // s.page_size)
    units = lambda: [jnp.asarray(rng.integers(0, most, s.units), jnp.int32) for most in limits]
    run = masses_of(s.page_size, config)
    found = [kernel_times(run, q, k, *units(), iterations=3) for _ in range(3)]
    ours, every = (statistics.median(x[i] for x in found) for i in (0, 1))
    row = {"shape": label, "units": s.units, "mb": s.key_bytes / 1e6, "us": ours, "all_us": every}
    row |= {"launches": found[0][2], "tb_s": s.key_bytes / ours / 1e6} | (dataclasses.asdict(config) if config else {})
    return row


def tune() -> dict:
    """Sizes of a block and of the ring."""
    shape = AUDIT_MASS_SHAPES["llama-8b-b8-64k-page64"]
    sizes = ((132, 6), (264, 3), (264, 4), (396, 3), (528, 2), (528, 3))
    rings = [AuditMassConfig(blocks=b, stages=s, checksums=c) for c in (True, False) for b, s in sizes]
    rows = [
        ("llama-8b-b8-64k", SELECT_SHAPES["llama-8b-b8-64k"]),
        ("llama-8b-b1-128k", SELECT_SHAPES["llama-8b-b1-128k"]),
    ]
    select = [
        row
        for name, size in rows
        for warpgroups in (2, 4, 8)
        for row in time_selection(f"{name} x{warpgroups}", size, SelectConfig(warpgroups=warpgroups), xla=False)
    ]
    pages = {page: dataclasses.replace(shape, page_size=page) for page in (16, 64)}
    return {"select": select, "audit": [time_masses(f"page{p}", s, ring) for p, s in pages.items() for ring in rings]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    say(jax.devices()[0].device_kind, jax.__version__)
    selection = [
        row
        for pages, groups, warpgroups in ((101, 3, 8), (1000, 1, 1), (4096, 4, 2), (8191, 8, 4))
        for row in check_selection(pages, groups, SelectConfig(warpgroups=warpgroups))
    ]
    right, differ = sum(r["ok"] for r in selection), sum(r["rows_differ"] for r in selection)
    say(f"selection: {right} of {len(selection)} right, {differ} rows differ by rounding")
    masses = check_masses()
    right, most = sum(r["ok"] for r in masses), max(r["of_bound"] for r in masses)
    say(f"masses: {right} of {len(masses)} right, errors up to {most:.2f} of their bound")
    for row in selection + masses:
        if not row["ok"]:
            say("WRONG", row)
    result: dict = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    result |= {"selection": selection, "masses": masses, "ceiling": ceiling()}
    say(f"read-only reduction {result['ceiling'] / 1e12:.2f} TB/s")
    if args.tune:
        result |= tune()
    else:
        result["select"] = [
            row for name, s in SELECT_SHAPES.items() for row in time_selection(name, s, xla=name in BESIDE_XLA)
        ]
        result["audit"] = [time_masses(name, s) for name, s in AUDIT_MASS_SHAPES.items()]
    table(result)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


def table(result: dict) -> None:
    """What was timed, a line each."""
    for r in result["select"]:
        twin = f" | xla {r['xla_us']:7.1f} us, {r['xla_launches']} launches" if "xla_us" in r else ""
        print(
            f"{r['shape']:28} {r['name']:5} {r['us']:6.1f} us | {r['all_us']:6.1f} us, {r['launches']} launches{twin}"
        )
    for r in result["audit"]:
        speed = f"{r['tb_s']:.2f} TB/s ({r['tb_s'] * 1e12 / result['ceiling']:.0%})"
        units = f"{r['units']:6} units {r['us']:6.1f} us {speed}"
        config = " ".join(f"{k} {r[k]}" for k in ("blocks", "stages", "checksums") if k in r)
        print(f"{r['shape']:28} {units} | {r['all_us']:6.1f} us, {r['launches']} launches {config}")


if __name__ == "__main__":
    main()
