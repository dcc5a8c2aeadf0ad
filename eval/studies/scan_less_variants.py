"""What a decode step may read instead of the whole key sketch, and how many bytes that is.

For a block of 64 tokens and a KV head, with H channels, G query heads and pages of 16:

    full scan         36 H + 144      codes 32 H, low and step 4 H, residuals 128, norms 16
    moved scores      48 G + 4 (norm), + 2 H (ball), + 4 H + 4 (box): estimate, lower and upper of four pages first
    b leading bits    8 b H + 4 H + 16; a block that is then refined: (32 - 8 b) H + 128 more
"""

from __future__ import annotations

from typing import NamedTuple

from eval.studies.cheap_scores import Move

LLAMA = 128, 4  # H and G of the operator that was timed, which takes 156 us a layer, 82 of them for the scan
OPERATOR_US, SCAN_US = 156.0, 82.0


FULL = "full scan"


class Variant(NamedTuple):
    """What a step reads instead of the whole sketch."""

    name: str
    reuse: int = 1  # a full scan every so many steps
    how: Move = "norm"
    bits: int | None = None  # leading bits of the first level
    refine: float = 0.0  # share of the blocks that is then read in full
    rank: str = "estimate"  # by which these are chosen

    def share(self, lag: int, dim: int, group: int) -> float:
        """Bytes over those of a full scan, `lag` steps after one."""
        full = 36 * dim + 144
        if self.bits is not None:
            return (8 * self.bits * dim + 4 * dim + 16 + self.refine * ((32 - 8 * self.bits) * dim + 128)) / full
        moved = 48 * group + {"norm": 4, "ball": 2 * dim + 4, "box": 4 * dim + 8}[self.how]
        return moved / full if lag else 1.0

    def mean_share(self, dim: int, group: int) -> float:
        """The same, over a whole cycle."""
        return sum(self.share(lag, dim, group) for lag in range(self.reuse)) / self.reuse


VARIANTS = [
    Variant(FULL),
    *(Variant(f"reuse {r}, {how}", r, how) for how in ("norm", "ball", "box") for r in (2, 4, 8)),
    *(
        Variant(f"limits, {share:.0%} by {rank}", bits=0, refine=share, rank=rank)
        for share in (0.25, 0.5)
        for rank in ("estimate", "upper", "truth")
    ),
    *(Variant(f"{b} bit, {share:.0%}", bits=b, refine=share) for b in (1, 2, 3) for share in (0.0, 0.25, 0.5)),
]


def prediction(variant: Variant) -> dict:
    """Of the attention operator at batch 8 and 64K tokens, if the scan takes time in proportion to its bytes."""
    share = variant.mean_share(*LLAMA)
    time = OPERATOR_US - SCAN_US + SCAN_US * share
    return {"bytes_llama_8b": share, "operator_us": time, "speedup": OPERATOR_US / time}
