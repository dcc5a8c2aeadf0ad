"""The pooled audit of a decode step: evidence of every layer in, an anytime-valid bound on lost attention out."""

from __future__ import annotations

from skg_jax.audit.config import AuditConfig, AuditScope, Design, Residual
from skg_jax.audit.report import AuditReport, Budget, HeadWeights
from skg_jax.audit.scope import run
from skg_jax.audit.units import LayerEvidence, StepEvidence, layer_evidence, step_evidence

__all__ = [
    "AuditConfig",
    "AuditReport",
    "AuditScope",
    "Budget",
    "Design",
    "HeadWeights",
    "LayerEvidence",
    "Residual",
    "StepEvidence",
    "layer_evidence",
    "run",
    "step_evidence",
]
