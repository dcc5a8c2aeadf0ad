"""Error probability over the attempts of one request.

`uniform` splits alpha evenly. `ledger` spends half of it evenly and the other half per *failure*: between two failures
the level is constant, and the first false acceptance of such an epoch is the first bad attempt of that epoch, so each
epoch costs its level only once, however many attempts it holds. Sum over all epochs and attempts: at most alpha, under
any adaptive stopping. That a conjunctive claim needs no correction over its parts is the point of SHANGRLA (Stark 2020,
arXiv:1911.10035) and of fixed-sequence testing (Maurer 1995; Wiens 2003).

Note:
    Under the ledger only the budget declared in advance may be quoted; bounds computed on the way are valid one by one
    only.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from skg_jax.stats._types import BoolLike

NO_ALPHA = 1e30  # log(1/alpha) once alpha is 0: out of reach of any wealth, yet finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpendingConfig:
    """A schedule. Raises ValueError when a field is out of range.

    alpha: error probability of the request. attempts: how many attempts it covers. failures: how many epochs of
    constant level the ledger funds, 0 for the even split.
    """

    alpha: float
    attempts: int
    failures: int = 0

    def __post_init__(self):
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is {self.alpha}, but an error probability lies strictly between 0 and 1.")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}, but at least one attempt must be covered.")
        if self.failures < 0:
            raise ValueError(f"failures is {self.failures}, but it must be 0 (even split) or more (ledger).")

    @property
    def levels(self) -> tuple[float, float]:
        """(level of every attempt, extra level while the ledger funds the epoch)."""
        if not self.failures:
            return self.alpha / self.attempts, 0.0
        return self.alpha / (2 * self.attempts), self.alpha / (2 * self.failures)


def uniform(alpha: float, attempts: int) -> SpendingConfig:
    """alpha / attempts for each attempt."""
    return SpendingConfig(alpha=alpha, attempts=attempts)


def ledger(alpha: float, attempts: int, failures: int | None = None) -> SpendingConfig:
    """alpha / (2 attempts) for each attempt, and alpha / (2 failures) more until that many have failed.

    failures: default 2% of the attempts, at least 1.
    """
    return SpendingConfig(alpha=alpha, attempts=attempts, failures=failures or max(1, round(0.02 * attempts)))


class SpendingState(NamedTuple):
    """What a request has spent: the alpha of all epochs and attempts so far, counted failures, counted attempts."""

    spent: Float[Array, ""]
    failures: Int32[Array, ""]
    attempts: Int32[Array, ""]


class Level(NamedTuple):
    """The level of the next attempt. log_inv_alpha is rounded up, and 1e30 when alpha is 0."""

    alpha: Float[Array, ""]
    log_inv_alpha: Float[Array, ""]


def init(config: SpendingConfig) -> SpendingState:
    del config  # nothing is spent yet, under any schedule
    return SpendingState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def next_alpha(config: SpendingConfig, state: SpendingState) -> Level:
    """The level of the next attempt; 0 once the attempts are used up. Fixed before that attempt's key is used."""
    each, extra = config.levels
    choices = np.array([0.0, each, each + extra])
    funded = state.failures < config.failures
    index = jnp.where(state.attempts < config.attempts, 1 + funded, 0)
    tails = [NO_ALPHA, *(np.nextafter(np.float32(-math.log(a)), np.float32(np.inf)) for a in choices[1:])]
    return Level(jnp.asarray(choices, jnp.float32)[index], jnp.asarray(tails, jnp.float32)[index])


def update(config: SpendingConfig, state: SpendingState, counted: BoolLike, failed: BoolLike) -> SpendingState:
    """Book one attempt.

    Args:
        counted: it was audited with fresh randomness. Acceptances by the bounds alone and exact runs cost nothing.
        failed: it was audited and not accepted, whatever happened then. Ignored unless counted.
    """
    covered = jnp.asarray(counted) & (state.attempts < config.attempts)
    attempts = state.attempts + covered
    failures = state.failures + (covered & failed)
    spent = jnp.where(covered, _spent(config, attempts, state.failures), state.spent)
    return SpendingState(spent, failures, attempts)


def _spent(config: SpendingConfig, attempts: Int32[Array, ""], failures: Int32[Array, ""]) -> Float[Array, ""]:
    """From the counts, not by adding: float32 sums of a thousand levels may pass alpha."""
    part = attempts / jnp.float32(config.attempts)
    if config.failures:
        epochs = jnp.minimum(failures + 1, config.failures) / jnp.float32(config.failures)
        part = 0.5 * part + 0.5 * jnp.where(attempts > 0, epochs, 0)
    return jnp.asarray(np.float32(config.alpha) * part, jnp.float32)


def exhausted(config: SpendingConfig, state: SpendingState) -> Bool[Array, ""]:
    """True when later attempts are no longer covered by the request's alpha."""
    return state.attempts >= config.attempts
