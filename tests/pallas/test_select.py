"""The selection kernel: interpreted against its XLA twin, lowered for sm_90, its lane-level code on emulated lanes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from skg_jax import selectors
from skg_jax.pallas import lane_code, lanes, radix, select
from skg_jax.pallas.select import SelectConfig
from skg_jax.pallas.shapes import SELECT_SHAPES
from skg_jax.selectors import Selection
from tests.pallas import emulated
from tests.pallas import select_cases as cases
from tests.pallas.decode_cases import races_found

B, K, G, M = 3, 2, 2, 101
TOTAL = (M, 40, 1)
KERNELS = {"topk": select.topk, "topp": select.topp}


@functools.cache
def compiled(name: str, implementation: str):
    """(ctx, budget) -> Selection."""
    if implementation == "xla":
        return jax.jit(lambda ctx, budget: selectors.SELECTORS[name]("xla").select(ctx, (), budget)[0])
    kernel = functools.partial(KERNELS[name], interpret=True)
    run = lambda ctx, budget: Selection(*kernel(ctx.estimate, ctx.must_read, ctx.total_pages, budget))
    return jax.jit(run)


def same(name: str, ctx, budget) -> Selection:
    """The kernel's selection, which is the twin's, without a race."""
    found, twin = (compiled(name, which)(ctx, budget) for which in ("kernel", "xla"))
    for ours, theirs in zip(found, twin, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert cases.consistent(found) and not races_found()
    return found


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("budget", [7.0, 0.1, np.inf])
def test_the_kernel_takes_the_pages_of_its_twin(kind, budget):
    same("topk", cases.make(kind, (B, K, G, M), TOTAL), cases.budgets(budget, B))


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("p", [0.5, 0.97, 1.0])
def test_the_kernel_keeps_the_mass_of_its_twin(kind, p):
    same("topp", cases.make(kind, (B, K, G, M), TOTAL), cases.budgets(p, B))


@pytest.mark.parametrize("name", KERNELS)
def test_forced_pages_are_read_whatever_the_budget(name):
    for forced in (0.5, 1.0):
        ctx = cases.make("random", (B, K, G, M), TOTAL, forced=forced)
        found = same(name, ctx, cases.budgets(0.05, B))
        in_use = np.arange(M) < np.asarray(TOTAL)[:, None]
        must = np.asarray(ctx.must_read) & in_use
        assert np.asarray(found.read, bool)[np.broadcast_to(must[:, None], (B, K, M))].all()
        if forced == 1:
            np.testing.assert_array_equal(found.num_pages, np.repeat(np.asarray(TOTAL)[:, None], K, axis=1))


@pytest.mark.parametrize("count", [1, 2, 6, 39, 40, 41, 100, 101, 102])
def test_exactly_the_pages_that_the_budget_buys(count):
    ctx = cases.make("tied", (B, K, G, M), TOTAL, forced=0)
    found = same("topk", ctx, cases.budgets(count, B))
    np.testing.assert_array_equal(found.num_pages, np.minimum(count, np.asarray(TOTAL))[:, None].repeat(K, axis=1))


def test_a_limit_that_is_just_met_reads_no_page_of_no_weight():
    """Shares around 2**-31, half of a unit of weight: the one that rounds up and those that do not are in one bin."""
    half = np.float32(2**-31)
    share = jnp.asarray([0.25, 0.25, 63 * 2.0**-30, np.nextafter(half, np.float32(0)), 0.9 * half, 0.8 * half])
    weight = (share * select.WHOLE + 0.5).astype(jnp.int32)
    assert weight[3:].tolist() == [1, 0, 0]
    block, none = select._Interpreted(pages=6), jnp.int32(0)
    weights, others = {"share": weight, "count": jnp.ones_like(weight)}, jnp.ones(6, bool)
    choose = lambda limit, by: select._first(share, weights[by], others, none, limit, block.ids(), block, by)
    assert choose(weight[:4].sum(), "share").tolist() == [True] * 4 + [False] * 2
    assert choose(weight[:3].sum(), "share").tolist() == [True] * 3 + [False] * 3
    assert choose(jnp.int32(4), "count").tolist() == [True] * 4 + [False] * 2


def test_rows_have_budgets_and_lengths_of_their_own():
    ctx = cases.make("random", (B, K, G, M), TOTAL, forced=0)
    found = same("topk", ctx, jnp.asarray([0.25, 11, np.inf], jnp.float32))
    np.testing.assert_array_equal(found.num_pages, [[26] * K, [11] * K, [1] * K])


def test_a_head_that_is_not_a_number_has_no_say_and_the_others_do():
    ctx = cases.make("random", (B, K, G, M), (M, M, M), forced=0)
    broken = ctx.estimate.at[:, :, 1, 5].set(jnp.nan)
    found = same("topk", ctx._replace(estimate=broken), cases.budgets(9, B))
    np.testing.assert_array_equal(found.num_pages, 9)


def test_an_unused_row_reads_nothing():
    found = same("topk", cases.make("random", (B, K, G, M), (0, M, 3), forced=1.0), cases.budgets(5, B))
    np.testing.assert_array_equal(found.num_pages, [[0] * K, [M] * K, [3] * K])


def test_selectors_choose_their_implementation():
    ctx, budget = cases.make("random", (1, 1, 1, 9), (9,)), cases.budgets(0.4, 1)
    for name in KERNELS:
        by_default, twin = (selectors.SELECTORS[name](x).select(ctx, (), budget)[0] for x in (None, "xla"))
        for ours, theirs in zip(by_default, twin, strict=True):  # on a CPU the default is the twin
            np.testing.assert_array_equal(ours, theirs)
    lowered = jax.jit(lambda ctx: selectors.topk("mosaic_gpu").select(ctx, (), budget)[0]).trace(ctx)
    assert "select_pages_by_count" in str(lowered.jaxpr)
    with pytest.raises(NotImplementedError, match="at most 16384 pages of a row, not 16385"):
        selectors.topk("mosaic_gpu").select(cases.make("equal", (1, 1, 1, 16385), (9,)), (), cases.budgets(1, 1))


def lower(batch: int, kv_heads: int, groups: int, pages: int, kernel=select.topk, config=None):
    shape = jax.ShapeDtypeStruct
    args = (
        shape((batch, kv_heads, groups, pages), jnp.float32), shape((batch, pages), bool),
        shape((batch,), jnp.int32), shape((batch,), jnp.float32),
    )  # fmt: skip
    run = jax.jit(functools.partial(kernel, config=config, interpret=False))
    return run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", SELECT_SHAPES)
def test_every_named_shape_lowers_for_hopper_in_one_launch(name):
    s = SELECT_SHAPES[name]
    text = lower(s.batch, s.kv_heads, s.groups, s.pages)
    assert text.count("mosaic_gpu_v2") == 1


@pytest.mark.parametrize("pages", [1, 16384])
def test_odd_and_largest_rows_lower(pages):
    lower(1, 2, 1, pages, kernel=select.topp)
    lower(2, 1, 8, min(pages, 4096), config=SelectConfig(warpgroups=8))


def test_what_the_kernel_cannot_do_is_said():
    with pytest.raises(ValueError, match="warpgroups=3: a block has 1, 2, 4 or 8 warpgroups."):
        SelectConfig(warpgroups=3)
    with pytest.raises(NotImplementedError, match="takes float32 estimates, not bfloat16"):
        half = jnp.zeros((1, 1, 1, 8), jnp.bfloat16)
        select.topk(half, jnp.zeros((1, 8), bool), jnp.ones(1, jnp.int32), jnp.ones(1))
    assert sum(SelectConfig(warpgroups=8).shared_memory().values()) == 2048 + 4096


# --- lane-level code, run for every lane of a block -----------------------------------------------------------------

WARPGROUPS, REGISTERS = 2, 3
THREADS, CAPACITY = 128 * WARPGROUPS, 128 * WARPGROUPS * REGISTERS


@pytest.fixture
def block(monkeypatch):
    """A block of emulated lanes that `lanes` runs on."""
    return emulated.install(monkeypatch, (lane_code, lanes, radix), THREADS)


def test_every_page_has_one_lane(block):
    ids = block.values(lanes._ids(None, count=REGISTERS))
    np.testing.assert_array_equal(np.sort(ids.ravel()), np.arange(CAPACITY))


@pytest.mark.parametrize("used", [CAPACITY - 5, 70, 1, 0])
def test_lanes_load_what_is_in_use_and_nothing_past_it(block, used):
    rows = np.random.default_rng(0).normal(size=(2, 2, CAPACITY - 5)).astype(np.float32)
    row = rows[1, 0]
    row[used or 1 :] = np.nan
    rows[0], rows[1, 1] = np.nan, np.nan
    ids = block.values(lanes._ids(None, count=REGISTERS))
    found = block.values(lanes._load(None, block.memory(rows), block.scalar(2), block.scalar(used), count=REGISTERS))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[ids < used], row[ids[ids < used]])
    flags = np.arange(3 * (CAPACITY - 5)).reshape(3, -1) % 2 == 1
    inside, args = ids < CAPACITY - 5, (block.memory(flags), block.scalar(1), block.scalar(CAPACITY - 5))
    found = block.values(lanes._load(None, *args, count=REGISTERS))
    np.testing.assert_array_equal(found[inside], flags[1][ids[inside]])


@pytest.mark.parametrize("count", [1, lanes.TOGETHER])
@pytest.mark.parametrize(("op", "dtype"), [("add", np.int32), ("add", np.float32), ("max", np.float32)])
def test_reductions_reach_every_lane(block, op, dtype, count):
    xs = np.random.default_rng(1).integers(-9, 9, (count, REGISTERS, THREADS)).astype(dtype)
    scratch = block.memory(np.full((lanes.SLOTS, 4 * WARPGROUPS), -1, np.int32))
    arrays = [block.array(x) for x in xs]
    found = lanes._reduce(None, scratch, block.scalar(3), *arrays, op=op, warps=4 * WARPGROUPS)
    for x, own in zip(xs, found, strict=True):
        assert (block.values(own) == (x.sum() if op == "add" else x.max())).all()
    used = range(3, 3 + count)
    assert (np.delete(scratch.array, used, axis=0) == -1).all() and (scratch.array[used] != -1).any(1).all()


def test_the_maximum_of_a_nan_is_nan(block):
    x = np.zeros((REGISTERS, THREADS), np.float32)
    x[1, 77] = np.nan
    scratch = block.memory(np.zeros((lanes.SLOTS, 4 * WARPGROUPS), np.int32))
    (found,) = lanes._reduce(None, scratch, block.scalar(0), block.array(x), op="max", warps=4 * WARPGROUPS)
    assert np.isnan(block.values(found)).all()


WINDOWS = [(0, 30), (3 << 22, 22), (5 << 14, 14), (7 << 6, 6)]  # lowest key and bits, of each turn


@pytest.mark.parametrize("turn", range(radix.TURNS))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("limit", ["one more", "in between", "the lowest bin", "all", "more than all"])
def test_the_bin_that_passes_a_limit_is_found(block, turn, weighted, limit):
    rng = np.random.default_rng(turn)
    low, bits = WINDOWS[turn]
    key = rng.integers(low - 300, low + 300, (REGISTERS, THREADS))
    key = np.where(rng.random(key.shape) < 0.8, rng.integers(low, low + 2**bits, key.shape), key).astype(np.int32)
    key[0, ::7] = -1  # no candidate
    key[1, 5] = low  # the lowest bin is not empty
    weight = rng.integers(0, 9, key.shape).astype(np.int32) if weighted else np.ones_like(key)
    weight[1, 5] = 1
    shift, above = max(bits - radix.BITS, 0), 11
    inside = (key >= low) & (key < low + 2**bits)
    own = np.bincount((key - low)[inside] >> shift, weight[inside], radix.BINS).astype(int)
    held = above + own[::-1].cumsum()[::-1]
    asked = {"one more": above + 1, "in between": (above + held[0]) // 2, "the lowest bin": held[1] + 1}
    asked = (asked | {"all": held[0], "more than all": held[0] + 1})[limit]
    bins = np.full((radix.TURNS, radix.BINS), 9, np.int32)
    memory = block.memory(bins)
    radix._clear(None, memory, threads=THREADS)
    assert (bins == 0).all()
    arrays = [block.array(x) for x in ([key, weight] if weighted else [key])]
    numbers = [block.scalar(x) for x in (low, 2**bits, shift, above, asked, turn)]
    found = [block.values(x) for x in radix._cut(None, memory, *arrays, *numbers)]
    place = max(np.flatnonzero(held >= asked), default=0)
    for values, expected in zip(found, (place, held[place], held[place] - own[place]), strict=True):
        assert (values == expected).all()
    assert (np.delete(bins, turn, axis=0) == 0).all()


@pytest.mark.parametrize("pages", [CAPACITY, CAPACITY - 1, 513, 100, 1])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.9, 1.0])
def test_the_list_and_the_mask_are_written_once(block, pages, density):
    ids = block.values(lanes._ids(None, count=REGISTERS))
    wanted = (np.random.default_rng(pages).random(CAPACITY) < density) & (np.arange(CAPACITY) < pages)
    listed, mask = block.memory(np.full((3, pages), -9, np.int32)), block.memory(np.zeros((3, pages), bool))
    scratch = block.memory(np.zeros((lanes.SLOTS, 4 * WARPGROUPS), np.int32))
    args = block.array(wanted[ids].astype(np.int32)), listed, mask, block.scalar(1), scratch
    count = block.values(lanes._write(None, *args, warps=4 * WARPGROUPS, slot=lanes.SLOTS - 1))
    assert (count == wanted.sum()).all()
    found = (listed.array[1], count[0, 0], wanted[:pages])
    assert cases.consistent(Selection(*(jnp.asarray(x)[None, None] for x in found)))
    np.testing.assert_array_equal(mask.array[1], wanted[:pages])
    assert listed.stores == pages and mask.stores == pages
    assert (listed.array[::2] == -9).all() and not mask.array[::2].any()  # the other rows are left alone
