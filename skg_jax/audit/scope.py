"""The audit of a decode step, by the scope of its claim."""

from __future__ import annotations

from jaxtyping import Array, Key

from skg_jax.audit import heads, step
from skg_jax.audit.config import AuditConfig
from skg_jax.audit.report import AuditReport, Budget, HeadWeights
from skg_jax.audit.units import StepEvidence
from skg_jax.kv.cache import PagedKVCache
from skg_jax.pallas.dispatch import Implementation


def run(
    key: Key[Array, " B"],
    evidence: StepEvidence,
    cache: PagedKVCache,
    weights: HeadWeights,
    budget: Budget,
    config: AuditConfig,
    implementation: Implementation | None = None,
) -> AuditReport:
    """Audit one step: its weighted mean over all heads ("step"), or every head by itself ("heads").

    Args:
      key: one per row, fresh: never used before and unknown when the step's pages were chosen.
      evidence: of all layers. cache: the version that the step used.

    Returns: the report; under "heads" its bounds are those of the worst head. A row with nothing unread is accepted
      with bound `uncovered`.
    """
    audit = heads.run if config.scope == "heads" else step.run
    return audit(key, evidence, cache, weights, budget, config, implementation)
