"""What an audit reads and how; frozen, hashable, part of the compiled program."""

from __future__ import annotations

import dataclasses
from typing import Literal

from skg_jax.kv.sketch import BoundKind
from skg_jax.types import BLOCK, PAGE_SIZES

type Residual = Literal["mass", "output"]
type AuditScope = Literal["step", "heads"]
type Design = Literal["pps", "wor", "boundary"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig:
    """Options of the step audit.

    Attributes:
      page_size: tokens per page, 16, 32 or 64.
      scope: what the budget limits: "step", the weighted mean over all heads; "heads", every head by itself.
      residual: "mass", the dropped attention mass; "output", a bound on the relative change of the attention output.
      rate: share of the unread units drawn in the first round, which is always read.
      rounds: size of each round in multiples of the first; rows stop at the end of the first round that accepts them.
      design: "pps", independent draws proportional to the gap between the bounds; "wor", the same law without
        replacement; "boundary", uniform draws near the selection boundary plus uniform ones (for comparison: it needs
        far more).
      bounds: "sketch", or "box" for channel minima and maxima alone (for comparison: certifies nothing).
      uniform_share: part of the draws spread evenly, so that every unit with a gap can be drawn.
      output_floor: smallest output norm that the output residual divides by.
      sink_pages, recent_pages: first and last pages that are always read.

    Raises:
      ValueError: if a field is out of range.
    """

    page_size: int = 16
    scope: AuditScope = "step"
    residual: Residual = "mass"
    rate: float = 0.01
    rounds: tuple[int, ...] = (1, 1, 2)
    design: Design = "pps"
    bounds: BoundKind = "sketch"
    uniform_share: float = 0.02
    output_floor: float = 1e-3
    sink_pages: int = 1
    recent_pages: int = 4

    def __post_init__(self):
        if self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {PAGE_SIZES}, not {self.page_size}.")
        if self.scope not in ("step", "heads"):
            raise ValueError(f"scope must be step or heads, not {self.scope}.")
        if self.scope == "heads" and self.design != "pps":
            raise ValueError(f"scope heads draws by itself and knows no design {self.design}; leave the design out.")
        if not 0 < self.rate <= 1:
            raise ValueError(f"rate must be in (0, 1], not {self.rate}.")
        if not self.rounds or self.rounds[0] != 1 or min(self.rounds) < 1:
            raise ValueError(f"rounds must be multiples of the first, which is 1, not {self.rounds}.")
        if not 0 < self.uniform_share <= 1:
            raise ValueError(f"uniform_share must be in (0, 1], not {self.uniform_share}.")
        if not self.output_floor > 0:
            raise ValueError(f"output_floor must be positive, not {self.output_floor}.")
        if self.sink_pages < 0 or self.recent_pages < 1:
            raise ValueError("sink_pages must be at least 0 and recent_pages at least 1 (the page being written).")

    @property
    def parts(self) -> int:
        """Pages per block."""
        return BLOCK // self.page_size
