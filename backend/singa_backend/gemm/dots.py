"""Dot products of bytes: sixteen columns of four unsigned bytes each, with four signed bytes of a row, exact."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..elementwise.builder import LANES, Vector
from .frame import Code


class Dots(ABC):
    """How a processor computes them.

    Attributes:
        code: where they are written.
        bits: the number of bits of the unsigned bytes that may be set.
        middle: what is subtracted from the unsigned bytes.
        kind: the type of the sums of some columns.
        parts: the number of such types for the sums of 16 columns.
    """

    middle = 0
    kind: str
    parts: int

    def __init__(self, code: Code, bits: int) -> None:
        self.code, self.bits = code, bits

    def begin(self, sums: Vector | None = None) -> list[str]:
        """Places for sums, which have int32, or are zero."""
        k = self.code
        parts = ["zeroinitializer"] * self.parts if sums is None else k.split(sums, LANES // self.parts)
        places = [k.place(self.kind) for _ in parts]
        for p, part in zip(places, parts, strict=True):
            k.emit(f"store {self.kind} {part}, ptr {p}, align 64")
        return places

    def add(self, places: list[str], columns: list[tuple[str, str]], row: str) -> None:
        """Add the products of four bytes.  At most 32 bytes of a column are added before `sums`."""
        k = self.code
        for p, column in zip(places, columns, strict=True):
            total = self._added(k.raw(f"load {self.kind}, ptr {p}, align 64"), column, row)
            k.emit(f"store {self.kind} {total}, ptr {p}, align 64")

    def spread(self, pointer: str) -> str:
        """Four bytes of a row, for all columns of a part."""
        k, lanes = self.code, LANES // self.parts
        number = k.raw(f"load i32, ptr {pointer}, align 4")
        first = k.raw(f"insertelement <{lanes} x i32> poison, i32 {number}, i64 0")
        whole = k.raw(f"shufflevector <{lanes} x i32> {first}, <{lanes} x i32> poison, <{lanes} x i32> zeroinitializer")
        return k.raw(f"bitcast <{lanes} x i32> {whole} to <{4 * lanes} x i8>")

    @abstractmethod
    def columns(self, words: Vector) -> list[tuple[str, str]]:
        """The bytes of the columns of each part, and what else `add` needs of them."""

    @abstractmethod
    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        """A sum with four more products."""

    def sums(self, places: list[str]) -> Vector:
        """The sums as int32."""
        return self.code.joined([self._whole(total) for total in self._numbers(places)], "i32")

    def _whole(self, total: str) -> str:
        """A sum as int32."""
        return total

    def _split(self, words: Vector) -> list[str]:
        """The bytes of each part."""
        k, lanes = self.code, LANES // self.parts
        return [k.raw(f"bitcast <{lanes} x i32> {p} to <{4 * lanes} x i8>") for p in k.split(words, lanes)]

    def _numbers(self, places: list[str]) -> list[str]:
        return [self.code.raw(f"load {self.kind}, ptr {p}, align 64") for p in places]

    def _call(self, name: str, result: str, operands: str, *values: str) -> str:
        k = self.code
        k.declared.add(f"declare {result} @llvm.{name}({', '.join([operands] * len(values))})")
        return k.raw(f"call {result} @llvm.{name}({', '.join(f'{operands} {v}' for v in values)})")


class Vnni(Dots):
    """One instruction of AVX-512 VNNI."""

    kind, parts = "<16 x i32>", 1

    def columns(self, words: Vector) -> list[tuple[str, str]]:
        """The bytes of the columns of each part, and what else `add` needs of them."""
        return [(b, "") for b in self._split(words)]

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        k, name, operand = self.code, "llvm.x86.avx512.vpdpbusd.512", "<64 x i8>"
        k.declared.add(f"declare {self.kind} @{name}({self.kind}, {operand}, {operand})")
        return k.raw(f"call {self.kind} @{name}({self.kind} {total}, {operand} {column[0]}, {operand} {row})")


class Avx2(Dots):
    """Sums of pairs in 16 bits: those of 32 bytes fit if the unsigned ones have at most 4 bits; otherwise each pair does.

    Then the signed bytes take the sign of the others, minus 128: so the products are those of magnitudes of at most 128.
    """

    parts = 2

    def __init__(self, code: Code, bits: int) -> None:
        super().__init__(code, bits)
        self.middle = 128 if bits == 8 else 0
        self.kind = "<8 x i32>" if bits == 8 else "<16 x i16>"

    def columns(self, words: Vector) -> list[tuple[str, str]]:
        """The bytes of the columns of each part, and what else `add` needs of them."""
        if self.bits < 8:
            return [(b, b) for b in self._split(words)]
        self.code.declared.add("declare <32 x i8> @llvm.abs.v32i8(<32 x i8>, i1)")
        parts = self._split(words ^ 0x80808080)
        return [(b, self.code.raw(f"call <32 x i8> @llvm.abs.v32i8(<32 x i8> {b}, i1 false)")) for b in parts]

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        if self.bits == 8:
            row = self._call("x86.avx2.psign.b", "<32 x i8>", "<32 x i8>", row, column[0])
        pairs = self._call("x86.avx2.pmadd.ub.sw", "<16 x i16>", "<32 x i8>", column[1], row)
        return self.code.raw(f"add {self.kind} {total}, {self._wide(pairs) if self.bits == 8 else pairs}")

    def _wide(self, pairs: str) -> str:
        return self._call("x86.avx2.pmadd.wd", "<8 x i32>", "<16 x i16>", pairs, "splat (i16 1)")

    def _whole(self, total: str) -> str:
        return total if self.bits == 8 else self._wide(total)


class Neon(Dots):
    """Products of signed bytes in 16 bits, whose neighbours are added twice."""

    kind, parts = "<4 x i32>", 4

    def __init__(self, code: Code, bits: int) -> None:
        super().__init__(code, bits)
        self.middle = 1 << bits - 1

    def columns(self, words: Vector) -> list[tuple[str, str]]:
        """The bytes of the columns of each part, and what else `add` needs of them."""
        middle = self.middle - 256 * (self.bits == 8)
        return [(self.code.raw(f"sub <16 x i8> {b}, splat (i8 {middle})"), "") for b in self._split(words)]

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        k, sums = self.code, []
        for first in (0, 8):
            lanes = ", ".join(f"i32 {first + i}" for i in range(8))
            halves = [k.raw(f"shufflevector <16 x i8> {v}, <16 x i8> poison, <8 x i32> <{lanes}>") for v in (column[0], row)]
            a, b = (k.raw(f"sext <8 x i8> {v} to <8 x i16>") for v in halves)
            products = k.raw(f"mul <8 x i16> {a}, {b}")
            sums.append(self._call("aarch64.neon.saddlp.v4i32.v8i16", "<4 x i32>", "<8 x i16>", products))
        return k.raw(f"add <4 x i32> {total}, {self._call('aarch64.neon.addp.v4i32', '<4 x i32>', '<4 x i32>', *sums)}")


class DotProduct(Neon):
    """One instruction of Arm's dot products."""

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        k, name, operand = self.code, "llvm.aarch64.neon.sdot.v4i32.v16i8", "<16 x i8>"
        k.declared.add(f"declare {self.kind} @{name}({self.kind}, {operand}, {operand})")
        return k.raw(f"call {self.kind} @{name}({self.kind} {total}, {operand} {column[0]}, {operand} {row})")


DOTS: dict[str, type[Dots]] = {"avx2": Avx2, "avx512": Avx2, "vnni": Vnni, "aarch64": Neon, "dotprod": DotProduct}
"""The dot products of each level."""


# Dot products with columns of signed bytes


class WeightDots(Dots):
    """Dot products whose columns are signed, of rows that have been copied in the form for them.

    Attributes:
        planes: the number of parts of four rows of W that are multiplied one after the other.
        row_bytes: the bytes of a row for four rows of W.
    """

    planes, row_bytes = 1, 4

    @abstractmethod
    def columns_of(self, words: Vector, plane: int) -> list[tuple[str, str]]:
        """The columns of a plane."""


class WeightVnni(Vnni, WeightDots):
    """Unsigned bytes of rows."""

    def columns_of(self, words: Vector, plane: int) -> list[tuple[str, str]]:
        """The columns of a plane."""
        return self.columns(words)

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        return super()._added(total, (row, ""), column[0])


class WeightPairs(WeightDots):
    """Pairs of int16, exact."""

    kind, parts, planes, row_bytes = "<8 x i32>", 2, 2, 8

    def columns(self, words: Vector) -> list[tuple[str, str]]:
        """The columns as int16 in the higher bytes of words."""
        return [(self.code.raw(f"bitcast <32 x i8> {b} to <16 x i16>"), "") for b in self._split(words)]

    def columns_of(self, words: Vector, plane: int) -> list[tuple[str, str]]:
        """The columns of a plane: the first and third byte, or the second and fourth."""
        k, eight = self.code, "splat (i16 8)"
        parts = [p for p, _ in self.columns(words)]
        parts = parts if plane else [k.raw(f"shl <16 x i16> {p}, {eight}") for p in parts]
        return [(k.raw(f"ashr <16 x i16> {p}, {eight}"), "") for p in parts]

    def spread(self, pointer: str) -> str:
        """Two int16 of a row."""
        return self.code.raw(f"bitcast <32 x i8> {super().spread(pointer)} to <16 x i16>")

    def _added(self, total: str, column: tuple[str, str], row: str) -> str:
        pairs = self._call("x86.avx2.pmadd.wd", "<8 x i32>", "<16 x i16>", column[0], row)
        return self.code.raw(f"add <8 x i32> {total}, {pairs}")


class WeightNeon(Neon, WeightDots):
    """Signed bytes of rows."""

    def columns_of(self, words: Vector, plane: int) -> list[tuple[str, str]]:
        """The columns of a plane."""
        return [(b, "") for b in self._split(words)]


class WeightDotProduct(DotProduct, WeightNeon):
    """Signed bytes of rows, by Arm's dot products."""


WEIGHT_DOTS: dict[str, type[WeightDots]] = {
    "avx2": WeightPairs, "avx512": WeightPairs, "vnni": WeightVnni, "aarch64": WeightNeon, "dotprod": WeightDotProduct,
}  # fmt: skip
"""The dot products with signed columns of each level."""
