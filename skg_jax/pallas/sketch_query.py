"""Queries as the sketch scorer reads them: float16 fragments of mma.m16n8k16, and the numbers of each column.

A query is scaled by a power of two to a largest channel in [1/8, 1/4). Its column keeps, all of them times that power,
log2(e) and 1/sqrt(H): the scale itself; the norm of the query; what a logit may be off for each unit of a record's
norm; and what it may be off in any case. The first error is made of (u = 2**-24; see `sketch_unit`)

    2 (H + 16) u   the exact logit in float32 that a reader of the page will compute, and the stored norms
    36 u H/16      the chain of q.low
    2**-11         a query in float32, used as float16; queries in 16 bits lose nothing but subnormals, 2**-25 each
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from skg_jax.pallas.sketch_unit import COLUMNS, LANES, UnitShape
from skg_jax.pallas.warp import Value, Warp

_U = 2.0**-24
_LOG2E = math.log2(math.e)
_SMALLEST, _LARGEST = 27, 227  # biased exponents that are scaled to [1/8, 1/4); others end as 0 or as no bound


class Column(NamedTuple):
    """A column to be made."""

    number: Value
    raw: Value  # where its query starts: bytes
    query: Value  # where the fragments of its head start
    columns: Value  # where the numbers of its head start


def prepare_columns(warp: Warp, unit: UnitShape, dtype, columns: list[Column]) -> None:
    """One warp, some columns. Those of a doubled group are written twice.

    The warp's memory holds `raw`, the queries, and room for `query` and `columns` (`score_unit`).
    """
    channels = [_channels(warp, unit, dtype, column.raw) for column in columns]  # all on their way at once
    for column, x in zip(columns, channels, strict=True):
        _prepare_column(warp, unit, dtype, column, x)


def _prepare_column(warp: Warp, unit: UnitShape, dtype, column: Column, x: list[Value]) -> None:
    used = column.number < unit.group
    x = [warp.select(used, value, warp.number(0.0)) for value in x]
    largest = warp.number(0.0)
    for value in x:
        largest = _larger(warp, largest, warp.select(value < 0.0, value * -1.0, value))
    exponent = warp.as_word(_over_lanes(warp, largest, lambda a, b: _larger(warp, a, b))) >> 23
    exponent = warp.select(exponent < _SMALLEST, warp.word(_SMALLEST), exponent)
    exponent = warp.select(exponent < _LARGEST, exponent, warp.word(_LARGEST))
    down, up = warp.as_float((warp.word(251) - exponent) << 23), warp.as_float((exponent + 3) << 23)
    x = [value * down for value in x]
    square = warp.number(0.0)
    for value in x:
        square = warp.fma(value, value, square)
    norm = warp.sqrt(_over_lanes(warp, square, lambda a, b: a + b))
    numbers = [warp.as_word(n) for n in _numbers(norm, up, unit.head_dim, dtype)]
    words = [warp.pack_halves(*x[i : i + 2]) for i in range(0, len(x), 2)]
    for copy in (0, COLUMNS // 2) if unit.doubled else (0,):
        number = column.number + copy
        for i, word in enumerate(words):
            at = _word_of(warp.lane * (len(x) // 2) + i)
            warp.store("query", column.query + number * 64 + at, [word])
        warp.store("columns", column.columns + number * 16 + (warp.lane & 0), numbers)


def _word_of(pair):
    """Byte of a pair of channels in the fragments of a column.

    The four words of a lane stand in the order 0, 2, 1, 3: as a matrix of rows the first half of the channels of a
    chunk then lies in rows 0 to 7 and the second in rows 8 to 15.
    """
    word = ((pair & 1) << 1) | ((pair >> 1) & 1)
    return (pair >> 4) * 512 + ((pair >> 2) & 3) * 16 + word * 4


def _channels(warp: Warp, unit: UnitShape, dtype, offset: Value) -> list[Value]:
    """Consecutive channels of each lane."""
    count, size = unit.head_dim // LANES, jnp.dtype(dtype).itemsize
    words = warp.load("raw", offset + warp.lane * (count * size), count * size // 4)
    if dtype == jnp.float32:
        return [warp.as_float(word) for word in words]
    if dtype == jnp.float16:
        return [x for word in words for x in warp.halves(word)]
    top = warp.word(0xFFFF0000)
    return [warp.as_float(half) for word in words for half in (word << 16, word & top)]


def _larger(warp: Warp, a: Value, b: Value) -> Value:
    return warp.select(a < b, b, a)


def _over_lanes(warp: Warp, x: Value, combine) -> Value:
    for distance in (1, 2, 4, 8, 16):
        x = combine(x, warp.exchange(x, distance))
    return x


def _numbers(norm, power, dim: int, dtype) -> list:
    """Numbers of a column, from the norm of the scaled query; on registers or arrays."""
    norm = norm * (1.0 + 2.0**-12)
    relative = 2 * (dim + 16) * _U + 36 * _U * dim / 16 + (2.0**-11 if dtype == jnp.float32 else 0.0)
    scale = power * (_LOG2E / dim**0.5)
    slack = (norm * relative + dim**0.5 * 2.0**-25) * (1.0 + 2.0**-10)
    return [scale, norm * scale, slack * scale, scale * (16 * dim * 2.0**-25)]


def operands(
    q: Float[Array, "*lead G H"], unit: UnitShape
) -> tuple[Float[Array, "*lead words"], Float[Array, "*lead 32"]]:
    """The same on whole arrays: fragments as float16, and numbers."""
    *lead, group, dim = q.shape
    room = COLUMNS // 2 if unit.doubled else COLUMNS
    padded = jnp.pad(q.astype(jnp.float32), (*[(0, 0)] * len(lead), (0, room - group), (0, 0)))
    exponent = lax.bitcast_convert_type(jnp.abs(padded).max(-1), jnp.int32) >> 23
    exponent = jnp.clip(exponent, _SMALLEST, _LARGEST)
    power = lambda biased: lax.bitcast_convert_type(biased << 23, jnp.float32)
    padded = padded * power(251 - exponent)[..., None]
    numbers = _numbers(jnp.linalg.norm(padded, axis=-1), power(exponent + 3), dim, q.dtype)
    twice = lambda x: jnp.concatenate([x, x], axis=-2) if unit.doubled else x
    fragments = twice(padded).astype(jnp.float16).reshape(*lead, COLUMNS, unit.chunks, 4, 2, 2, 2)
    fragments = fragments.swapaxes(-3, -2)  # words 0, 2, 1, 3, see `_word_of`
    columns = twice(jnp.stack(numbers, axis=-1))
    return jnp.moveaxis(fragments, -6, -5).reshape(*lead, -1), columns.reshape(*lead, -1)
