"""Sketch scoring: log-masses of all pages of a sequence, estimated and bounded, from one read of the 4-bit sketch.

A producer warp copies the records of a few heads of a block, one stage of a ring, into shared memory; consumer
warpgroups take stages in turn, one warp a unit (`sketch_unit`), and write natural logarithms. Nothing crosses warps.
The XLA twin is `skg_jax.kv.sketch.page_scores`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxtyping import Array, Float, Int, UInt32

from skg_jax.pallas import dispatch, smem
from skg_jax.pallas.sketch_unit import COLUMNS, LANES, Bound, Results, UnitShape, score_unit
from skg_jax.pallas.warp import ArrayWarp, GpuWarp, Register
from skg_jax.types import BLOCK

MULTIPROCESSORS = 132
WARPS = 4  # of a warpgroup
_NORMS = 4  # numbers of a record's `norms`
_LINE = 128  # bytes: where a TMA copy may start in shared memory
_MOST_STAGES = 16
_PRODUCER_REGISTERS = 24
_HEADS_OF_BLOCK = 8  # whose queries a block keeps
_LOG2E = math.log2(math.e)
_U = 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class SketchScoreConfig:
    """How the kernel runs; the result does not depend on it. Static, hashable."""

    groups: int = 4
    """Consumer warpgroups."""
    stages: int | None = None
    """Of the ring, a multiple of `groups`; None: as many as fit, up to 16."""
    splits: int | None = None
    """Thread blocks that share the blocks of a sequence; None: about one for each multiprocessor."""
    registers: int | None = None
    """Of a consumer thread, taken over from the producer; None: an equal share for all."""

    def __post_init__(self):
        if not 1 <= self.groups <= 6:
            raise ValueError(f"groups is {self.groups}; a thread block has room for 1 to 6 consumer warpgroups.")
        if self.stages is not None and (self.stages < self.groups or self.stages % self.groups):
            raise ValueError(f"stages is {self.stages}; it must be a multiple of groups, which is {self.groups}.")
        if self.splits is not None and self.splits < 1:
            raise ValueError(f"splits is {self.splits}; it must be at least 1.")


class Scores(NamedTuple):
    """Natural logarithms of page masses, float32; the bounds are None if none were asked for."""

    estimate: Float[Array, "B K G M"]
    lower: Float[Array, "B K G M"] | None
    upper: Float[Array, "B K G M"] | None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """Everything static about one launch."""

    unit: UnitShape
    config: SketchScoreConfig
    heads: int  # of a thread block
    heads_of_stage: int
    blocks_of_stage: int
    stages: int
    splits: int
    max_pages: int  # M

    @property
    def chunks(self) -> int:
        """Stages that the heads of a block take."""
        return self.heads // self.heads_of_stage

    @property
    def fields(self) -> dict[str, tuple[int, int, Any]]:
        """Of a record, as TMA copies it: rows and columns of all heads of a stage, dtype."""
        head = {"codes": BLOCK * self.unit.head_dim // 8, "low": self.unit.head_dim, "step": self.unit.head_dim}
        if self.unit.bound == "token":
            head["residual"] = BLOCK
        dtype = lambda name: jnp.uint32 if name == "codes" else jnp.float16
        rows = {name: (*_rows(n * self.heads_of_stage), dtype(name)) for name, n in head.items()}
        return rows | {"norms": (1, _NORMS * self.heads_of_stage, jnp.float32)}

    @property
    def names(self) -> tuple[str, ...]:
        return ("estimate",) if self.unit.bound == "none" else ("estimate", "lower", "upper")

    def ring(self, stages: int) -> dict[str, Any]:
        """Allocations of the ring; a slot of every block starts on a line."""
        shapes = {name: ((rows, width), dtype) for name, (rows, width, dtype) in self.fields.items()}
        shapes["norms"] = (-(-shapes["norms"][0][1] * 4 // _LINE) * _LINE // 4,), jnp.float32
        return {name: plgpu.SMEM((stages, self.blocks_of_stage, *s), dtype) for name, (s, dtype) in shapes.items()}

    def queries(self) -> dict[str, Any]:
        fragments = plgpu.SMEM((self.heads, self.unit.chunks, LANES * COLUMNS), jnp.float16)
        return {"query": fragments, "columns": plgpu.SMEM((self.heads, COLUMNS * 4), jnp.float32)}

    def shared_memory(self, stages: int) -> dict[str, int]:
        """Bytes of shared memory that a thread block asks for, item by item."""
        arrays = self.queries() | self.ring(stages)
        return {name: smem.nbytes(x.shape, x.dtype) for name, x in arrays.items()} | {
            "barriers": smem.BARRIER * (1 + 2 * stages)
        }


def sketch_score(
    q: Float[Array, "B K G H"],
    codes: UInt32[Array, "L P K 64 words"],
    low: Float[Array, "L P K H"],
    step: Float[Array, "L P K H"],
    residual: Float[Array, "L P K 64"],
    norms: Float[Array, "L P K 4"],
    page_table: Int[Array, "B Mb"],
    length: Int[Array, " B"],
    layer: Int[Array, ""],
    *,
    page_size: int,
    bound: Bound = "token",
    config: SketchScoreConfig | None = None,
    interpret: bool | None = None,
) -> Scores:
    """Log-mass of every page: log of the sum of exp(q.k / sqrt(H)) over its tokens.

    Args:
      q: queries of one layer, float16, bfloat16 or float32. A query in float32 is used as float16, which the bounds
        cover: they are narrower for the others.
      codes, low, step, residual, norms: fields of a cache's `Sketch`. Blocks past the length are not read.
      length: tokens of each sequence; its last block is scored whole.
      bound: "token" bounds every token by its own residual, "group" all of a block by one number, "none" does not.
      interpret: None compiles for a GPU and interprets elsewhere.

    Returns: arrays [B, K, G, M], M = 64/C Mb. Entries past the length are not written: they hold anything. A query or
      score beyond float32 gets lower = -inf and upper = inf.

    Raises:
      NotImplementedError: for a shape or dtype that the kernel does not know.
    """
    plan = _plan(q, page_table.shape[1], page_size, bound, config or SketchScoreConfig())
    record = {"codes": codes, "low": low, "step": step, "residual": residual, "norms": norms}
    where = page_table, length, jnp.asarray(layer, jnp.int32).reshape(1)
    return _score(q, record, where, plan, dispatch.interpret(interpret) is not None)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _score(q, record: dict[str, Array], where, plan: _Plan, emulated: bool) -> Scores:
    pools = [_as_rows(record[name], width) for name, (_, width, _) in plan.fields.items()]
    batch, kv_heads, group, _ = q.shape
    result = jax.ShapeDtypeStruct((batch, kv_heads, group, plan.max_pages), jnp.float32)
    out = plgpu.kernel(
        functools.partial(_kernel, plan=plan, blocks=record["codes"].shape[1], emulated=emulated),
        out_type=[result] * len(plan.names),
        scratch_types=_scratch(plan),
        grid=(batch, kv_heads // plan.heads, plan.splits),
        grid_names=("row", "heads", "split"),
        num_threads=plan.config.groups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not emulated),
        interpret=dispatch.interpret(emulated),
        kernel_name="sketch_score",
    )(*operands(q, plan.unit), *pools, *where)
    return Scores(*out, *[None] * (3 - len(out)))


def _plan(q, max_blocks: int, page_size: int, bound: Bound, config: SketchScoreConfig) -> _Plan:
    batch, kv_heads, group, dim = q.shape
    _check(q, page_size, bound)
    heads = max(n for n in range(1, _HEADS_OF_BLOCK + 1) if kv_heads % n == 0)
    heads_of_stage = math.gcd(heads, WARPS)
    unit = UnitShape(head_dim=dim, group=group, page_size=page_size, bound=bound)
    tasks = -(-max_blocks * heads_of_stage // WARPS)
    splits = config.splits or max(1, min(MULTIPROCESSORS // (batch * (kv_heads // heads)), tasks))
    plan = _Plan(unit, config, heads, heads_of_stage, WARPS // heads_of_stage, config.stages or 0, splits, max_blocks * unit.pages)
    if config.stages is None:
        counts = range(config.groups, _MOST_STAGES + 1, config.groups)
        fitting = [n for n in counts if sum(plan.shared_memory(n).values()) <= smem.LIMIT]
        plan = dataclasses.replace(plan, stages=max(fitting, default=config.groups))
    smem.require(plan.shared_memory(plan.stages), "use fewer stages")
    return plan


def _check(q, page_size: int, bound: str) -> None:
    group, dim = q.shape[2:]
    if dim not in (64, 128):
        raise NotImplementedError(f"Sketch scoring takes a head dim of 64 or 128, not {dim}.")
    if group > COLUMNS:
        raise NotImplementedError(f"Sketch scoring takes up to {COLUMNS} query heads per KV head, not {group}.")
    if page_size not in (16, 32, 64):
        raise NotImplementedError(f"Sketch scoring takes pages of 16, 32 or 64 tokens, not {page_size}.")
    if bound not in ("token", "group", "none"):
        raise NotImplementedError(f"Sketch scoring knows the bounds token, group and none, not {bound}.")
    if q.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"Sketch scoring takes float16, bfloat16 or float32 queries, not {q.dtype}.")


def _rows(elements: int) -> tuple[int, int]:
    """Rows as wide as a TMA copy allows: narrow ones cost a third of the bandwidth."""
    width = math.gcd(elements, 256)
    return elements // width, width


def _as_rows(pool: Array, width: int) -> Array:
    """A pool [L, P, ...] as [L * P, rows, width]: the same memory."""
    return pool.reshape(pool.shape[0] * pool.shape[1], -1, width)


def _scratch(plan: _Plan):
    arrays = plan.queries() | plan.ring(plan.stages)
    copies = len(plan.fields) * plan.blocks_of_stage
    return dict(
        smem=arrays,
        query_ready=plgpu.Barrier(num_arrivals=2),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        free=plgpu.Barrier(num_barriers=plan.stages),
    )


def operands(q: Float[Array, "B K G H"], unit: UnitShape) -> tuple[Float[Array, "B K j 256"], Float[Array, "B K 32"]]:
    """Queries as mma fragments, and the numbers of each column: scale, norm, slack per norm of a record, slack."""
    *lead, group, dim = q.shape
    room = COLUMNS // 2 if unit.doubled else COLUMNS
    padded = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, room - group), (0, 0)))
    largest = jnp.abs(padded).max(-1, keepdims=True)
    exponent = (lax.bitcast_convert_type(largest, jnp.int32) >> 23) - 127
    exponent = jnp.where(largest > 0, jnp.clip(exponent, -100, 100), 0) + 3
    power = lambda e: lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
    padded = padded * power(-exponent)  # the largest channel in [1/8, 1/4)
    scale = power(exponent)[..., 0] * (_LOG2E / dim**0.5)
    columns = jnp.stack(_column_numbers(padded, scale, dim, q.dtype), axis=-1)
    twice = lambda x: jnp.concatenate([x, x], axis=2) if unit.doubled else x
    fragments = twice(padded).astype(jnp.float16).reshape(*lead, COLUMNS, unit.chunks, 4, 8)
    fragments = jnp.swapaxes(fragments, 2, 3).reshape(*lead, unit.chunks, -1)
    return fragments, twice(columns).reshape(*lead, -1)


def _column_numbers(q, scale, dim: int, dtype) -> list[Array]:
    """See the table in `sketch_unit`: u H 2 and 32 u of the exact logit and the stored norms, 36 u H/16 of q.low."""
    norm = jnp.linalg.norm(q, axis=-1) * (1.0 + 2.0**-12)
    lost = 2.0**-11 if dtype == jnp.float32 else 0.0
    relative = 2 * (dim + 16) * _U + 36 * _U * dim / 16 + lost
    per_norm = (relative * norm + dim**0.5 * 2.0**-25) * (1.0 + 2.0**-10)
    return [scale, norm * scale, per_norm * scale, scale * (16 * dim * 2.0**-25)]


def _kernel(*refs, plan: _Plan, blocks: int, emulated: bool, smem, query_ready, ready, free):
    query_gmem, columns_gmem, *rest = refs
    pools = dict(zip(plan.fields, rest, strict=False))
    table_gmem, length_gmem, layer_gmem, *outs = rest[len(pools) :]
    row, heads, split = (lax.axis_index(name) for name in ("row", "heads", "split"))
    warpgroup = lax.axis_index("warpgroup")
    queries = {"query": query_gmem, "columns": columns_gmem}
    count = jnp.minimum((length_gmem[row] + (BLOCK - 1)) // BLOCK, table_gmem.shape[1])
    steps = (count + (plan.blocks_of_stage - 1)) // plan.blocks_of_stage
    per = (steps + (plan.splits - 1)) // plan.splits
    first = split * per
    tasks = jnp.maximum(jnp.minimum(first + per, steps) - first, 0) * plan.chunks

    @pl.when(warpgroup == plan.config.groups)
    def produce():
        if plan.config.registers:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def per_warp(warp):
            @pl.when(warp == 0)
            def _():
                for name, x in queries.items():
                    source = x.at[row, pl.ds(heads * plan.heads, plan.heads)]
                    plgpu.copy_gmem_to_smem(source, smem[name], query_ready)
                offset = layer_gmem[0] * blocks
                last = jnp.maximum(count - 1, 0)

                def records(task):
                    """Where the pools hold the blocks of a task; a block too many is read twice."""
                    block = (first + task // plan.chunks) * plan.blocks_of_stage
                    each = range(plan.blocks_of_stage)
                    return tuple(offset + table_gmem[row, jnp.minimum(block + j, last)] for j in each)

                def step(task, current):
                    slot = lax.rem(task, plan.stages)
                    following = records(task + 1)

                    @pl.when(task >= plan.stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    _copy(plan, pools, smem, current, heads * plan.chunks + task % plan.chunks, slot, ready)
                    return following

                lax.fori_loop(0, tasks, step, records(0))

                @pl.loop(0, jnp.minimum(tasks, plan.stages))
                def drain(slot):
                    plgpu.barrier_wait(free.at[slot])

    @pl.when(warpgroup < plan.config.groups)
    def consume():
        if plan.config.registers:
            plgpu.set_max_registers(plan.config.registers, action="increase")
        plgpu.barrier_wait(query_ready)

        def step(turn, _):
            task = turn * plan.config.groups + warpgroup
            slot = lax.rem(task, plan.stages)
            plgpu.barrier_wait(ready.at[slot])
            block = (first + task // plan.chunks) * plan.blocks_of_stage
            head = task % plan.chunks * plan.heads_of_stage
            place = _Place(row, heads * plan.heads + head, head, block, count)
            (_emulate_stage if emulated else _score_stage)(plan, smem, slot, outs, place)
            plgpu.commit_smem()  # these reads come before the next copy into the slot
            plgpu.barrier_arrive(free.at[slot])
            return ()

        lax.fori_loop(0, (tasks - warpgroup + (plan.config.groups - 1)) // plan.config.groups, step, ())


class _Place(NamedTuple):
    """Of a stage."""

    row: Any
    head: Any  # first, of all KV heads
    local_head: Any  # first, of those of the thread block
    block: Any  # first, of the sequence
    count: Any  # blocks of the sequence


def _copy(plan: _Plan, pools, smem, records, chunk, slot, ready) -> None:
    for j, record in enumerate(records):
        for name, (rows, width, _) in plan.fields.items():
            if name == "norms":
                source, target = pools[name].at[record, chunk], smem[name].at[slot, j, pl.ds(0, width)]
            else:
                source, target = pools[name].at[record, pl.ds(chunk * rows, rows)], smem[name].at[slot, j]
            plgpu.copy_gmem_to_smem(source, target, ready.at[slot])


def _score_stage(plan: _Plan, smem, slot, outs, place: _Place) -> None:
    ref, scalar = plgpu.RefType(), plgpu.Layout.WG_SPLAT(())
    memory = [smem["query"], smem["columns"], *[smem[name].at[slot] for name in plan.fields]]
    refs = [*memory, *[out.at[place.row] for out in outs]]
    code = functools.partial(_emit_stage, plan=plan)
    plgpu.inline_mgpu(arg_types=(*[ref] * len(refs), *[scalar] * 4))(code)(*refs, *place[1:])


def _emit_stage(ctx, *args, plan: _Plan) -> None:
    """Each warp scores its units of the stage."""
    *refs, head, local_head, block, count = args
    head, local_head, block, count = (Register(_scalar(x)) for x in (head, local_head, block, count))
    names = ["query", "columns", *plan.fields]
    pointer = {name: utils.memref_ptr(x) for name, x in zip([*names, *plan.names], refs, strict=True)}
    warp = Register(arith.remui(utils.warp_idx(), _i32(WARPS)))
    units = plan.heads_of_stage * plan.blocks_of_stage
    for turn in range(units // WARPS):
        unit = warp + turn * WARPS
        j = Register(arith.divui(unit.value, _i32(plan.heads_of_stage)))
        h = Register(arith.remui(unit.value, _i32(plan.heads_of_stage)))
        at = _unit_offsets(plan, j, h, local_head)
        memory = {name: _advance(pointer[name], at[name]) for name in names}
        results = score_unit(GpuWarp(memory), plan.unit)
        _store(plan, results, {name: pointer[name] for name in plan.names}, head + h, block + j, count)


def _unit_offsets(plan: _Plan, j: Register, h: Register, local_head: Register) -> dict[str, Register]:
    """Byte offsets of a unit's pieces of memory in their allocations."""
    offsets = {
        "query": (local_head + h) * (LANES * COLUMNS * 2 * plan.unit.chunks),
        "columns": (local_head + h) * (COLUMNS * 4 * 4),
    }
    for name, x in plan.ring(plan.stages).items():
        of_block = math.prod(x.shape[2:]) * jnp.dtype(x.dtype).itemsize
        of_head = 4 * _NORMS if name == "norms" else of_block // plan.heads_of_stage
        offsets[name] = j * of_block + h * of_head
    return offsets


def _store(plan: _Plan, results: Results, pointers, head: Register, block: Register, count: Register) -> None:
    pages = plan.unit.pages
    out_row = (head * plan.unit.group + results.column) * (plan.max_pages) + block * pages + results.page
    for name, pointer in pointers.items():
        mine = results.mine[name] & (block < count)
        with ir.InsertionPoint(scf.IfOp(mine.value, [], has_else=False).then_block):
            llvm.store(results.values[name].value, _advance(pointer, out_row * 4), alignment=4)
            scf.yield_([])


def _scalar(x) -> ir.Value:
    return x.registers.item() if hasattr(x, "registers") else x


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _advance(pointer: ir.Value, offset: Register) -> ir.Value:
    return utils.getelementptr(pointer, [offset.value], ir.IntegerType.get_signless(8))


def _emulate_stage(plan: _Plan, smem, slot, outs, place: _Place) -> None:
    """The same units on arrays: the interpreter has no inline code."""
    heads, blocks = plan.heads_of_stage, plan.blocks_of_stage
    memory = {name: words(smem[name][pl.ds(place.local_head, heads)], heads) for name in ("query", "columns")}
    for name in plan.fields:
        x = smem[name][slot]
        if name == "norms":
            x = x[:, : _NORMS * heads]
        memory[name] = words(x, blocks, heads)
    results = score_unit(ArrayWarp(memory), plan.unit)
    tiles = {name: gathered(results, name, plan.unit, (blocks, heads)) for name in plan.names}
    for j in range(blocks):

        @pl.when(place.block + j < place.count)
        def _(j=j):
            pages = pl.ds((place.block + j) * plan.unit.pages, plan.unit.pages)
            for name, out in zip(plan.names, outs, strict=True):
                out[place.row, pl.ds(place.head, heads), :, pages] = tiles[name][j]


def words(x: Array, *lead: int) -> UInt32[Array, "*lead n"]:
    """Memory as a warp sees it."""
    x = x.reshape(*lead, -1)
    if x.dtype.itemsize == 2:
        x = x.reshape(*lead, -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def gathered(results: Results, name: str, unit: UnitShape, lead: tuple[int, ...]) -> Float[Array, "*lead G pages"]:
    """Where the lanes of some warps would have stored their numbers; NaN where none has."""
    column = jnp.where(results.mine[name], results.column, unit.group)  # dropped
    value = jnp.broadcast_to(results.values[name], (*lead, LANES))
    return jnp.full((*lead, unit.group, unit.pages), jnp.nan).at[..., column, results.page].set(value, mode="drop")
