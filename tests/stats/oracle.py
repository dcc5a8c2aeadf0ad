"""Independent float64 references, and the populations that the statistical tests share."""

import itertools
import math
from typing import NamedTuple

import numpy as np

BETAS = (1.0, 0.95, 0.85, 0.7, 0.5, 0.3, 0.15, 0.05)
WEIGHTS = (0.5, 0.15, 0.10, 0.08, 0.07, 0.05, 0.03, 0.02)
ALPHAS = (0.1, 0.05, 0.01, 0.001)
UNITS = 60


def wealth(slack, prob, spent, room, betas=BETAS, weights=WEIGHTS):
    """Wealth after each draw as a plain product of factors (no logs), inf once the room is gone."""
    capital, out, dead = np.array(weights, np.float64), [], False
    for r, q, s in zip(slack, prob, spent, strict=True):
        dead = dead or room - s <= 0
        if not dead:
            capital = capital * (1 - np.array(betas) + np.array(betas) * r / (q * (room - s)))
        out.append(math.inf if dead else capital.sum())
    return np.array(out)


def wor_inputs(slack, p):
    """(prob, spent) of successive draws without replacement, p summing to 1 over the population."""
    left = 1 - np.concatenate([[0.0], np.cumsum(p)[:-1]])
    return p / left, np.concatenate([[0.0], np.cumsum(slack)[:-1]])


def upper(slack, prob, spent, cap, floor, known, alpha):
    """Bisection for the smallest m rejected so far, to 2**-60 of the range, without any guard."""
    low, high = floor, cap - known
    for _ in range(60):
        middle = (low + high) / 2
        rejected = max(wealth(slack, prob, spent, cap - middle)) >= 1 / alpha
        low, high = (low, middle) if rejected else (middle, high)
    return high


def orders(p):
    """All orders of the units with their Plackett-Luce probabilities."""
    perms = np.array(list(itertools.permutations(range(len(p)))))
    q = p[perms] / (1 - np.concatenate([np.zeros((len(perms), 1)), np.cumsum(p[perms], 1)[:, :-1]], 1))
    return perms, q.prod(1)


class Population(NamedTuple):
    """UNITS units, float32 values that keep lo <= x <= cap; some are padding."""

    x: np.ndarray
    lo: np.ndarray
    cap: np.ndarray
    valid: np.ndarray


def population(name: str) -> Population:
    rng = np.random.default_rng(7)
    rank = 1.0 + np.arange(UNITS)
    x = {
        "flat": np.ones(UNITS),
        "lognormal": rng.lognormal(0, 2, UNITS),
        "zipf": rank**-1.2,
        "needle": np.where(rank == 17, 10.0, 0.05),
        "loose needle": np.where(rank == 17, 10.0, 0.05),
        "range": np.logspace(-12, 0, UNITS),
    }.get(name, rng.random(UNITS) + 0.1)
    cap = x * rng.uniform(1.5, 20, UNITS)
    valid = np.ones(UNITS, bool)
    if name == "needle":
        cap[16] = 1.3 * x[16]
    if name == "loose needle":
        cap[16] = 20 * x[16]
    if name == "half at bound":
        cap[::2] = x[::2]
    if name == "all at bound":
        x = cap
    if name == "all zero":
        x = np.zeros(UNITS)
    if name == "one unit":
        valid = rank == 5
    if name == "masked":
        valid = rank % 3 > 0
    x = x.astype(np.float32)
    cap = np.maximum(cap.astype(np.float32), x)
    lo = np.zeros(UNITS, np.float32)
    return Population(x, lo, cap, valid)


POPULATIONS = (
    "flat",
    "lognormal",
    "zipf",
    "needle",
    "loose needle",
    "half at bound",
    "all at bound",
    "all zero",
    "one unit",
    "range",
    "masked",
)
