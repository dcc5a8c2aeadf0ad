"""Random pools, queries and units for the audit mass kernel, and their masses in float64."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from skg_jax.pallas.audit_mass import UnitMasses
from skg_jax.types import Array


class Case(NamedTuple):
    q: Array  # [L, B, N, H]
    k: Array  # [L, P, K, 64, H]
    units: tuple[Array, ...]  # layer, row, head, block, part: int32 [n]
    valid: np.ndarray  # [n]


def make(sizes, units: int, page_size: int, dtype=jnp.bfloat16, norm: float = 1.0, padding=(), seed: int = 0) -> Case:
    """sizes: L, B, N, K, P, H. Blocks that no valid unit lies in are NaN; `padding` units are out of range."""
    layers, batch, heads, kv_heads, blocks, dim = sizes
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(layers, batch, heads, dim)) * norm
    k = rng.normal(size=(layers, blocks, kv_heads, 64, dim)) * norm
    limits = (layers, batch, kv_heads, blocks, 64 // page_size)
    index = np.stack([rng.integers(0, most, units) for most in limits])
    for place, unit in enumerate(padding):
        index[place % 5, unit] = limits[place % 5] if place % 2 else -1
    valid = np.ones(units, bool)
    valid[list(padding)] = False
    seen = np.zeros((layers, blocks, kv_heads), bool)
    seen[index[0, valid], index[3, valid], index[2, valid]] = True
    k[~seen] = np.nan
    return Case(jnp.asarray(q, dtype), jnp.asarray(k, dtype), tuple(jnp.asarray(i, jnp.int32) for i in index), valid)


def keys_and_queries(case: Case, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys [v, C, H] and queries [v, G, H] of the valid units, in the type of the pools."""
    layer, row, head, block, part = (np.asarray(i)[case.valid] for i in case.units)
    k, q = np.asarray(case.k), np.asarray(case.q)
    tokens = k[layer, block, head].reshape(len(layer), -1, page_size, k.shape[-1])
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    return tokens[np.arange(len(layer)), part], grouped[layer, row, head]


def exact(case: Case, page_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Log-masses [v, G] of the valid units in float64, and |q||k| / sqrt(H) with the largest key of each."""
    keys, q = (x.astype(np.float64) for x in keys_and_queries(case, page_size))
    logit = np.einsum("vgh,vch->vgc", q, keys) / np.sqrt(q.shape[-1])
    top = logit.max(-1)
    reach = np.linalg.norm(q, axis=-1) * np.linalg.norm(keys, axis=-1).max(-1)[:, None] / np.sqrt(q.shape[-1])
    return top + np.log(np.exp(logit - top[..., None]).sum(-1)), reach


def padding_is_blank(found: UnitMasses, case: Case) -> bool:
    """Whether units out of range have neither mass nor checksum."""
    return not any(np.asarray(x)[~case.valid].any() for x in found)
