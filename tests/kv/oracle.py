"""Float64 arithmetic on what the cache holds, written token by token from the definitions."""

import numpy as np

from skg_jax.kv.sketch import Sketch


def f64(x) -> np.ndarray:
    """A copy in float64, from bfloat16 and float16 too."""
    return np.asarray(x).astype(np.float64)


def decode(record: Sketch) -> np.ndarray:
    """The copy of the keys, [..., 64, H], in exact arithmetic."""
    words, dim = np.asarray(record.codes), record.low.shape[-1]
    codes = np.zeros((*words.shape[:-1], dim))
    for d in range(dim):
        chunk, word, pair, odd = d % 32 // 8, d // 32, d % 8 // 2, d % 2
        at = chunk * (words.shape[-1] // 4) + word
        codes[..., d] = words[..., at] >> (4 * pair + 16 * odd) & 15
    return f64(record.low)[..., None, :] + codes * f64(record.step)[..., None, :]


def logits(q, keys) -> np.ndarray:
    """q [..., G, H], keys [..., T, H] -> [..., G, T]."""
    return f64(q) @ np.swapaxes(f64(keys), -1, -2) / np.sqrt(np.shape(q)[-1])


def log_mass(score: np.ndarray, page_size: int) -> np.ndarray:
    """log of the sum of exp over each page, [..., T] -> [..., T/C]."""
    pages = score.reshape(*score.shape[:-1], -1, page_size)
    top = pages.max(-1)
    return top + np.log(np.exp(pages - top[..., None]).sum(-1))


def bounds(q, record: Sketch, page_size: int, kind: str = "sketch") -> tuple[np.ndarray, np.ndarray]:
    """The sketch's bounds without any allowance for rounding."""
    q, step, low = f64(q), f64(record.step)[..., None, :], f64(record.low)[..., None, :]
    scale = np.sqrt(q.shape[-1])
    score = logits(q, decode(record))
    by_norm = np.linalg.norm(q, axis=-1)[..., None] * f64(record.residual)[..., None, :] / scale
    by_step = (np.abs(q) * step).sum(-1)[..., None] / 2 / scale
    ends = q * low / scale, q * (low + 15 * step) / scale
    by_group = np.linalg.norm(q * step, axis=-1)[..., None] * f64(record.norms)[..., 0, None, None] / scale
    reach = np.minimum(by_norm, by_step) if kind == "sketch" else by_group
    lower = np.maximum(score - reach, np.minimum(*ends).sum(-1)[..., None])
    upper = np.minimum(score + reach, np.maximum(*ends).sum(-1)[..., None])
    return log_mass(lower, page_size), log_mass(upper, page_size)
