"""What a step really lost, in float64, from the tokens in the cache and the pages that were read."""

from typing import NamedTuple

import numpy as np

from skg_jax.types import BLOCK
from tests.audit.synthetic import BLOCKS, LENGTHS, H, K, L, N, Step
from tests.kv import oracle as keys_oracle
from tests.kv.oracle import f64


class Truth(NamedTuple):
    """Per layer, row and query head [L,B,N]; per page too [L,B,N,M]."""

    log_mass: np.ndarray  # of pages, -inf where there is no token
    unread: np.ndarray
    delta: np.ndarray  # dropped mass
    x: np.ndarray  # of unread pages, with the sketch's lower bounds in exact arithmetic
    out: np.ndarray  # [L,B,N,H] over the pages read
    dense: np.ndarray  # [L,B,N,H] over all pages


def truth(step: Step, page_size: int) -> Truth:
    parts = [_row(step, row, page_size) for row in range(len(LENGTHS))]
    return Truth(*(np.stack(x, axis=1) for x in zip(*parts, strict=True)))


def _row(step: Step, row: int, page_size: int):
    blocks = np.asarray(step.cache.page_table)[row]
    own = lambda pool: np.moveaxis(np.asarray(pool)[:, blocks], 2, 1)  # [L, K, blocks, ...]
    by_head = lambda x: f64(own(x)).reshape(L, K, BLOCKS * BLOCK, H)[..., : LENGTHS[row], :].repeat(N // K, axis=1)
    k, v, q = by_head(step.cache.k), by_head(step.cache.v), f64(step.q)[:, row]
    logit = (k @ q[..., None])[..., 0] / np.sqrt(H)
    mass = np.exp(logit - logit.max(-1, keepdims=True))
    padded = np.pad(mass, ((0, 0), (0, 0), (0, BLOCKS * BLOCK - LENGTHS[row])))
    pages = padded.reshape(L, N, -1, page_size).sum(-1)
    read = np.stack([np.asarray(step.selection.read, bool)[i, row] for i in range(L)]).repeat(N // K, axis=1)
    unread = ~read & (pages > 0)
    seen = read.repeat(page_size, axis=-1)[..., : LENGTHS[row]]
    selected, total = (mass * seen).sum(-1), mass.sum(-1)
    mean = lambda weight: (weight[..., None] * v).sum(-2) / weight.sum(-1)[..., None]
    lower = _lower(step, own, q, page_size) - logit.max(-1, keepdims=True)
    lower = np.where(unread, np.exp(lower), 0)
    rest = selected[..., None] + lower.sum(-1, keepdims=True) - lower
    x = np.where(unread, pages / (rest + pages), 0)
    with np.errstate(divide="ignore"):
        log_mass = np.log(pages) + logit.max(-1, keepdims=True)
    return log_mass, unread, 1 - selected / total, x, mean(mass * seen), mean(mass)


def _lower(step: Step, own, q: np.ndarray, page_size: int) -> np.ndarray:
    """Lower log-mass bounds [L,N,M] of sealed blocks."""
    record = type(step.cache.sketch)(*(own(x) for x in step.cache.sketch))
    grouped = q.reshape(L, K, 1, N // K, H)
    return np.moveaxis(keys_oracle.bounds(grouped, record, page_size)[0], 3, 2).reshape(L, N, -1)
