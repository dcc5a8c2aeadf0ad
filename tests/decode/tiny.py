"""A small random model with peaked attention, and requests on it, for tests of the decode loop."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from models import decoder
from models.config import ModelConfig
from skg_jax.audit import AuditConfig, HeadWeights
from skg_jax.decode import Program, Requests, decode_loop, first_rows, prefill
from skg_jax.guard.policy import Policy
from skg_jax.kv import cache as kv
from skg_jax.sampling import SamplingParams
from skg_jax.selectors import topk
from skg_jax.stats import spending

CONFIG = ModelConfig(
    architecture="llama", vocab_size=97, embed_dim=32, mlp_dim=48, num_layers=3, num_heads=6, num_kv_heads=2,
    head_dim=16, rope_theta=1e4, rope_scaling=None, norm_eps=1e-5, qkv_bias=False, tied_embeddings=False,
    max_context=4096,
)  # fmt: skip
CHUNK, CAPACITY = 128, 1024
PROGRAM = Program(CONFIG, "guarded", topk(), AuditConfig(rate=0.05), True, 8, CHUNK)


@functools.cache
def params():
    """Queries and keys are scaled up, so that attention is far from flat and selection matters."""
    made = decoder.init(CONFIG, jax.random.key(7))
    attn = made["layers"]["attn"]
    for name in ("q", "k"):
        attn[name]["kernel"] = attn[name]["kernel"] * 25.0
    made["embed"]["embedding"] = made["embed"]["embedding"] * 50.0
    made["head"]["kernel"] = made["head"]["kernel"] * 50.0
    return made


def prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).astype(np.int32)


def requests(
    prompts, steps: int, tau, *, alpha=0.01, spares=64, attempts=None, to_exact=True, tiers=(0.15, 0.4), seed=0,
    omega=None, uncovered=0.0, dense_below=0,
) -> Requests:  # fmt: skip
    """`tau` and `dense_below` per row. Greedy."""
    rows = len(prompts)
    plan = spending.uniform(alpha, attempts or steps + spares)
    schedule = jax.tree.map(lambda x: jnp.stack([x] * rows), spending.schedule(plan))
    policy = Policy(
        tau=jnp.asarray(np.broadcast_to(tau, rows), jnp.float32),
        budgets=jnp.broadcast_to(jnp.asarray([*tiers, jnp.inf], jnp.float32), (rows, len(tiers) + 1)),
        spares=jnp.full(rows, spares, jnp.int32),
        to_exact=jnp.full(rows, to_exact),
        dense_below=jnp.asarray(np.broadcast_to(dense_below, rows), jnp.int32),
        schedule=schedule,
    )
    heads = jnp.full((CONFIG.num_layers, CONFIG.num_heads), (1 - uncovered) / (CONFIG.num_layers * CONFIG.num_heads))
    zero = jnp.zeros(rows)
    return Requests(
        key=jax.vmap(lambda s: jax.random.fold_in(jax.random.key(seed), s))(jnp.asarray([int(p[0]) for p in prompts])),
        last=jnp.asarray([len(p) + steps for p in prompts], jnp.int32),
        stop=jnp.full((rows, 1), -2, jnp.int32),
        sampling=SamplingParams(zero, zero.astype(jnp.int32), zero + 1, zero),
        policy=policy,
        weights=HeadWeights(heads if omega is None else omega, jnp.float32(uncovered)),
    )


def start(prompts, asked: Requests, program=PROGRAM, capacity=CAPACITY):
    """Prefilled cache and rows."""
    cache = kv.init(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, len(prompts), capacity)
    first = []
    for row, ids in enumerate(prompts):
        for at in range(0, len(ids), CHUNK):
            chunk = ids[at : at + CHUNK]
            tokens = np.zeros((1, CHUNK), np.int32)
            tokens[0, : len(chunk)] = chunk
            index = [jnp.int32(i) for i in (row, at, len(chunk))]
            cache, token, _ = prefill(params(), cache, asked, tokens, *index, program=program)
        first.append(token)
    position = jnp.asarray([len(p) for p in prompts], jnp.int32)
    return cache, first_rows(asked.policy, jnp.stack(first), position, position < 0)


def finish(cache, rows, asked: Requests, program=PROGRAM, most=64):
    """Decode to the end. Returns cache, rows and the joined log as numpy arrays [attempts, B]."""
    logs = []
    for _ in range(most):
        cache, rows, log = decode_loop(params(), cache, asked, rows, program=program)
        log = jax.device_get(log)
        used = int(log.active.any(1).sum())
        logs.append(jax.tree.map(lambda x, used=used: x[:used], log))
        if bool(rows.done.all()):
            break
    return cache, rows, jax.tree.map(lambda *parts: np.concatenate(parts), *logs)


def tokens_of(log, row: int) -> list[int]:
    return [int(t) for t in log.token[:, row] if t >= 0]
