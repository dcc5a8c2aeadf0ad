"""What an audit is asked, and what it establishes, per row of a batch."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class AuditReport(NamedTuple):
    """What the audit of a step established, per row."""

    accepted: Bool[Array, " B"]  # residual <= tau at the row's error level, nothing amiss
    bound: Float[Array, " B"]  # upper bound on the residual at that level
    cap: Float[Array, " B"]  # what the page bounds give without reading
    log_wealth: Float[Array, " B"]  # against "residual >= tau"
    violated: Bool[Array, " B"]  # a unit lay outside its bounds
    corrupt: Int[Array, "B 2"]  # (layer, pool block) whose keys failed their checksum, or -1
    units: Int[Array, " B"]  # unread units of the step
    drawn: Int[Array, " B"]  # draws, repetitions included
    pages_read: Int[Array, " B"]  # distinct units read


class Budget(NamedTuple):
    """What is asked of a step: residual at most tau, at error exp(-log_inv_alpha)."""

    tau: Float[Array, " B"]
    log_inv_alpha: Float[Array, " B"]


class HeadWeights(NamedTuple):
    """Known weights of the residual, summing to one over all heads with `uncovered`."""

    omega: Float[Array, "L N"]
    uncovered: Float[Array, ""]  # weight of heads outside the audit: counted as lost entirely
