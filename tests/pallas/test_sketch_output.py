"""The scorer's order of tasks by enumeration, and what warps write, on emulated lanes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax.pallas import sketch_output, warp
from skg_jax.pallas.sketch_order import Order
from skg_jax.pallas.sketch_output import Place
from skg_jax.pallas.sketch_plan import Plan, SketchScoreConfig, plan_launch
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
    step, chunk, index, length = tasks
    assert set(zip(step.tolist(), chunk.tolist(), strict=True)) == {(s, c) for s in range(steps) for c in range(chunks)}
    assert set(length.tolist()) <= {1, run}
    whole = length == run
    if run > 1:
        assert whole.sum() == len(number) // order.lap * order.lap
    for group in range(groups):
        own = np.flatnonzero(number % groups == group)
        for turn, at in enumerate(own[whole[own]]):
            assert index[at] == turn % run
            if index[at]:  # goes on where it was
                before = own[turn - 1]
                assert step[at] == step[before] + 1 and chunk[at] == chunk[before]
    assert (index[~whole] == 0).all()


FIRST, HEAD = 3, 2  # block and KV head of the warp
UNKNOWN = np.array([-7, -8, -9], np.float32)  # of estimate, lower and upper bound


class Case(NamedTuple):
    plan: Plan
    numbers: np.ndarray  # [rows, pages]
    known: np.ndarray  # [blocks]

    def results(self, block: int) -> Results:
        """What the lanes of a warp have of one block: lane l the page l % pages of the member l // pages."""
        lane, pages, group = np.arange(32), self.plan.unit.pages, self.plan.unit.group
        member, page = lane // pages % group, (lane % pages).astype(np.int32)
        mine = register(lane < pages * group)
        outputs = [
            Output(
                register(self.numbers[side * group + member, block * pages + page]), register(UNKNOWN[side]),
                integer(side - 1) if side else None, mine,
            )
            for side in range(self.plan.rows // group)
        ]  # fmt: skip
        return Results(outputs, register(member.astype(np.int32)), register(page))

    def expected(self, blocks: int) -> np.ndarray:
        """[rows, pages], NaN where nothing is written."""
        pages = self.plan.unit.pages
        unknown = UNKNOWN.repeat(self.plan.unit.group)[: self.plan.rows, None]
        all_of_them = np.where(self.known.repeat(pages), self.numbers, unknown)
        block = np.arange(self.plan.pages) // pages - FIRST
        return np.where((block >= 0) & (block < blocks), all_of_them, np.nan)


def register(x) -> Register:
    return Register(emulated.Value(np.broadcast_to(x, 32).astype(np.asarray(x).dtype)))


def integer(x) -> Register:
    return register(np.asarray(x, np.int32))


def case_of(group: int, page_size: int, bound: Bound, run: int, blocks: int = 11) -> Case:
    q = jax.ShapeDtypeStruct((1, 4, group, 64), jnp.bfloat16)
    plan = plan_launch(q, blocks, page_size, bound, SketchScoreConfig(groups=1, run=run))
    rng = np.random.default_rng(group)
    return Case(plan, rng.normal(size=(plan.rows, plan.pages)).astype(np.float32), rng.random(blocks) < 0.7)


def write(case: Case, length: int, done: int, rows, pointers) -> None:
    """One run of a warp."""
    for index in range(length):
        at, plan = FIRST + done + index, case.plan
        place = Place(*map(integer, (HEAD - 1, 0, at, plan.max_blocks, int(case.known[at]), index, length)))
        if plan.run == 1:
            sketch_output.store(plan, case.results(at), pointers, integer(0), integer(1), place)
        else:
            sketch_output.keep(plan, case.results(at), rows, place)
            sketch_output.flush(plan, integer(np.arange(32)), rows, pointers, integer(1), place)


@pytest.mark.parametrize(
    ("group", "page_size", "bound"), [(4, 16, "token"), (7, 16, "token"), (3, 64, "group"), (8, 32, "none")]
)
@pytest.mark.parametrize("run", [1, 2, 8])
def test_runs_and_single_blocks_write_the_same_numbers(monkeypatch, group, page_size, bound, run):
    block, case = emulated.install(monkeypatch, (sketch_output, warp), 32), case_of(group, page_size, bound, run)
    blank = lambda *shape: block.memory(np.full(shape, np.nan, np.float32))
    pointer = lambda memory: emulated.Pointer(memory, np.zeros(32, np.int64))
    estimate, bounds = blank(4, group, case.plan.pages), blank(4, 2, group, case.plan.pages)
    rows = blank(case.plan.rows, case.plan.row_width)
    pointers, done = {"estimate": pointer(estimate), "bounds": pointer(bounds)}, 0
    for length in (run, run, 1, 1) if run < 8 else (run,):
        write(case, length, done, pointer(rows), pointers)
        done += length
    found = np.concatenate([estimate.array[HEAD], bounds.array[HEAD].reshape(2 * group, -1)])
    np.testing.assert_array_equal(found[: case.plan.rows], case.expected(done))
    others = [np.delete(x.array, HEAD, 0) for x in (estimate, bounds)]
    assert all(np.isnan(x).all() for x in [*others, found[case.plan.rows :]])
