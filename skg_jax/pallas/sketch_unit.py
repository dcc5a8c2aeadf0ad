"""The arithmetic of the sketch scorer: one warp, one unit (64 tokens of one KV head against one group of queries).

Tokens are the rows of mma.m16n8k16, in four tiles of 16, and query heads its 8 columns. A code is an operand as it
stands: four bits of a word, masked, are a subnormal float16, c * 2**-24 or c * 2**-20, and so no code is converted. With
w = f16(q o step), and c the codes of a token,

    logit = q.low + 7.5 q.step + sum_d w_d (c_d - 7.5)         (the first two terms are the centre of the grid)
    x = logit - centre                                          is what exponents are made of

Groups of at most 4 heads stand in the columns twice: lanes with t < 2 then work on upper bounds, the others on lower.

Rounding. All of it is inside the bounds; u = 2**-24, |.| is the Euclidean norm, and q is scaled by a power of two so that
its largest channel lies in [1/8, 1/4): products with float16 steps never overflow, whatever the query.

    a matrix instruction   adds 17 numbers, each cut to 24 or more bits of the largest (Fasi et al. 2021, PeerJ CS 7:e330;
                           Hopper keeps more): 18 * 2 u of the sum of their magnitudes, so 18 * 2 u * H/16 in a chain
    w                      2**-11 of every product and 2**-25 if subnormal: 7.5 * 2**-11 A + 7.5 * 2**-25 H in the logit,
                           where A = sum |q_d| step_d, and (1 + 2**-10) A for A taken from w
    chain of the codes     partial sums are below 22.5 A: 18 * 2 u * 8 * 22.5 A = 0.64 * 2**-11 A at H = 128
    chain of sum w         18 * 2 u * 8 * 7.5 A = 0.21 * 2**-11 A; that of q.step, times 7.5, the same
    together               8.6 * 2**-11 A: GRID = 9.25 * 2**-11; with A <= sqrt(H) |q o step| for the bound of a group
    chain of q.low         18 * 2 u * H/16 of |q| |low|, and what a query in float32 loses as float16, 2**-11 of |q| |k^|:
                           times `norm` of the record, in the caller's `slack`, with the float32 error of the stored
                           norms and of the exact logit that a reader of the page will compute
    float32                x and its scale: 2**-23 of a logit; exp2 2**-22, 6 additions, log2 2**-22 of at most 128:
                           2**-13 + 2**-21 |centre|, in units of log2
    exponents below -126   become 0: right for a lower bound; of an upper bound at most 64 * 2**-126 < FLOOR
    overflow               of a sum of lower bounds is cut to BIG; all that is not a number ends as no bound at all
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, NamedTuple

from skg_jax.pallas.warp import Value, Warp
from skg_jax.types import BLOCK

type Bound = Literal["token", "group", "none"]

COLUMNS = 8
TILE = 16  # tokens of one matrix instruction
LANES = 32
GRID = 9.25 * 2.0**-11
BIG = 3.0e38
FLOOR = 2.0**-119
_UP = 1.0 + 2.0**-9
_LN2 = math.log(2.0)
_HALF_ONE_16 = 0x4C004C00  # 16.0, 16.0
_CENTRE = 0x80788078  # -7.5 * 2**-20, twice: a subnormal, exact
_CODE_SCALE = 2.0**20
_TOGETHER = 2  # tiles whose chains of instructions overlap
_PAIRS = ((0, 1), (2, 3))  # words of a chunk that one instruction takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Static facts of a unit."""

    head_dim: int
    group: int
    page_size: int
    bound: Bound

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


class Results(NamedTuple):
    """Natural logarithms of one lane, and where they belong."""

    values: dict[str, Value]  # estimate, lower, upper
    mine: dict[str, Value]  # whether this lane is the one to write it
    column: Value
    page: Value


class _Columns(NamedTuple):
    """Numbers of the two columns of each lane; logarithms are binary."""

    scale: list[Value]  # of a logit
    norm: list[Value]  # |q|, scaled
    slack: list[Value]  # of the logit, rounding outside of the grid
    centre: list[Value]  # of the grid, scaled


class _Grid(NamedTuple):
    """Sums over the channels, for the two columns of each lane."""

    start: list[Value]  # -7.5 sum w, in units of 2**-20
    spread: list[Value]  # sum |w| ("token"), |w| ("group"), empty otherwise


def score_unit(warp: Warp, shape: UnitShape) -> Results:
    """Log-masses of the pages of one unit.

    The warp's memory holds `query` (float16 fragments: 16 bytes for each lane and 32 channels), `columns` (float32
    [8, 4]: scale, norm, slack for each norm of the record, slack), and the record: `codes`, `low`, `step`, `norms` and,
    for token bounds, `residual`.
    """
    query, low, step = _operands(warp, shape)
    rho, norm = (warp.as_float(x) for x in warp.load("norms", warp.lane & 0, 2))
    columns = _columns(warp, shape, query, low, step, norm)
    weights = [[warp.mul_halves(*x) for x in zip(*pair, strict=True)] for pair in zip(query, step, strict=True)]
    grid = _grid(warp, shape, weights)
    reach = _Reach(warp, shape, columns, grid, rho)
    scale = [x * _CODE_SCALE for x in columns.scale]
    sums = _Sums(warp, shape)
    for first in range(0, BLOCK // TILE, _TOGETHER):
        tiles = range(first, first + _TOGETHER)
        for tile, acc in zip(tiles, _tiles(warp, shape, weights, grid.start, tiles), strict=True):
            sums.add(tile, [x * scale[i % 2] for i, x in enumerate(acc)], reach)
    return sums.results(columns.centre, reach)


def _operands(warp: Warp, shape: UnitShape):
    """Query fragments, low and step of the channels of each lane: [chunk][word]."""
    t = warp.lane & 3
    chunks = range(shape.chunks)
    query = [warp.load("query", warp.lane * 16 + 512 * j, 4) for j in chunks]
    return query, *([warp.load(name, t * 16 + 64 * j, 4) for j in chunks] for name in ("low", "step"))


def _columns(warp: Warp, shape: UnitShape, query, low, step, norm) -> _Columns:
    t = warp.lane & 3
    both = [[warp.as_float(x) for x in warp.load("columns", t * 32 + 16 * i, 4)] for i in range(2)]
    scale, norm_q, per_norm, least = ([own[k] for own in both] for k in range(4))
    rows = [[low[j][a], step[j][a], low[j][b], step[j][b]] for j in range(shape.chunks) for a, b in _PAIRS]
    inner = _chain(warp, rows, _by_pairs(query))  # q.low in rows 0-7, q.step in rows 8-15
    centre = [warp.fma(inner[2 + i], warp.number(7.5), inner[i]) * scale[i] for i in range(2)]
    return _Columns(scale, norm_q, [warp.fma(per_norm[i], norm, least[i]) for i in range(2)], centre)


def _by_pairs(words):
    return [[chunk[a], chunk[b]] for chunk in words for a, b in _PAIRS]


def _chain(warp: Warp, rows, columns):
    return warp.chains([[warp.number(0.0)] * 4], [rows], columns)[0]


def _grid(warp: Warp, shape: UnitShape, weights) -> _Grid:
    t, g = warp.lane & 3, warp.lane >> 2
    columns, centre = _by_pairs(weights), warp.word(_CENTRE)
    absolute = lambda mask: [[x & mask for x in pair] for pair in columns]
    everywhere = warp.word(0x7FFF7FFF)
    constant = [[centre] * 4] * len(columns)
    if shape.bound == "group":  # w w^T has the squares on its diagonal
        rows = [[a, centre, b, centre] for a, b in columns]
        out = _chain(warp, rows, columns)
        square = [warp.shuffle(out[i], t * 9 + 4 * i) for i in range(2)]
        return _Grid(out[2:], [warp.sqrt(x) for x in square])
    if shape.bound == "none" or not shape.doubled:
        start = _chain(warp, constant, columns)[:2]
        size = [] if shape.bound == "none" else _chain(warp, constant, absolute(everywhere))[:2]
    else:  # the second copy of the group gives the sum of magnitudes
        mask = warp.select(g < 4, warp.word(0xFFFFFFFF), everywhere)
        own = _chain(warp, constant, absolute(mask))[:2]
        other = [warp.exchange(x, 2) for x in own]
        start, size = ([warp.select(t < 2, *pair) for pair in zip(*x, strict=True)] for x in ((own, other), (other, own)))
    return _Grid(start, [x * (-_CODE_SCALE / 7.5) for x in size])


def _tiles(warp: Warp, shape: UnitShape, weights, start, tiles):
    """x of 16 tokens each, [tile][4], in units of 2**-20."""
    rows = [_code_rows(warp, shape, tile) for tile in tiles]
    by_16 = warp.word(_HALF_ONE_16)
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
    return warp.load("codes", token * width + t * (width // 4) + TILE * tile * width, shape.chunks)


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
        elif shape.bound == "token":
            self.slack = [warp.fma(a, warp.number(GRID * _UP), b) for a, b in zip(scaled, columns.slack, strict=True)]
            self.box = [warp.fma(a, warp.number(0.5 * _UP), b) for a, b in zip(scaled, self.slack, strict=True)]

    def of_tile(self, tile: int):
        """For each accumulator of a tile, from the residual of its token."""
        g = self.warp.lane >> 2
        pair = self.warp.load("residual", g * 4 + 2 * TILE * tile, 1)[0]
        rows = self.warp.halves(self.warp.rotate(pair, (g & 1) * 16))
        by_norm = lambda i: self.warp.fma(self.columns.norm[i % 2], rows[i // 2], self.slack[i % 2])
        return [self.warp.min(by_norm(i), self.box[i % 2]) for i in range(4)]


class _Sums:
    """Sums of exponentials by page and column; of a doubled group `both` is upper for t < 2 and lower for the rest."""

    def __init__(self, warp: Warp, shape: UnitShape):
        self.warp, self.shape = warp, shape
        self.first_copy = (warp.lane & 3) < 2
        self.sign = warp.select(self.first_copy, warp.number(1.0), warp.number(-1.0))
        self.by_name: dict[str, list] = {}

    def add(self, tile: int, x: list[Value], reach: _Reach) -> None:
        warp = self.warp
        if self.shape.doubled:  # each copy takes the estimate of half of the tokens
            for i in range(2):
                self._count("estimate", tile, i, warp.select(self.first_copy, x[i], x[2 + i]))
        else:
            self._count_all("estimate", tile, x)
        if self.shape.bound == "token":
            far = reach.of_tile(tile)
            if self.shape.doubled:
                self._count_all("both", tile, [warp.fma(r, self.sign, v) for r, v in zip(far, x, strict=True)])
            else:
                self._count_all("lower", tile, [v - r for r, v in zip(far, x, strict=True)])
                self._count_all("upper", tile, [v + r for r, v in zip(far, x, strict=True)])

    def _count_all(self, name: str, tile: int, exponents) -> None:
        for i, x in enumerate(exponents):
            self._count(name, tile, i % 2, x)

    def _count(self, name: str, tile: int, i: int, exponent) -> None:
        pages = self.shape.pages
        at = tile * TILE // self.shape.page_size + pages * i
        sums = self.by_name.setdefault(name, [None] * (2 * pages))
        term = self.warp.exp2(exponent)
        sums[at] = term if sums[at] is None else sums[at] + term

    def results(self, centre: list[Value], reach: _Reach) -> Results:
        warp, shape = self.warp, self.shape
        logs = {name: self._over_lanes(sums) for name, sums in self.by_name.items()}
        if shape.doubled:
            logs["estimate"] = logs["estimate"] + warp.exchange(logs["estimate"], 2)
        own = self._own_column
        ends = _Ends(warp, own(centre))
        values = {"estimate": ends.estimate(logs["estimate"])}
        if shape.bound == "group":
            logs["both"], far = logs["estimate"], own(reach.group)
        else:
            far = warp.number(0.0)
        if shape.bound != "none":
            values["lower"] = ends.lower(logs.get("lower", logs.get("both")), far)
            values["upper"] = ends.upper(logs.get("upper", logs.get("both")), far)
        return self._place(values)

    def _over_lanes(self, sums: list[Value]) -> Value:
        """Add over the lanes with one t: of n sums, lane 4 g + t ends with number g % n.

        With each exchange a lane hands over half of its sums, and keeps the other half.
        """
        warp = self.warp
        for bit in (4, 8, 16):
            low = (warp.lane & bit) < 1
            if len(sums) == 1:
                sums = [sums[0] + warp.exchange(sums[0], bit)]
                continue
            pairs = list(zip(sums[::2], sums[1::2], strict=True))
            sums = [warp.select(low, a, b) + warp.exchange(warp.select(low, b, a), bit) for a, b in pairs]
        return sums[0]

    def _own_column(self, pair: list[Value]) -> Value:
        """Of numbers of both columns, the one that `_over_lanes` leaves with this lane."""
        return self.warp.select(((self.warp.lane >> 2) & self.shape.pages) < 1, *pair)

    def _place(self, values: dict[str, Value]) -> Results:
        lane, pages = self.warp.lane, self.shape.pages
        g, t = lane >> 2, lane & (1 if self.shape.doubled else 3)
        column = t * 2 + self._own_column([lane & 0, (lane & 0) + 1])
        inside = (g < 2 * pages) & (column < self.shape.group)
        upper_copy, lower_copy = inside, inside
        if self.shape.doubled:
            upper_copy, lower_copy = inside & ((lane & 2) < 1), inside & ((lane & 2 ^ 2) < 1)
        mine = {name: lower_copy if name == "lower" else upper_copy for name in values}
        return Results(values, mine, column, g & (pages - 1))


class _Ends:
    """From sums of powers of two to natural logarithms, rounded outward; what is no number ends as no bound."""

    def __init__(self, warp: Warp, centre: Value):
        self.warp, self.centre = warp, centre
        size = warp.select(centre < 0.0, centre * -1.0, centre)
        self.pad = warp.fma(size, warp.number(2.0**-21), warp.number(2.0**-13))

    def _cut(self, total: Value) -> Value:
        big = self.warp.number(BIG)
        return self.warp.select(big < total, big, total)

    def estimate(self, total: Value) -> Value:
        log = (self.warp.log2(self._cut(total) + 2.0**-126) + self.centre) * _LN2
        return self.warp.select(log < BIG, log, self.warp.number(-math.inf))

    def lower(self, total: Value, far: Value) -> Value:
        log = (self.warp.log2(self._cut(total)) + self.centre - far - self.pad) * _LN2
        return self.warp.select(log < BIG, log, self.warp.number(-math.inf))

    def upper(self, total: Value, far: Value) -> Value:
        log = (self.warp.log2(total + FLOOR) + self.centre + far + self.pad) * _LN2
        return self.warp.select(self.warp.number(-BIG) < log, log, self.warp.number(math.inf))
