"""Blocks of keys and queries that provoke the ways a quantised bound breaks."""

import numpy as np

from skg_jax.types import BLOCK


def hard_keys(head_dim: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Named blocks [64, H] in float32."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=(BLOCK, head_dim))
    codes = rng.integers(0, 15, size=(BLOCK, head_dim))
    low = rng.integers(-2048, 2048, size=head_dim) / 256  # exact in float16, and so is 1/16
    outliers = normal.copy()
    outliers[:, rng.choice(head_dim, 3, replace=False)] += np.array([280.0, -130.0, 61.0])
    between = np.float16(rng.uniform(1, 2, size=(BLOCK, head_dim))).astype(np.float64) + 2.0**-11
    blocks = {
        "normal": normal,
        "on the grid": low + codes / 16,
        "half-way between codes": np.vstack([low[None], low[None] + 15 / 16, (low + (codes + 0.5) / 16)[2:]]),
        "half-way between float16 numbers": between,
        "half-way and negative": -between,
        "constant channels": np.where(np.arange(head_dim) % 2, np.pi, normal),
        "every key the same": np.broadcast_to(normal[:1] * 37, normal.shape),
        "offset far above the spread": 1000 + normal * 1e-3,
        "offset of either sign": rng.choice([-3000.0, 3000.0], head_dim) + normal,
        "scale 1e-6": normal * 1e-6,
        "below the smallest float16": normal * 1e-9,
        "scale 1e4": np.clip(normal, -6, 6) * 1e4,
        "a range close to all of float16": np.where(rng.random(normal.shape) < 0.1, 65504.0, -65504.0),
        "one key above float16": np.where(np.arange(BLOCK)[:, None] == 9, 1e5, normal),
        "outlier channels": outliers,
        "one outlier key": np.where(np.arange(BLOCK)[:, None] == 9, normal * 300, normal),
        "zero": np.zeros_like(normal),
    }
    return {name: block.astype(np.float32) for name, block in blocks.items()}


def hard_queries(keys: np.ndarray, missed: np.ndarray, groups: int, seed: int = 0) -> list[np.ndarray]:
    """Query groups [G, H] for keys [64, H] whose codes miss `missed` [64, H]: zero, random, aimed, far too large."""
    rng = np.random.default_rng(seed)
    shape = (groups, keys.shape[1])
    normal, at = rng.normal(size=shape), rng.integers(BLOCK, size=groups)
    unit = lambda x: x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-30)
    reach = np.sqrt(keys.shape[1]) / max(np.abs(keys).max(), 1e-6)
    queries = [
        np.zeros(shape),
        normal,
        normal * 1e-4,
        np.eye(keys.shape[1])[rng.integers(keys.shape[1], size=groups)] * 5,
        unit(keys[at].astype(np.float64)) * 30,
        unit(missed[at]) * 100,
        -unit(missed[at]) * 100,
        np.sign(normal) * np.sign(missed[at]) * 8,
        unit(normal) * reach * 1e5,  # logits to about 1e5, of either sign
        -unit(keys[at].astype(np.float64)) * reach * 1e5,
    ]
    return [q.astype(np.float32) for q in queries]
