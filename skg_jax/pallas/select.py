"""Page selection in one launch: shares of the pages, the pages that a budget buys, their list and their mask.

One block per sequence and KV head. Its lanes hold all pages of the row in registers, and nothing is sorted: a page is
read if the weight of the pages ahead of it stays below a limit. With weight 1 and limit n these are the n best pages,
with the share as weight and limit p the fewest that hold p. The share of the last page read is found digit by digit of
its bits (float32 numbers >= 0 order like integers), the last of its ties by bisection on the page id.

Pallas has no words for what a lane does by itself: `lanes.py`, `radix.py`. In interpret mode plain jnp stands in.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, UInt8

from skg_jax.pallas import dispatch, radix, smem
from skg_jax.pallas.lane_code import WARPGROUP
from skg_jax.pallas.lanes import SLOTS, TOGETHER, Lanes
from skg_jax.pallas.radix import Cut, Window

LOG_FLOOR = -64.0  # pages this far below a head's best have no share: no denormal numbers
WHOLE = 2**30  # a share of one, where shares are added: as integers every order gives the same sum
_MOST_REGISTERS = 32  # pages that one lane can hold beside everything else
_KEY_BITS = 30  # shares are at most 1, and 2.0 is the first number with bit 30

type By = Literal["count", "share"]
type Lists = tuple[Int[Array, "B K M"], Int[Array, "B K"], UInt8[Array, "B K M"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """How the pages of a row are spread over a block.

    Raises:
      ValueError: if a field breaks its rule.
    """

    warpgroups: int  # of 128 lanes each

    def __post_init__(self) -> None:
        if self.warpgroups not in (1, 2, 4, 8):
            raise ValueError(f"warpgroups={self.warpgroups}: a block has 1, 2, 4 or 8 warpgroups.")

    @classmethod
    def of(cls, pages: int) -> SelectConfig:
        """Fastest on an H200: more lanes make reductions longer, fewer make the rest longer."""
        return cls(warpgroups=2 if pages <= 2048 else 4)

    def registers(self, pages: int) -> int:
        """Pages that each lane holds."""
        return math.ceil(pages / (WARPGROUP * self.warpgroups))

    def scratch(self) -> dict[str, tuple[int, int]]:
        """Shapes of the allocations in shared memory, of int32."""
        return {"partial results": (SLOTS, 4 * self.warpgroups), "bins": (radix.TURNS, radix.BINS)}

    def shared_memory(self) -> dict[str, int]:
        """Bytes of each allocation."""
        return {name: smem.nbytes(shape, jnp.int32) for name, shape in self.scratch().items()}


def topk(
    estimate: Float[Array, "B K G M"],
    must_read: Bool[Array, "B M"],
    total_pages: Int[Array, " B"],
    budget: Float[Array, " B"],
    *,
    config: SelectConfig | None = None,
    interpret: bool | None = None,
) -> Lists:
    """The pages of largest share, as many as the budget buys.

    Args:
      estimate: float32 log-masses (natural logarithm). Those of pages from `total_pages` on are not read.
      must_read: pages in use that are read in any case; they count towards the budget.
      total_pages: int32, pages in use.
      budget: float32. Below 1: fraction of the pages in use, rounded up; from 1 up: number of pages; inf: all.
      interpret: True or False overrides `dispatch.interpret`.

    Returns:
      page_ids int32, ascending, entries past the number M - 1; num_pages int32; the mask of the same pages, a byte
      each. The same pages as the XLA twin (selectors/topk.py): ties go to the lower page id, and only pages whose
      shares differ by rounding (relative 2e-6) can change places.

    Raises:
      NotImplementedError: if a row has more pages than a block can hold, or the estimates are not float32.
    """
    return _select(estimate, must_read, total_pages, budget, "count", config, interpret)


def topp(
    estimate: Float[Array, "B K G M"],
    must_read: Bool[Array, "B M"],
    total_pages: Int[Array, " B"],
    budget: Float[Array, " B"],
    *,
    config: SelectConfig | None = None,
    interpret: bool | None = None,
) -> Lists:
    """The fewest pages whose shares reach p = `budget`; with p >= 1 every page. Otherwise as `topk`.

    Shares are added as multiples of 2**-30, as in the XLA twin (selectors/topp.py).
    """
    return _select(estimate, must_read, total_pages, budget, "share", config, interpret)


def _select(estimate, must_read, total_pages, budget, by: By, config: SelectConfig | None, interpret) -> Lists:
    config = config or SelectConfig.of(estimate.shape[-1])
    _check(estimate, config)
    emulated = dispatch.interpret(interpret) is not None
    return _launch(estimate, must_read, total_pages, budget, by, config, emulated)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _launch(estimate, must_read, total_pages, budget, by: By, config: SelectConfig, emulated: bool) -> Lists:
    batch, kv_heads, _, pages = estimate.shape
    params = dispatch.interpret(emulated)
    row = jax.ShapeDtypeStruct((batch, kv_heads, pages), jnp.int32)
    body = functools.partial(_kernel, by=by, config=config if params is None else None)
    return plgpu.kernel(
        body,
        out_type=(row, jax.ShapeDtypeStruct(row.shape[:2], jnp.int32), jax.ShapeDtypeStruct(row.shape, jnp.uint8)),
        scratch_types=tuple(plgpu.SMEM(shape, jnp.int32) for shape in config.scratch().values()),
        grid=(batch, kv_heads),
        grid_names=("b", "k"),
        num_threads=config.warpgroups if params is None else 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=params is None),
        interpret=params,
        kernel_name=f"select_pages_by_{by}",
    )(estimate, must_read, total_pages, budget)


def _check(estimate, config: SelectConfig) -> None:
    pages = estimate.shape[-1]
    if estimate.dtype != jnp.float32:
        raise NotImplementedError(f"The selection kernel takes float32 estimates, not {estimate.dtype}.")
    if config.registers(pages) > _MOST_REGISTERS:
        most = WARPGROUP * config.warpgroups * _MOST_REGISTERS
        raise NotImplementedError(f"The selection kernel holds at most {most} pages of a row, not {pages}.")


def _kernel(
    estimate_gmem, must_gmem, total_gmem, budget_gmem, ids_gmem, count_gmem, mask_gmem, scratch, bins, *, by: By, config
):
    b, k = lax.axis_index("b"), lax.axis_index("k")
    groups, pages = estimate_gmem.shape[2:]
    used_pages = total_gmem[b]
    if config is None:
        lanes = _Interpreted(pages=pages)
    else:
        lanes = Lanes(warpgroups=config.warpgroups, registers=config.registers(pages), scratch=scratch, bins=bins)
    lanes.clear()
    ids = lanes.ids()
    used = ids < used_pages
    flag = lanes.load(must_gmem, (b,), used_pages, jnp.int32)
    forced, others = used & (flag != 0), used & (flag == 0)
    share = _share(estimate_gmem, [(b, k, g) for g in range(groups)], used, used_pages, lanes)
    weight = (share * WHOLE + 0.5).astype(jnp.int32) if by == "share" else jnp.ones_like(ids)
    limit = _limit(budget_gmem[b], used_pages, by)
    best = _first(share, weight, others, lanes.sum(jnp.where(forced, weight, 0)), limit, ids, lanes, by)
    read = jnp.where(forced | best, 1, 0)
    count_gmem[b, k] = lanes.write(read, ids_gmem, mask_gmem, (b, k))


def _share(estimate_gmem, rows, used, used_pages, lanes):
    """Mean over the heads of the softmax over pages; a head without a usable estimate has no say."""
    total = jnp.zeros_like(used, jnp.float32)
    for first in range(0, len(rows), lanes.together):
        some = [lanes.load(estimate_gmem, row, used_pages) for row in rows[first : first + lanes.together]]
        some = [jnp.where(used, x, -jnp.inf) for x in some]
        # NaN where the head has no estimate, or one that is not a number
        some = [x - most for x, most in zip(some, lanes.maxima(some), strict=True)]
        masses = [jnp.where(x >= LOG_FLOOR, jnp.exp(x), 0.0) for x in some]
        for mass, whole in zip(masses, lanes.sums(masses), strict=True):
            total = total + mass * (1.0 / jnp.maximum(whole, 1.0))
    return total * (1.0 / len(rows))


def _limit(budget, used_pages, by: By):
    """What the weight of the pages ahead of a page must stay below."""
    if by == "share":
        return jnp.where(budget >= 1, jnp.int32(2**31 - 1), _ceil(jnp.where(budget < 1, budget, 1.0) * WHOLE))
    most = used_pages.astype(jnp.float32)
    fraction = _ceil(jnp.where(budget < 1, budget, 0.0) * most)
    asked = jnp.where(budget < 1, fraction.astype(jnp.float32), budget)
    return jnp.minimum(jnp.maximum(asked, 1.0), most).astype(jnp.int32)


def _ceil(x):
    """To int32, rounded up; of numbers in its range."""
    whole = x.astype(jnp.int32)
    return jnp.where(whole.astype(jnp.float32) < x, whole + 1, whole)


def _first(share, weight, candidate, forced_weight, limit, ids, lanes, by: By):
    """The candidates, by descending share and ascending id, with less than `limit` ahead of them."""
    key = jnp.where(candidate, lax.bitcast_convert_type(share, jnp.int32), -1)
    last, above, exact = _last_key(key, weight, forced_weight, limit, lanes, by)
    tied = key == last
    ties = lanes.sum(jnp.where(tied, 1, 0))
    each = 1 if by == "count" else lax.div(lanes.sum(jnp.where(tied, weight, 0)), jnp.maximum(ties, 1))
    room = jnp.where(exact, lanes.capacity, _room(limit - above, each, lanes.capacity))
    return (key > last) | (tied & (ids <= _tie_cut(tied, room, ties, ids, lanes)))


def _last_key(key, weight, forced_weight, limit, lanes, by: By):
    """The smallest key with less than `limit` in larger keys, what these hold, and whether the rest is exact.

    Digit by digit, from the highest. Of numbers of pages it is exact where the keys from a bin on are just as many as
    the limit: all of them are read, and nothing remains to be decided. Shares go on to the last digit: a page of no
    weight could lie in the bin, behind the one that meets the limit.
    """
    counted = by == "count"

    def step(carry):
        turn, low, above, _ = carry
        left = _KEY_BITS - radix.BITS * turn
        shift = jnp.maximum(left - radix.BITS, 0)
        window = Window(low, lax.shift_left(jnp.int32(1), left), shift)
        cut = lanes.cut(key, [] if counted else [weight], window, above, limit, turn)
        exact = jnp.where(cut.held == limit, 1, 0) if counted else carry[3]
        return turn + 1, low + lax.shift_left(cut.bin, shift), cut.beyond, exact

    more = lambda carry: (carry[0] < radix.TURNS) & (carry[3] == 0)
    full = forced_weight >= limit
    none, highest = jnp.int32(0), jnp.int32(2**_KEY_BITS - 1)
    start = (jnp.where(full, radix.TURNS, none), jnp.where(full, highest, none), forced_weight, none)
    _, last, above, exact = lax.while_loop(more, step, start)
    return last, above, exact != 0


def _room(left, each, most: int):
    """How many tied pages fit until their weights fill what is left, the one that fills it included."""
    fit = lax.div(left - 1, jnp.maximum(each, 1)) + 1
    return jnp.where(each > 0, jnp.minimum(fit, most), most)


def _tie_cut(tied, room, ties, ids, lanes):
    """The page id up to which tied pages are read: that of the `room`-th, found bit by bit."""

    def step(carry):
        bit, cut = carry
        trial = cut | lax.shift_left(jnp.int32(1), bit)
        ahead = lanes.sum(jnp.where(tied & (ids < trial), 1, 0), loop=bit)
        return bit - 1, jnp.where(ahead < room, trial, cut)

    highest = lanes.capacity.bit_length() - 1
    all_fit = ties <= jnp.maximum(room, 0)
    start = (jnp.where(all_fit, -1, highest), jnp.where(all_fit, lanes.capacity, 0))
    return lax.while_loop(lambda carry: carry[0] >= 0, step, start)[1]


class _Interpreted:
    """`Lanes` in plain jnp, for interpret mode: one array in the order of the pages."""

    together = TOGETHER

    def __init__(self, *, pages: int):
        self.capacity = pages

    def ids(self):
        return jnp.arange(self.capacity, dtype=jnp.int32)

    def load(self, array, at: tuple, used, dtype=jnp.float32):
        del used
        return array[at].astype(dtype)

    def sum(self, x, loop=None):
        del loop
        return jnp.sum(x, dtype=x.dtype)

    def sums(self, xs: list) -> list:
        return [jnp.sum(x, dtype=x.dtype) for x in xs]

    def maxima(self, xs: list) -> list:
        return [jnp.max(x) for x in xs]

    def clear(self) -> None:
        pass

    def cut(self, key, weights: list, window: Window, above, limit, turn) -> Cut:
        del turn
        offset = key - window.low
        inside = (offset >= 0) & (offset < window.size)
        at = jnp.where(inside, lax.shift_right_logical(offset, window.shift), radix.BINS)
        own = jnp.zeros(radix.BINS, jnp.int32).at[at].add(*(weights or [1]), mode="drop")
        held = above + jnp.cumsum(own[::-1])[::-1]
        found = jnp.max(jnp.where(held >= limit, jnp.arange(radix.BINS), 0))
        return Cut(found, held[found], held[found] - own[found])

    def write(self, read, ids_gmem, mask_gmem, at: tuple):
        rank = jnp.cumsum(read) - read
        count = jnp.sum(read, dtype=jnp.int32)
        page = self.ids()
        place = jnp.where(read != 0, rank, count + page - rank)
        ids_gmem[at] = jnp.zeros_like(page).at[place].set(jnp.where(read != 0, page, self.capacity - 1))
        mask_gmem[at] = read.astype(jnp.uint8)
        return count
