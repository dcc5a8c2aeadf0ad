"""Exact masses of drawn pages and the checksums of their keys, over all layers, in one launch.

A tile of 64 tokens holds one unit of 64 tokens, two of 32 or four of 16, from anywhere in the pools. One warpgroup
streams the tiles of its block into a ring. One computes S^T = K q^T on the tensor cores, tokens as rows, and reduces
every column to log sum exp; each unit has columns of its own, the rest of its rows is masked. One sums the bits of the
same tiles, so that what is checked is what was multiplied.

Error of a log-mass, against real arithmetic on the same q and k. Products of two bfloat16 or float16 numbers are exact
in float32. The tensor core adds 16 of them and the accumulator at a time, each aligned to the largest and truncated
(Fasi, Higham, Mikaitis, Pranesh 2021): at most 17 * 2**-23 |q||k| for each of H/16 steps. Scaling, base change and the
subtraction of the maximum add 8 * 2**-24 of the largest logit. So with u = 2**-24

    |error| <= (2.125 H + 8) u |q||k| / sqrt(H) + 1e-5,

where |k| is the largest key norm of the unit. The constant holds the sum of 64 exponentials (63 u = 3.8e-6), ex2.approx
(2**-22 relative) and lg2.approx (2**-22 relative to a logarithm of at most 6, 1e-6): 5.1e-6 together.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Bool, Float, Int, UInt32

from skg_jax.pallas import dispatch, smem
from skg_jax.types import BLOCK, PAGE_SIZES

COLUMNS = 8  # query heads that one unit gets in a tile: the smallest width of a wgmma
QUARTER = 16  # tokens of one checksum (kv/integrity.py)
_LOG2E = math.log2(math.e)
_NEVER = -1e30  # finite: no NaN from differences
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35  # kv/integrity.py
_LOAD, _MASS, _CHECK = range(3)  # what each warpgroup does


class UnitMasses(NamedTuple):
    """Units as their keys say."""

    log_mass: Float[Array, "n G"]  # natural logarithm; 0 for padding
    checksum: UInt32[Array, "n quarters"]  # one for every 16 keys; 0 for padding


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditMassConfig:
    """Shape of the launch.

    Raises:
      ValueError: if a field breaks its rule.
    """

    blocks: int = 264  # at most; two on each multiprocessor of an H200
    stages: int = 4  # tiles in the ring
    checksums: bool = True  # False: masses alone, checksums are 0

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"blocks={self.blocks}: a launch needs at least one block.")
        if not 2 <= self.stages <= 8:
            raise ValueError(f"stages={self.stages}: a ring has 2 to 8 stages.")

    def shared_memory(self, page_size: int, head_dim: int, dtype) -> dict[str, int]:
        """Bytes of each allocation."""
        columns = COLUMNS * (BLOCK // page_size)
        return {
            "keys": smem.nbytes((self.stages, BLOCK, head_dim), dtype),
            "queries": smem.nbytes((self.stages, columns, head_dim), dtype),
            "barriers": smem.nbytes((2 * self.stages,), jnp.int64),
            "reduction": smem.REDUCTION,
        }


def audit_mass(
    q: Float[Array, "L B N H"],
    k: Float[Array, "L P K 64 H"],
    layer: Int[Array, " n"],
    row: Int[Array, " n"],
    head: Int[Array, " n"],
    block: Int[Array, " n"],
    part: Int[Array, " n"],
    *,
    page_size: int,
    config: AuditMassConfig | None = None,
    interpret: bool | None = None,
) -> UnitMasses:
    """Log of sum over a page's tokens of exp(q.k / sqrt(H)), for every query head of the group, and its checksums.

    Args:
      q: bfloat16 or float16 queries, as attention used them. k: key pool of the same type.
      layer, row, head, block, part: int32; unit i is page `part[i]` (of 64 / page_size) of KV head `head[i]` in pool
        block `block[i]`, seen by sequence `row[i]`. A unit with any index out of range is padding and is not read.
      page_size: 16, 32 or 64 tokens.

    Returns:
      float32 log-masses, whose error is bounded above, and checksums equal to those of kv/integrity.py.

    Raises:
      NotImplementedError: for types, head sizes, groups or rings that the kernel does not have.
    """
    (layers, batch, heads, dim), (_, blocks, kv_heads, *_) = q.shape, k.shape
    groups, parts = heads // kv_heads, BLOCK // page_size
    config = config or AuditMassConfig()
    _check(q, k, groups, page_size, config)
    params = dispatch.interpret(interpret)
    valid = _inside((layer, layers), (row, batch), (head, kv_heads), (block, blocks), (part, parts))
    slab = ((layer * blocks + block) * kv_heads + head) * parts + part
    queries, first = _query_tiles(q, groups, (layer * batch + row) * heads + head * groups)
    # TMA fills what lies outside an array with zeros and reads nothing; the interpreter has no outside
    nothing = (len(queries), len(k.reshape(-1, page_size * dim))) if params is None else (0, 0)
    slab, tile = jnp.where(valid, slab, nothing[1]), jnp.where(valid, first // COLUMNS, nothing[0])
    mass, sums = _launch(queries, k.reshape(-1, page_size, dim), slab, tile, config, params)
    own = (first % COLUMNS)[:, None] + jnp.arange(groups)
    mass = jnp.take_along_axis(mass.reshape(-1, COLUMNS)[: len(slab)], own, axis=1)
    sums = lax.bitcast_convert_type(sums, jnp.uint32).reshape(-1, page_size // QUARTER)[: len(slab)]
    known = valid[:, None] & config.checksums
    return UnitMasses(jnp.where(valid[:, None], mass, 0.0), jnp.where(known, sums, 0))


def logit_error(head_dim: int) -> float:
    """Factor of |q||k| / sqrt(H) in the error of a log-mass: the module's first lines."""
    return (2.125 * head_dim + 8) * 2.0**-24


def _check(q, k, groups: int, page_size: int, config: AuditMassConfig) -> None:
    dim = q.shape[-1]
    if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"Audit masses need q and k both bfloat16 or both float16, not {q.dtype}, {k.dtype}.")
    if dim not in (64, 128):
        raise NotImplementedError(f"Audit masses need a head size of 64 or 128, not {dim}.")
    if groups > COLUMNS:
        raise NotImplementedError(f"Audit masses need at most {COLUMNS} query heads per KV head, not {groups}.")
    if page_size not in PAGE_SIZES:
        raise NotImplementedError(f"Audit masses need pages of {PAGE_SIZES} tokens, not {page_size}.")
    smem.require(config.shared_memory(page_size, dim, k.dtype), "take fewer stages")


def _inside(*indices: tuple[Array, int]) -> Bool[Array, " n"]:
    return functools.reduce(jnp.logical_and, [(i >= 0) & (i < size) for i, size in indices])


def _query_tiles(q: Float[Array, "L B N H"], groups: int, first: Int[Array, " n"]):
    """Queries as tiles of eight heads, and where each unit's group begins among the rows of all tiles.

    A group that divides eight lies within one tile as it is; another is padded to a tile of its own.
    """
    rows = q.reshape(-1, q.shape[-1])
    if COLUMNS % groups:
        rows = jnp.pad(rows.reshape(-1, groups, q.shape[-1]), ((0, 0), (0, COLUMNS - groups), (0, 0)))
        rows, first = rows.reshape(-1, q.shape[-1]), first // groups * COLUMNS
    rows = jnp.pad(rows, ((0, -len(rows) % COLUMNS), (0, 0)))
    return rows.reshape(-1, COLUMNS, q.shape[-1]), first


def _launch(q, k, slab, tile, config: AuditMassConfig, params):
    units, (_, page_size, dim) = len(slab), k.shape
    per_tile = BLOCK // page_size
    tiles = pl.cdiv(units, per_tile)
    body = functools.partial(_kernel, units=units, scale=dim**-0.5 * _LOG2E, interpreted=params is not None)
    consumers = 2 if config.checksums else 1
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((tiles, COLUMNS * per_tile), jnp.float32),
            jax.ShapeDtypeStruct((tiles, BLOCK // QUARTER), jnp.int32),
        ),
        scratch_types=(
            smem.operand((config.stages, COLUMNS * per_tile, dim), q.dtype),
            smem.operand((config.stages, BLOCK, dim), k.dtype),
            plgpu.Barrier(num_arrivals=2 * per_tile, num_barriers=config.stages),
            plgpu.Barrier(num_arrivals=consumers, num_barriers=config.stages),
        ),
        grid=(min(config.blocks, tiles),),
        grid_names=("block",),
        num_threads=1 + consumers,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=params is None),
        interpret=params,
        kernel_name="audit_mass",
    )(q, k, slab, tile)


def _kernel(
    q_gmem, k_gmem, slab_gmem, tile_gmem, mass_gmem, sum_gmem, q_smem, k_smem, ready, free, *, units, scale, interpreted
):
    blocks, stages = lax.axis_size("block"), k_smem.shape[0]
    first, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    per_tile = BLOCK // k_gmem.shape[1]
    count = lax.div(pl.cdiv(units, per_tile) - first + (blocks - 1), blocks)
    at = lambda i: first + i * blocks

    @pl.when(warpgroup == _LOAD)
    def _():
        refs = q_gmem, k_gmem, slab_gmem, tile_gmem, q_smem, k_smem, ready, free
        _stream(refs, at, count, units)

    def consume(use):
        @pl.loop(0, count)
        def _(i):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(ready.at[slot])
            use(at(i), slot)

    @pl.when(warpgroup == _MASS)
    def _():
        own = _own(k_gmem.shape[1])
        consume(lambda tile, slot: _mass(tile, slot, q_smem, k_smem, free, mass_gmem, own, scale))

    @pl.when(warpgroup == _CHECK)
    def _():
        consume(lambda tile, slot: _check_keys(tile, slot, k_smem, free, sum_gmem, interpreted))


def _stream(refs, at, count, units: int) -> None:
    """One warp keeps the ring filled; the indices of a tile are read while the one before it is on its way."""
    q_gmem, k_gmem, slab_gmem, tile_gmem, q_smem, k_smem, ready, free = refs
    stages, page_size = k_smem.shape[0], k_gmem.shape[1]

    def indices(i):
        unit = [jnp.minimum(at(i) * (BLOCK // page_size) + j, units - 1) for j in range(BLOCK // page_size)]
        return tuple((slab_gmem[u], tile_gmem[u]) for u in unit)

    def step(i, current):
        slot = lax.rem(i, stages)
        following = indices(i + 1)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[slot])

        for j, (slab, tile) in enumerate(current):
            keys, queries = pl.ds(j * page_size, page_size), pl.ds(j * COLUMNS, COLUMNS)
            plgpu.copy_gmem_to_smem(k_gmem.at[slab], k_smem.at[slot, keys], ready.at[slot])
            plgpu.copy_gmem_to_smem(q_gmem.at[tile], q_smem.at[slot, queries], ready.at[slot])
        return following

    @plgpu.warp_map
    def _(warp):
        @pl.when(warp == 0)
        def _():
            lax.fori_loop(0, count, step, indices(0))

            @pl.loop(0, jnp.minimum(count, stages))  # every phase of a barrier is waited for
            def _(slot):
                plgpu.barrier_wait(free.at[slot])


def _own(page_size: int):
    """Which columns belong to the unit of a row; None where a tile is one unit."""
    if page_size == BLOCK:
        return None
    shape = (BLOCK, COLUMNS * (BLOCK // page_size))
    index = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=smem.TILE)
    return lax.div(index(0), page_size) == lax.div(index(1), COLUMNS)


def _mass(tile, slot, q_smem, k_smem, free, mass_gmem, own, scale: float) -> None:
    """Log sum exp of every column."""
    shape = (BLOCK, q_smem.shape[1])

    def products(acc):
        plgpu.wgmma(acc, k_smem.at[slot], q_smem.at[slot].T)
        return acc[...]

    s = pl.run_scoped(products, plgpu.ACC(shape, jnp.float32)) * scale  # pyright: ignore[reportPrivateImportUsage]
    plgpu.barrier_arrive(free.at[slot])
    s = s if own is None else jnp.where(own, s, _NEVER)
    top = jnp.max(s, axis=0)
    total = jnp.sum(jnp.exp2(s - smem.across(top, shape)), axis=0)
    mass_gmem.at[tile][...] = (top + jnp.log2(total)) * (1 / _LOG2E)


def _check_keys(tile, slot, k_smem, free, sum_gmem, interpreted: bool) -> None:
    """Checksums of the tile, one for every 16 rows."""
    if interpreted:
        sum_gmem.at[tile][...] = _checksum(k_smem[slot])
    else:
        keys = plgpu.RefType(smem.operand(k_smem.shape, k_smem.dtype).transforms)
        run = functools.partial(_checksum_of_lanes, dim=k_smem.shape[-1])
        plgpu.inline_mgpu(arg_types=(keys, plgpu.RefType()))(run)(k_smem.at[slot], sum_gmem.at[tile])
    plgpu.commit_smem()  # these reads come before the refill, which goes another way
    plgpu.barrier_arrive(free.at[slot])


def _checksum(keys: Float[Array, "64 H"]) -> Int[Array, " 4"]:
    """kv/integrity.py, for interpret mode."""
    words = lax.bitcast_convert_type(keys.reshape(BLOCK // QUARTER, -1, 2), jnp.uint32)
    h = words + jnp.arange(words.shape[1], dtype=jnp.uint32) * jnp.uint32(_GOLDEN)
    h = (h ^ (h >> 16)) * jnp.uint32(_MIX_1)
    h = (h ^ (h >> 13)) * jnp.uint32(_MIX_2)
    return lax.bitcast_convert_type(jnp.sum(h ^ (h >> 16), axis=1, dtype=jnp.uint32), jnp.int32)


def chunks(dim: int) -> list[tuple[int, int]]:
    """Which 32-bit words of a quarter of a tile a lane reads: 4 adjacent ones, 16 bytes, for each entry.

    A swizzled tile stores channels 64 c..64 c + 63 of 8 rows as one KiB, and the 16-byte chunk i of row r in place
    i ^ r. So lane l finds at byte 512 j + 16 l the words from `base` + H / 2 (l / 8) + 4 ((l % 8) ^ (l / 8) ^ `flip`)
    on, counted in the order of the checksum. Returns (base, flip) for every j.
    """
    found = []
    for j in range(QUARTER * dim * 2 // 512):
        row_group, column = divmod(j // 2, dim // 64)
        flip = 4 * (j % 2)
        found.append((((row_group * 8 + flip) * dim + column * 64) // 2, flip))
    return found


def _checksum_of_lanes(ctx, keys, sums, *, dim: int) -> None:
    """One warp for each quarter; all 32-bit arithmetic wraps."""
    i32 = ir.IntegerType.get_signless(32)
    const = lambda value: utils.c((value + 2**31) % 2**32 - 2**31, i32)
    lane, warp = arith.andi(utils.thread_idx(), const(31)), arith.remui(utils.warp_idx(), const(4))
    row, place = arith.shrui(lane, const(3)), arith.andi(lane, const(7))
    offset = arith.addi(arith.muli(warp, const(QUARTER * dim * 2)), arith.muli(lane, const(16)))
    i8 = ir.IntegerType.get_signless(8)
    base = utils.getelementptr(utils.memref_ptr(keys), [offset], i8)
    total = const(0)
    for j, (start, flip) in enumerate(chunks(dim)):
        chunk = arith.xori(arith.xori(place, row), const(flip))
        position = arith.addi(arith.muli(row, const(dim // 2)), arith.muli(chunk, const(4)))
        shift = arith.muli(position, const(_GOLDEN))  # one of two, whatever j
        quad = llvm.load(ir.VectorType.get((4,), i32), utils.getelementptr(base, [512 * j], i8), alignment=16)
        for i in range(4):
            at = ir.DenseI64ArrayAttr.get([i])
            word = vector.extract(quad, dynamic_position=[], static_position=at)
            h = arith.addi(word, arith.addi(shift, const((start + i) * _GOLDEN)))
            total = arith.addi(total, _mix(h, const))
    total = utils.redux(total, const(-1), utils.ReductionKind.ADD)
    llvm.store(total, utils.getelementptr(utils.memref_ptr(sums), [warp], i32))  # every lane the same


def _mix(h, const):
    """The finaliser of MurmurHash3."""
    for shift, factor in ((16, _MIX_1), (13, _MIX_2)):
        h = arith.muli(arith.xori(h, arith.shrui(h, const(shift))), const(factor))
    return arith.xori(h, arith.shrui(h, const(16)))
