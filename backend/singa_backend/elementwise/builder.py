"""LLVM IR text: vectors of 16 lanes in SSA form, memory, and loops.

Every operation is rounded once and none is contracted: processors with shorter vectors split these and have equal bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

LANES = 16
"""The lanes of a vector on every processor."""

SUFFIX = {"half": "f16", "float": "f32", "double": "f64"}
"""The word in the names of intrinsics for each type of real numbers."""

INTEGER = {"half": ("i16", 10, 15), "float": ("i32", 23, 127), "double": ("i64", 52, 1023)}
"""The integer of the bits of a real number, the bits of its fraction, and the bias of its exponent."""

_LANE_NUMBERS = "<" + ", ".join(f"i64 {i}" for i in range(LANES)) + ">"


def type_of(dtype: np.dtype[Any]) -> str:
    """The type of LLVM of the values of a dtype."""
    return {"f2": "half", "f4": "float", "f8": "double", "b1": "i1"}.get(dtype.str[1:]) or f"i{8 * dtype.itemsize}"


def stored_type(dtype: np.dtype[Any]) -> str:
    """The type of LLVM of the values of a dtype in memory."""
    return "i8" if dtype.kind == "b" else type_of(dtype)


class Vector:
    """The lanes of a value of a type; operators take vectors and numbers, and compare real numbers and signed integers."""

    __slots__ = ("builder", "name", "type")

    def __init__(self, builder: Builder, name: str, kind: str) -> None:
        self.builder, self.name, self.type = builder, name, kind

    @property
    def real(self) -> bool:
        """Whether the values are real numbers."""
        return self.type in SUFFIX

    def two(self, other: Vector | float, words: str) -> Vector:
        """The instruction whose name is given, with another operand."""
        b = self.builder.vector(other, self.type)
        return self.builder.made(f"{words} <{LANES} x {self.type}> {self.name}, {b.name}", self.type)

    def __add__(self, b: Vector | float) -> Vector:
        return self.two(b, "fadd" if self.real else "add")

    def __sub__(self, b: Vector | float) -> Vector:
        return self.two(b, "fsub" if self.real else "sub")

    def __mul__(self, b: Vector | float) -> Vector:
        return self.two(b, "fmul" if self.real else "mul")

    def __truediv__(self, b: Vector | float) -> Vector:
        return self.two(b, "fdiv")

    def __rsub__(self, a: float) -> Vector:
        return self.builder.vector(a, self.type) - self

    def __rtruediv__(self, a: float) -> Vector:
        return self.builder.vector(a, self.type) / self

    def __and__(self, b: Vector | float) -> Vector:
        return self.two(b, "and")

    def __or__(self, b: Vector | float) -> Vector:
        return self.two(b, "or")

    def __xor__(self, b: Vector | float) -> Vector:
        return self.two(b, "xor")

    def __neg__(self) -> Vector:
        return self.builder.made(f"fneg <{LANES} x {self.type}> {self.name}", self.type) if self.real else 0 - self

    def __lt__(self, b: Vector | float) -> Vector:
        return self.compare("lt", b)

    def __gt__(self, b: Vector | float) -> Vector:
        return self.compare("gt", b)

    def __ge__(self, b: Vector | float) -> Vector:
        return self.compare("ge", b)

    def compare(self, how: str, b: Vector | float, unsigned: bool = False) -> Vector:
        """The lanes in which eq, ne, lt, le, gt or ge holds; uno: in which one is a NaN."""
        if self.real:
            words = "fcmp " + {"ne": "une", "uno": "uno"}.get(how, "o" + how)
        else:
            words = "icmp " + (how if how in ("eq", "ne") else ("u" if unsigned else "s") + how)
        return Vector(self.builder, self.two(b, words).name, "i1")

    def where(self, condition: Vector, other: Vector | float) -> Vector:
        """These values if a condition is true, others if it is false."""
        b, full = self.builder.vector(other, self.type), f"<{LANES} x {self.type}>"
        return self.builder.made(f"select <{LANES} x i1> {condition.name}, {full} {self.name}, {full} {b.name}", self.type)

    def to(self, how: str, kind: str) -> Vector:
        """Converted by an instruction."""
        return self.builder.made(f"{how} <{LANES} x {self.type}> {self.name} to <{LANES} x {kind}>", kind)

    def bits(self) -> Vector:
        """The bits of real numbers as integers."""
        return self.to("bitcast", INTEGER[self.type][0])

    def bound(self, how: str, limit: Vector | float) -> Vector:
        """The larger ("gt") or the smaller ("lt") of a number and these, one instruction on x86; a NaN of these stays."""
        number = self.builder.vector(limit, self.type)
        return number.where(number.compare(how, self), self)

    def lane(self, i: int | str) -> str:
        """The scalar in a lane."""
        return self.builder.raw(f"extractelement <{LANES} x {self.type}> {self.name}, i64 {i}")


class Builder:
    """The text of the body of a function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.places: list[str] = []
        self.declared: set[str] = set()
        self._count = 0

    def number(self) -> int:
        """A number that no other name has."""
        self._count += 1
        return self._count

    def emit(self, text: str) -> None:
        """A line."""
        self.lines.append("  " + text)

    def raw(self, text: str) -> str:
        """An instruction with a result of any type."""
        name = f"%v{self.number()}"
        self.lines.append(f"  {name} = {text}")
        return name

    def made(self, text: str, kind: str) -> Vector:
        """An instruction whose result is a vector."""
        return Vector(self, self.raw(text), kind)

    def vector(self, value: Any, kind: str) -> Vector:
        """A number in every lane; a vector as it is."""
        if isinstance(value, Vector):
            return value
        if kind == "half":
            text = f"0xH{np.float16(value).view(np.uint16):04X}"
        elif kind in SUFFIX:
            with np.errstate(over="ignore"):
                wide = float(np.float32(value)) if kind == "float" else float(value)
            text = f"0x{struct.unpack('<Q', struct.pack('<d', wide))[0]:016X}"
        else:
            text = str(int(value) & (1 << int(kind[1:])) - 1) if kind != "i1" else "true" if value else "false"
        return Vector(self, f"splat ({kind} {text})", kind)

    def call(self, name: str, first: Vector, *others: Vector | float) -> Vector:
        """An intrinsic, whose operands have the type of the first."""
        full, args = f"<{LANES} x {first.type}>", [first, *(self.vector(v, first.type) for v in others)]
        symbol = f"llvm.{name}.v{LANES}{SUFFIX.get(first.type, first.type)}"
        self.declared.add(f"declare {full} @{symbol}({', '.join([full] * len(args))})")
        return self.made(f"call {full} @{symbol}({', '.join(f'{full} {a.name}' for a in args)})", first.type)

    def fma(self, a: Vector, b: Vector | float, c: Vector | float) -> Vector:
        """Computes a b + c, rounded once."""
        return self.call("fma", a, b, c)

    def splat(self, scalar: str, kind: str) -> Vector:
        """A scalar in every lane."""
        full = f"<{LANES} x {kind}>"
        first = self.raw(f"insertelement {full} poison, {kind} {scalar}, i64 0")
        return self.made(f"shufflevector {full} {first}, {full} poison, <{LANES} x i32> zeroinitializer", kind)

    def shuffled(self, x: Vector, lanes: list[int]) -> Vector:
        """The values of other lanes."""
        full, numbers = f"<{LANES} x {x.type}>", ", ".join(f"i32 {i}" for i in lanes)
        return self.made(f"shufflevector {full} {x.name}, {full} poison, <{LANES} x i32> <{numbers}>", x.type)

    def place(self, kind: str) -> str:
        """Memory for a value of a type on the stack."""
        name = f"%p{self.number()}"
        self.places.append(f"  {name} = alloca {kind}, align 64")
        return name

    def kept(self, x: Vector) -> str:
        """Memory with a vector, which loops may change."""
        place = self.place(f"<{LANES} x {x.type}>")
        self.put(x, place)
        return place

    def put(self, x: Vector, place: str) -> None:
        """Write a vector to its memory."""
        self.emit(f"store <{LANES} x {x.type}> {x.name}, ptr {place}, align 64")

    def get(self, place: str, kind: str) -> Vector:
        """The vector in memory."""
        return self.made(f"load <{LANES} x {kind}>, ptr {place}, align 64", kind)

    def load(self, pointer: str, dtype: np.dtype[Any], mask: Vector | None = None) -> Vector:
        """Adjacent elements."""
        kind = stored_type(dtype)
        full, align = f"<{LANES} x {kind}>", dtype.itemsize
        if mask is None:
            found = self.made(f"load {full}, ptr {pointer}, align {align}", kind)
        else:
            symbol = f"llvm.masked.load.v{LANES}{SUFFIX.get(kind, kind)}.p0"
            self.declared.add(f"declare {full} @{symbol}(ptr, <{LANES} x i1>, {full})")
            where = f"ptr align {align} {pointer}, <{LANES} x i1> {mask.name}"
            found = self.made(f"call {full} @{symbol}({where}, {full} zeroinitializer)", kind)
        return self._logical(found, dtype)

    def prefetch(self, pointer: str) -> None:
        """Let what is at a pointer, which need not be valid, be read early."""
        self.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
        self.emit(f"call void @llvm.prefetch.p0(ptr {pointer}, i32 0, i32 3, i32 1)")

    def gather(self, pointer: str, step: str, dtype: np.dtype[Any], last: str | None = None) -> Vector:
        """Elements with a step in bytes; lanes after the last repeat it."""
        kind = stored_type(dtype)
        lanes = Vector(self, _LANE_NUMBERS, "i64")
        if last is not None:
            end = self.splat(last, "i64")
            lanes = lanes.where(lanes < end, end)
        where = self.raw(f"getelementptr i8, ptr {pointer}, <{LANES} x i64> {(lanes * self.splat(step, 'i64')).name}")
        symbol, full = f"llvm.masked.gather.v{LANES}{SUFFIX.get(kind, kind)}.v{LANES}p0", f"<{LANES} x {kind}>"
        self.declared.add(f"declare {full} @{symbol}(<{LANES} x ptr>, <{LANES} x i1>, {full})")
        pointers = f"<{LANES} x ptr> align {dtype.itemsize} {where}"
        return self._logical(
            self.made(f"call {full} @{symbol}({pointers}, <{LANES} x i1> splat (i1 true), {full} poison)", kind), dtype
        )

    def scalar(self, pointer: str, dtype: np.dtype[Any]) -> Vector:
        """An element in every lane."""
        kind = stored_type(dtype)
        return self._logical(self.splat(self.raw(f"load {kind}, ptr {pointer}, align {dtype.itemsize}"), kind), dtype)

    def _logical(self, x: Vector, dtype: np.dtype[Any]) -> Vector:
        return x.compare("ne", 0) if dtype.kind == "b" else x

    def store(self, x: Vector, pointer: str, dtype: np.dtype[Any], mask: Vector | None = None) -> None:
        """Write adjacent elements."""
        x = x.to("zext", "i8") if x.type == "i1" else x
        full = f"<{LANES} x {x.type}>"
        if mask is None:
            return self.emit(f"store {full} {x.name}, ptr {pointer}, align {dtype.itemsize}")
        symbol = f"llvm.masked.store.v{LANES}{SUFFIX.get(x.type, x.type)}.p0"
        self.declared.add(f"declare void @{symbol}({full}, ptr, <{LANES} x i1>)")
        where = f"ptr align {dtype.itemsize} {pointer}, <{LANES} x i1> {mask.name}"
        return self.emit(f"call void @{symbol}({full} {x.name}, {where})")

    def store_one(self, x: Vector, pointer: str, dtype: np.dtype[Any]) -> None:
        """Write the element of the first lane."""
        x = x.to("zext", "i8") if x.type == "i1" else x
        self.emit(f"store {x.type} {x.lane(0)}, ptr {pointer}, align {dtype.itemsize}")

    def numbers(self, first: str, kind: str, step: int) -> Vector:
        """The number in the first lane, and by a step more in each one after it."""
        begin = first if kind == "i64" else self.raw(f"trunc i64 {first} to {kind}")
        return self.splat(begin, kind) + Vector(self, "<" + ", ".join(f"{kind} {i * step}" for i in range(LANES)) + ">", kind)

    def first(self, count: str) -> Vector:
        """The mask of the first lanes."""
        return Vector(self, _LANE_NUMBERS, "i64") < self.splat(count, "i64")

    def loop(self, limit: str, step: int | str, body: Callable[[str], Any], start: str = "0") -> None:
        """Run a body for i = start, start + step, .. below a limit."""
        place, label = self.place("i64"), f"L{self.number()}"
        self.emit(f"store i64 {start}, ptr {place}")
        self.emit(f"br label %{label}")
        self.lines.append(f"{label}:")
        i = self.raw(f"load i64, ptr {place}")
        self.emit(f"br i1 {self.raw(f'icmp slt i64 {i}, {limit}')}, label %{label}b, label %{label}e")
        self.lines.append(f"{label}b:")
        body(i)
        self.emit(f"store i64 {self.raw(f'add i64 {i}, {step}')}, ptr {place}")
        self.emit(f"br label %{label}, !llvm.loop !1")
        self.lines.append(f"{label}e:")

    def if_any(self, condition: Vector, body: Callable[[], Any]) -> None:
        """Run a body if a condition is true in any lane."""
        label, mask = f"L{self.number()}", self.raw(f"bitcast <{LANES} x i1> {condition.name} to i{LANES}")
        self.emit(f"br i1 {self.raw(f'icmp ne i{LANES} {mask}, 0')}, label %{label}b, label %{label}e, !prof !3")
        self.lines.append(f"{label}b:")
        body()
        self.emit(f"br label %{label}e")
        self.lines.append(f"{label}e:")

    def function(self, head: str) -> str:
        """The text of a function with this head, which returns nothing."""
        return "\n".join([f"define {head} {{", "entry:", *self.places, *self.lines, "  ret void", "}", ""])


METADATA = """
!1 = distinct !{!1, !2}
!2 = !{!"llvm.loop.unroll.disable"}
!3 = !{!"branch_weights", i32 1, i32 1000000}
"""
