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


class Output(NamedTuple):
    """A number of every lane, for one store."""

    value: Value
    unknown: Value  # what takes its place where nothing is known
    side: Value | None  # of the bounds: 0 lower, 1 upper; None: the estimate
    mine: Value  # whether this lane is the one to write it


class Results(NamedTuple):
    """Natural logarithms of one lane, and where they belong."""

    outputs: list[Output]
    member: Value  # query head of the group
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

    @property
    def column(self) -> Value:
        """The column whose sums this lane will have in the end."""
        return (self.warp.lane & 3) * 2 + self.own([self.warp.word(0), self.warp.word(1)])

    def own(self, pair: list[Value]) -> Value:
        """Of numbers of both columns of the lane, that one's."""
        return self.warp.select(((self.warp.lane >> 2) & self.pages) < 1, *pair)

    def results(self, centre: Value, reach: list[Value] | None) -> Results:
        """Logarithms of all pages.

        Args:
          centre: of the exponents of the lane's `column`. reach: how far off all tokens of both columns may be, if
            `add` was not told.
        """
        warp, g = self.warp, self.warp.lane >> 2
        totals = {name: self._over_lanes(sums) for name, sums in self.by_name.items()}
        if self.doubled:
            totals["estimate"] = totals["estimate"] + warp.exchange(totals["estimate"], 2)
        ends = _Ends(warp, centre, warp.number(0.0) if reach is None else self.own(reach))
        member = self.column & 3 if self.doubled else self.column
        inside = (g < 2 * self.pages) & (member < self.group)
        first = inside & self.first_copy if self.doubled else inside
        outputs = [Output(ends.estimate(totals["estimate"]), warp.number(-math.inf), None, first)]
        if reach is not None or len(totals) > 1:
            outputs += [Output(*ends.bound(total, sign), inside) for total, sign in self._bounds(totals)]
        return Results(outputs, member, g & (self.pages - 1))

    def _bounds(self, totals: dict[str, Value]) -> list[tuple[Value, Value]]:
        """What bounds are made of, and their signs: -1 lower, 1 upper."""
        sides = [("both", self.sign)]
        if not self.doubled:
            sides = [("lower", self.warp.number(-1.0)), ("upper", self.warp.number(1.0))]
        return [(totals.get(name, totals["estimate"]), sign) for name, sign in sides]

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


class _Ends:
    """From sums of powers of two to natural logarithms, rounded outward; what is no number ends as no bound."""

    def __init__(self, warp: Warp, centre: Value, far: Value):
        self.warp, self.centre = warp, centre
        size = warp.select(centre < 0.0, centre * -1.0, centre)
        self.reach = far + warp.fma(size, warp.number(2.0**-21), warp.number(2.0**-13))

    def _cut(self, total: Value) -> Value:
        big = self.warp.number(BIG)
        return self.warp.select(big < total, big, total)

    def estimate(self, total: Value) -> Value:
        log = (self.warp.log2(self._cut(total) + 2.0**-126) + self.centre) * _LN2
        return self.warp.select(log < BIG, log, self.warp.number(-math.inf))

    def bound(self, total: Value, sign: Value) -> tuple[Value, Value, Value]:
        """Lower where the sign is -1, upper where it is 1; what stands for none; 0 or 1."""
        warp, upper = self.warp, self.warp.number(0.0) < sign
        total = warp.select(upper, total + FLOOR, self._cut(total))
        log = (warp.log2(total) + warp.fma(sign, self.reach, self.centre)) * _LN2
        none = sign * math.inf
        return (
            warp.select(warp.number(-BIG) < sign * log, log, none),
            none,
            warp.select(upper, warp.word(1), warp.word(0)),
        )
