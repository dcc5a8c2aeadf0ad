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
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, scf, vector

WARPGROUP = 128
WARP = 32
TOGETHER = 4  # arrays that one barrier can serve
_HELD = 64  # registers of arrays that are reduced together
SLOTS = 3 + 2 * TOGETHER  # of shared memory: two for code in a line, as wide as that, two for loops, one for the list
_REF = plgpu.RefType()
_SCALAR = plgpu.Layout.WG_SPLAT(())
_SAME = plgpu.Layout.WG_SPLAT((WARPGROUP,))  # one value in every lane


@dataclasses.dataclass(kw_only=True)
class Lanes:
    """One row of pages over the lanes of a block.

    Args:
      warpgroups: of 128 lanes in the block.
      registers: pages that one lane holds.
      scratch: int32 [SLOTS, 4 * warpgroups] in shared memory.
    """

    warpgroups: int
    registers: int
    scratch: jax.Ref
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
        return plgpu.inline_mgpu(arg_types=(_REF, _SCALAR, _SCALAR), return_type=kind)(read)(
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
        kinds = [plgpu.ShapeDtypeStruct((WARPGROUP,), x.dtype, _SAME) for x in xs]
        run = functools.partial(_reduce, op=op, warps=4 * self.warpgroups)
        args = (_REF, _SCALAR, *[self._layout] * len(xs))
        found = plgpu.inline_mgpu(arg_types=args, return_type=kinds)(run)(self.scratch, slot, *xs)
        return [_one_of(x) for x in found]

    def write(self, read, ids_gmem, mask_gmem, at: tuple):
        """Store row `at` of the list of pages with read != 0, ascending, and of the mask. Returns how many there are.

        Entries of the list past their number are M - 1.
        """
        run = functools.partial(_write, warps=4 * self.warpgroups, slot=SLOTS - 1)
        kind = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, _SAME)
        call = plgpu.inline_mgpu(arg_types=(self._layout, _REF, _REF, _SCALAR, _REF), return_type=kind)(run)
        return _one_of(call(read, ids_gmem, mask_gmem, _row_number(ids_gmem, at), self.scratch))


def _row_number(array, at: tuple):
    """Which row of an array [..., M], counted through."""
    return functools.reduce(lambda row, place: row * place[0] + place[1], zip(array.shape, at, strict=False), 0)


def _one_of(same):
    """The one value of an array: MLIR code cannot return a scalar. Costs nothing."""
    return jnp.max(same)


def _i32():
    return ir.IntegerType.get_signless(32)


def _const(value: int):
    return utils.c(value, _i32())


def _asm(text: str, constraints: str, *args, pure: bool = True):
    return llvm.inline_asm(_i32(), list(args), text, constraints, has_side_effects=not pure)


def _lane_and_warp():
    thread = utils.thread_idx()
    return arith.andi(thread, _const(WARP - 1)), _warp()


def _warp():
    """Number of the warp. Not broadcast over the warp: that takes longer than it saves."""
    return utils.warp_idx(sync=False)


def _pages(count: int):
    """Page of each register of this lane."""
    lane, warp = _lane_and_warp()
    first = arith.addi(arith.muli(warp, _const(WARP * count)), lane)
    return [arith.addi(first, _const(WARP * i)) for i in range(count)]


def _scalars(array):
    """Registers of an array as plain values."""
    at = ir.DenseI64ArrayAttr.get([0])
    return [vector.extract(r, dynamic_position=[], static_position=at) for r in array.registers.flat]


def _as_array(values, signed: bool | None):
    registers = np.empty(len(values), object)
    registers[:] = [vector.broadcast(ir.VectorType.get((1,), v.type), v) for v in values]
    layout = mgpu.WGStridedFragLayout((WARPGROUP * len(values),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def _as_same(value, signed: bool | None):
    layout = mgpu.WGSplatFragLayout((WARPGROUP,))
    return mgpu.FragmentedArray(_registers=np.array(value, object), _layout=layout, _is_signed=signed)


def _signed(kind) -> bool | None:
    return True if isinstance(kind, ir.IntegerType) else None


def _scalar(x):
    return x.registers.item() if hasattr(x, "registers") else x


def _ids(ctx, *, count: int):
    return _as_array(_pages(count), True)


def _load(ctx, array, row, used, *, count: int):
    kind, start = _row(array, row)
    last = arith.maxsi(arith.subi(_scalar(used), _const(1)), _const(0))
    at = [utils.getelementptr(start, [arith.minsi(page, last)], kind) for page in _pages(count)]
    values = [llvm.load(kind, p) for p in at]
    if utils.bitwidth(kind) < 32:
        values = [arith.extui(_i32(), v) for v in values]
    return _as_array(values, _signed(kind))


def _row(array, row):
    """Type and address of a row's first element; taken from the whole array, for a slice of bool starts in bits."""
    kind = _stored(ir.MemRefType(array.type).element_type)
    first = arith.muli(_scalar(row), _const(ir.MemRefType(array.type).shape[-1]))
    return kind, utils.getelementptr(utils.memref_ptr(array), [first], kind)


def _stored(kind):
    """How a number lies in memory: a bool takes a byte."""
    return ir.IntegerType.get_signless(8) if utils.bitwidth(kind) == 1 else kind


def _combine(op: str, kind):
    """The reduction of two values; the maximum of a NaN is NaN."""
    if op == "max":
        return arith.maximumf
    return arith.addi if isinstance(kind, ir.IntegerType) else arith.addf


def _tree(values, combine):
    """Reduce a list pairwise: a fixed order, and short chains."""
    while len(values) > 1:
        pairs = [combine(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def _over_warp(x, combine):
    if combine is arith.addi:
        return utils.redux(x, _const(-1), utils.ReductionKind.ADD)
    for distance in (16, 8, 4, 2, 1):
        x = combine(x, utils.shfl_bfly(x, distance))
    return x


def _exchange(xs: list, scratch, slot, warps: int) -> list[list]:
    """Values of each warp, known to every lane: xs[k] in slot + k. One block barrier."""
    base = utils.getelementptr(utils.memref_ptr(scratch), [arith.muli(slot, _const(warps))], _i32())
    own = utils.getelementptr(base, [_warp()], _i32())
    for k, x in enumerate(xs):
        # every lane of the warp stores the same
        llvm.store(utils.bitcast(x, _i32()), utils.getelementptr(own, [warps * k], _i32()))
    gpu.barrier()
    return [[utils.bitcast(w, x.type) for w in _words(base, warps * k, warps)] for k, x in enumerate(xs)]


def _words(base, first: int, count: int) -> list:
    words = []
    for i in range(first, first + count, 4):
        quad = llvm.load(ir.VectorType.get((4,), _i32()), utils.getelementptr(base, [i], _i32()), alignment=16)
        at = [ir.DenseI64ArrayAttr.get([j]) for j in range(4)]
        words += [vector.extract(quad, dynamic_position=[], static_position=j) for j in at]
    return words


def _reduce(ctx, scratch, slot, *xs, op: str, warps: int):
    values = [_scalars(x) for x in xs]
    combine = _combine(op, values[0][0].type)
    of_warp = [_over_warp(_tree(own, combine), combine) for own in values]
    totals = [_tree(own, combine) for own in _exchange(of_warp, scratch, _scalar(slot), warps)]
    return [_as_same(total, _signed(total.type)) for total in totals]


def _write(ctx, read, ids_gmem, mask_gmem, row, scratch, *, warps: int, slot: int):
    flags, pages = _scalars(read), ir.MemRefType(ids_gmem.type).shape[-1]
    (_, ids), (_, mask) = _row(ids_gmem, row), _row(mask_gmem, row)
    vote = "{.reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff;}"
    ballots = [_asm(vote, "=r,r", flag, pure=False) for flag in flags]
    counts = [_asm("popc.b32 $0, $1;", "=r,r", b) for b in ballots]
    (by_warp,) = _exchange([_tree(counts, arith.addi)], scratch, _const(slot), warps)
    total = _tree(by_warp, arith.addi)
    ahead = _before(by_warp)  # pages read before the run of this warp
    below = _asm("mov.u32 $0, %lanemask_lt;", "=r")
    for page, flag, ballot, count in zip(_pages(len(flags)), flags, ballots, counts, strict=True):
        rank = arith.addi(ahead, _asm("popc.b32 $0, $1;", "=r,r", arith.andi(ballot, below)))
        _put(page, flag, rank, total, ids, mask, pages)
        ahead = arith.addi(ahead, count)
    return _as_same(total, True)


def _before(by_warp):
    warp = _warp()
    earlier = [arith.cmpi(arith.CmpIPredicate.ult, _const(w), warp) for w in range(len(by_warp))]
    return _tree([arith.select(e, n, _const(0)) for e, n in zip(earlier, by_warp, strict=True)], arith.addi)


def _put(page, flag, rank, total, ids, mask, pages: int):
    """Store one page: a page read goes to its rank, another behind them all."""
    i8 = ir.IntegerType.get_signless(8)
    is_read = arith.cmpi(arith.CmpIPredicate.ne, flag, _const(0))
    behind = arith.subi(arith.addi(total, page), rank)
    inside = arith.cmpi(arith.CmpIPredicate.slt, page, _const(pages))
    with ir.InsertionPoint(scf.IfOp(inside, [], has_else=False).then_block):
        at = utils.getelementptr(ids, [arith.select(is_read, rank, behind)], _i32())
        llvm.store(arith.select(is_read, page, _const(pages - 1)), at)
        llvm.store(arith.extui(i8, is_read), utils.getelementptr(mask, [page], i8))
        scf.yield_([])
