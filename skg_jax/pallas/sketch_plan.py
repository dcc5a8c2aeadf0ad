"""How a launch of the sketch scorer is laid out: configuration, ring, shared memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from skg_jax.pallas import smem
from skg_jax.pallas.sketch_order import Order
from skg_jax.pallas.sketch_unit import COLUMNS, LANES, Bound, UnitShape
from skg_jax.types import BLOCK, PAGE_SIZES

MULTIPROCESSORS = 132
WARPS = 4  # of a warpgroup
NORMS = 4  # numbers of a record's `norms`
PRODUCER_REGISTERS = 24
# Of a consumer thread, taken over from the producer. They come from what the thread block was launched with (96 or 128
# a thread), not from the 65536 of the multiprocessor: with more than is left the consumers wait for ever.
CONSUMER_REGISTERS = {3: 152, 4: 112}
_LINE = 128  # bytes: where a TMA copy may start in shared memory
_MOST_STAGES = 16
_GROUPS = 4
_FEW_STAGES = 64  # of a thread block
_RUN = 8  # blocks: their pages of 16 tokens fill a line of memory
_MOST_HEADS = 8  # whose queries a thread block keeps


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchScoreConfig:
    """How the kernel runs; the result does not depend on it. Static, hashable."""

    groups: int | None = None
    """Consumer warpgroups; None: 4, or 3 where each would get few stages: what counts then is how soon they begin."""
    stages: int | None = None
    """Of the ring, a multiple of the groups; None: as many as fit, up to 16."""
    splits: int | None = None
    """Thread blocks that share the blocks of a sequence; None: about one for each multiprocessor."""
    together: int = 2
    """Tiles of 16 tokens whose chains of matrix instructions overlap: 1, 2 or 4."""
    run: int | None = None
    """Blocks whose numbers a warp writes together: 1, 2, 4 or 8, and 1 where a stage has more than one block. None: 8,
    or 1 where each warpgroup gets few stages."""

    def __post_init__(self):
        if self.groups is not None and not 1 <= self.groups <= 6:
            raise ValueError(f"groups is {self.groups}; a thread block has room for 1 to 6 consumer warpgroups.")
        groups = self.groups or _GROUPS
        if self.stages is not None and (self.stages < 1 or self.stages % groups):
            raise ValueError(f"stages is {self.stages}; it must be a multiple of groups, which is {groups}.")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits is {self.splits}; it must be at least 1.")
        if self.together not in (1, 2, 4):
            raise ValueError(f"together is {self.together}; a block has four tiles: 1, 2 or 4.")
        if self.run not in (None, 1, 2, 4, 8):
            raise ValueError(f"run is {self.run}; it must be 1, 2, 4 or 8 blocks.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything static about one launch."""

    unit: UnitShape
    groups: int
    heads: int  # of a thread block
    heads_of_stage: int
    blocks_of_stage: int
    stages: int
    splits: int
    max_blocks: int  # of a sequence
    run: int  # blocks whose numbers a warp writes together

    @property
    def order(self) -> Order:
        """Of the stages; a chunk is the heads of one."""
        return Order(groups=self.groups, chunks=self.heads // self.heads_of_stage, run=self.run)

    @property
    def rows(self) -> int:
        """Of numbers that a warp keeps for a run: estimates and bounds of a group."""
        return self.unit.group * (3 if self.bounded else 1)

    @property
    def row_width(self) -> int:
        """Numbers of such a row, and four more: lanes that write different rows meet in no bank."""
        return self.run * self.unit.pages + 4

    @property
    def registers(self) -> int | None:
        """Of a consumer thread; None: an equal share for all threads."""
        return CONSUMER_REGISTERS.get(self.groups)

    @property
    def pages(self) -> int:
        """M."""
        return self.max_blocks * self.unit.pages

    @property
    def bounded(self) -> bool:
        """Whether there are bounds."""
        return self.unit.bound != "none"

    @property
    def fields(self) -> dict[str, tuple[int, int, Any]]:
        """Of a record, as TMA copies it: rows and columns of all heads of a stage, dtype.

        Rows are as wide as a copy allows: narrow ones cost a third of the bandwidth.
        """
        elements = {"codes": BLOCK * self.unit.head_dim // 8, "low": self.unit.head_dim, "step": self.unit.head_dim}
        if self.unit.bound == "token":
            elements["residual"] = BLOCK
        rows = {}
        for name, of_head in elements.items():
            count = of_head * self.heads_of_stage
            width = math.gcd(count, 256)
            rows[name] = count // width, width, jnp.uint32 if name == "codes" else jnp.float16
        return rows | {"norms": (1, NORMS * self.heads_of_stage, jnp.float32)}

    def ring(self, stages: int) -> dict[str, Any]:
        """Allocations of the ring; each block of a slot starts on a line."""
        shapes: dict[str, Any] = {name: ((rows, width), dtype) for name, (rows, width, dtype) in self.fields.items()}
        norms = 4 * NORMS * self.heads_of_stage
        shapes["norms"] = (-(-norms // _LINE) * _LINE // 4,), jnp.float32
        return {name: plgpu.SMEM((stages, self.blocks_of_stage, *s), dtype) for name, (s, dtype) in shapes.items()}

    def queries(self) -> dict[str, Any]:
        """Allocations of the queries: fragments and numbers of the columns."""
        fragments = plgpu.SMEM((self.heads, self.unit.chunks * LANES * COLUMNS), jnp.float16)
        return {"query": fragments, "columns": plgpu.SMEM((self.heads, COLUMNS * 4), jnp.float32)}

    def own(self) -> dict[str, Any]:
        """Allocations beside the ring: the queries, and what warps keep for a run."""
        rows = plgpu.SMEM((self.groups * WARPS * self.rows, self.row_width), jnp.float32)
        return self.queries() | ({"rows": rows} if self.run > 1 else {})

    def shared_memory(self, stages: int) -> dict[str, int]:
        """Bytes of shared memory that a thread block asks for, item by item."""
        arrays = self.own() | self.ring(stages)
        barriers = {"barriers": smem.BARRIER * (1 + 2 * stages)}
        return {name: smem.nbytes(x.shape, x.dtype) for name, x in arrays.items()} | barriers


def plan_launch(q, max_blocks: int, page_size: int, bound: Bound, config: SketchScoreConfig) -> Plan:
    """Fill in what the configuration leaves open.

    Raises:
      NotImplementedError: for a shape or dtype that the kernel does not know, or a ring that does not fit.
    """
    _check(q, page_size, bound)
    batch, kv_heads, group, dim = q.shape
    heads = max(n for n in range(1, _MOST_HEADS + 1) if kv_heads % n == 0)
    heads_of_stage = math.gcd(heads, WARPS)
    blocks_of_stage = WARPS // heads_of_stage
    most = -(-max_blocks // blocks_of_stage)
    splits = config.splits or max(1, min(MULTIPROCESSORS // (batch * (kv_heads // heads)), most))
    few = -(-most // splits) * (heads // heads_of_stage) < _FEW_STAGES
    plan = Plan(
        unit=UnitShape(head_dim=dim, group=group, page_size=page_size, bound=bound, together=config.together),
        groups=config.groups or (3 if few and config.stages is None else _GROUPS),
        heads=heads,
        heads_of_stage=heads_of_stage,
        blocks_of_stage=blocks_of_stage,
        stages=config.stages or 0,
        splits=splits,
        max_blocks=max_blocks,
        run=1 if blocks_of_stage > 1 else config.run or (1 if few else _RUN),
    )
    if config.stages is None:
        plan = dataclasses.replace(plan, stages=_most_stages(plan))
    smem.require(plan.shared_memory(plan.stages), "use fewer stages")
    return plan


def _most_stages(plan: Plan) -> int:
    counts = range(plan.groups, _MOST_STAGES + 1, plan.groups)
    fitting = [n for n in counts if sum(plan.shared_memory(n).values()) <= smem.LIMIT]
    return max(fitting, default=plan.groups)


def _check(q, page_size: int, bound: str) -> None:
    group, dim = q.shape[2:]
    if dim not in (64, 128):
        raise NotImplementedError(f"Sketch scoring takes a head dim of 64 or 128, not {dim}.")
    if group > COLUMNS:
        raise NotImplementedError(f"Sketch scoring takes up to {COLUMNS} query heads per KV head, not {group}.")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"Sketch scoring takes pages of 16, 32 or 64 tokens, not {page_size}.")
    if bound not in ("token", "group", "none"):
        raise NotImplementedError(f"Sketch scoring knows the bounds token, group and none, not {bound}.")
    if q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"Sketch scoring takes float16, bfloat16 or float32 queries, not {q.dtype}.")
