"""Sums of powers of two over the lanes of a warp, and from them to natural logarithms, rounded outward.

Exponents are relative to the centre of a unit's grid. Those below -126 become 0: right for a lower bound; an upper
bound adds FLOOR, more than the 64 of a unit together. A lower bound cuts off what overflows. What is no number ends as
no bound at all: lower = -inf, upper = inf.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from skg_jax.pallas.warp import Value, Warp

BIG = 3.0e38
FLOOR = 2.0**-119
_LN2 = math.log(2.0)


class Results(NamedTuple):
    """Natural logarithms of one lane, and where they belong."""

    values: dict[str, Value]  # estimate, lower, upper
    mine: dict[str, Value]  # whether this lane is the one to write it
    column: Value
    page: Value


class Sums:
    """By page and column; of a doubled group `both` is upper for t < 2 and lower for the rest.

    Args:
      pages: of a unit. group: query heads. doubled: whether they stand in the columns twice.
    """

    def __init__(self, warp: Warp, *, pages: int, group: int, doubled: bool):
        self.warp, self.pages, self.group, self.doubled = warp, pages, group, doubled
        self.first_copy = (warp.lane & 3) < 2
        self.sign = warp.select(self.first_copy, warp.number(1.0), warp.number(-1.0))
        self.by_name: dict[str, list] = {}

    def add(self, page: int, x: list[Value], reach: list[Value] | None) -> None:
        """Count 16 tokens: exponents of both columns of two rows, and how far off each may be."""
        if self.doubled:  # each copy takes the estimate of half of the tokens
            halves = zip(x[:2], x[2:], strict=True)
            self._count("estimate", page, [self.warp.select(self.first_copy, *pair) for pair in halves])
        else:
            self._count("estimate", page, x)
        if reach is None:
            return
        pairs = list(zip(x, reach, strict=True))
        if self.doubled:
            self._count("both", page, [self.warp.fma(far, self.sign, v) for v, far in pairs])
        else:
            self._count("lower", page, [v - far for v, far in pairs])
            self._count("upper", page, [v + far for v, far in pairs])

    def _count(self, name: str, page: int, exponents: list[Value]) -> None:
        sums = self.by_name.setdefault(name, [None] * (2 * self.pages))
        for i, x in enumerate(exponents):
            at, term = page + self.pages * (i % 2), self.warp.exp2(x)
            sums[at] = term if sums[at] is None else sums[at] + term

    def results(self, centre: list[Value], reach: list[Value] | None) -> Results:
        """Logarithms of all pages.

        Args:
          centre: of the exponents of each column. reach: how far off all tokens of a column may be, if `add` was not
            told.
        """
        # Else the compiler keeps a dozen numbers through the whole unit, and spills more of them.
        self.warp.read_lane()
        self.first_copy = (self.warp.lane & 3) < 2
        logs = {name: self._over_lanes(sums) for name, sums in self.by_name.items()}
        if self.doubled:
            logs["estimate"] = logs["estimate"] + self.warp.exchange(logs["estimate"], 2)
        ends = _Ends(self.warp, self._own_column(centre))
        values = {"estimate": ends.estimate(logs["estimate"])}
        if reach is not None:
            logs["both"] = logs["estimate"]
        if len(logs) > 1:
            far = self.warp.number(0.0) if reach is None else self._own_column(reach)
            values["lower"] = ends.lower(logs["both" if "both" in logs else "lower"], far)
            values["upper"] = ends.upper(logs["both" if "both" in logs else "upper"], far)
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
        return self.warp.select(((self.warp.lane >> 2) & self.pages) < 1, *pair)

    def _place(self, values: dict[str, Value]) -> Results:
        lane = self.warp.lane
        g, t = lane >> 2, lane & (1 if self.doubled else 3)
        column = t * 2 + self._own_column([lane & 0, (lane & 0) + 1])
        inside = (g < 2 * self.pages) & (column < self.group)
        first, second = inside, inside
        if self.doubled:
            first, second = inside & self.first_copy, inside & (((lane & 2) ^ 2) < 1)
        mine = {name: second if name == "lower" else first for name in values}
        return Results(values, mine, column, g & (self.pages - 1))


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
