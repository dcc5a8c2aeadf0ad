"""How tight an audit of one head is, by the law of its draws: the median upper bound on the dropped mass.

    python -m eval.studies.sampling_designs

A head of 1000 unread pages holds `share` of the attention; the page bounds are 20 times too loose on average. Of every
kind 12 populations are made, each is audited 100 times without replacement at alpha = 0.05, and the table shows the
median over populations of the median bound after 16, 32 and 64 reads. Laws:

    pps         in proportion to the bound, with a uniform share of 5%: what the audits use
    pps, 20%    the same with a uniform share of 20%
    80/20       80% of the draws on the boundary, the 5% of the pages that a selector would have taken next, which has
                seen their bounds; 20% on all
    80/20 mass  the same for a selector that has seen their masses, up to noise
    uniform     every page alike
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.stats import kaplan_wald as kw
from skg_jax.stats import sampling

UNITS, POPULATIONS, AUDITS, ALPHA = 1000, 12, 100, 0.05
READS = (16, 32, 64)
LAWS = ("pps", "pps, 20%", "80/20", "80/20 mass", "uniform")
KINDS = ("lognormal", "zipf")
CONFIG = kw.KWConfig(capacity=READS[-1])


def population(kind: str, seed: int, looseness: float = 20.0, total: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    """(masses that sum to `total` of the selected mass, their bounds): a share total / (1 + total) is dropped."""
    rng = np.random.default_rng(seed)
    w = rng.lognormal(0, 2, UNITS) if kind == "lognormal" else 1.0 / np.arange(1, UNITS + 1)
    w *= total / w.sum()
    loose = looseness * rng.lognormal(-(0.7**2) / 2, 0.7, UNITS)
    return w, np.maximum(w * loose, w)


def law_of(name: str, w: np.ndarray, bound: np.ndarray, seed: int) -> jax.Array:
    """Probabilities of the first draw."""
    gap, there = jnp.asarray(bound, jnp.float32), jnp.ones(UNITS, bool)
    shares = {"pps": 0.05, "pps, 20%": 0.2, "uniform": 1.0}
    if name in shares:
        return sampling.pps_probs(gap, there, shares[name])
    score = bound if name == "80/20" else w * np.random.default_rng([seed, 1]).lognormal(0, 0.7, UNITS)
    return sampling.boundary_probs(gap, jnp.asarray(score, jnp.float32), there, 0.8, 0.05)


@jax.jit
def bounds(key, w, bound, law):
    """[AUDITS, 3] upper bounds on the dropped mass after 16, 32 and 64 reads."""
    cap = bound.sum()

    def one(key):
        index = sampling.draw_wor(key, law, READS[-1])
        seen = functools.partial(kw.observe_wor, (bound - w)[index], law[index])

        def after(count):
            state, _ = kw.update_batch(kw.init(CONFIG), seen(jnp.arange(READS[-1]) < count))
            return kw.upper(state, cap, 0.0, -math.log(ALPHA), kw.rounding_guard(cap), CONFIG)

        u = jax.lax.map(after, jnp.asarray(READS))
        return u / (1 + u)

    return jax.lax.map(one, jax.random.split(key, AUDITS))


def medians(kind: str, law: str, seed: int = 0) -> np.ndarray:
    """[3] medians over the populations of the median bounds."""
    found = []
    for i in range(seed, seed + POPULATIONS):
        w, bound = population(kind, i)
        as32 = (jnp.asarray(v, jnp.float32) for v in (w, bound))
        found.append(np.median(bounds(jax.random.key(i), *as32, law_of(law, w, bound, i)), axis=0))
    return np.median(found, axis=0)


def table(kind: str) -> str:
    """One line a law."""
    head = f"{kind:<12}" + "".join(f"{f'n={n}':>8}" for n in READS)
    rows = [f"{law:<12}" + "".join(f"{u:>8.3f}" for u in medians(kind, law)) for law in LAWS]
    return "\n".join([head, *rows])


def main() -> None:
    print("\n\n".join(table(kind) for kind in KINDS))


if __name__ == "__main__":
    main()
