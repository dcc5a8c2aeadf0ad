"""Sketch scoring: log-masses of all pages of a sequence, estimated and bounded, from one read of the 4-bit sketch.

A producer warp copies the records of a few heads of a block, one stage of a ring, into shared memory; consumer
warpgroups take stages in turn, one warp a unit (`sketch_unit`), and write natural logarithms. Nothing crosses warps.
Bounds go where those of all layers lie, so that nobody has to gather them. The XLA twin is `skg_jax.kv.scoring`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt32

from skg_jax.pallas import dispatch, sketch_stage
from skg_jax.pallas.sketch_order import divided
from skg_jax.pallas.sketch_output import Place
from skg_jax.pallas.sketch_plan import PRODUCER_REGISTERS, Plan, SketchScoreConfig, plan_launch
from skg_jax.pallas.sketch_unit import Bound
from skg_jax.types import BLOCK

type Bounds = Float[Array, "L B K 2 G M"]  # lower and upper of the pages' log-masses, in all layers, float32


def sketch_score(
    q: Float[Array, "B K G H"],
    codes: UInt32[Array, "L P K 64 words"],
    low: Float[Array, "L P K H"],
    step: Float[Array, "L P K H"],
    residual: Float[Array, "L P K 64"],
    norms: Float[Array, "L P K 4"],
    page_table: Int[Array, "B Mb"],
    known: Bool[Array, "B Mb"],
    length: Int[Array, " B"],
    layer: Int[Array, ""],
    bounds: Bounds | None = None,
    *,
    page_size: int,
    bound: Bound = "token",
    config: SketchScoreConfig | None = None,
    interpret: bool | None = None,
) -> tuple[Float[Array, "B K G M"], Bounds | None]:
    """Natural logarithm of the mass of every page: of the sum of exp(q.k / sqrt(H)) over its tokens.

    Args:
      q: queries of one layer, float16, bfloat16 or float32. A query in float32 is used as float16, which the bounds
        cover: they are narrower for the others.
      codes, low, step, residual, norms: fields of a cache's `Sketch`. Blocks past the length are not read.
      known: whether the record of a logical block describes its present content.
      length: tokens of each sequence; its last block is scored whole.
      layer: index into L.
      bounds: those of `layer` are written in place, into arrays of any content; inside of a jit that owns them nothing
        is copied. Needed unless bound is "none".
      bound: "token" bounds every token by its own residual, "group" all of a block by one number, "none" does not.
      interpret: None compiles for a GPU and interprets elsewhere.

    Returns: the estimate [B, K, G, M], M = 64/C Mb, float32, and the bounds. Of blocks that are not known, or past the
      length, estimate and lower bound are -inf and the upper is inf; so are bounds of a query or score beyond float32.

    Raises:
      NotImplementedError: for a shape or dtype that the kernel does not know.
    """
    emulated = dispatch.interpret(interpret) is not None
    if config is None:  # under the interpreter every waiting warpgroup keeps a thread of the host
        config = SketchScoreConfig(groups=2) if emulated else SketchScoreConfig()
    plan = plan_launch(q, page_table.shape[1], page_size, bound, config)
    record = {"codes": codes, "low": low, "step": step, "residual": residual, "norms": norms}
    where = page_table, known.astype(jnp.int32), length, jnp.asarray(layer, jnp.int32).reshape(1)
    return _score(q, record, where, bounds if bound != "none" else None, plan, emulated)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _score(q, record: dict[str, Array], where, bounds: Bounds | None, plan: Plan, emulated: bool):
    rows = lambda pool, width: pool.reshape(pool.shape[0] * pool.shape[1], -1, width)  # the same memory
    pools = [rows(record[name], width) for name, (_, width, _) in plan.fields.items()]
    places = [] if bounds is None else [jax.new_ref(bounds.reshape(-1, *bounds.shape[2:]))]
    batch, kv_heads, group, _ = q.shape
    mesh = plgpu.Mesh(
        grid=(batch, kv_heads // plan.heads, plan.splits),
        grid_names=("row", "heads", "split"),
        num_threads=plan.groups + 1,
        thread_name="warpgroup",
        kernel_name="sketch_score",
    )
    kernel = functools.partial(_kernel, plan=plan, blocks=record["codes"].shape[1], emulated=emulated)
    run: Any = pl.kernel(
        lambda *gmem: pl.run_scoped(functools.partial(kernel, *gmem), collective_axes="warpgroup", **_scratch(plan)),
        [jax.ShapeDtypeStruct((batch, kv_heads, group, plan.pages), jnp.float32)],
        mesh=mesh,
        name="sketch_score",
        interpret=dispatch.interpret(emulated) or False,
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not emulated),
    )
    (estimate,) = run(*places, q, *pools, *where)
    return estimate, None if bounds is None else jax.freeze(places[0]).reshape(bounds.shape)


def _scratch(plan: Plan):
    copies = len(plan.fields) * plan.blocks_of_stage
    return dict(
        smem=plan.own() | plan.ring(plan.stages),
        query_ready=plgpu.Barrier(num_arrivals=plan.groups),
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=plan.stages),
        free=plgpu.Barrier(num_barriers=plan.stages),
    )


def _kernel(*gmem, plan: Plan, blocks: int, emulated: bool, smem, query_ready, ready, free):
    """Bounds [L*B,K,2,G,M] if any; q [B,K,G,H]; pools [L*P, rows, width]; table, known [B,Mb]; length [B]; layer [1];
    estimate [B,K,G,M].

    A task is a stage of this thread block: some heads of one or a few blocks.
    """
    *bounds_gmem, q_gmem = gmem[: plan.bounded + 1]
    refs = gmem[plan.bounded + 1 :]
    pools = dict(zip(plan.fields, refs, strict=False))
    table_gmem, known_gmem, length_gmem, layer_gmem, estimate_gmem = refs[len(pools) :]
    row, heads, split = (lax.axis_index(name) for name in ("row", "heads", "split"))
    outs = [estimate_gmem.at[row], *[ref.at[layer_gmem[0] * lax.axis_size("row") + row] for ref in bounds_gmem]]
    warpgroup, groups = lax.axis_index("warpgroup"), plan.groups
    head0 = heads * plan.heads
    count = jnp.minimum((length_gmem[row] + (BLOCK - 1)) // BLOCK, plan.max_blocks)
    last = jnp.maximum(count - 1, 0)
    steps = (count + (plan.blocks_of_stage - 1)) // plan.blocks_of_stage
    per = (steps + (plan.splits - 1)) // plan.splits
    first = split * per
    tasks = jnp.maximum(jnp.minimum(first + per, steps) - first, 0) * plan.order.chunks
    task_of = lambda number: plan.order.task(number, tasks)
    block_of = lambda task: (first + task.step) * plan.blocks_of_stage
    logical = lambda task: [jnp.minimum(block_of(task) + j, last) for j in range(plan.blocks_of_stage)]

    @pl.when(warpgroup == groups)
    def produce():
        if plan.registers:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @plgpu.warp_map
        def per_warp(warp):
            @pl.when(warp == 0)
            def _():
                offset = layer_gmem[0] * blocks
                records = lambda number: tuple(offset + table_gmem[row, block] for block in logical(task_of(number)))

                def step(number, current):
                    slot, chunk = divided(number, plan.stages)[1], task_of(number).chunk
                    following = records(number + 1)

                    @pl.when(number >= plan.stages)
                    def _():
                        plgpu.barrier_wait(free.at[slot])

                    _copy(plan, pools, smem, current, heads * plan.order.chunks + chunk, slot, ready)
                    return following

                lax.fori_loop(0, tasks, step, records(0))

                @pl.loop(0, jnp.minimum(tasks, plan.stages))
                def drain(slot):
                    plgpu.barrier_wait(free.at[slot])

    @pl.when(warpgroup < groups)
    def consume():
        if plan.registers:
            plgpu.set_max_registers(plan.registers, action="increase")
        if not emulated:
            sketch_stage.prepare_queries(plan, q_gmem.dtype, q_gmem.at[row, pl.ds(head0, plan.heads)], smem)
        else:

            @pl.when(warpgroup == 0)
            def _():
                sketch_stage.emulate_queries(plan, q_gmem[row, pl.ds(head0, plan.heads)], smem)

        plgpu.barrier_arrive(query_ready)

        def fill(turn, _):
            block = count + split + plan.splits * (warpgroup + groups * turn)
            if emulated:
                sketch_stage.emulate_fill(plan, outs, head0, block)
            else:
                sketch_stage.fill_block(plan, outs, head0, block)
            return ()

        past = plan.max_blocks - count - split - plan.splits * warpgroup
        lax.fori_loop(0, jnp.maximum(past + (plan.splits * groups - 1), 0) // (plan.splits * groups), fill, ())
        plgpu.barrier_wait(query_ready)

        def known(turn):
            blocks = logical(task_of(turn * groups + warpgroup))
            flags = [known_gmem[row, block] << j for j, block in enumerate(blocks)]
            return sum(flags[1:], flags[0])

        def step(turn, flags):
            number = turn * groups + warpgroup
            slot, task = divided(number, plan.stages)[1], task_of(number)
            following = known(turn + 1)  # asked for one turn ahead: nobody waits for it
            plgpu.barrier_wait(ready.at[slot])
            local_head = task.chunk * plan.heads_of_stage
            place = Place(head0 + local_head, local_head, block_of(task), count, flags, task.index, task.run)
            if emulated:
                sketch_stage.emulate_stage(plan, smem, slot, outs, place)
                plgpu.commit_smem()  # the interpreter knows no arrival of single threads
            else:
                sketch_stage.score_stage(plan, smem, slot, outs, place)
            plgpu.barrier_arrive(free.at[slot])  # on a GPU by every thread, when its own reads are over
            return following

        lax.fori_loop(0, (tasks - warpgroup + (groups - 1)) // groups, step, known(0))


def _copy(plan: Plan, pools, smem, records, chunk, slot, ready) -> None:
    """Records of some heads of a stage's blocks."""
    for j, record in enumerate(records):
        for name, (rows, width, _) in plan.fields.items():
            if name == "norms":
                source, target = pools[name].at[record, chunk], smem[name].at[slot, j, pl.ds(0, width)]
            else:
                source, target = pools[name].at[record, pl.ds(chunk * rows, rows)], smem[name].at[slot, j]
            plgpu.copy_gmem_to_smem(source, target, ready.at[slot])
