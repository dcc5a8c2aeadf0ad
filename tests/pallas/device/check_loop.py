"""A whole guarded attempt on the GPU: kernels against XLA, on the same cache.

    python -m tests.pallas.device.check_loop

A model of few layers whose heads have Llama-3.1-8B's shape, synthetic attention, two rows. Exits with 1 on a
difference.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

import jax
import numpy as np

from models import decoder, published
from skg_jax.bench import steps, synthesis
from skg_jax.decode import Program
from skg_jax.decode.attempt import sparse_step
from skg_jax.guard import GuardConfig
from skg_jax.kv import cache as kv
from skg_jax.selectors import topk

CONTEXT, POSITION = 8192, 8000
BOTH = ("xla", "mosaic_gpu")


@functools.partial(jax.jit, static_argnames="program", donate_argnames="cache")
def step(params, cache, requests, rows, program):
    got, evidence = sparse_step(params, kv.touch(cache, rows.position), requests, rows, program)
    return got._replace(cache=got.cache), evidence


def units_relative(evidence, omega: np.ndarray) -> list[float]:
    """Least and largest relative distance of the units' bounds from those in float64, outward positive."""
    layers, batch, kv_heads, group, _ = evidence.log_lower.shape
    of_head = lambda x: np.float64(x).reshape(layers, -1, kv_heads, group, 1)
    unread, selected = evidence.unread[..., None, :], of_head(evidence.log_selected)
    low, high = (np.exp(np.minimum(np.float64(x) - selected, 700)) for x in (evidence.log_lower, evidence.log_upper))
    rest = 1 + np.where(unread, low, 0).sum(-1, keepdims=True) - low
    lower, upper = ((of_head(omega) * x / (rest + x)).sum(3)[evidence.unread] for x in (low, high))
    gaps = np.concatenate([
        1 - evidence.lower[evidence.unread] / lower, evidence.upper[evidence.unread] / upper - 1
    ])  # fmt: skip
    return [float(gaps.min()), float(gaps.max())]


def main() -> int:
    config = synthesis.synthetic_config(published.get("llama-3.1-8b"))
    config = dataclasses.replace(config, num_layers=3, embed_dim=512, mlp_dim=512, vocab_size=512)
    spreads = synthesis.head_spreads(synthesis.profile("smollm2-135m-instruct"), config)
    along = synthesis.directions(config, jax.random.key(1))
    params = decoder.unstack(synthesis.synthetic_params(config, spreads, along, jax.random.key(0)))
    guard = GuardConfig(rounds=(1,), audit_rate=0.05)
    found = {}
    for name in BOTH:
        cache = synthesis.synthetic_cache(config, along, 2, CONTEXT, POSITION // 64 * 64, jax.random.key(2))
        program = Program(model=config, mode="guarded", selector=topk(name), audit=guard.audit(16), implementation=name)
        asked = steps.requests(config, 2, guard, 0.27, 0.1, 100)
        got, evidence = jax.device_get(step(params, cache, asked, steps.start(2, POSITION), program))
        found[name] = got, evidence
    (a, first), (b, second) = (found[name] for name in BOTH)
    relative = lambda x, y: float(np.linalg.norm(np.float64(x) - np.float64(y)) / np.linalg.norm(np.float64(x)))
    exact = _exact_log_mass(second, b.cache)
    inside = (exact >= second.log_lower - 1e-12) & (exact <= second.log_upper + 1e-12)
    unread = np.broadcast_to(second.unread[..., None, :], exact.shape)
    report = {
        "hidden_relative": relative(a.hidden, b.hidden),
        "selected": [np.asarray(x.selected).tolist() for x in (a, b)],
        "selection_differs": float((first.unread != second.unread).mean()),
        "log_selected_max": float(np.abs(first.log_selected - second.log_selected).max()),
        "bound": [np.asarray(x.report.bound).tolist() for x in (a, b)],
        "bound_alone": [np.asarray(x.report.cap).tolist() for x in (a, b)],
        "accepted": [np.asarray(x.report.accepted).tolist() for x in (a, b)],
        "violated": [np.asarray(x.report.violated).tolist() for x in (a, b)],
        "corrupt": [np.asarray(x.report.corrupt).tolist() for x in (a, b)],
        "units_outside_their_bounds": int((unread & ~inside).sum()), "units": int(unread.sum()),
        "units_relative": units_relative(second, np.asarray(asked.weights.omega, np.float64)),
        "appended_equal": bool((a.cache.k.view(np.uint16) == b.cache.k.view(np.uint16)).mean() > 0.9999),
    }  # fmt: skip
    print(json.dumps(report, indent=1))
    good = (
        report["hidden_relative"] < 2e-2
        and report["selection_differs"] < 2e-3
        and not np.asarray(b.report.violated).any()
        and (np.asarray(b.report.corrupt) < 0).all()
        and report["units_outside_their_bounds"] == 0
        and all(0 <= gap < 1e-4 for gap in report["units_relative"])
    )
    print("PASS" if good else "FAIL")
    return 0 if good else 1


def _exact_log_mass(evidence, cache) -> np.ndarray:
    """Log-masses of all pages in float64, [L, B, K, G, M], from the queries and keys that the step had."""
    k = np.asarray(cache.k, np.float32).astype(np.float64)[:, np.asarray(cache.page_table)]  # [L, B, Mb, K, 64, H]
    layers, batch, blocks, heads, _, dim = k.shape
    q = np.asarray(evidence.q, np.float32).astype(np.float64).reshape(layers, batch, heads, -1, dim)
    logit = np.einsum("lbkgh,lbmkth->lbkgmt", q, k, optimize=True) / dim**0.5
    logit = logit.reshape(*logit.shape[:4], blocks * 4, 16)
    top = logit.max(-1)
    return top + np.log(np.exp(logit - top[..., None]).sum(-1))


if __name__ == "__main__":
    sys.exit(main())
