"""Words for lane-level code, written as MLIR: values of a lane, and how Pallas is given them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

WARPGROUP = 128
WARP = 32
REF = plgpu.RefType()
SCALAR = plgpu.Layout.WG_SPLAT(())
SAME = plgpu.Layout.WG_SPLAT((WARPGROUP,))  # one value in every lane


def i32():
    return ir.IntegerType.get_signless(32)


def const(value: int):
    return utils.c(value, i32())


def asm(text: str, constraints: str, *args, pure: bool = True):
    return llvm.inline_asm(i32(), list(args), text, constraints, has_side_effects=not pure)


def warp_number():
    """Number of the warp. Not broadcast over the warp: that takes longer than it saves."""
    return utils.warp_idx(sync=False)


def lane_and_warp():
    thread = utils.thread_idx()
    return arith.andi(thread, const(WARP - 1)), warp_number()


def scalar(x):
    return x.registers.item() if hasattr(x, "registers") else x


def scalars(array):
    """Registers of an array as plain values."""
    at = ir.DenseI64ArrayAttr.get([0])
    return [vector.extract(r, dynamic_position=[], static_position=at) for r in array.registers.flat]


def as_array(values, signed: bool | None):
    registers = np.empty(len(values), object)
    registers[:] = [vector.broadcast(ir.VectorType.get((1,), v.type), v) for v in values]
    layout = mgpu.WGStridedFragLayout((WARPGROUP * len(values),), 1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=signed)


def as_same(value, signed: bool | None):
    layout = mgpu.WGSplatFragLayout((WARPGROUP,))
    return mgpu.FragmentedArray(_registers=np.array(value, object), _layout=layout, _is_signed=signed)


def one_of(same):
    """The one value of an array: MLIR code cannot return a scalar. Costs nothing."""
    return jnp.max(same)


def signed(kind) -> bool | None:
    return True if isinstance(kind, ir.IntegerType) else None


def tree(values, combine):
    """Reduce a list pairwise: a fixed order, and short chains."""
    while len(values) > 1:
        pairs = [combine(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
        values = pairs + values[len(values) // 2 * 2 :]
    return values[0]


def load_words(base, first: int, count: int) -> list:
    words = []
    for i in range(first, first + count, 4):
        quad = llvm.load(ir.VectorType.get((4,), i32()), utils.getelementptr(base, [i], i32()), alignment=16)
        at = [ir.DenseI64ArrayAttr.get([j]) for j in range(4)]
        words += [vector.extract(quad, dynamic_position=[], static_position=j) for j in at]
    return words
