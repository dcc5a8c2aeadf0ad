"""What a user asks of the guard; host side, turned into arrays by `policy`."""

from __future__ import annotations

import dataclasses
import json
import math
from importlib import resources
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from skg_jax.audit import AuditConfig, AuditScope, Design, HeadWeights, Residual
from skg_jax.guard.policy import Policy
from skg_jax.kv.sketch import BoundKind
from skg_jax.stats import spending

type Spending = Literal["uniform", "ledger"]
type OnReject = Literal["exact", "release"]

_LONGEST = 2**31 - 1  # what an int32 holds: longer than any context


@dataclasses.dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """The permit that a request asks for.

    Attributes:
      tau: largest residual of a step that is let through; None takes the model's operating point (docs/guarantee.md).
      alpha: error probability of the whole request.
      max_steps: decode steps that alpha is split over; None: as many as the request may take.
      spare_attempts: audited repetitions beyond one attempt per step; None: a quarter of max_steps, at least 8.
      spending: "uniform", equal shares; "ledger", shares per fallback with an equal floor.
      tiers: page budgets tried after the first one, ascending; exact attention follows the last. None: see
        `default_tiers`.
      on_reject: what follows the last tier: "exact" attention, or "release" of the step without a certificate.
      scope: what tau limits: "step", the weighted mean over all heads; "heads", every head by itself.
      residual: "mass", attention mass dropped; "output", bound on the relative change of the attention output.
      weights: of the heads in the residual: "uniform", "gain" (spectral norm of the head's output projection), or a
        JSON file with a [layers][heads] table of nonnegative numbers, null for a head that is not covered.
      audit_rate, rounds, design, bounds: see AuditConfig.

    Raises:
      ValueError: if a field is out of range.
    """

    tau: float | None = None
    alpha: float = 0.01
    max_steps: int | None = None
    spare_attempts: int | None = None
    spending: Spending = "uniform"
    tiers: tuple[float, ...] | None = None
    on_reject: OnReject = "exact"
    scope: AuditScope = "step"
    residual: Residual = "mass"
    weights: str = "uniform"
    audit_rate: float = 0.01
    rounds: tuple[int, ...] = (1, 1, 2)
    design: Design = "pps"
    bounds: BoundKind = "sketch"

    def __post_init__(self):
        if self.tau is not None and not (self.tau > 0 and math.isfinite(self.tau)):
            raise ValueError(f"tau must be a positive number, not {self.tau}.")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be strictly between 0 and 1, not {self.alpha}.")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps must be at least 1, not {self.max_steps}.")
        if self.spare_attempts is not None and self.spare_attempts < 0:
            raise ValueError(f"spare_attempts must be at least 0, not {self.spare_attempts}.")
        tiers = self.tiers or ()
        if not all(_is_budget(t) for t in tiers) or list(tiers) != sorted(set(tiers)):
            raise ValueError(f"tiers must be positive, finite and strictly increasing, not {self.tiers}.")
        self.audit(page_size=16)  # refuses what AuditConfig refuses; the page size comes with the request

    def audit(self, page_size: int) -> AuditConfig:
        """What is compiled in, with the page size of the request."""
        return AuditConfig(
            page_size=page_size, scope=self.scope, residual=self.residual, rate=self.audit_rate, rounds=self.rounds,
            design=self.design, bounds=self.bounds,
        )  # fmt: skip

    def after(self, pages: float) -> GuardConfig:
        """The same with its tiers named, for a first page budget."""
        return self if self.tiers is not None else dataclasses.replace(self, tiers=default_tiers(pages))

    def plan(self, steps: int) -> tuple[spending.SpendingConfig, int]:
        """Split of alpha over a request of at most `steps` decode steps, and its spare attempts."""
        steps = max(self.max_steps or steps, 1)
        spares = max(8, steps // 4) if self.spare_attempts is None else self.spare_attempts
        split = spending.ledger if self.spending == "ledger" else spending.uniform
        return split(self.alpha, steps + spares), spares

    def policy(self, tau: float, pages: float, steps: list[int], dense_below: int = 0) -> Policy:
        """Arrays for a batch; `steps` holds the most decode steps of each row, for `dense_below` see `Policy`.

        Raises:
          ValueError: if the tiers do not all exceed the first budget.
        """
        tiers = self.after(pages).tiers or ()
        if tiers and tiers[0] <= pages:  # shares, below 1, come before counts
            raise ValueError(f"every tier must exceed the first page budget {pages}, but the tiers are {tiers}.")
        plans = [self.plan(n) for n in steps]
        rows = len(steps)
        budgets = jnp.asarray([pages, *tiers, math.inf], jnp.float32)
        schedules = [spending.schedule(split) for split, _ in plans]
        return Policy(
            tau=jnp.full(rows, tau, jnp.float32),
            budgets=jnp.broadcast_to(budgets, (rows, budgets.size)),
            spares=jnp.asarray([spares for _, spares in plans], jnp.int32),
            to_exact=jnp.full(rows, self.on_reject == "exact"),
            dense_below=jnp.full(rows, min(dense_below, _LONGEST), jnp.int32),
            schedule=jax.tree.map(lambda *xs: jnp.stack(xs), *schedules),
        )


def default_tiers(pages: float) -> tuple[float, ...]:
    """The tier after a first budget: two and a half times as much, or none where that is every page."""
    if not _is_budget(pages):  # refused elsewhere, with its own sentence
        return ()
    more = float(math.ceil(2.5 * pages)) if pages >= 1 else 2.5 * pages
    return () if pages < 1 <= more else (more,)


def operating_point(model: str, config: GuardConfig, pages: float) -> float | None:
    """Default tau: the level that accepted at least 95% of held-in steps with the default selector; None if unmeasured.

    It is no safety level, and says nothing about the text.
    """
    if config.scope != "step":
        return None
    table = json.loads(resources.files("skg_jax.guard").joinpath("operating_points.json").read_text())
    wanted = {"model": model, "residual": config.residual, "weights": config.weights, "pages": pages}
    return next((row["tau"] for row in table["points"] if wanted.items() <= row.items()), None)


def head_weights(
    config: GuardConfig, kernel: Float[Array, "L N H D"]
) -> tuple[HeadWeights, tuple[tuple[int, int], ...]]:
    """Known head weights, summing to one with those of uncovered heads; and which (layer, head) are uncovered.

    Args:
      kernel: output projections of all layers.

    Raises:
      ValueError: if the file cannot be read, has another shape, a negative or non-finite entry, or no positive one.
    """
    shape = kernel.shape[:2]
    covered = np.ones(shape, bool)
    if config.weights == "uniform":
        raw = np.ones(shape)
    elif config.weights == "gain":
        gram = jnp.einsum("lnhd,lngd->lnhg", kernel, kernel, preferred_element_type=jnp.float32)
        raw = np.sqrt(np.maximum(np.linalg.eigvalsh(np.asarray(gram, np.float64))[..., -1], 0))
    else:
        raw, covered = _weights_from(Path(config.weights), shape)
    raw = raw / raw.sum()
    omega = jnp.asarray(np.where(covered, raw, 0), jnp.float32)
    missing = tuple((int(layer), int(head)) for layer, head in np.argwhere(~covered))
    return HeadWeights(omega, jnp.asarray(raw[~covered].sum(), jnp.float32)), missing


def _weights_from(path: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """A null counts as uncovered, at the mean weight of the others: it is never quietly dropped from the sum."""
    try:
        table = np.array(json.loads(path.read_text()), dtype=float)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"head weights: cannot read a table of numbers from {path} ({error}).") from error
    if table.shape != shape:
        raise ValueError(f"head weights: {path} has shape {table.shape}, but the model has {shape} (layers, heads).")
    covered = ~np.isnan(table)
    given = table[covered]
    if not (np.isfinite(given).all() and (given >= 0).all() and given.any()):
        raise ValueError(f"head weights: {path} must hold finite numbers >= 0, at least one of them positive.")
    return np.where(covered, table, given.mean()), covered


def _is_budget(value: float) -> bool:
    return value > 0 and math.isfinite(value)
