"""The arithmetic of the sketch scorer: one warp, one unit (64 tokens of one KV head against one group of queries).

Tokens are the rows of mma.m16n8k16, in four tiles of 16, and query heads its 8 columns. A code is an operand as it
stands: four bits of a word, masked, are a subnormal float16, c * 2**-24 or c * 2**-20, and no code is converted. With
w = f16(q o step), and c the codes of a token,

    logit = q.low + 7.5 q.step + sum_d w_d (c_d - 7.5)         (the first two terms are the centre of the grid)
    x = logit - centre                                          is what exponents are made of

Groups of at most 4 heads stand in the columns twice: lanes with t < 2 then work on upper bounds, the others on lower.

Rounding. All of it is inside the bounds; u = 2**-24, |.| is the Euclidean norm, A = sum |q_d| step_d. Queries are
scaled by a power of two to a largest channel in [1/8, 1/4): products with float16 steps never overflow.

    a matrix instruction  adds 17 numbers, each cut to 24 or more bits of the largest (Fasi et al. 2021, PeerJ CS 7,
                          e330, for the two generations before Hopper, which keeps more): 18 * 2 u of the sum of
                          magnitudes, so 18 * 2 u * H/16 in a chain
    w                     2**-11 of every product, or 2**-25 if subnormal: 7.5 * 2**-11 A + 7.5 * 2**-25 H in the
                          logit; the sums of |w| that stand for A are below it by no more than 2**-11 A + 2**-25 H
    chain of the codes    partial sums are below 22.5 A: 18 * 2 u * 8 * 22.5 A = 0.80 * 2**-11 A at H = 128
    chain of sum w        18 * 2 u * 8 * 7.5 A = 0.27 * 2**-11 A; that of q.step, times 7.5, no more
    together              8.84 * 2**-11 A: GRID = 9.25 * 2**-11. For the bound of a group, A <= sqrt(H) |q o step|
    chain of q.low        two halves: 18 * 2 u * H/32 of |q| |low| in each, and 3 roundings of their sums, u each: below
                          18 * 2 u * H/16. With what a query in float32 loses as float16, 2**-11 |q| |k^|: times `norm`
                          of the record, in the slack of `sketch_query`, with the float32 error of the stored norms and
                          of the exact logit that a reader of the page will compute
    float32               x and its scale: 2**-23 of a logit; exp2 2**-22, 6 additions, log2 2**-22 of at most 128:
                          together below 2**-13 + 2**-21 |centre|, in units of log2 (`sketch_sums`)
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from skg_jax.pallas.sketch_sums import Results, Sums
from skg_jax.pallas.warp import Value, Warp
from skg_jax.types import BLOCK

type Bound = Literal["token", "group", "none"]

COLUMNS = 8
TILE = 16  # tokens of one matrix instruction
LANES = 32
GRID = 9.25 * 2.0**-11
_UP = 1.0 + 2.0**-9
_BY_16 = 0x4C004C00  # 16.0, 16.0
_CENTRE = 0x80788078  # -7.5 * 2**-20, twice: a subnormal, exact
_CODE_SCALE = 2.0**20
_PAIRS = ((0, 1), (2, 3))  # words of a chunk that one instruction takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Static facts of a unit."""

    head_dim: int
    group: int
    page_size: int
    bound: Bound
    together: int = 2  # tiles whose chains of instructions overlap

    @property
    def doubled(self) -> bool:
        """Whether the group stands in the columns twice."""
        return self.group <= COLUMNS // 2

    @property
    def chunks(self) -> int:
        return self.head_dim // LANES

    @property
    def pages(self) -> int:
        return BLOCK // self.page_size


class _Columns(NamedTuple):
    """Numbers of the two columns of each lane; logarithms are binary."""

    scale: list[Value]  # of a logit
    norm: list[Value]  # |q|, scaled
    slack: list[Value]  # of the logit, rounding outside of the grid


class _Grid(NamedTuple):
    """Sums over the channels, for the two columns of each lane."""

    start: list[Value]  # -7.5 sum w, in units of 2**-20
    spread: list[Value]  # sum |w| ("token"), |w| ("group"), empty otherwise


def score_unit(warp: Warp, shape: UnitShape) -> Results:
    """Log-masses of the pages of one unit.

    The warp's memory holds `query` (float16 fragments: 16 bytes for each lane and 32 channels, their words in the order
    0, 2, 1, 3), `columns` (float32 [8, 4]: scale, norm, slack for each norm of the record, slack), and the record:
    `codes`, `low`, `step`, `norms` and, for token bounds, `residual`.
    """
    query = [warp.load("query", warp.lane * 16, 4, then=512 * j) for j in range(shape.chunks)]
    centre = _centre(warp, shape, query)
    rho, norm = (warp.as_float(x) for x in warp.load("norms", warp.lane & 0, 2))
    columns = _columns(warp, norm)
    weights = _weights(warp, query)
    grid = _grid(warp, shape, weights)
    reach = _Reach(warp, shape, columns, grid, rho)
    scale = [x * _CODE_SCALE for x in columns.scale]
    sums = Sums(warp, pages=shape.pages, group=shape.group, doubled=shape.doubled)
    for first in range(0, BLOCK // TILE, shape.together):
        tiles = range(first, first + shape.together)
        for tile, acc in zip(tiles, _tiles(warp, shape, weights, grid.start, tiles), strict=True):
            page = tile * TILE // shape.page_size
            sums.add(page, [x * scale[i % 2] for i, x in enumerate(acc)], reach.of_tile(tile))
    centre = warp.shuffle(centre, sums.column << 2) * sums.own(columns.scale)
    return sums.results(centre, reach.of_unit())


def _centre(warp: Warp, shape: UnitShape, query) -> Value:
    """q.low + 7.5 q.step for the query of row g of the lane.

    Queries are rows: the first half of the channels of a chunk in rows 0-7, the second in rows 8-15. Columns 0 and 4
    are the first halves of low, 1 and 5 the second, 2, 3, 6, 7 those of step. What is wanted of the products lies in
    the lane's first and last number; the other two join halves that do not belong together.
    """
    g, t = warp.lane >> 2, warp.lane & 3
    own = t * 16 + (g & 1) * 8
    halves = [warp.load_either((g & 2) < 1, "low", "step", own, 2, then=64 * j) for j in range(shape.chunks)]
    out = _chain(warp, query, halves)
    own = (out[0] + out[3]) * warp.select((t & 1) < 1, warp.number(1.0), warp.number(7.5))
    return own + warp.exchange(own, 1)


def _columns(warp: Warp, norm) -> _Columns:
    t = warp.lane & 3
    both = [[warp.as_float(x) for x in warp.load("columns", t * 32, 4, then=16 * i)] for i in range(2)]
    scale, norm_q, per_norm, least = ([own[k] for own in both] for k in range(4))
    return _Columns(scale, norm_q, [warp.fma(per_norm[i], norm, least[i]) for i in range(2)])


def _weights(warp: Warp, query):
    """q o step of the channels of each lane: [chunk][word]."""
    t = warp.lane & 3
    steps = [warp.load("step", t * 16, 4, then=64 * j) for j in range(len(query))]
    in_order = [[words[i] for i in (0, 2, 1, 3)] for words in query]
    return [[warp.mul_halves(*x) for x in zip(*pair, strict=True)] for pair in zip(in_order, steps, strict=True)]


def _by_pairs(words):
    return [[chunk[a], chunk[b]] for chunk in words for a, b in _PAIRS]


def _chain(warp: Warp, rows, columns):
    return warp.chains([[warp.number(0.0)] * 4], [rows], columns)[0]


def _grid(warp: Warp, shape: UnitShape, weights) -> _Grid:
    t = warp.lane & 3
    of_columns = lambda total, first: [warp.shuffle(total, first + 4 * i) for i in range(2)]
    if shape.bound == "group":
        start = of_columns(_sum_of_rows(warp, weights, None), t * 8)
        diagonal = enumerate(_squares(warp, weights))
        return _Grid(start, [warp.sqrt(warp.shuffle(x, t * 9 + 4 * i)) for i, x in diagonal])
    everywhere = warp.word(0x7FFF7FFF)
    if shape.bound == "none":
        return _Grid(of_columns(_sum_of_rows(warp, weights, None), t * 8), [])
    if shape.doubled:  # the second copy of the group gives the sum of magnitudes
        total = _sum_of_rows(warp, weights, warp.select(warp.lane < 16, warp.word(0xFFFFFFFF), everywhere))
        start, size = (of_columns(total, (t & 1) * 8 + copy) for copy in (0, 16))
    else:
        start = of_columns(_sum_of_rows(warp, weights, None), t * 8)
        size = of_columns(_sum_of_rows(warp, weights, everywhere), t * 8)
    return _Grid(start, [x * (-_CODE_SCALE / 7.5) for x in size])


def _sum_of_rows(warp: Warp, weights, mask) -> Value:
    """-7.5 times the sum over the channels of the weights of row g of the lane, of which a mask is applied first."""
    masked = lambda x: x if mask is None else x & mask
    rows = [[masked(chunk[i]) for i in (0, 2, 1, 3)] for chunk in weights]
    out = _chain(warp, rows, [[warp.word(_CENTRE)] * 2] * len(rows))
    return out[0] + out[2]


def _squares(warp: Warp, weights) -> list[Value]:
    """Entries of w w^T in both columns of the lane; in row g, its diagonal where g is the column."""
    rows = [[chunk[i] for i in (0, 2, 1, 3)] for chunk in weights]
    first, second = (_chain(warp, rows, [chunk[i : i + 2] for chunk in weights]) for i in (0, 2))
    return [first[i] + second[2 + i] for i in range(2)]


def _tiles(warp: Warp, shape: UnitShape, weights, start, tiles):
    """x of 16 tokens each, [tile][4], in units of 2**-20."""
    rows = [_code_rows(warp, shape, tile) for tile in tiles]
    by_16 = warp.word(_BY_16)
    scaled = [[x if i % 2 else warp.mul_halves(x, by_16) for i, x in enumerate(chunk)] for chunk in weights]
    return warp.chains([start * 2 for _ in tiles], rows, _by_pairs(scaled))


def _code_rows(warp: Warp, shape: UnitShape, tile: int):
    """Fragments of 16 tokens: row g is token 2 g + (g & 1), row g + 8 its neighbour.

    So the residuals of both are one word, and the 16-byte loads of a warp meet no bank twice.
    """
    first, second = (_token_words(warp, shape, tile, row) for row in range(2))
    for pair in zip(first, second, strict=True):
        a, b = (_nibbles(warp, word) for word in pair)
        for i, k in _PAIRS:
            yield [a[i], b[i], a[k], b[k]]


def _token_words(warp: Warp, shape: UnitShape, tile: int, row: int):
    g, t = warp.lane >> 2, warp.lane & 3
    width = shape.head_dim // 2  # bytes of a token
    token = g * 2 + ((g & 1) ^ row)
    return warp.load("codes", token * width + t * (width // 4), shape.chunks, then=TILE * tile * width)


def _nibbles(warp: Warp, word):
    """Operands of the pairs of channels 0..3: c * 2**-24 of the even ones, c * 2**-20 of the odd ones."""
    high = word >> 8
    lower, upper = warp.word(0x000F000F), warp.word(0x00F000F0)
    return [word & lower, word & upper, high & lower, high & upper]


class _Reach:
    """How far a logit may lie from its decoded value, rounding included."""

    def __init__(self, warp: Warp, shape: UnitShape, columns: _Columns, grid: _Grid, rho):
        self.warp, self.shape, self.columns = warp, shape, columns
        scaled = [a * b for a, b in zip(grid.spread, columns.scale, strict=False)]
        if shape.bound == "group":
            width = warp.fma(rho, warp.number(_UP), warp.number(GRID * _UP * shape.head_dim**0.5))
            self.group = [warp.fma(a, width, b) for a, b in zip(scaled, columns.slack, strict=True)]
        if shape.bound == "token":
            self.slack = [warp.fma(a, warp.number(GRID * _UP), b) for a, b in zip(scaled, columns.slack, strict=True)]
            self.box = [warp.fma(a, warp.number(0.5 * _UP), b) for a, b in zip(scaled, self.slack, strict=True)]

    def of_tile(self, tile: int) -> list[Value] | None:
        """For each accumulator of a tile, from the residual of its token."""
        if self.shape.bound != "token":
            return None
        g = self.warp.lane >> 2
        pair = self.warp.load("residual", g * 4, 1, then=2 * TILE * tile)[0]
        rows = self.warp.halves(self.warp.rotate(pair, (g & 1) * 16))
        by_norm = lambda i: self.warp.fma(self.columns.norm[i % 2], rows[i // 2], self.slack[i % 2])
        return [self.warp.min(by_norm(i), self.box[i % 2]) for i in range(4)]

    def of_unit(self) -> list[Value] | None:
        """For each column, whatever the token."""
        return self.group if self.shape.bound == "group" else None
