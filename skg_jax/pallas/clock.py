"""The GPU's own clock inside a compiled loop: what a step took, without a host in between."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm
from jaxtyping import Array, Int

from skg_jax.pallas.dispatch import available


def stamp(after: Array) -> Int[Array, "2"]:
    """Low and high word of the nanosecond clock, read once `after` has been computed; zeros without a Hopper GPU."""
    if not available():
        return jnp.zeros(2, jnp.int32)
    return plgpu.kernel(
        _kernel, out_type=jax.ShapeDtypeStruct((2,), jnp.int32), grid=(1,), grid_names=("once",), kernel_name="clock"
    )(after)


def nanoseconds(stamps: np.ndarray) -> np.ndarray:
    """Stamps [..., 2] as int64."""
    words = stamps.astype(np.uint32).astype(np.int64)
    return words[..., 0] | (words[..., 1] << 32)


def _kernel(after_ref, out_ref):
    del after_ref  # its buffer orders this launch behind what made it
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(_read_clock)(out_ref)


def _read_clock(_, out):
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    now = llvm.inline_asm(i64, [], "mov.u64 $0, %globaltimer;", "=l", has_side_effects=True)
    low = arith.trunci(i32, now)
    high = arith.trunci(i32, arith.shrui(now, arith.constant(i64, 32)))
    pointer = utils.memref_ptr(out)
    for offset, word in ((0, low), (4, high)):  # all lanes write the same value
        at = utils.getelementptr(pointer, [offset], ir.IntegerType.get_signless(8))
        llvm.store(word, at, alignment=4)
