"""Decisions about audited steps, and what a request may claim at its end."""

from __future__ import annotations

from skg_jax.guard.certificate import Attempt, Certificate, Terms, certify
from skg_jax.guard.config import GuardConfig, default_tiers, head_weights, operating_point
from skg_jax.guard.policy import Decision, GuardState, Policy, Verdict

__all__ = [
    "Attempt", "Certificate", "Decision", "GuardConfig", "GuardState", "Policy", "Terms", "Verdict", "certify",
    "default_tiers", "head_weights", "operating_point",
]  # fmt: skip
