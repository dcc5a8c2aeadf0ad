"""One warp's instructions, in two forms: emitted as MLIR for the GPU, and as arrays of 32 lanes elsewhere.

Lane-level code is written once, against `Warp`. On a GPU every value is a 32-bit register; elsewhere an array of lanes
[..., 32], so that the very same code runs under the interpreter and is compared with exact arithmetic there.
Words are unsigned integers; a word may hold two float16 ("halves"), the lower half first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

type Fragment = list[Any]  # words of a matrix
type Matrices = list[list[Any]]
type PairKind = Literal["bf16", "f16"]  # what the halves of a word are
type Value = Any  # has + - * & | ^ << >> < with its like and with Python numbers


@runtime_checkable
class Warp(Protocol):
    """What lane-level code may use."""

    lane: Value
    """Number of the lane, 0..31."""

    def word(self, value: int) -> Value:
        """The same word in all lanes."""
        ...

    def number(self, value: float) -> Value:
        """The same float32 in all lanes."""
        ...

    def load(self, name: str, offset: Value, count: int, then: int = 0) -> list[Value]:
        """`count` consecutive words (1, 2 or 4) of a named piece of memory, from byte `offset + then`.

        What is known beforehand belongs into `then`: it costs no instruction.
        """
        ...

    def load_either(self, condition: Value, a: str, b: str, offset: Value, count: int, then: int = 0) -> list[Value]:
        """`load` from the first piece of memory where the condition holds, else from the second."""
        ...

    def store(self, name: str, offset: Value, words: list[Value]) -> None:
        """1, 2 or 4 consecutive words."""
        ...

    def as_float(self, word: Value) -> Value:
        """The bits of a word as float32."""
        ...

    def as_word(self, x: Value) -> Value:
        """The bits of a float32."""
        ...

    def halves(self, word: Value) -> tuple[Value, Value]:
        """Both float16 of a word as float32."""
        ...

    def pack_halves(self, low: Value, high: Value) -> Value:
        """Two float32 rounded to float16, to infinity where they are too large."""
        ...

    def pack_halves_down(self, low: Value, high: Value) -> Value:
        """Two float32 rounded down to float16: at most what they were, -infinity included."""
        ...

    def pack_halves_up(self, low: Value, high: Value) -> Value:
        """Two float32 rounded up to float16."""
        ...

    def min_pairs(self, a: Value, b: Value, kind: PairKind) -> Value:
        """The smaller of both 16-bit numbers of a word; NaN where either is."""
        ...

    def max_pairs(self, a: Value, b: Value, kind: PairKind) -> Value:
        """The larger ones."""
        ...

    def mul_halves(self, a: Value, b: Value) -> Value:
        """Products of both float16, rounded to nearest."""
        ...

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c in float32."""
        ...

    def min(self, a: Value, b: Value) -> Value:
        """The smaller one; of a number and NaN, the number."""
        ...

    def max(self, a: Value, b: Value) -> Value:
        """The larger one; NaN if either is."""
        ...

    def reciprocal(self, x: Value) -> Value:
        """1 / x, rounded to nearest."""
        ...

    def exp2(self, x: Value) -> Value:
        """To 2 units in the last place; results below 2**-126 are 0."""
        ...

    def log2(self, x: Value) -> Value:
        """To 2**-22, absolute between 1/2 and 2, relative elsewhere."""
        ...

    def sqrt(self, x: Value) -> Value:
        """To 1 unit in the last place."""
        ...

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        """a where the condition holds, b elsewhere."""
        ...

    def rotate(self, word: Value, by: Value) -> Value:
        """Bits of a word rotated to the left."""
        ...

    def exchange(self, x: Value, distance: int) -> Value:
        """The value of lane `lane ^ distance`."""
        ...

    def shuffle(self, x: Value, source: Value) -> Value:
        """The value of lane `source`."""
        ...

    def total(self, word: Value) -> Value:
        """Sum over the lanes, modulo 2**32."""
        ...

    def sync(self) -> None:
        """All warps of the warpgroup have come here, and see what the others stored before."""
        ...

    def low_halves(self, a: Value, b: Value) -> Value:
        """The lower halves of two words, that of `a` first."""
        ...

    def chains(self, acc: Matrices, rows: Sequence[Iterable[Fragment]], columns: Iterable[Fragment]) -> Matrices:
        """acc[m] + sum_k rows[m][k] columns[k] of mma.m16n8k16, the sums interleaved.

        float16 fragments: rows [16, 16] of 4 words, columns [16, 8] of 2; acc [16, 8] of 4 float32.
        """
        ...


class Register:
    """A 32-bit register, or a predicate, with the operators of its type."""

    def __init__(self, value: Any):
        self.value = value

    @property
    def is_float(self) -> bool:
        return isinstance(self.value.type, ir.FloatType)

    def _like(self, other) -> Any:
        return other.value if isinstance(other, Register) else utils.c(other, self.value.type)

    def _apply(self, of_words, of_floats, other) -> Register:
        return Register((of_floats if self.is_float else of_words)(self.value, self._like(other)))

    def __add__(self, other):
        return self._apply(arith.addi, arith.addf, other)

    def __sub__(self, other):
        return self._apply(arith.subi, arith.subf, other)

    def __mul__(self, other):
        return self._apply(arith.muli, arith.mulf, other)

    def __divmod__(self, by: int):
        quotient = Register(arith.divui(self.value, self._like(by)))
        return quotient, self - quotient * by

    def __and__(self, other):
        return Register(arith.andi(self.value, self._like(other)))

    def __or__(self, other):
        return Register(arith.ori(self.value, self._like(other)))

    def __xor__(self, other):
        return Register(arith.xori(self.value, self._like(other)))

    def __lshift__(self, other):
        return Register(arith.shli(self.value, self._like(other)))

    def __rshift__(self, other):
        return Register(arith.shrui(self.value, self._like(other)))

    def __lt__(self, other):
        if self.is_float:  # false for NaN
            return Register(arith.cmpf(arith.CmpFPredicate.OLT, self.value, self._like(other)))
        return Register(arith.cmpi(arith.CmpIPredicate.ult, self.value, self._like(other)))


class GpuWarp:
    """Emits the instructions into the kernel that is being lowered.

    Args:
      memory: pointers by name.
    """

    def __init__(self, memory: dict[str, ir.Value]):
        self._memory = memory
        # With effects: what has none is asked for again at every use, and waited for.
        lane = llvm.inline_asm(ir.IntegerType.get_signless(32), [], "mov.u32 $0, %laneid;", "=r", has_side_effects=True)
        self.lane = Register(lane)

    def word(self, value: int) -> Register:
        return Register(_i32(value - (value >> 31 << 32)))

    def number(self, value: float) -> Register:
        return Register(utils.c(value, ir.F32Type.get()))

    def load(self, name: str, offset: Register, count: int, then: int = 0) -> list[Register]:
        return self._load(self._memory[name], offset, count, then)

    def load_either(
        self, condition: Register, a: str, b: str, offset: Register, count: int, then: int = 0
    ) -> list[Register]:
        memory = arith.select(condition.value, self._memory[a], self._memory[b])
        return self._load(memory, offset, count, then)

    def _load(self, memory: ir.Value, offset: Register, count: int, then: int) -> list[Register]:
        i32, i8 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(8)
        at = utils.getelementptr(memory, [offset.value], i8)
        at = utils.getelementptr(at, [then], i8) if then else at
        if count == 1:
            return [Register(llvm.load(i32, at, alignment=4))]
        words = llvm.load(ir.VectorType.get((count,), i32), at, alignment=4 * count)
        position = [ir.DenseI64ArrayAttr.get([i]) for i in range(count)]
        return [Register(vector.extract(words, dynamic_position=[], static_position=p)) for p in position]

    def store(self, name: str, offset: Register, words: list[Register]) -> None:
        at = utils.getelementptr(self._memory[name], [offset.value], ir.IntegerType.get_signless(8))
        whole = vector.from_elements(
            ir.VectorType.get((len(words),), words[0].value.type), [word.value for word in words]
        )
        llvm.store(whole, at, alignment=4 * len(words))

    def as_word(self, x: Register) -> Register:
        return Register(utils.bitcast(x.value, ir.IntegerType.get_signless(32)))

    def as_float(self, word: Register) -> Register:
        return Register(utils.bitcast(word.value, ir.F32Type.get()))

    def halves(self, word: Register) -> tuple[Register, Register]:
        code = "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;}"
        low, high = _struct_asm(2, code, "=f,=f,r", word)
        return low, high

    def pack_halves(self, low: Register, high: Register) -> Register:
        return _asm(ir.IntegerType.get_signless(32), "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,f,f", high, low)

    def pack_halves_down(self, low: Register, high: Register) -> Register:
        return _pack_directed("rm", low, high)

    def pack_halves_up(self, low: Register, high: Register) -> Register:
        return _pack_directed("rp", low, high)

    def min_pairs(self, a: Register, b: Register, kind: PairKind) -> Register:
        return _asm(ir.IntegerType.get_signless(32), f"min.NaN.{kind}x2 $0, $1, $2;", "=r,r,r", a, b)

    def max_pairs(self, a: Register, b: Register, kind: PairKind) -> Register:
        return _asm(ir.IntegerType.get_signless(32), f"max.NaN.{kind}x2 $0, $1, $2;", "=r,r,r", a, b)

    def mul_halves(self, a: Register, b: Register) -> Register:
        return _asm(ir.IntegerType.get_signless(32), "mul.rn.f16x2 $0, $1, $2;", "=r,r,r", a, b)

    def fma(self, a: Register, b: Register, c: Register) -> Register:
        return _float_asm("fma.rn.f32 $0, $1, $2, $3;", a, b, c)

    def min(self, a: Register, b: Register) -> Register:
        return _float_asm("min.f32 $0, $1, $2;", a, b)

    def max(self, a: Register, b: Register) -> Register:
        return _float_asm("max.NaN.f32 $0, $1, $2;", a, b)

    def reciprocal(self, x: Register) -> Register:
        return _float_asm("rcp.rn.f32 $0, $1;", x)

    def exp2(self, x: Register) -> Register:
        return _float_asm("ex2.approx.ftz.f32 $0, $1;", x)

    def log2(self, x: Register) -> Register:
        return _float_asm("lg2.approx.ftz.f32 $0, $1;", x)

    def sqrt(self, x: Register) -> Register:
        return _float_asm("sqrt.approx.f32 $0, $1;", x)

    def select(self, condition: Register, a: Register, b: Register) -> Register:
        return Register(arith.select(condition.value, a.value, b.value))

    def rotate(self, word: Register, by: Register) -> Register:
        return _asm(ir.IntegerType.get_signless(32), "shf.l.wrap.b32 $0, $1, $1, $2;", "=r,r,r", word, by)

    def exchange(self, x: Register, distance: int) -> Register:
        return Register(utils.shfl_bfly(x.value, distance))

    def shuffle(self, x: Register, source: Register) -> Register:
        i32 = ir.IntegerType.get_signless(32)
        word = utils.bitcast(x.value, i32)
        moved = nvvm.shfl_sync(_i32(-1), word, source.value, _i32(31), nvvm.ShflKind.idx)
        return Register(utils.bitcast(moved, x.value.type))

    def low_halves(self, a: Register, b: Register) -> Register:
        return _asm(ir.IntegerType.get_signless(32), "prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", a, b)

    def total(self, word: Register) -> Register:
        return Register(utils.redux(word.value, _i32(-1), utils.ReductionKind.ADD))

    def sync(self) -> None:
        utils.warpgroup_barrier()

    def chains(self, acc: Matrices, rows: Sequence[Iterable[Fragment]], columns: Iterable[Fragment]) -> Matrices:
        acc = list(acc)
        for *a, b in zip(*rows, columns, strict=True):
            acc = [_mma(c, x, b) for c, x in zip(acc, a, strict=True)]
        return acc


def _mma(acc: Fragment, a: Fragment, b: Fragment) -> Fragment:
    code = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
    return _struct_asm(4, code, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", *a, *b, *acc)


def _i32(value: int) -> ir.Value:
    return utils.c(value, ir.IntegerType.get_signless(32))


def _asm(result: ir.Type, code: str, constraints: str, *args: Register) -> Register:
    return Register(llvm.inline_asm(result, [x.value for x in args], code, constraints))


def _float_asm(code: str, *args: Register) -> Register:
    return _asm(ir.F32Type.get(), code, ",".join(["=f"] + ["f"] * len(args)), *args)


def _pack_directed(mode: str, low: Register, high: Register) -> Register:
    code = f"{{.reg .b16 a, b; cvt.{mode}.f16.f32 a, $1; cvt.{mode}.f16.f32 b, $2; mov.b32 $0, {{a, b}};}}"
    return _asm(ir.IntegerType.get_signless(32), code, "=r,f,f", low, high)


def _struct_asm(count: int, code: str, constraints: str, *args: Register) -> list[Register]:
    f32 = ir.F32Type.get()
    whole = llvm.inline_asm(llvm.StructType.get_literal([f32] * count), [x.value for x in args], code, constraints)
    return [Register(llvm.extractvalue(f32, whole, [i])) for i in range(count)]


class ArrayWarp:
    """The same instructions on arrays [..., 32] of uint32 and float32.

    Args:
      memory: words [..., n] by name, uint32; leading axes are warps that run the same code, each in memory of its own.
        Warps that share memory [n] differ in the leading axes of their offsets.
    """

    def __init__(self, memory: dict[str, jax.Array]):
        self._memory = memory
        self.lane = jnp.arange(32, dtype=jnp.uint32)

    def word(self, value: int) -> jax.Array:
        return jnp.full(32, np.uint32(value))

    def number(self, value: float) -> jax.Array:
        return jnp.full(32, np.float32(value))

    def load(self, name: str, offset: jax.Array, count: int, then: int = 0) -> list[jax.Array]:
        at = ((offset + then) // 4).astype(jnp.int32)
        return [self._memory[name][..., at + i] for i in range(count)]

    def load_either(
        self, condition: jax.Array, a: str, b: str, offset: jax.Array, count: int, then: int = 0
    ) -> list[jax.Array]:
        either = zip(*(self.load(name, offset, count, then) for name in (a, b)), strict=True)
        return [jnp.where(condition, *both) for both in either]

    def store(self, name: str, offset: jax.Array, words: list[jax.Array]) -> None:
        at = (offset // 4).astype(jnp.int32)
        for i, word in enumerate(words):
            self._memory[name] = self._memory[name].at[..., at + i].set(word)

    def as_word(self, x: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)

    def as_float(self, word: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(word, jnp.float32)

    def halves(self, word: jax.Array) -> tuple[jax.Array, jax.Array]:
        pair = _unpack_halves(word)
        return pair[..., 0], pair[..., 1]

    def pack_halves(self, low: jax.Array, high: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(jnp.stack([low, high], -1).astype(jnp.float16), jnp.uint32)

    def pack_halves_down(self, low: jax.Array, high: jax.Array) -> jax.Array:
        return _round_pair(-jnp.inf, low, high)

    def pack_halves_up(self, low: jax.Array, high: jax.Array) -> jax.Array:
        return _round_pair(jnp.inf, low, high)

    def min_pairs(self, a: jax.Array, b: jax.Array, kind: PairKind) -> jax.Array:
        return _on_pairs(jnp.minimum, a, b, kind)

    def max_pairs(self, a: jax.Array, b: jax.Array, kind: PairKind) -> jax.Array:
        return _on_pairs(jnp.maximum, a, b, kind)

    def mul_halves(self, a: jax.Array, b: jax.Array) -> jax.Array:
        product = (_unpack_halves(a) * _unpack_halves(b)).astype(jnp.float16)  # exact in float32, then rounded once
        return jax.lax.bitcast_convert_type(product, jnp.uint32)

    def fma(self, a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return a * b + c

    def min(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.fmin(a, b)

    def max(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.maximum(a, b)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        return 1.0 / x

    def exp2(self, x: jax.Array) -> jax.Array:
        return jnp.where(x < -126, 0.0, jnp.exp2(x))

    def log2(self, x: jax.Array) -> jax.Array:
        return jnp.log2(x)

    def sqrt(self, x: jax.Array) -> jax.Array:
        return jnp.sqrt(x)

    def select(self, condition: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(condition, a, b)

    def rotate(self, word: jax.Array, by: jax.Array) -> jax.Array:
        return (word << by) | (word >> ((32 - by) & 31))

    def exchange(self, x: jax.Array, distance: int) -> jax.Array:
        pairs = x.reshape(*x.shape[:-1], -1, 2, distance)
        return pairs[..., ::-1, :].reshape(x.shape)

    def shuffle(self, x: jax.Array, source: jax.Array) -> jax.Array:
        return x[..., source.astype(jnp.int32)]

    def low_halves(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return (a & 0xFFFF) | (b << 16)

    def total(self, word: jax.Array) -> jax.Array:
        return jnp.broadcast_to(word.sum(-1, keepdims=True, dtype=jnp.uint32), word.shape)

    def sync(self) -> None:
        pass  # all warps run in step

    def chains(self, acc: Matrices, rows: Sequence[Iterable[Fragment]], columns: Iterable[Fragment]) -> Matrices:
        # lane 4 g + t holds k = 2 t, 2 t + 1 (first words) and 8 more (last words) of rows g and g + 8, and of column g
        right = _fragments(columns, "khgti->gkhti")
        products = [jnp.matmul(_fragments(x, "khrgti->rgkhti"), right.mT, precision="highest") for x in rows]
        split = [x.reshape(*x.shape[:-2], 2, 32, 2) for x in products]
        return [
            [c[2 * r + i] + x[..., r, :, i] for r in range(2) for i in range(2)]
            for c, x in zip(acc, split, strict=True)
        ]


def _fragments(fragments: Iterable[Fragment], order: str) -> jax.Array:
    """Matrix [..., rows, 16 n] of a chain of n fragments, float32."""
    source, target = order.split("->")
    words = jnp.stack(jnp.broadcast_arrays(*(word for fragment in fragments for word in fragment)), axis=-2)
    lead = words.shape[:-2]
    sizes = {"k": -1, "h": 2, "r": 2, "g": 8, "t": 4, "i": 2}
    x = _unpack_halves(words).reshape(*lead, *(sizes[axis] for axis in source))
    x = x.transpose(*range(len(lead)), *(len(lead) + source.index(axis) for axis in target))
    return x.reshape(*lead, 16 if "r" in order else 8, -1)


def _round_pair(towards: float, low: jax.Array, high: jax.Array) -> jax.Array:
    x = jnp.stack([low, high], -1)
    # the barrier keeps a compiler from cancelling the two conversions, which would undo the rounding
    near = jax.lax.optimization_barrier(x.astype(jnp.float16))
    wrong = near.astype(jnp.float32) < x if towards > 0 else near.astype(jnp.float32) > x
    there = jnp.where(wrong, jnp.nextafter(near, jnp.float16(towards)), near)
    return jax.lax.bitcast_convert_type(there, jnp.uint32)


def _on_pairs(operation: Callable, a: jax.Array, b: jax.Array, kind: PairKind) -> jax.Array:
    dtype = {"bf16": jnp.bfloat16, "f16": jnp.float16}[kind]
    pairs = (jax.lax.bitcast_convert_type(x, dtype) for x in (a, b))
    return jax.lax.bitcast_convert_type(operation(*pairs), jnp.uint32)


def _unpack_halves(word: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(word, jnp.float16).astype(jnp.float32)
