"""One digit of a radix selection: in which bin of keys, counted from the largest, a limit is passed.

A histogram in shared memory, by atomic additions; then every warp for itself adds up the bins from the top. One block
barrier a digit, and bins of its own for each, so that none has to be cleared again.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm

from skg_jax.pallas.lane_code import (
    REF,
    SAME,
    SCALAR,
    WARP,
    WARPGROUP,
    as_same,
    asm,
    const,
    i32,
    lane_and_warp,
    load_words,
    one_of,
    scalar,
    scalars,
    tree,
)

BITS = 8
BINS = 1 << BITS
TURNS = 4  # digits of a key of 30 bits: 8, 8, 8, 6
_EACH = BINS // WARP  # bins of a lane
_STEPS = (1, 2, 4, 8, 16)


class Window(NamedTuple):
    """Keys from `low` on, `size` of them, in bins of 2**shift; int32 scalars."""

    low: Any
    size: Any
    shift: Any


class Cut(NamedTuple):
    """The bin that was found, and what is held by the keys from it on, and by those beyond it; int32 scalars."""

    bin: Any
    held: Any
    beyond: Any


def clear(bins: jax.Ref, warpgroups: int) -> None:
    """Empty the histograms, int32 [TURNS, BINS] in shared memory. A block barrier must follow before a `cut`."""
    plgpu.inline_mgpu(arg_types=(REF,))(functools.partial(_clear, threads=WARPGROUP * warpgroups))(bins)


def cut(bins: jax.Ref, layout, key, weights: list, window: Window, above, limit, turn) -> Cut:
    """The highest bin such that it, the bins after it and `above` hold at least `limit`; bin 0 if there is none.

    Args:
      layout: of key and weights. key: int32 array. weights: its weights, not negative, as the only element; empty: 1
        each. above: what keys after the window hold, less than `limit`. turn: number of the call, from 0, below TURNS.
    """
    args = (REF, *[layout] * (1 + len(weights)), *[SCALAR] * 6)
    kinds = [plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, SAME)] * len(Cut._fields)
    found = plgpu.inline_mgpu(arg_types=args, return_type=kinds)(_cut)(bins, key, *weights, *window, above, limit, turn)
    return Cut(*[one_of(x) for x in found])


def _clear(ctx, bins, *, threads: int):
    start = utils.getelementptr(utils.memref_ptr(bins), [utils.thread_idx()], i32())
    for first in range(0, TURNS * BINS, threads):
        llvm.store(const(0), utils.getelementptr(start, [first], i32()))


def _cut(ctx, bins, key, *rest):
    *weights, low, size, shift, above, limit, turn = rest
    low, size, shift, above, limit, turn = (scalar(x) for x in (low, size, shift, above, limit, turn))
    own_bins = utils.getelementptr(utils.memref_ptr(bins), [arith.muli(turn, const(BINS))], i32())
    keys = scalars(key)
    for x, weight in zip(keys, scalars(weights[0]) if weights else [const(1)] * len(keys), strict=True):
        offset = arith.subi(x, low)
        inside = arith.cmpi(arith.CmpIPredicate.ult, offset, size)
        _add(utils.getelementptr(own_bins, [arith.shrui(offset, shift)], i32()), weight, inside)
    gpu.barrier()
    return [as_same(x, True) for x in _passed(own_bins, above, limit)]


def _add(pointer, weight, condition) -> None:
    address = llvm.ptrtoint(i32(), pointer)
    utils.inline_ptx("red.shared.add.u32 [$0], $1;", address, weight, predicate=condition, has_side_effects=True)


def _passed(bins, above, limit):
    """Bin, held and beyond. Lane 0 has the highest bins; one lane finds the bin, sums over the warp tell all."""
    lane, _ = lane_and_warp()
    first = arith.subi(const(BINS - _EACH), arith.muli(lane, const(_EACH)))
    words = load_words(utils.getelementptr(bins, [first], i32()), 0, _EACH)
    held = arith.addi(above, _ahead(tree(words, arith.addi)))
    found = [const(0)] * 3
    for i in reversed(range(_EACH)):
        beyond, held = held, arith.addi(held, words[i])
        here = arith.andi(_less(beyond, limit), _not(_less(held, limit)) if i else _or_last(held, limit, lane))
        values = arith.addi(first, const(i)), held, beyond
        found = [arith.select(here, value, old) for value, old in zip(values, found, strict=True)]
    return [utils.redux(x, const(-1), utils.ReductionKind.ADD) for x in found]


def _less(a, b):
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _not(condition):
    return arith.xori(condition, utils.c(1, ir.IntegerType.get_signless(1)))


def _or_last(held, limit, lane):
    """Whether a lane's lowest bin passes, or there is no lower one."""
    last = arith.cmpi(arith.CmpIPredicate.eq, lane, const(WARP - 1))
    return arith.ori(_not(_less(held, limit)), last)


def _ahead(own):
    """Sum over the lanes before this one."""
    total = own
    for distance in _STEPS:
        text = f"{{.reg .pred p; .reg .b32 t; shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; "
        total = asm(text + "@!p mov.b32 t, 0; add.s32 $0, $1, t;}", "=r,r", total, pure=False)
    return arith.subi(total, own)
