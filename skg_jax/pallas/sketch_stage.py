"""One stage of the sketch scorer's ring, by a consumer warpgroup: emitted lane by lane, or emulated on arrays.

Both forms run the same lane code (`sketch_unit`, `sketch_query`); the interpreter has no inline code.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf
from jaxtyping import Array, Float, UInt32

from skg_jax.pallas import sketch_output
from skg_jax.pallas.lane_code import REF, SCALAR, WARPGROUP, const, scalar, warp_number
from skg_jax.pallas.sketch_output import Place, advance, log2
from skg_jax.pallas.sketch_plan import NORMS, WARPS, Plan
from skg_jax.pallas.sketch_query import Column, operands, prepare_columns
from skg_jax.pallas.sketch_sums import Results
from skg_jax.pallas.sketch_unit import COLUMNS, LANES, UnitShape, score_unit
from skg_jax.pallas.warp import ArrayWarp, GpuWarp, Register

UNKNOWN = {"estimate": -math.inf, "lower": -math.inf, "upper": math.inf}
_SIDES = {"lower": 0, "upper": 1}  # of the bounds


# --- on the GPU -----------------------------------------------------------------------------------------------------


def prepare_queries(plan: Plan, dtype, q_gmem, smem) -> None:
    """All columns of a thread block, over the warps of its consumers. q_gmem: [heads, G, H]."""
    code = functools.partial(_emit_queries, plan=plan, dtype=dtype)
    plgpu.inline_mgpu(arg_types=(REF, REF, REF))(code)(q_gmem, smem["query"], smem["columns"])


def score_stage(plan: Plan, smem, slot, outs, place: Place) -> None:
    """The units of a stage, one to a warp. outs: estimate [K, G, M] and, if there are any, bounds [K, 2, G, M]."""
    refs = [smem[name] for name in plan.own()] + [smem[name].at[slot] for name in plan.fields] + [*outs]
    code = functools.partial(_emit_stage, plan=plan)
    plgpu.inline_mgpu(arg_types=(*[REF] * len(refs), *[SCALAR] * len(place)))(code)(*refs, *place)


def fill_block(plan: Plan, outs, head, block) -> None:
    """Say that nothing is known of a block past the length."""
    code = functools.partial(_emit_fill, plan=plan)
    plgpu.inline_mgpu(arg_types=(*[REF] * len(outs), SCALAR, SCALAR))(code)(*outs, head, block)


def _emit_queries(ctx, q_gmem, query_smem, columns_smem, *, plan: Plan, dtype) -> None:
    unit, size = plan.unit, jnp.dtype(dtype).itemsize
    pointers = {"raw": q_gmem, "query": query_smem, "columns": columns_smem}
    pointers = {name: utils.memref_ptr(ref) for name, ref in pointers.items()}
    of_head = COLUMNS // 2 if unit.doubled else COLUMNS
    warps, columns, mine = WARPS * plan.groups, plan.heads * of_head, []
    for first in range(0, columns, warps):
        number = _at_most(_warp() + first, columns - 1)  # warps too many do the last one again
        head, column = number >> log2(of_head), number & (of_head - 1)
        raw = (head * unit.group + _at_most(column, unit.group - 1)) * (unit.head_dim * size)
        mine.append(Column(column, raw, head * (LANES * COLUMNS * 2 * unit.chunks), head * (COLUMNS * 4 * 4)))
    prepare_columns(GpuWarp(pointers), unit, dtype, mine)


def _emit_stage(ctx, *args, plan: Plan) -> None:
    names = [*plan.own(), *plan.fields, *sketch_output.names(plan)]
    pointers = {name: utils.memref_ptr(ref) for name, ref in zip(names, args, strict=False)}
    place = Place(*[Register(scalar(x)) for x in args[len(names) :]])
    number = _warp() & (WARPS - 1)  # a stage has as many units
    j, h = number >> log2(plan.heads_of_stage), number & (plan.heads_of_stage - 1)
    offsets = _unit_offsets(plan, j, h, place.local_head)
    warp = GpuWarp({name: advance(pointers[name], offset) for name, offset in offsets.items()})
    results = score_unit(warp, plan.unit)
    if plan.run == 1:
        return sketch_output.store(plan, results, pointers, j, h, place)
    rows = advance(pointers["rows"], _warp() * (plan.rows * plan.row_width * 4))
    sketch_output.keep(plan, results, rows, place)
    sketch_output.flush(plan, warp.lane, rows, pointers, h, place)


def _unit_offsets(plan: Plan, j: Register, h: Register, local_head: Register) -> dict[str, Register]:
    """Bytes from the start of the allocations to the unit's own part."""
    head = local_head + h
    offsets = {"query": head * (LANES * COLUMNS * 2 * plan.unit.chunks), "columns": head * (COLUMNS * 4 * 4)}
    for name, x in plan.ring(plan.stages).items():
        of_block = math.prod(x.shape[2:]) * jnp.dtype(x.dtype).itemsize
        of_head = 4 * NORMS if name == "norms" else of_block // plan.heads_of_stage
        offsets[name] = j * of_block + h * of_head
    return offsets


def _emit_fill(ctx, *args, plan: Plan) -> None:
    *outs, head, block = args
    pointers = {name: utils.memref_ptr(out) for name, out in zip(sketch_output.names(plan), outs, strict=True)}
    head, block = Register(scalar(head)), Register(scalar(block))
    rows, pages = plan.heads * plan.unit.group, plan.unit.pages
    for first in range(0, rows * pages, WARPGROUP):
        number = Register(arith.remui(utils.thread_idx(), const(WARPGROUP))) + first
        row, page = number >> log2(pages), block * pages + (number & (pages - 1))
        local, member = divmod(row, plan.unit.group)
        with ir.InsertionPoint(scf.IfOp((row < rows).value, [], has_else=False).then_block):
            for name, number in UNKNOWN.items() if plan.bounded else [("estimate", UNKNOWN["estimate"])]:
                side = None if name == "estimate" else Register(const(_SIDES[name]))
                output, at = sketch_output.entry(plan, side, head + local, member, page)
                llvm.store(_f32(number), advance(pointers[output], at), alignment=4)
            scf.yield_([])


def _warp() -> Register:
    """Number of the warp in its thread block."""
    return Register(warp_number())


def _at_most(x: Register, largest: int) -> Register:
    return Register(arith.minui(x.value, const(largest)))


def _f32(value: float) -> ir.Value:
    return utils.c(value, ir.F32Type.get())


# --- under the interpreter ------------------------------------------------------------------------------------------


def emulate_queries(plan: Plan, q: Float[Array, "heads G H"], smem) -> None:
    smem["query"][...], smem["columns"][...] = operands(q, plan.unit)


def emulate_stage(plan: Plan, smem, slot, outs, place: Place) -> None:
    heads, blocks = plan.heads_of_stage, plan.blocks_of_stage
    memory = {name: words(smem[name][pl.ds(place.local_head, heads)], heads) for name in ("query", "columns")}
    for name in plan.fields:
        x = smem[name][slot]
        memory[name] = words(x[:, : NORMS * heads] if name == "norms" else x, blocks, heads)
    results = score_unit(ArrayWarp(memory), plan.unit)
    tiles = gathered(results, plan.unit, (blocks, heads))
    for j in range(blocks):

        @pl.when(place.block + j < place.count)
        def _(j=j):
            pages = pl.ds((place.block + j) * plan.unit.pages, plan.unit.pages)
            for name, tile in tiles.items():
                _put(outs, name, place.head, pages, jnp.where((place.known >> j) & 1, tile[j], UNKNOWN[name]))


def emulate_fill(plan: Plan, outs, head, block) -> None:
    tile = jnp.zeros((plan.heads, plan.unit.group, plan.unit.pages))
    for name in ("estimate", *_SIDES) if plan.bounded else ("estimate",):
        _put(outs, name, head, pl.ds(block * plan.unit.pages, plan.unit.pages), tile + UNKNOWN[name])


def _put(outs, name: str, head, pages, tile: Float[Array, "heads G pages"]) -> None:
    heads = pl.ds(head, len(tile))
    if name == "estimate":
        outs[0][heads, :, pages] = tile
    else:
        outs[1][heads, _SIDES[name], :, pages] = tile


def words(x: jax.Array, *lead: int) -> UInt32[Array, "*lead n"]:
    """Memory as a warp sees it."""
    x = x.reshape(*lead, -1)
    if x.dtype.itemsize == 2:
        x = x.reshape(*lead, -1, 2)
    return lax.bitcast_convert_type(x, jnp.uint32)


def gathered(results: Results, unit: UnitShape, lead: tuple[int, ...]) -> dict[str, Float[Array, "*lead G pages"]]:
    """What the lanes of some warps would have stored, by the names of `UNKNOWN`; NaN where none has."""
    blank = jnp.full((3, *lead, unit.group, unit.pages), jnp.nan)
    for out in results.outputs:
        row = jnp.zeros(LANES, jnp.int32) if out.side is None else 1 + out.side.astype(jnp.int32)
        column = jnp.where(out.mine, results.member, unit.group)  # dropped
        value = jnp.moveaxis(jnp.broadcast_to(out.value, (*lead, LANES)), -1, 0)
        blank = blank.at[row, ..., column, results.page].set(value, mode="drop")
    return dict(zip(UNKNOWN, blank[: 3 if len(results.outputs) > 1 else 1], strict=False))
