"""The pooled audit of a decode step: evidence of every layer in, an anytime-valid bound on lost attention out."""

from __future__ import annotations

from skg_jax.audit.config import AuditConfig, Design, Residual
from skg_jax.audit.step import AuditReport, Budget, HeadWeights, run
from skg_jax.audit.units import StepEvidence, layer_evidence

__all__ = [
    "AuditConfig",
    "AuditReport",
    "Budget",
    "Design",
    "HeadWeights",
    "Residual",
    "StepEvidence",
    "layer_evidence",
    "run",
]
