"""Sealing: sketch, norms and checksums of full blocks, in all layers and heads, in one launch and in place.

A thread block of one warpgroup takes one unit, the keys and values of one KV head: TMA fetches them, `seal_unit` does
the rest. Several thread blocks live on a multiprocessor, and while some compute, others wait for memory. Blocks that
are not full end at once. The XLA twin is `skg_jax.kv.sealing`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxtyping import Array, Bool, Float, Int, UInt32

from skg_jax.pallas import dispatch, smem
from skg_jax.pallas.seal_unit import WARPS, UnitShape, seal_unit
from skg_jax.pallas.warp import ArrayWarp, GpuWarp, PairKind, Register
from skg_jax.types import BLOCK

_KINDS: dict[Any, PairKind] = {jnp.dtype(jnp.bfloat16): "bf16", jnp.dtype(jnp.float16): "f16"}
_SCALAR = plgpu.Layout.WG_SPLAT(())


class Metadata(NamedTuple):
    """What is known about every block of a pool, as `PagedKVCache` and its `Sketch` name it."""

    codes: UInt32[Array, "L P K 64 words"]
    low: Float[Array, "L P K H"]
    step: Float[Array, "L P K H"]
    residual: Float[Array, "L P K 64"]
    norms: Float[Array, "L P K 4"]
    key_norm: Float[Array, "L P K"]
    value_norm: Float[Array, "L P K"]
    k_sum: UInt32[Array, "L P K 4"]
    v_sum: UInt32[Array, "L P K 4"]


def seal(
    k: Float[Array, "L P K 64 H"],
    v: Float[Array, "L P K 64 H"],
    metadata: Metadata,
    blocks: Int[Array, " n"],
    full: Bool[Array, " n"],
    *,
    interpret: bool | None = None,
) -> tuple[Metadata, Bool[Array, "L n K"]]:
    """Metadata of the full blocks among `blocks`.

    The arrays of `metadata` are aliased to the results: inside of a jit that owns them nothing is copied. Everything of
    other blocks stays as it is, and their keys and values are not read.

    Args:
      k, v: pools of one dtype, bfloat16 or float16. metadata: float16 grids and residuals, float32 norms.
      blocks: int32, of the pool; one may be named twice. One out of range counts as not full.

    Returns:
      the metadata; whether the keys of each full block fit the sketch's number format (if not its sketch is zero and
      must not be used). Bounds are those of the twin but for rounding: `seal_unit` says why they hold.

    Raises:
      NotImplementedError: for a dtype or head dim that the kernel does not know.
    """
    shape = _shape_of(k, v)
    inside = full & (blocks >= 0) & (blocks < k.shape[1])
    found, fits = _seal(k, v, metadata, jnp.where(inside, blocks, -1), shape, dispatch.interpret(interpret) is not None)
    return found, inside[:, None] & (fits != 0)


def _shape_of(k, v) -> UnitShape:
    if k.dtype not in _KINDS or v.dtype != k.dtype:
        raise NotImplementedError(
            f"Sealing takes pools of one dtype, bfloat16 or float16, not {k.dtype} and {v.dtype}."
        )
    if k.shape[-1] not in (64, 128):
        raise NotImplementedError(f"Sealing takes a head dim of 64 or 128, not {k.shape[-1]}.")
    return UnitShape(head_dim=k.shape[-1], kind=_KINDS[k.dtype])


def shared_memory(shape: UnitShape) -> dict[str, int]:
    """Bytes of each allocation of a thread block: small enough for several on one multiprocessor."""
    tile = smem.nbytes((BLOCK, shape.head_dim), jnp.bfloat16)
    scratch = smem.nbytes((sum(shape.scratch.values()),), jnp.uint32)
    return {"keys": tile, "values": tile, "scratch": scratch, "barriers": smem.BARRIER}


@functools.partial(jax.jit, static_argnums=(4, 5))
def _seal(k, v, metadata: Metadata, blocks, shape: UnitShape, interpreted: bool):
    (layers, pool, heads), count = k.shape[:3], len(blocks)
    units = layers * pool * heads
    refs = [jax.new_ref(x.reshape(units, -1)) for x in metadata]
    tile = smem.operand((BLOCK, shape.head_dim), k.dtype)
    scratch = tile, tile, plgpu.SMEM((sum(shape.scratch.values()),), jnp.uint32), plgpu.Barrier(num_arrivals=2)
    mesh = plgpu.Mesh(grid=(layers, count, heads), grid_names=("layer", "block", "head"), kernel_name="seal_blocks")

    def body(*gmem):
        pl.run_scoped(functools.partial(_kernel, *gmem, pool=pool, shape=shape, interpreted=interpreted), *scratch)

    launch: Any = pl.kernel(
        body,
        jax.ShapeDtypeStruct((layers * count * heads, 1), jnp.uint32),
        mesh=mesh,
        name="seal_blocks",
        interpret=dispatch.interpret(interpreted),
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=not interpreted, reduction_scratch_bytes=0),
    )
    flat = lambda x: x.reshape(units, BLOCK, shape.head_dim)
    fits = launch(*refs, flat(k), flat(v), blocks)
    found = Metadata(*(jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, metadata, strict=True)))
    return found, fits.reshape(layers, count, heads)


def _kernel(*refs, pool: int, shape: UnitShape, interpreted: bool):
    """metadata [L*P*K, n] each; k, v [L*P*K, 64, H]; blocks [n]; fits [L*n*K, 1]; then shared memory."""
    *metadata, k_gmem, v_gmem, blocks_gmem, fits_gmem, k_smem, v_smem, scratch, ready = refs
    layer, i, head = (lax.axis_index(name) for name in ("layer", "block", "head"))
    block, heads = blocks_gmem[i], lax.axis_size("head")

    @pl.when(block >= 0)
    def _():
        unit = (layer * pool + block) * heads + head
        call = (layer * lax.axis_size("block") + i) * heads + head
        plgpu.copy_gmem_to_smem(k_gmem.at[unit], k_smem, ready)
        plgpu.copy_gmem_to_smem(v_gmem.at[unit], v_smem, ready)
        plgpu.barrier_wait(ready)
        run = _emulate if interpreted else _emit
        run(shape, k_smem, v_smem, scratch, [*metadata, fits_gmem], unit, call)


def _emit(shape: UnitShape, k_smem, v_smem, scratch, results, unit, call) -> None:
    tile = plgpu.RefType(smem.operand(k_smem.shape, k_smem.dtype).transforms)
    types = tile, tile, *[plgpu.RefType()] * (1 + len(results)), _SCALAR, _SCALAR
    code = functools.partial(_emit_unit, shape=shape)
    plgpu.inline_mgpu(arg_types=types)(code)(k_smem, v_smem, scratch, *results, unit, call)


def _emit_unit(ctx, k, v, scratch, *args, shape: UnitShape) -> None:
    *results, unit, call = args
    memory = {"k": utils.memref_ptr(k), "v": utils.memref_ptr(v)}
    start = 0
    for name, words in shape.scratch.items():
        memory[name] = utils.getelementptr(utils.memref_ptr(scratch), [start], ir.IntegerType.get_signless(32))
        start += words
    for (name, words), result in zip(shape.results.items(), results, strict=True):
        memory[name] = _record(utils.memref_ptr(result), call if name == "fits" else unit, words)
    warp = arith.remui(utils.warp_idx(), utils.c(WARPS, ir.IntegerType.get_signless(32)))
    seal_unit(GpuWarp(memory), Register(warp), shape)


def _record(start: ir.Value, number, words: int) -> ir.Value:
    """Where record `number` begins: a pool has more bytes than 32 bits can count."""
    i64 = ir.IntegerType.get_signless(64)
    number = arith.extui(i64, number.registers.item() if hasattr(number, "registers") else number)
    offset = arith.muli(number, utils.c(words, i64))
    return utils.getelementptr(start, [offset], ir.IntegerType.get_signless(32))


def _emulate(shape: UnitShape, k_smem, v_smem, scratch, results, unit, call) -> None:
    """The same for the interpreter, which has no inline code: all lanes of the warpgroup in step."""
    del scratch
    memory = {"k": as_swizzled(k_smem[...]), "v": as_swizzled(v_smem[...])}
    memory |= {name: jnp.zeros(words, jnp.uint32) for name, words in (shape.scratch | shape.results).items()}
    seal_unit(ArrayWarp(memory), jnp.arange(WARPS, dtype=jnp.uint32)[:, None], shape)
    for name, result in zip(shape.results, results, strict=True):
        found = lax.bitcast_convert_type(memory[name], result.dtype).reshape(-1)
        result[call if name == "fits" else unit] = found


def as_swizzled(tile: Float[Array, "64 H"]) -> UInt32[Array, " words"]:
    """Shared memory as TMA fills it: 64 channels of 8 tokens are a KiB, chunk c of token t is in place c ^ t."""
    chunks = tile.reshape(8, 8, -1, 8, 8).swapaxes(1, 2)  # tokens / 8, column, token % 8, chunk, element
    token, place = jnp.arange(8)[:, None], jnp.arange(8)
    return lax.bitcast_convert_type(chunks[:, :, token, place ^ token].reshape(-1, 2), jnp.uint32)
