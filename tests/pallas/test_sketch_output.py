"""The scorer's order of tasks by enumeration, and what warps write, on emulated lanes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.pallas import sketch_output, warp
from skg_jax.pallas.sketch_order import Order
from skg_jax.pallas.sketch_output import Place
from skg_jax.pallas.sketch_plan import SketchScoreConfig, plan_launch
from skg_jax.pallas.sketch_sums import Output, Results
from skg_jax.pallas.sketch_unit import Bound
from skg_jax.pallas.warp import Register
from tests.pallas import emulated


@pytest.mark.parametrize("run", [1, 2, 8])
@pytest.mark.parametrize(("groups", "chunks"), [(4, 2), (4, 1), (3, 2), (2, 3), (1, 1)])
@pytest.mark.parametrize("steps", [0, 1, 5, 16, 37])
def test_every_task_is_taken_once_and_runs_stay_with_their_warpgroup(groups, chunks, run, steps):
    order = Order(groups=groups, chunks=chunks, run=run)
    number = np.arange(steps * chunks)
    tasks = [np.broadcast_to(x, number.shape) for x in order.task(jnp.asarray(number, jnp.int32), len(number))]
    step, chunk, place, length = tasks
    assert set(zip(step.tolist(), chunk.tolist(), strict=True)) == {(s, c) for s in range(steps) for c in range(chunks)}
    assert set(length.tolist()) <= {1, run}
    whole = length == run
    if run > 1:
        assert whole.sum() == len(number) // order.lap * order.lap
    for group in range(groups):
        own = np.flatnonzero(number % groups == group)
        for turn, at in enumerate(own[whole[own]]):
            assert place[at] == turn % run
            if place[at]:  # goes on where it was
                before = own[turn - 1]
                assert step[at] == step[before] + 1 and chunk[at] == chunk[before]
    assert (place[~whole] == 0).all()


def plan_of(group: int, page_size: int, bound: Bound, run: int, blocks: int = 11):
    q = jax.ShapeDtypeStruct((1, 4, group, 64), jnp.bfloat16)
    return plan_launch(q, blocks, page_size, bound, SketchScoreConfig(groups=1, run=run))


@pytest.mark.parametrize(
    ("group", "page_size", "bound"), [(4, 16, "token"), (7, 16, "token"), (3, 64, "group"), (8, 32, "none")]
)
@pytest.mark.parametrize("run", [1, 2, 8])
def test_runs_and_single_blocks_write_the_same_numbers(monkeypatch, group, page_size, bound, run):
    block = emulated.install(monkeypatch, (sketch_output, warp), 32)
    plan = plan_of(group, page_size, bound, run)
    plan = dataclasses.replace(plan, run=run)
    pages, rows = plan.unit.pages, plan.rows
    numbers = np.random.default_rng(group).normal(size=(rows, plan.pages)).astype(np.float32)
    known = np.random.default_rng(1).random(plan.max_blocks) < 0.7
    unknown = np.array([-7, -8, -9], np.float32).repeat(group)
    estimate = block.memory(np.full((4, group, plan.pages), np.nan, np.float32))
    bounds = block.memory(np.full((4, 2, group, plan.pages), np.nan, np.float32))
    kept = block.memory(np.full((rows, plan.row_width), np.nan, np.float32))
    pointer = lambda memory: emulated.Pointer(memory, np.zeros(32, np.int64))
    pointers = {"estimate": pointer(estimate), "bounds": pointer(bounds)}
    lane = np.arange(32)
    register = lambda x: Register(emulated.Value(np.broadcast_to(x, 32).astype(np.asarray(x).dtype)))
    integer = lambda x: register(np.int32(x))
    head, first, done = 2, 3, 0  # of the warp, and of the blocks
    for length in (run, run, 1, 1)[: 4 if run < 8 else 1]:
        for place in range(length):
            at = first + done
            number = np.minimum(at * pages + lane % pages, plan.pages - 1)
            member = (lane // pages) % group
            mine = register(lane < pages * group)
            outputs = [
                Output(
                    register(numbers[side * group + member, number]), register(unknown[side * group + member]),
                    None if side == 0 else integer(side - 1), mine,
                )
                for side in range(rows // group)
            ]  # fmt: skip
            results = Results(outputs, register(member.astype(np.int32)), register((lane % pages).astype(np.int32)))
            where = Place(*map(integer, (head - 1, 0, at, plan.max_blocks, int(known[at]), place, length)))
            if run == 1:
                sketch_output.store(plan, results, pointers, integer(0), integer(1), where)
            else:
                sketch_output.keep(plan, results, pointer(kept), where)
                sketch_output.flush(plan, integer(lane), pointer(kept), pointers, integer(1), where)
            done += 1
    expected = np.where(known.repeat(pages), numbers, unknown[:rows, None])
    written = np.zeros(plan.pages, bool)
    written[first * pages : (first + done) * pages] = True
    found = np.concatenate([estimate.array[head], bounds.array[head].reshape(2 * group, -1)])[:rows]
    np.testing.assert_array_equal(found[:, written], expected[:, written])
    others = [np.delete(estimate.array, head, 0), np.delete(bounds.array, head, 0), found[:, ~written]]
    assert all(np.isnan(x).all() for x in others)
    assert bound != "none" or np.isnan(bounds.array).all()
