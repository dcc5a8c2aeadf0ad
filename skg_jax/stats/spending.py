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

from skg_jax.stats._types import BoolLike, whole

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
        whole("attempts", self.attempts, 1)
        whole("failures", self.failures, 0)  # 0: even split

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


class Schedule(NamedTuple):
    """A `SpendingConfig` as arrays, so that one compiled program serves every request; may be stacked and vmapped."""

    alpha: Float[Array, "*batch"]
    attempts: Int32[Array, "*batch"]
    failures: Int32[Array, "*batch"]
    levels: Float[Array, "*batch 3"]  # alpha of an attempt: none left, even share, even share and ledger
    log_inv: Float[Array, "*batch 3"]  # log(1/level), rounded up, NO_ALPHA for none


class SpendingState(NamedTuple):
    """What a request has spent: the alpha of all epochs and attempts so far, counted failures, counted attempts."""

    spent: Float[Array, "*batch"]
    failures: Int32[Array, "*batch"]
    attempts: Int32[Array, "*batch"]


class Level(NamedTuple):
    """The level of the next attempt. log_inv_alpha is rounded up, and 1e30 when alpha is 0."""

    alpha: Float[Array, ""]
    log_inv_alpha: Float[Array, ""]


def schedule(config: SpendingConfig) -> Schedule:
    """The arrays of a configuration; host side."""
    each, extra = config.levels
    levels = np.array([0.0, each, each + extra])
    tails = [np.nextafter(np.float32(-math.log(a)), np.float32(np.inf)) for a in levels[1:]]
    return Schedule(
        jnp.asarray(config.alpha, jnp.float32),
        jnp.asarray(config.attempts, jnp.int32),
        jnp.asarray(config.failures, jnp.int32),
        jnp.asarray(levels, jnp.float32),
        jnp.asarray([NO_ALPHA, *tails], jnp.float32),
    )


def init() -> SpendingState:
    """Nothing is spent yet, under any schedule."""
    return SpendingState(jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def next_alpha(plan: Schedule, state: SpendingState) -> Level:
    """The level of the next attempt; 0 once the attempts are used up. Fixed before that attempt's key is used."""
    funded = state.failures < plan.failures
    index = jnp.where(exhausted(plan, state), 0, 1 + funded)
    return Level(plan.levels[index], plan.log_inv[index])


def update(plan: Schedule, state: SpendingState, counted: BoolLike, failed: BoolLike) -> SpendingState:
    """Book one attempt.

    Args:
        counted: it was audited with fresh randomness. Acceptances by the bounds alone and exact runs cost nothing.
        failed: it was audited and not accepted, whatever happened then. Ignored unless counted.
    """
    covered = jnp.asarray(counted) & ~exhausted(plan, state)
    attempts = state.attempts + covered
    failures = state.failures + (covered & failed)
    spent = jnp.where(covered, _spent(plan, attempts, state.failures), state.spent)
    return SpendingState(spent, failures, attempts)


def _spent(plan: Schedule, attempts: Int32[Array, ""], failures: Int32[Array, ""]) -> Float[Array, ""]:
    """From the counts, not by adding: float32 sums of a thousand levels may pass alpha."""
    part = attempts / plan.attempts.astype(jnp.float32)
    epochs = jnp.minimum(failures + 1, plan.failures) / jnp.maximum(plan.failures, 1).astype(jnp.float32)
    both = 0.5 * part + 0.5 * jnp.where(attempts > 0, epochs, 0)
    return plan.alpha * jnp.where(plan.failures > 0, both, part)


def exhausted(plan: Schedule, state: SpendingState) -> Bool[Array, ""]:
    """True when later attempts are no longer covered by the request's alpha."""
    return state.attempts >= plan.attempts
