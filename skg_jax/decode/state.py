"""What the compiled loop carries: requests as data, rows in flight, and a log line per attempt."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from models.config import ModelConfig
from skg_jax.audit import AuditConfig, HeadWeights
from skg_jax.guard import policy as guard
from skg_jax.guard.policy import GuardState, Policy
from skg_jax.pallas.dispatch import Implementation
from skg_jax.sampling import SamplingParams
from skg_jax.selectors import Selector, topk

type Mode = Literal["dense", "sparse", "guarded"]

NO_TOKEN = -1
AUDIT_STREAM, SAMPLE_STREAM = 0, 1  # never share a key: the audit's must be unknown when tokens and pages are chosen


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that is compiled in. Two requests with equal programs and shapes share one executable."""

    model: ModelConfig
    mode: Mode = "guarded"
    selector: Selector = dataclasses.field(default_factory=topk)
    audit: AuditConfig = AuditConfig()
    greedy: bool = True
    attempts_per_dispatch: int = 16
    prefill_chunk: int = 512
    implementation: Implementation | None = None  # of all that has a kernel; None: kernels where they can

    @property
    def guarded(self) -> bool:
        return self.mode == "guarded"


class Requests(NamedTuple):
    """What the rows asked for; constant over their lifetime."""

    key: Key[Array, " B"]
    last: Int[Array, " B"]  # position of the last token that may be generated
    stop: Int[Array, "B E"]  # token ids that end a row, padded with NO_TOKEN
    sampling: SamplingParams
    policy: Policy
    weights: HeadWeights


class Rows(NamedTuple):
    """Where the rows are. `token` is known but not yet in the cache; it will be written at `position`."""

    token: Int[Array, " B"]
    position: Int[Array, " B"]
    tier: Int[Array, " B"]  # index of the page budget of the next attempt
    attempt: Int[Array, " B"]  # number of the next attempt, which its audit key is folded from
    done: Bool[Array, " B"]
    guard: GuardState


def first_rows(policy: Policy, token: Int[Array, " B"], position: Int[Array, " B"], done: Bool[Array, " B"]) -> Rows:
    """Rows before their first decode step, at the tier where it starts; see `Rows` for the arguments."""
    state, none = guard.init(token.shape[0]), jnp.zeros_like(position)
    return Rows(token, position, guard.resting_tier(policy, state, position + 1), none, done, state)


class StepInfo(NamedTuple):
    """One attempt of every row; meaningless where not `active`."""

    active: Bool[Array, "*n B"]
    token: Int[Array, "*n B"]  # NO_TOKEN unless the attempt was the one that stood
    position: Int[Array, "*n B"]
    verdict: Int[Array, "*n B"]
    exact: Bool[Array, "*n B"]  # all pages were read
    bound: Float[Array, "*n B"]
    cap: Float[Array, "*n B"]  # bound without the audit
    units: Int[Array, "*n B"]  # unread units of the step
    drawn: Int[Array, "*n B"]  # draws of the audit, repetitions included
    audited: Int[Array, "*n B"]  # distinct units read
    selected: Int[Array, "*n B"]  # pages read by attention, over layers and KV heads
    total: Int[Array, "*n B"]  # pages in use, over layers and KV heads
    violated: Bool[Array, "*n B"]
    unbounded: Int[Array, "*n B"]  # unread pages without bounds, over layers and KV heads
    key_reused: Bool[Array, "*n B"]
    uncovered: Bool[Array, "*n B"]
    corrupt: Int[Array, "*n B 2"]


def stream(key: Key[Array, " B"], which: int, count: Int[Array, " B"]) -> Key[Array, " B"]:
    """Per-row key of one purpose and one point in the request; equal wherever the row stands in a batch."""
    return jax.vmap(lambda k, c: jax.random.fold_in(jax.random.fold_in(k, which), c))(key, count)


def empty_log(attempts: int, batch: int) -> StepInfo:
    """A log whose lines are all inactive; no two fields share their memory, so that it can be donated."""
    flag, number, real = (
        functools.partial(jnp.zeros, (attempts, batch), dtype) for dtype in (jnp.bool, jnp.int32, jnp.float32)
    )
    return StepInfo(
        active=flag(), token=number() + NO_TOKEN, position=number(), verdict=number(), exact=flag(), bound=real(),
        cap=real(), units=number(), drawn=number(), audited=number(), selected=number(), total=number(),
        violated=flag(), unbounded=number(), key_reused=flag(), uncovered=flag(),
        corrupt=jnp.zeros((attempts, batch, 2), jnp.int32),
    )  # fmt: skip
