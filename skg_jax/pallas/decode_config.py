"""Configuration of the paged decode kernel: tile sizes, how lists are split, what fits into shared memory."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp

from skg_jax.pallas import smem
from skg_jax.types import BLOCK

MULTIPROCESSORS = 132  # of an H100 or H200
RESIDENT = 2  # blocks per multiprocessor in a wave; they hide each other's softmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedDecodeConfig:
    """How the kernel runs; the result does not depend on it but for rounding. Static, hashable."""

    tile: int = 64
    """Tokens per step of the softmax: 64 or 128."""
    stages: int = 2
    """Tiles of K and V in flight per block. Fewer leave room for more blocks: 2 beat 3 by 1 to 3% wherever measured."""
    splits: int | None = None
    """Blocks that share one list; None: `pick_splits`."""
    expected_pages: int | None = None
    """Pages that a list usually holds, where its capacity says little; None: the capacity."""
    uneven: bool = False
    """Whether lists differ much in length: several waves of smaller blocks then balance the load."""

    def __post_init__(self):
        if self.tile not in (64, 128):
            raise ValueError(f"tile is {self.tile}; wgmma has 64 rows: 64 or 128.")
        for name in ("stages", "splits", "expected_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")


DEFAULT = PagedDecodeConfig()


class Spec(NamedTuple):
    """Everything about one call that is static."""

    pairs: int  # B * K
    kv_heads: int
    blocks: int  # P
    max_pages: int  # of a row
    head_dim: int
    group: int
    columns: int
    page: int
    tile: int
    stages: int
    splits: int
    listed: bool

    @property
    def per_tile(self) -> int:
        return self.tile // self.page

    @property
    def parts(self) -> int:
        return BLOCK // self.page


def pick_splits(batch: int, kv_heads: int, tokens: int, config: PagedDecodeConfig) -> int:
    """Blocks per list: about one wave of blocks for lists of equal length, about four for uneven ones.

    Few lists are not split further than into one block per multiprocessor: more only lengthens the merge.

    Args:
      tokens: of a list. Every block gets at least two tiles, so that loading and arithmetic overlap.
    """
    if config.splits is not None:
        return config.splits
    lists, waves = batch * kv_heads, 4 if config.uneven else 1
    most = max(16, round(MULTIPROCESSORS / lists))
    return max(1, min(round(waves * RESIDENT * MULTIPROCESSORS / lists), most, tokens // (2 * config.tile)))


def columns_of(group: int) -> int:
    """wgmma's N for a group of query heads: 8 or 16."""
    return 8 if group <= 8 else 16


def shared_memory(config: PagedDecodeConfig, head_dim: int, group: int, dtype, out_dtype) -> dict[str, int]:
    """Bytes of shared memory that a block asks for, item by item."""
    columns, ring = columns_of(group), (config.stages, config.tile, head_dim)
    return {
        "q": smem.nbytes((columns, head_dim), dtype),
        "p": smem.nbytes((columns, config.tile), dtype),
        "k": smem.nbytes(ring, dtype),
        "v": smem.nbytes(ring, dtype),
        "rows": smem.nbytes((columns, head_dim), out_dtype),
        "numbers": smem.nbytes((columns,), jnp.float32),
        "reduction": smem.REDUCTION,
        "barriers": smem.BARRIER * 4 * config.stages,
    }
