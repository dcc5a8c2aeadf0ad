"""The arithmetic of sealing: one warpgroup, one unit (64 keys and 64 values of one KV head), 16 tokens to a warp.

Keys and values lie in shared memory as TMA swizzles them: 64 channels of 8 tokens are a KiB, and the 16-byte chunk c of
token t is in place c ^ t. With r = lane % 8 and q = lane // 8 a lane reads them in two ways without bank conflicts:

    by channels   chunk r of every column of 64 channels, tokens 4 i + q: extremes over the tokens stay in the lane
    by tokens     tokens r and r + 8, chunks 4 j + q: sums over the channels stay in the lane, and so do the words of
                  codes q H/32 + j of a token, which are neighbours (kv/sketch.py)

Bounds. What is stored bounds the true numbers, in exact arithmetic; u = 2**-24 (float32), low and step are float16.

    low, step  low <= k and k <= low + 15 step: both are rounded outward, and _UP covers 3 roundings of the quotient
    code       d = k - low is off by u d at most, the reciprocal of the step by u, their product by u where multiply-
               adds are not fused (the interpreter). k - low <= 15 step, so |k - k^| / step <= 1/2 + 3 * 15.001 u, which
               is below (1 + 1e-5) / 2, and no code leaves 0..15
    residual   the difference d - code step is rounded once; with the error of d it lacks no more than 15.001 u step in
               a channel, 15.001 u |step| in the norm: _MISSED |step| is added. The sum of squares, all positive, is
               good to 40 u, its root to 20 u, and what follows to 4 u: _UP, 168 u, is more
    rho        the same in units of steps: 3 * 15.001 u in a channel, so _MISSED_STEPS sqrt(H) is added
    norms      as the residual; _LOST, added under the root, is more than 128 squares below 2**-126 can be
    underflow  of other squares: below 2**-63 sqrt(H), less than the spare part of _MISSED |step|, as steps that are not
               0 are at least 2**-24. Channels of step 0 are constant and miss nothing

What a machine that flushes subnormal float32 to zero loses besides (the interpreter's host; the GPU keeps them) is
below 2**-125 in a channel.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from skg_jax.pallas.warp import PairKind, Value, Warp
from skg_jax.types import BLOCK

WARPS = 4
QUARTER = BLOCK // WARPS  # tokens of a warp and of a checksum
LEVELS = 15.0
_UP = 1.0 + 1e-5
_MISSED = 2.0**-20
_MISSED_STEPS = 2.0**-18
_LOST = 2.0**-112
_TO_INTEGER = 1.5 * 2.0**23  # added to a small number, rounds it to an integer, which then is in the lowest bits
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35  # kv/integrity.py
_BOTH = range(2)  # tokens of a lane that reads by tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnitShape:
    """Static facts of a unit."""

    head_dim: int
    kind: PairKind  # of keys and values

    @property
    def columns(self) -> int:
        """Swizzled columns of 64 channels."""
        return self.head_dim // 64

    @property
    def chunks(self) -> int:
        """16-byte chunks of a token that one lane reads by tokens."""
        return self.head_dim // 32

    @property
    def scratch(self) -> dict[str, int]:
        """Words of shared memory beside keys and values: what the warps tell each other."""
        return {"ends": WARPS * self.head_dim, "grid": 3 * self.head_dim, "sums": 2 * WARPS, "most": 4 * WARPS}

    @property
    def results(self) -> dict[str, int]:
        """Words of global memory that a unit writes."""
        return {
            "codes": BLOCK * self.head_dim // 8, "low": self.head_dim // 2, "step": self.head_dim // 2,
            "residual": BLOCK // 2, "norms": 4, "key_norm": 1, "value_norm": 1, "k_sum": 4, "v_sum": 4, "fits": 1,
        }  # fmt: skip


class _Lane(NamedTuple):
    """Where this lane is."""

    quarter: Value  # of the block: number of its warp
    r: Value
    q: Value
    zero: Value


class _Channels(NamedTuple):
    """Grid of two channels of this lane: words of two float16, and where they belong."""

    at: Value
    low: Value
    step: Value


class _Tokens(NamedTuple):
    """What the keys of this lane's two tokens come to; sums are over all channels."""

    codes: list[list[Value]]  # words of each token
    missed: list[Value]  # squares of k - k^
    in_steps: list[Value]  # the same in steps
    keys: list[Value]  # squares of k


def seal_unit(warp: Warp, quarter: Value, shape: UnitShape) -> None:
    """Metadata of one unit; its sketch is zero if the keys do not fit into float16.

    The warp's memory holds `k` and `v` [64, H], swizzled, room for `shape.scratch`, and takes `shape.results`.
    """
    lane = _Lane(quarter, warp.lane & 7, warp.lane >> 3, (quarter ^ quarter) + (warp.lane & 0))
    k_sum = _extremes(warp, shape, lane)
    v_sum, v_squares = _values(warp, shape, lane)
    warp.sync()
    channels = _grid(warp, shape, lane)
    warp.sync()
    tokens = _encode(warp, shape, lane)
    norm_square, step_square = _grid_norms(warp, shape, lane)
    residual = [warp.fma(warp.sqrt(x), warp.number(_UP), warp.sqrt(step_square) * _MISSED) for x in tokens.missed]
    residual, worst = _residual_words(warp, lane, residual)
    most = [_larger(warp, pair) for pair in (tokens.in_steps, tokens.keys, v_squares)]
    steps, keys, values, worst = _over_block(warp, lane, [*most, worst])
    norm = warp.sqrt(norm_square) * _UP
    fits = (norm < math.inf) & (worst < math.inf)
    keep = lambda word: warp.select(fits, word, warp.word(0))
    for b in _BOTH:
        at = (lane.quarter * QUARTER + lane.r + 8 * b) * (shape.head_dim // 2) + lane.q * (shape.head_dim // 8)
        warp.store("codes", at, [keep(word) for word in tokens.codes[b]])
    warp.store("low", channels.at, [keep(channels.low)])
    warp.store("step", channels.at, [keep(channels.step)])
    at = lane.quarter * (2 * QUARTER) + (lane.q & 1) * QUARTER + (lane.r >> 1) * 4
    warp.store("residual", at, [keep(warp.select((lane.q & 1) < 1, *residual))])
    rho = warp.sqrt(steps) * _UP + _MISSED_STEPS * math.sqrt(shape.head_dim)
    warp.store("norms", lane.zero, [*(keep(warp.as_word(x)) for x in (rho, norm)), warp.word(0), warp.word(0)])
    for name, square in (("key_norm", keys), ("value_norm", values)):
        warp.store(name, lane.zero, [warp.as_word(warp.sqrt(square + _LOST) * _UP)])
    for name, total in (("k_sum", k_sum), ("v_sum", v_sum)):
        warp.store(name, lane.quarter * 4 + lane.zero, [total])
    warp.store("fits", lane.zero, [warp.select(fits, warp.word(1), warp.word(0))])


def _extremes(warp: Warp, shape: UnitShape, lane: _Lane) -> Value:
    """Store the smallest and largest keys of the quarter, channel by channel. Returns its checksum."""
    least: list = [None] * shape.columns
    most: list = [None] * shape.columns
    total = warp.word(0)
    for i in range(QUARTER // 4):
        for column in range(shape.columns):
            half, token = i // 2, lane.q + 4 * (i % 2)
            words = _chunk(warp, "k", shape, lane, half, token, column, lane.r)
            total = total + _checksum(warp, shape, words, half, token, column, lane.r)
            for ends, op in ((least, warp.min_pairs), (most, warp.max_pairs)):
                so_far = ends[column]
                ends[column] = words if so_far is None else _each(op, so_far, words, shape)
    for end, (ends, op) in enumerate(((least, warp.min_pairs), (most, warp.max_pairs))):
        for column, words in enumerate(ends):
            for distance in (8, 16):
                words = _each(op, words, [warp.exchange(x, distance) for x in words], shape)
            at = lane.quarter * (4 * shape.head_dim) + lane.r * 16 + (end * 2 * shape.head_dim + column * 128)
            warp.store("ends", at, words)
    return warp.total(total)


def _values(warp: Warp, shape: UnitShape, lane: _Lane) -> tuple[Value, list[Value]]:
    """Checksum of a quarter of values, and the sums of squares of this lane's two."""
    total, squares = warp.word(0), [warp.number(0.0)] * 2
    for j in range(shape.chunks):
        for half in _BOTH:
            column, chunk = j // 2, lane.q + 4 * (j % 2)
            words = _chunk(warp, "v", shape, lane, half, lane.r, column, chunk)
            total = total + _checksum(warp, shape, words, half, lane.r, column, chunk)
            for x in _numbers(warp, words, shape):
                squares[half] = warp.fma(x, x, squares[half])
    return warp.total(total), [_over_channels(warp, x) for x in squares]


def _grid(warp: Warp, shape: UnitShape, lane: _Lane) -> _Channels:
    """Store low, step and 1 / step of two channels, and the sums of squares that norms are made of.

    A warp takes 64 channels; of 64 there are, all warps do the same, of 128, every second one.
    """
    number = (lane.quarter * 32 + warp.lane) & (shape.head_dim // 2 - 1)
    first, last = (
        [warp.load("ends", number * 4 + (w * 4 + end * 2) * shape.head_dim, 1) for w in range(WARPS)] for end in _BOTH
    )
    for w in range(1, WARPS):
        first[0] = _each(warp.min_pairs, first[0], first[w], shape)
        last[0] = _each(warp.max_pairs, last[0], last[w], shape)
    low_word = warp.pack_halves_down(*_numbers(warp, first[0], shape))
    low = warp.halves(low_word)
    ranges = [(x - y) * (_UP / LEVELS) for x, y in zip(_numbers(warp, last[0], shape), low, strict=True)]
    step_word = warp.pack_halves_up(*ranges)
    step = warp.halves(step_word)
    inverse = [warp.select(x < 2.0**-24, warp.number(0.0), warp.reciprocal(x)) for x in step]
    for field, pair in enumerate((low, step, inverse)):
        warp.store("grid", number * 8 + field * 4 * shape.head_dim, [warp.as_word(x) for x in pair])
    size = [warp.fma(x, warp.number(LEVELS), _absolute(warp, y)) for x, y in zip(step, low, strict=True)]
    sums = [warp.fma(a, a, b * b) for a, b in (size, step)]
    for distance in (1, 2, 4, 8, 16):
        sums = [x + warp.exchange(x, distance) for x in sums]
    warp.store("sums", lane.quarter * 8 + lane.zero, [warp.as_word(x) for x in sums])
    return _Channels(number * 4, low_word, step_word)


def _grid_norms(warp: Warp, shape: UnitShape, lane: _Lane) -> list[Value]:
    """Squares of the norms of |low| + 15 step and of step."""
    parts = [[warp.as_float(x) for x in warp.load("sums", lane.zero + 8 * w, 2)] for w in range(shape.columns)]
    return parts[0] if len(parts) == 1 else [x + y for x, y in zip(*parts, strict=True)]


def _encode(warp: Warp, shape: UnitShape, lane: _Lane) -> _Tokens:
    """Codes of two tokens, in the order of their words, and what they miss."""
    integer = warp.number(_TO_INTEGER)
    codes, sums = [[] for _ in _BOTH], [[warp.number(0.0)] * 3 for _ in _BOTH]
    for j in range(shape.chunks):
        low, step, inverse = (_channel_numbers(warp, shape, lane, j, field) for field in range(3))
        for half in _BOTH:
            words = _chunk(warp, "k", shape, lane, half, lane.r, j // 2, lane.q + 4 * (j % 2))
            missed, in_steps, squares = sums[half]
            packed: list = []  # codes of even and of odd channels, as integers in the lowest bits of a float32
            for e, key in enumerate(_numbers(warp, words, shape)):
                above = key - low[e]
                rounded = warp.fma(above, inverse[e], integer)
                minus_code = integer - rounded
                if e < 2:
                    packed.append(rounded)
                else:
                    packed[e % 2] = warp.fma(minus_code, warp.number(-(16.0 ** (e // 2))), packed[e % 2])
                miss = warp.fma(minus_code, step[e], above)
                of_step = warp.fma(above, inverse[e], minus_code)
                missed, in_steps = warp.fma(miss, miss, missed), warp.fma(of_step, of_step, in_steps)
                squares = warp.fma(key, key, squares)
            codes[half].append(warp.low_halves(*(warp.as_word(x) for x in packed)))
            sums[half] = [missed, in_steps, squares]
    whole = [[_over_channels(warp, x) for x in three] for three in sums]
    return _Tokens(codes, *(list(pair) for pair in zip(*whole, strict=True)))


def _channel_numbers(warp: Warp, shape: UnitShape, lane: _Lane, j: int, field: int) -> list[Value]:
    """A field of the grid for the 8 channels of chunk 4 j + q."""
    at = lane.q * 32 + lane.zero + (128 * j + field * 4 * shape.head_dim)
    return [warp.as_float(x) for half in _BOTH for x in warp.load("grid", at + 16 * half, 4)]


def _residual_words(warp: Warp, lane: _Lane, residual: list[Value]) -> tuple[list[Value], Value]:
    """Residuals of neighbouring tokens, rounded up, in one word, and the largest; the same for r and r ^ 1."""
    odd, words, worst = lane.r & 1, [], []
    for own in residual:
        other = warp.exchange(own, 1)
        first, second = (warp.select(odd < 1, *pair) for pair in ((own, other), (other, own)))
        words.append(warp.pack_halves_up(first, second))
        worst += warp.halves(words[-1])
    return words, _larger(warp, worst)


def _over_block(warp: Warp, lane: _Lane, most: list[Value]) -> list[Value]:
    """The largest of four numbers each over all tokens of the block, NaN if there is one."""
    for distance in (1, 2, 4):
        most = [warp.max(x, warp.exchange(x, distance)) for x in most]
    warp.store("most", lane.quarter * 16 + lane.zero, [warp.as_word(x) for x in most])
    warp.sync()
    parts = [warp.load("most", lane.zero + 16 * w, 4) for w in range(WARPS)]
    return [_larger(warp, [warp.as_float(x) for x in same]) for same in zip(*parts, strict=True)]


def _chunk(warp: Warp, name: str, shape: UnitShape, lane: _Lane, half: int, token, column: int, chunk) -> list[Value]:
    """8 channels of token 8 half + token of the quarter."""
    tile = half * shape.columns + column
    at = lane.quarter * (2048 * shape.columns) + token * 128 + (chunk ^ token) * 16 + tile * 1024
    return warp.load(name, at, 4)


def _checksum(warp: Warp, shape: UnitShape, words: list[Value], half: int, token, column: int, chunk) -> Value:
    """Of the words of `_chunk`, as part of their quarter's."""
    shift = (token * (shape.head_dim // 2) + chunk * 4) * warp.word(_GOLDEN)
    start = half * 4 * shape.head_dim + column * 32
    mixed = [_mix(warp, x + shift + warp.word((start + e) * _GOLDEN % 2**32)) for e, x in enumerate(words)]
    return (mixed[0] + mixed[1]) + (mixed[2] + mixed[3])


def _mix(warp: Warp, h: Value) -> Value:
    """The finaliser of MurmurHash3."""
    for shift, factor in ((16, _MIX_1), (13, _MIX_2)):
        h = (h ^ (h >> shift)) * warp.word(factor)
    return h ^ (h >> 16)


def _numbers(warp: Warp, words: list[Value], shape: UnitShape) -> list[Value]:
    """As float32."""
    if shape.kind == "f16":
        return [x for word in words for x in warp.halves(word)]
    top = warp.word(0xFFFF0000)
    return [warp.as_float(half) for word in words for half in (word << 16, word & top)]


def _each(op, a: list[Value], b: list[Value], shape: UnitShape) -> list[Value]:
    return [op(x, y, shape.kind) for x, y in zip(a, b, strict=True)]


def _absolute(warp: Warp, x: Value) -> Value:
    return warp.as_float(warp.as_word(x) & 0x7FFFFFFF)


def _over_channels(warp: Warp, x: Value) -> Value:
    for distance in (8, 16):
        x = x + warp.exchange(x, distance)
    return x


def _larger(warp: Warp, numbers: list[Value]) -> Value:
    most = numbers[0]
    for x in numbers[1:]:
        most = warp.max(most, x)
    return most
