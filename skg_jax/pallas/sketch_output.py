"""Where the sketch scorer's numbers go: to global memory at once, or over rows in shared memory in whole runs."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from skg_jax.pallas.sketch_plan import Plan
from skg_jax.pallas.sketch_sums import Results
from skg_jax.pallas.sketch_unit import LANES
from skg_jax.pallas.warp import Register

type Mlir = Any  # a value or a pointer


class Place(NamedTuple):
    """Of a stage; traced integers."""

    head: Any  # first, of all KV heads
    local_head: Any  # first, of those of the thread block
    block: Any  # first, of the sequence
    count: Any  # blocks of the sequence
    known: Any  # bit j: whether the record of block + j is current
    index: Any  # in a run of blocks whose numbers are written together
    run: Any  # blocks of the run


def names(plan: Plan) -> list[str]:
    """The outputs, in the order in which the kernel is given them."""
    return ["estimate", "bounds"] if plan.bounded else ["estimate"]


def entry(plan: Plan, side: Register | None, head: Register, member: Register, page: Register) -> tuple[str, Register]:
    """The output that holds a number, and at which byte."""
    if side is None:
        return "estimate", ((head * plan.unit.group + member) * plan.pages + page) * 4
    return "bounds", (((head * 2 + side) * plan.unit.group + member) * plan.pages + page) * 4


def store(plan: Plan, results: Results, pointers, j: Register, h: Register, place: Place) -> None:
    """Each number by itself."""
    block = place.block + j
    page = block * plan.unit.pages + results.page
    for out in results.outputs:
        mine = out.mine & (block < place.count)
        name, at = entry(plan, out.side, place.head + h, results.member, page)
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), advance(pointers[name], at))
        _store_where(mine, "global", address, _if_known(out, place.known >> j))


def keep(plan: Plan, results: Results, rows: Mlir, place: Place) -> None:
    """The numbers of a block, into rows of the warp: estimates of the group, lower bounds, upper bounds."""
    for out in results.outputs:
        row = results.member if out.side is None else (out.side + 1) * plan.unit.group + results.member
        at = (row * plan.row_width + place.index * plan.unit.pages + results.page) * 4
        address = llvm.ptrtoint(ir.IntegerType.get_signless(32), advance(rows, at))
        _store_where(out.mine, "shared", address, _if_known(out, place.known))


def flush(plan: Plan, lane: Register, rows: Mlir, pointers, h: Register, place: Place) -> None:
    """After the last block of a run, the rows of the warp to global memory."""
    utils.warp_barrier()
    last = arith.cmpi(arith.CmpIPredicate.eq, (place.index + 1).value, place.run.value)
    with ir.InsertionPoint(scf.IfOp(last, [], has_else=False).then_block):
        for name in names(plan):
            _flush_rows(plan, name, lane, rows, pointers[name], place.head + h, place)
        scf.yield_([])
    utils.warp_barrier()  # before the next block's numbers


def _flush_rows(plan: Plan, name: str, lane: Register, rows: Mlir, output: Mlir, head: Register, place: Place) -> None:
    """Estimates, or bounds. A lane takes the pages of one block."""
    group, pages = plan.unit.group, plan.unit.pages
    start, count = (0, group) if name == "estimate" else (group, 2 * group)
    block = lane & (plan.run - 1)  # of the run
    page = (place.block - place.index + block) * pages
    for first in range(0, count, LANES // plan.run):
        row = (lane >> log2(plan.run)) + first
        inside = (row < count) & (block < place.run)
        with ir.InsertionPoint(scf.IfOp(inside.value, [], has_else=False).then_block):
            side, member = (None, row) if name == "estimate" else divmod(row, group)
            _, at = entry(plan, side, head, member, page)
            source = advance(rows, ((row + start) * plan.row_width + block * pages) * 4)
            _copy(source, advance(output, at), pages)
            scf.yield_([])


def _copy(source: Mlir, target: Mlir, count: int) -> None:
    kind = ir.VectorType.get((count,), ir.F32Type.get())
    llvm.store(llvm.load(kind, source, alignment=4 * count), target, alignment=4 * count)


def _if_known(out, flags: Register) -> Mlir:
    known = ((flags & 1) ^ 1) < 1
    return arith.select(known.value, out.value.value, out.unknown.value)


def _store_where(condition: Register, memory: str, address: Mlir, value: Mlir) -> None:
    """Without a branch."""
    utils.inline_ptx(f"st.{memory}.f32 [$0], $1;", address, value, predicate=condition.value, has_side_effects=True)


def advance(pointer: Mlir, offset: Register) -> Mlir:
    return utils.getelementptr(pointer, [offset.value], ir.IntegerType.get_signless(8))


def log2(power: int) -> int:
    return power.bit_length() - 1
