"""Pools of hard blocks to be sealed, poisoned where nothing may be read, and what their metadata must say."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.kv import cache as kv
from skg_jax.kv import integrity
from skg_jax.kv.sketch import Sketch
from skg_jax.pallas.seal import Metadata
from skg_jax.types import BLOCK
from tests.kv import oracle
from tests.kv.hard_keys import hard_keys
from tests.kv.oracle import f64

LARGEST = 65504.0  # of float16
TINY = 2.0**-125  # what a host that flushes subnormal numbers may lose in a channel


class Case(NamedTuple):
    k: jax.Array  # [L, P, K, 64, H]
    v: jax.Array
    metadata: Metadata
    blocks: jax.Array  # [n]
    full: jax.Array  # [n]

    @property
    def sealed(self) -> np.ndarray:
        """Blocks that are sealed."""
        inside = (np.asarray(self.blocks) >= 0) & (np.asarray(self.blocks) < self.k.shape[1])
        return np.asarray(self.blocks)[inside & np.asarray(self.full)]


def blocks_of_keys(dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Named blocks [64, H] in float32: those of the sketch's tests and what only 16-bit pools provoke."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(BLOCK, dim)).astype(np.float32)
    token, channel = np.arange(BLOCK)[:, None], np.arange(dim)
    mark = lambda value, at=9: np.where((token == at) & (channel == dim - 1), value, normal)
    return hard_keys(dim, seed) | {
        "largest of float16": np.where((token == 0) & (channel == 0), LARGEST, mark(-LARGEST, 1)),
        "everything at the ends": np.where(normal < 0, -LARGEST, LARGEST),
        "subnormal of float16": np.round(normal * 4) * 2.0**-24,
        "below float16 beside normal": np.where(channel % 3 == 0, normal * 1e-8, normal),
        "one channel far from its step": np.where(channel == 5, 60000 + np.round(normal) * 32, normal),
        "one key too large": mark(3e6),
        "one key too small": mark(-1e6),
        "infinite": mark(np.inf),
        "not a number": mark(np.nan, 63),
    }


def make(dim: int, dtype, heads: int, count: int, full: np.ndarray, seed: int = 0, layers: int = 2) -> Case:
    """`count` blocks of which some are full, hard keys dealt out over the units; the rest of the pools is NaN."""
    rng = np.random.default_rng(seed)
    pool = count + 3
    blocks = rng.permutation(pool)[:count].astype(np.int32)
    whole = np.full((2, layers, pool, heads, BLOCK, dim), np.nan, np.float32)
    hard = list(blocks_of_keys(dim, seed).values())
    for i, at in enumerate(np.ndindex(layers, int(full.sum()), heads)):
        unit = at[0], blocks[full][at[1]], at[2]
        whole[0][unit], whole[1][unit] = hard[i % len(hard)], rng.normal(size=(BLOCK, dim)) * 10.0 ** (i % 5 - 2)
    k, v = (_as_pool(x, dtype) for x in whole)
    return Case(k, v, _garbage(rng, (layers, pool, heads), dim), jnp.asarray(blocks), jnp.asarray(full))


def _as_pool(x: np.ndarray, dtype) -> jax.Array:
    with np.errstate(over="ignore"):
        return jnp.asarray(x.astype(jnp.dtype(dtype)))


def _garbage(rng, lead: tuple[int, int, int], dim: int) -> Metadata:
    """Arbitrary bits, NaN among them."""
    layers, pool, heads = lead
    shapes = jax.eval_shape(lambda: kv.metadata(kv.init(layers, heads, dim, 1, pool * BLOCK)))
    fill = lambda x: jnp.asarray(np.frombuffer(rng.bytes(x.size * x.dtype.itemsize), x.dtype).reshape(x.shape))
    return jax.tree.map(fill, shapes)


def units(case: Case, found: Metadata) -> tuple[Any, np.ndarray, np.ndarray]:
    """Metadata, keys and values of all sealed units, [units, ...]."""
    pick = lambda x: np.asarray(x)[:, case.sealed].reshape(-1, *x.shape[3:])
    return jax.tree.map(pick, found), pick(case.k), pick(case.v)


def fitting(keys: np.ndarray) -> np.ndarray:
    """Which blocks [n, 64, H] have a sketch: grid and residuals within float16 (no case is near the limit)."""
    keys = f64(keys)
    with np.errstate(all="ignore"):
        low = np.minimum(keys.min(-2), LARGEST)
        step = (keys.max(-2) - low) / 15
        missed = (keys - low[:, None]) - np.round((keys - low[:, None]) / step[:, None]) * step[:, None]
        reach = np.linalg.norm(np.where(step[:, None] > 0, missed, 0), axis=-1).max(-1)
        return (low >= -LARGEST).all(-1) & (step <= LARGEST).all(-1) & (reach <= LARGEST)


def faults(found, keys: np.ndarray, values: np.ndarray) -> set[str]:
    """What is wrong with metadata from `units`: bounds that do not hold, or are looser than rounding asks."""
    fits = fitting(keys)
    wrong = {f"{name} of what does not fit" for name in Sketch._fields if getattr(found, name)[~fits].any()}
    wrong |= _faults_of_sketch(Sketch(*(x[fits] for x in found[: len(Sketch._fields)])), f64(keys)[fits])
    for name, x, norm in (("key norm", keys, found.key_norm), ("value norm", values, found.value_norm)):
        with np.errstate(all="ignore"):
            exact = np.linalg.norm(f64(x), axis=-1).max(-1)
        close = (exact <= norm) & (norm <= 1.0001 * exact + 2.0**-55)
        wrong |= set() if (close | (np.isnan(exact) & np.isnan(norm))).all() else {name}
    for name, x, sums in (("key sums", keys, found.k_sum), ("value sums", values, found.v_sum)):
        wrong |= set() if np.array_equal(sums, integrity.checksum(jnp.asarray(x))) else {name}
    return wrong


def _faults_of_sketch(record, keys: np.ndarray) -> set[str]:
    low, step, residual, norms = (f64(x) for x in (record.low, record.step, record.residual, record.norms))
    missed = np.abs(keys - oracle.decode(record))
    norm, steps = np.linalg.norm(missed, axis=-1), np.where(step > 0, step, 1)[:, None]
    size, in_steps = np.linalg.norm(step, axis=-1)[:, None], np.linalg.norm(missed / steps, axis=-1).max(-1)
    grid = np.linalg.norm(np.abs(low) + 15 * step, axis=-1)
    gap = (keys.max(-2) - low) / 15
    above = lambda x: f64(np.nextafter(x, np.float16(np.inf)))
    below = lambda x: f64(np.nextafter(x, np.float16(-np.inf)))
    lost = TINY * keys.shape[-1] ** 0.5
    holds = {
        "low": (low <= keys.min(-2)) & ((above(record.low) > keys.min(-2)) | (low == LARGEST)),
        "step": (step >= gap - TINY) & ((step == 0) | (below(record.step) <= gap * (1 + 2e-5))),
        "codes": missed <= step[:, None] / 2 * (1 + 1e-5) + TINY,
        "residual": norm <= residual + lost,
        "loose residual": residual <= norm * (1 + 2.0**-9) + size * 2.0**-18 + 2.0**-24,
        "rho": in_steps <= norms[:, 0] + lost,
        "loose rho": norms[:, 0] <= in_steps * 1.0001 + 2.0**-17 * keys.shape[-1] ** 0.5,
        "norm": (grid <= norms[:, 1]) & (norms[:, 1] <= grid * 1.0001),
        "rest of norms": norms[:, 2:] == 0,
    }
    return {name for name, held in holds.items() if not held.all()}


def rest_is_untouched(case: Case, found: Metadata) -> bool:
    """Whether metadata of all other blocks kept their bits."""
    bits = lambda x: np.asarray(x).view(f"u{np.asarray(x).dtype.itemsize}")
    others = lambda x: np.delete(bits(x), case.sealed, axis=1)
    return all(np.array_equal(others(a), others(b)) for a, b in zip(case.metadata, found, strict=True))
