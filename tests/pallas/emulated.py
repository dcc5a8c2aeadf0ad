"""MLIR on emulated lanes: runs the lane-level code of a kernel in numpy, all lanes of a block in step.

`install` replaces the dialects that a module imported by objects that compute at once. A value is an array over the
lanes, a pointer a buffer with one byte offset per lane. Only what the kernels use exists; anything else fails. In step
means that a missing barrier goes unseen.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from typing import Any

import numpy as np

WARP = 32


class IntegerType:
    def __init__(self, width: int):
        self.width = width
        self.dtype = np.dtype(f"int{width}") if width > 1 else np.dtype(bool)

    @staticmethod
    def get_signless(width: int) -> IntegerType:
        return IntegerType(width)


class FloatType:
    width, dtype = 32, np.dtype(np.float32)


class VectorType:
    def __init__(self, shape, element):
        self.shape, self.element = shape, element

    @staticmethod
    def get(shape, element) -> VectorType:
        return VectorType(shape, element)


def _kind(dtype) -> IntegerType | FloatType:
    return FloatType() if dtype.kind == "f" else IntegerType(1 if dtype.kind == "b" else 8 * dtype.itemsize)


class Value:
    """One number per lane, or a vector of them [n, lanes]."""

    def __init__(self, data: np.ndarray):
        self.data = data
        self.type = _kind(data.dtype)


class Array:
    """Registers of a warpgroup, as `FragmentedArray` holds them."""

    def __init__(self, *, _registers: np.ndarray, _layout: Any, _is_signed: bool | None):
        self.registers, self.layout, self.is_signed = _registers, _layout, _is_signed


class Memory:
    """A buffer, global or shared."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self.bytes = array.view(np.uint8).reshape(-1)
        self.type = types.SimpleNamespace(element_type=_kind(array.dtype), shape=array.shape)
        self.stores = 0


class Pointer:
    def __init__(self, memory: Memory, offset: np.ndarray):
        self.memory, self.offset = memory, offset


class Block:
    """The lanes of a block and the dialects that act on them."""

    def __init__(self, threads: int):
        self.threads = threads
        self.active = [np.ones(threads, bool)]
        self.lane = np.arange(threads)

    def memory(self, array: np.ndarray) -> Memory:
        return Memory(array)

    def scalar(self, value: int) -> Array:
        return Array(_registers=np.array(self._full(value), object), _layout=None, _is_signed=True)

    def array(self, x: np.ndarray) -> Array:
        """Registers [n, lanes]."""
        registers = np.empty(len(x), object)
        registers[:] = [Value(row[None]) for row in x]
        return Array(_registers=registers, _layout=None, _is_signed=x.dtype != np.float32 or None)

    def values(self, array: Array) -> np.ndarray:
        """Registers [n, lanes] of an array."""
        return np.stack([r.data.reshape(-1, self.threads)[0] for r in array.registers.flat])

    def _full(self, value: int, dtype=np.int32) -> Value:
        return Value(np.full(self.threads, value).astype(dtype))

    # --- arithmetic

    def arith(self):
        wrap = lambda f: lambda a, b: Value(f(a.data.view(np.uint32), b.data.view(np.uint32)).view(np.int32))
        plain = lambda f: lambda a, b: Value(f(a.data, b.data))
        compare = {"eq": np.equal, "ne": np.not_equal, "slt": np.less}
        unsigned = {"ult": np.less}

        def cmpi(how, a, b):
            if how in compare:
                return Value(compare[how](a.data, b.data))
            return Value(unsigned[how](a.data.view(np.uint32), b.data.view(np.uint32)))

        def extui(kind, x):
            narrow = x.data.astype(np.uint8) if x.data.dtype == bool else x.data.view(f"u{x.data.dtype.itemsize}")
            return Value(narrow.astype(kind.dtype))

        return types.SimpleNamespace(
            addi=wrap(np.add), subi=wrap(np.subtract), muli=wrap(np.multiply), remui=wrap(np.remainder),
            andi=plain(np.bitwise_and), ori=plain(np.bitwise_or), xori=plain(np.bitwise_xor),
            shrui=wrap(np.right_shift), divui=wrap(np.floor_divide),
            minsi=plain(np.minimum), maxsi=plain(np.maximum), addf=plain(np.add), maximumf=plain(np.maximum),
            subf=plain(np.subtract), mulf=plain(np.multiply),
            select=lambda c, a, b: Value(np.where(c.data, a.data, b.data)), cmpi=cmpi, extui=extui,
            CmpIPredicate=types.SimpleNamespace(ult="ult", slt="slt", ne="ne", eq="eq"),
        )  # fmt: skip

    def vector(self):
        def extract(x, dynamic_position, static_position):
            assert not dynamic_position
            return Value(x.data[static_position[0]])

        return types.SimpleNamespace(extract=extract, broadcast=lambda _, x: Value(x.data[None]))

    # --- memory, warps, blocks

    def llvm(self):
        def load(kind, pointer, alignment=1):
            count, element = (kind.shape[0], kind.element) if isinstance(kind, VectorType) else (1, kind)
            offset = np.where(self.active[-1], pointer.offset, 0)  # the other lanes read nothing
            assert (offset % alignment == 0).all()
            width = element.dtype.itemsize
            at = offset + np.arange(count * width)[:, None]
            assert (at >= 0).all() and (at < pointer.memory.bytes.size).all(), "out of bounds"
            raw = pointer.memory.bytes[at].reshape(count, width, -1).transpose(0, 2, 1)
            data = np.ascontiguousarray(raw).view(element.dtype)[..., 0]
            return Value(data if isinstance(kind, VectorType) else data[0])

        def store(value, pointer, alignment=1):
            on = self.active[-1]
            of_lanes = np.ascontiguousarray(value.data.reshape(-1, self.threads).T)
            at = pointer.offset[on, None] + np.arange(of_lanes.itemsize * of_lanes.shape[1])
            assert (at >= 0).all() and (at < pointer.memory.bytes.size).all(), "out of bounds"
            assert (pointer.offset[on] % alignment == 0).all()
            raw = of_lanes.view(np.uint8).reshape(self.threads, -1)[on]
            pointer.memory.bytes[at] = raw
            assert (pointer.memory.bytes[at] == raw).all(), "two lanes store different values in one place"
            pointer.memory.stores += int(on.sum())

        self._store = store
        return types.SimpleNamespace(
            load=load, store=store, inline_asm=self._asm, ptrtoint=lambda kind, pointer: pointer
        )  # fmt: skip

    def _asm(self, kind, args, text, constraints, has_side_effects=False):
        if "vote.sync.ballot" in text:
            assert has_side_effects and self.active[-1].all()
            bits = (args[0].data != 0).reshape(-1, WARP) @ (1 << np.arange(WARP, dtype=np.int64))
            return Value(np.repeat(bits, WARP).astype(np.uint32).view(np.int32))
        if text.startswith("popc.b32"):
            return Value(np.bitwise_count(args[0].data.view(np.uint32)).astype(np.int32))
        if "%lanemask_lt" in text:
            return Value(((1 << (self.lane % WARP)) - 1).astype(np.uint32).view(np.int32))
        if "shfl.sync.up.b32" in text:
            assert has_side_effects and self.active[-1].all()
            distance = int(text.split("$1, ")[1].split(",")[0])
            before = np.where(self.lane % WARP >= distance, args[0].data[self.lane - distance], 0)
            return Value(args[0].data + before)
        raise NotImplementedError(text)

    def _ptx(self, text, pointer, value, predicate, has_side_effects):
        assert has_side_effects
        if text in ("st.global.f32 [$0], $1;", "st.shared.f32 [$0], $1;"):
            with self._inside(predicate.data):
                return self._store(value, pointer)
        assert text == "red.shared.add.u32 [$0], $1;"
        on = self.active[-1] & predicate.data
        assert (pointer.offset[on] >= 0).all() and (pointer.offset[on] % 4 == 0).all(), "out of bounds"
        np.add.at(pointer.memory.bytes.view(np.uint32), pointer.offset[on] // 4, value.data.view(np.uint32)[on])

    def utils(self):
        def redux(x, mask, kind):
            assert (mask.data == -1).all() and kind == "add" and self.active[-1].all()
            sums = x.data.view(np.uint32).reshape(-1, WARP).sum(1, dtype=np.uint32)
            return Value(np.repeat(sums, WARP).view(np.int32))

        def getelementptr(pointer, indices, kind):
            index = indices[0] if isinstance(indices[0], int) else indices[0].data.astype(np.int64)
            return Pointer(pointer.memory, pointer.offset + index * kind.dtype.itemsize)

        return types.SimpleNamespace(
            c=lambda value, kind: self._full(value, kind.dtype), redux=redux, getelementptr=getelementptr,
            thread_idx=lambda: Value(self.lane.astype(np.int32)),
            warp_idx=lambda sync=True: Value((self.lane // WARP).astype(np.int32)),
            memref_ptr=lambda memory: Pointer(memory, np.zeros(self.threads, np.int64)),
            bitwidth=lambda kind: kind.width, bitcast=lambda x, kind: Value(x.data.view(kind.dtype)),
            inline_ptx=self._ptx, shfl_bfly=lambda x, distance: Value(x.data[self.lane ^ distance]),
            ReductionKind=types.SimpleNamespace(ADD="add"), warp_barrier=lambda: None,
        )  # fmt: skip

    def scf(self):
        def if_op(condition, results, has_else):
            assert not results and not has_else
            return types.SimpleNamespace(then_block=condition.data)

        return types.SimpleNamespace(IfOp=if_op, yield_=lambda _: None)

    @contextlib.contextmanager
    def _inside(self, condition):
        self.active.append(self.active[-1] & condition)
        yield
        self.active.pop()

    def ir(self):
        return types.SimpleNamespace(
            IntegerType=IntegerType, VectorType=VectorType, MemRefType=lambda kind: kind, InsertionPoint=self._inside,
            FloatType=FloatType, F32Type=types.SimpleNamespace(get=FloatType),
            DenseI64ArrayAttr=types.SimpleNamespace(get=lambda positions: positions),
        )  # fmt: skip


def install(monkeypatch, modules, threads: int) -> Block:
    """A block that the lane-level functions of `modules` run on."""
    block = Block(threads)
    parts = {name: getattr(block, name)() for name in ("arith", "vector", "llvm", "utils", "scf", "ir")}
    parts["gpu"] = types.SimpleNamespace(barrier=lambda: None)
    layout = lambda *args: args
    parts["mgpu"] = types.SimpleNamespace(FragmentedArray=Array, WGStridedFragLayout=layout, WGSplatFragLayout=layout)
    for module, (name, part) in itertools.product(modules, parts.items()):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, part)
    return block
