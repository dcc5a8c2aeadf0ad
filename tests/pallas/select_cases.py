"""Estimates of all kinds for the selection kernel, and the comparison with its twin."""

import jax.numpy as jnp
import numpy as np

from skg_jax.selectors import SelectContext, Selection
from skg_jax.selectors.base import estimated_share
from tests.selectors.contexts import context

ROUNDING = 2e-6  # of a share: sums and exponentials in float32, in two orders


def estimates(kind: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Log-masses [B, K, G, M] of one kind."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=shape)
    if kind == "random":
        return 2 * noise
    if kind == "tied":
        return np.round(1.5 * noise)
    if kind == "equal":
        return np.full(shape, -7.25)
    if kind == "peaked":  # sinks, a recent window, a few needles, and a long tail far below
        page = np.arange(shape[-1])
        tail = 40 + 6 * noise - 50 * rng.random(shape) ** 4
        needle = np.where(rng.random(shape) < 4 / shape[-1], 60.0, 0.0)
        return tail + 45.0 * (page < 1) + 12.0 * (page > shape[-1] - 6) + needle
    if kind == "wide":  # most pages have no share at all
        return 300 * noise
    if kind == "unknown":
        return np.where(rng.random(shape) < 0.7, -np.inf, noise)
    if kind == "nothing":
        return np.full(shape, -np.inf)
    raise ValueError(kind)


KINDS = ("random", "tied", "equal", "peaked", "wide", "unknown", "nothing")


def make(kind: str, shape: tuple[int, ...], total, seed: int = 0, forced: float = 0.03) -> SelectContext:
    """A context whose pages past `total` are poison."""
    estimate = estimates(kind, shape, seed)
    past = np.arange(shape[-1]) >= np.asarray(total)[:, None, None, None]
    must = np.random.default_rng(seed + 1).random((shape[0], shape[-1])) < forced
    return context(np.where(past, np.nan, estimate), total, must)


def misplaced(found: Selection, twin: Selection, ctx: SelectContext) -> tuple[int, float]:
    """How many rows differ, and how far the shares of their differing pages lie apart (relative)."""
    a, b, share = (np.asarray(x) for x in (found.read, twin.read, estimated_share(ctx)))
    apart = 0.0
    for at in np.argwhere((a != b).any(-1)):
        values = share[tuple(at)][(a != b)[tuple(at)]]
        apart = max(apart, float((values.max() - values.min()) / values.max()) if values.max() else 0.0)
    return int((a != b).any(-1).sum()), apart


def consistent(found: Selection) -> bool:
    """Whether list, number and mask are the same set, and the list is filled up as promised."""
    ids, count, read = (np.asarray(x) for x in found)
    pages = ids.shape[-1]
    for at in np.ndindex(*count.shape):
        listed = np.flatnonzero(read[at])
        expected = np.concatenate([listed, np.full(pages - len(listed), pages - 1)])
        if count[at] != len(listed) or (ids[at] != expected).any():
            return False
    return True


def budgets(value: float, batch: int):
    return jnp.full((batch,), value, jnp.float32)
