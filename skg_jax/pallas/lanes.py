"""Lane-level code of the selection kernel, written as MLIR: what Pallas has no words for.

The pages of a row are dealt out in runs, one to each warp of the block: register i of lane l of warp w holds page
32 (R w + i) + l, where R is the number of registers. To Pallas the R registers of a warpgroup are one array of 128 R
elements. The order of its elements is nothing that Pallas knows or needs: `ids` says which page each one is.

Sums and maxima are over all warps of the block, with one block barrier each, or one for several arrays. They alternate
between slots of shared memory, so that none is overwritten before every warp has read it: two calls in a row must not
share a slot.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf

from skg_jax.pallas import radix
from skg_jax.pallas.lane_code import (
    REF,
    SAME,
    SCALAR,
    WARP,
    WARPGROUP,
    as_array,
    as_same,
    asm,
    const,
    i32,
    lane_and_warp,
    load_words,
    one_of,
    scalar,
    scalars,
    signed,
    tree,
    warp_number,
)
from skg_jax.pallas.radix import Cut, Window

TOGETHER = 4  # arrays that one barrier can serve
_HELD = 64  # registers of arrays that are reduced together
SLOTS = 3 + 2 * TOGETHER  # of shared memory: two for code in a line, as wide as that, two for loops, one for the list


@dataclasses.dataclass(kw_only=True)
class Lanes:
    """One row of pages over the lanes of a block.

    Args:
      warpgroups: of 128 lanes in the block.
      registers: pages that one lane holds.
      scratch: int32 [SLOTS, 4 * warpgroups] in shared memory. bins: see `radix.clear`.
    """

    warpgroups: int
    registers: int
    scratch: jax.Ref
    bins: jax.Ref
    _turn: int = 0

    @property
    def capacity(self) -> int:
        """Elements of the block, padding included."""
        return WARPGROUP * self.warpgroups * self.registers

    @property
    def together(self) -> int:
        """Arrays that lanes can hold beside everything else."""
        return max(1, min(TOGETHER, _HELD // self.registers))

    @property
    def _layout(self):
        return plgpu.Layout.WG_STRIDED((WARPGROUP * self.registers,), vec_size=1)

    def _array(self, dtype) -> plgpu.ShapeDtypeStruct:
        return plgpu.ShapeDtypeStruct((WARPGROUP * self.registers,), dtype, self._layout)

    def ids(self):
        """Page of every element, int32; numbers from M on are no pages."""
        return plgpu.inline_mgpu(return_type=self._array(jnp.int32))(functools.partial(_ids, count=self.registers))()

    def load(self, array, at: tuple, used, dtype=jnp.float32):
        """Elements of the row `at` of an array [..., M] in global memory; those from `used` on hold copies of others.

        `dtype` is that of the result: bool in memory comes as int32.
        """
        read = functools.partial(_load, count=self.registers)
        kind = self._array(dtype)
        return plgpu.inline_mgpu(arg_types=(REF, SCALAR, SCALAR), return_type=kind)(read)(
            array, _row_number(array, at), used
        )

    def sum(self, x, loop=None):
        """Sum over the row, the same in every lane. `loop`: number of the trip, in a loop with one call."""
        if loop is None:
            return self.sums([x])[0]
        return self._reduce([x], "add", 2 * TOGETHER + (loop & 1))[0]

    def sums(self, xs: list) -> list:
        """Sums of up to TOGETHER arrays."""
        self._turn ^= 1
        return self._reduce(xs, "add", jnp.int32(self._turn * TOGETHER))

    def maxima(self, xs: list) -> list:
        """Largest elements of up to TOGETHER arrays, or NaN where there is one."""
        self._turn ^= 1
        return self._reduce(xs, "max", jnp.int32(self._turn * TOGETHER))

    def _reduce(self, xs: list, op: str, slot) -> list:
        kinds = [plgpu.ShapeDtypeStruct((WARPGROUP,), x.dtype, SAME) for x in xs]
        run = functools.partial(_reduce, op=op, warps=4 * self.warpgroups)
        args = (REF, SCALAR, *[self._layout] * len(xs))
        found = plgpu.inline_mgpu(arg_types=args, return_type=kinds)(run)(self.scratch, slot, *xs)
        return [one_of(x) for x in found]

    def clear(self) -> None:
        """Empty all bins; before the first reduction, and that before the first `cut`."""
        radix.clear(self.bins, self.warpgroups)

    def cut(self, key, weights: list, window: Window, above, limit, turn) -> Cut:
        """See `radix.cut`."""
        return radix.cut(self.bins, self._layout, key, weights, window, above, limit, turn)

    def write(self, read, ids_gmem, mask_gmem, at: tuple):
        """Store row `at` of the list of pages with read != 0, ascending, and of the mask. Returns how many there are.

        Entries of the list past their number are M - 1.
        """
        run = functools.partial(_write, warps=4 * self.warpgroups, slot=SLOTS - 1)
        kind = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, SAME)
        call = plgpu.inline_mgpu(arg_types=(self._layout, REF, REF, SCALAR, REF), return_type=kind)(run)
        return one_of(call(read, ids_gmem, mask_gmem, _row_number(ids_gmem, at), self.scratch))


def _row_number(array, at: tuple):
    """Which row of an array [..., M], counted through."""
    return functools.reduce(lambda row, place: row * place[0] + place[1], zip(array.shape, at, strict=False), 0)


def _pages(count: int):
    """Page of each register of this lane."""
    lane, warp = lane_and_warp()
    first = arith.addi(arith.muli(warp, const(WARP * count)), lane)
    return [arith.addi(first, const(WARP * i)) for i in range(count)]


def _ids(ctx, *, count: int):
    return as_array(_pages(count), True)


def _load(ctx, array, row, used, *, count: int):
    kind, start = _row(array, row)
    last = arith.maxsi(arith.subi(scalar(used), const(1)), const(0))
    at = [utils.getelementptr(start, [arith.minsi(page, last)], kind) for page in _pages(count)]
    values = [llvm.load(kind, p) for p in at]
    if utils.bitwidth(kind) < 32:
        values = [arith.extui(i32(), v) for v in values]
    return as_array(values, signed(kind))


def _row(array, row):
    """Type and address of a row's first element; taken from the whole array, for a slice of bool starts in bits."""
    kind = _stored(ir.MemRefType(array.type).element_type)
    first = arith.muli(scalar(row), const(ir.MemRefType(array.type).shape[-1]))
    return kind, utils.getelementptr(utils.memref_ptr(array), [first], kind)


def _stored(kind):
    """How a number lies in memory: a bool takes a byte."""
    return ir.IntegerType.get_signless(8) if utils.bitwidth(kind) == 1 else kind


def _combine(op: str, kind):
    """The reduction of two values; the maximum of a NaN is NaN."""
    if op == "max":
        return arith.maximumf
    return arith.addi if isinstance(kind, ir.IntegerType) else arith.addf


def _over_warp(x, combine):
    if combine is arith.addi:
        return utils.redux(x, const(-1), utils.ReductionKind.ADD)
    for distance in (16, 8, 4, 2, 1):
        x = combine(x, utils.shfl_bfly(x, distance))
    return x


def _exchange(xs: list, scratch, slot, warps: int) -> list[list]:
    """Values of each warp, known to every lane: xs[k] in slot + k. One block barrier."""
    base = utils.getelementptr(utils.memref_ptr(scratch), [arith.muli(slot, const(warps))], i32())
    own = utils.getelementptr(base, [warp_number()], i32())
    for k, x in enumerate(xs):
        # every lane of the warp stores the same
        llvm.store(utils.bitcast(x, i32()), utils.getelementptr(own, [warps * k], i32()))
    gpu.barrier()
    return [[utils.bitcast(w, x.type) for w in load_words(base, warps * k, warps)] for k, x in enumerate(xs)]


def _reduce(ctx, scratch, slot, *xs, op: str, warps: int):
    values = [scalars(x) for x in xs]
    combine = _combine(op, values[0][0].type)
    of_warp = [_over_warp(tree(own, combine), combine) for own in values]
    totals = [tree(own, combine) for own in _exchange(of_warp, scratch, scalar(slot), warps)]
    return [as_same(total, signed(total.type)) for total in totals]


def _write(ctx, read, ids_gmem, mask_gmem, row, scratch, *, warps: int, slot: int):
    flags, pages = scalars(read), ir.MemRefType(ids_gmem.type).shape[-1]
    (_, ids), (_, mask) = _row(ids_gmem, row), _row(mask_gmem, row)
    vote = "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    ballots = [asm(vote, "=r,r", flag, pure=False) for flag in flags]
    counts = [asm("popc.b32 $0, $1;", "=r,r", b) for b in ballots]
    (by_warp,) = _exchange([tree(counts, arith.addi)], scratch, const(slot), warps)
    total = tree(by_warp, arith.addi)
    ahead = _before(by_warp)  # pages read before the run of this warp
    below = asm("mov.u32 $0, %lanemask_lt;", "=r")
    for page, flag, ballot, count in zip(_pages(len(flags)), flags, ballots, counts, strict=True):
        rank = arith.addi(ahead, asm("popc.b32 $0, $1;", "=r,r", arith.andi(ballot, below)))
        _put(page, flag, rank, total, ids, mask, pages)
        ahead = arith.addi(ahead, count)
    return as_same(total, True)


def _before(by_warp):
    warp = warp_number()
    earlier = [arith.cmpi(arith.CmpIPredicate.ult, const(w), warp) for w in range(len(by_warp))]
    return tree([arith.select(e, n, const(0)) for e, n in zip(earlier, by_warp, strict=True)], arith.addi)


def _put(page, flag, rank, total, ids, mask, pages: int):
    """Store one page: a page read goes to its rank, another behind them all."""
    i8 = ir.IntegerType.get_signless(8)
    is_read = arith.cmpi(arith.CmpIPredicate.ne, flag, const(0))
    behind = arith.subi(arith.addi(total, page), rank)
    inside = arith.cmpi(arith.CmpIPredicate.slt, page, const(pages))
    with ir.InsertionPoint(scf.IfOp(inside, [], has_else=False).then_block):
        at = utils.getelementptr(ids, [arith.select(is_read, rank, behind)], i32())
        llvm.store(arith.select(is_read, page, const(pages - 1)), at)
        llvm.store(arith.extui(i8, is_read), utils.getelementptr(mask, [page], i8))
        scf.yield_([])
