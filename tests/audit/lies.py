"""Ways in which an audit could be misled, as data: the honest and the misled program are one compiled program."""

import contextlib
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from skg_jax.kv import sketch
from skg_jax.stats import blocked


class Lies(NamedTuple):
    """`narrow`: nats taken off every upper bound. `flat`: share of a uniform law in what is claimed of draws."""

    narrow: np.ndarray | jax.Array
    flat: np.ndarray | jax.Array


def lies(narrow: float = 0.0, flat: float = 0.0) -> Lies:
    return Lies(np.asarray(narrow, np.float32), np.asarray(flat, np.float32))  # one dtype: one compilation


HONEST = lies()


@contextlib.contextmanager
def told(told: Lies):
    """While tracing inside: bounds and laws are those of the lies."""
    scores_of, probs_of = sketch.page_scores, blocked.probs

    def page_scores(*args, **kwargs):
        scores = scores_of(*args, **kwargs)
        return scores._replace(upper=scores.upper - told.narrow)

    def probs(law, index, like):
        p = probs_of(law, index, like)
        uniform = (p > 0) / jnp.maximum((law.k > 0).sum(), 1).astype(p.dtype)
        return jnp.where(told.flat > 0, (1 - told.flat) * p + told.flat * uniform, p)

    with mock.patch.object(sketch, "page_scores", page_scores), mock.patch.object(blocked, "probs", probs):
        yield
