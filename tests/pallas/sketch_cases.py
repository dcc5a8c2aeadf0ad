"""Pools of sketches with everything poisoned that must not be read, and what their pages weigh in float64."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.kv import sketch
from skg_jax.kv.sketch import Sketch
from skg_jax.pallas.sketch_score import Bounds
from skg_jax.types import BLOCK
from tests.kv import oracle
from tests.kv.oracle import f64

LAYER, LAYERS = 1, 2
WRONG = 12345.0


class Case(NamedTuple):
    q: jax.Array  # [B, K, G, H]
    record: Sketch  # [L, P, K, ...]
    keys: np.ndarray  # [P, K, 64, H] of LAYER
    table: jax.Array
    known: jax.Array  # [B, Mb]
    length: jax.Array

    def arguments(self, page_size: int) -> tuple:
        """Of `sketch_score`; the room for bounds holds WRONG."""
        batch, heads, group, _ = self.q.shape
        room = jnp.full((LAYERS, batch, heads, 2, group, self.table.shape[1] * (BLOCK // page_size)), WRONG)
        return self.q, *self.record, self.table, self.known, self.length, jnp.int32(LAYER), room

    def scored(self, page_size: int) -> np.ndarray:
        """Which pages have a score, [B, K, G, M]."""
        pages = (self.in_use & np.asarray(self.known)).repeat(BLOCK // page_size, axis=1)
        return np.broadcast_to(pages[:, None, None], (*self.q.shape[:3], pages.shape[1]))

    @property
    def in_use(self) -> np.ndarray:
        """[B, Mb]"""
        return np.arange(self.table.shape[1]) * BLOCK < np.asarray(self.length)[:, None]


def named(estimate, bounds: Bounds | None) -> dict[str, jax.Array]:
    """Results of `sketch_score` for LAYER; the other layer's bounds must be as they were."""
    if bounds is None:
        return {"estimate": estimate}
    assert (np.asarray(bounds)[1 - LAYER] == WRONG).all()
    return {"estimate": estimate, "lower": bounds[LAYER, :, :, 0], "upper": bounds[LAYER, :, :, 1]}


def make(heads: int, group: int, dim: int, lengths, max_blocks: int, dtype=jnp.bfloat16, seed: int = 0) -> Case:
    """Keys with an offset and a spread of their own in every channel; blocks in random order."""
    rng = np.random.default_rng(seed)
    rows = len(lengths)
    pool = rows * max_blocks
    channel = lambda *shape: rng.normal(size=(1, heads, 1, dim))
    keys = rng.normal(size=(pool, heads, BLOCK, dim)) * np.exp(channel()) + 2 * channel()
    keys = keys.astype(np.float32)
    record, fits = jax.jit(sketch.build)(keys)
    assert np.asarray(fits).all()
    table = rng.permutation(pool).reshape(rows, max_blocks).astype(np.int32)
    q = jnp.asarray(rng.normal(size=(rows, heads, group, dim)), dtype)
    known = jnp.asarray(rng.random(table.shape) < 0.8)
    case = Case(q, record, keys, jnp.asarray(table), known, jnp.asarray(lengths, jnp.int32))
    unused = table[~case.in_use]
    return case._replace(record=jax.tree.map(lambda x: _poisoned(np.asarray(x), unused), record))


def _poisoned(records: np.ndarray, unused: np.ndarray) -> jax.Array:
    """Two layers, of which only LAYER and only blocks in use hold anything but NaN (codes: all ones)."""
    worst = np.nan if records.dtype.kind == "f" else 0xFFFFFFFF
    records = records.copy()
    records[unused] = worst
    other = np.full_like(records, worst)
    return jnp.asarray(np.stack([other, records]))


def expected(case: Case, page_size: int, bound: str) -> dict[str, np.ndarray]:
    """Float64 [B, K, G, M]: exact, estimate, lower, upper without any allowance for rounding, and the allowance."""
    record = jax.tree.map(lambda x: np.asarray(x)[LAYER, np.asarray(case.table)], case.record)  # [B, Mb, K, ...]
    q = f64(case.q)[:, None]
    scale = np.sqrt(q.shape[-1])
    score = oracle.logits(q, oracle.decode(record))
    grid = (np.abs(q) * f64(record.step)[..., None, :]).sum(-1)[..., None] / scale
    if bound == "group":
        size = np.linalg.norm(q * f64(record.step)[..., None, :], axis=-1)
        reach = (size * f64(record.norms)[..., :1])[..., None] / scale
    else:
        by_norm = np.linalg.norm(q, axis=-1)[..., None] * f64(record.residual)[..., None, :] / scale
        reach = np.minimum(by_norm, grid / 2)
    keys = case.keys[np.asarray(case.table)]
    size = np.linalg.norm(q, axis=-1) * f64(record.norms)[..., 1:2] / scale
    by_page = {
        "exact": oracle.log_mass(oracle.logits(q, keys), page_size),
        "estimate": oracle.log_mass(score, page_size),
        "lower": oracle.log_mass(score - reach, page_size),
        "upper": oracle.log_mass(score + reach, page_size),
        "grid": np.repeat(grid, BLOCK // page_size, axis=-1),
        "size": np.repeat(size[..., None], BLOCK // page_size, axis=-1),
    }
    return {name: np.moveaxis(x, 1, 3).reshape(*case.q.shape[:3], -1) for name, x in by_page.items()}
