"""Object files in memory without a linker, on Linux on x86-64: code that refers to nothing but itself, relative to its own place.

A function has memory of its own, which is written first, and then executable and no longer writable.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

HERE = sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize > 1 << 32
"""Whether object files are loaded here."""

RELATIVE = frozenset([2, 4])
"""The relocations that are known: the 32 bits of the distance to a symbol, or to a function (R_X86_64_PC32, R_X86_64_PLT32)."""

_CODE, _SYMBOLS, _RELOCATIONS = 1, 2, 4
_IS_WRITTEN, _IN_MEMORY = 1, 2


class NotLoaded(Exception):
    """An object file is not loaded; the message names the reason."""


@dataclass(frozen=True)
class Section:
    """A section of an object file, in the words of ELF."""

    kind: int
    flags: int
    start: int
    size: int
    link: int
    info: int
    align: int
    entry: int

    @property
    def entries(self) -> range:
        """The places of the entries of a table."""
        return range(self.start, self.start + self.size, self.entry)


@dataclass(frozen=True)
class ElfSymbol:
    """A name in an object file: its section, 0 if it is in none, and its place there."""

    name: str
    section: int
    value: int


def sections(code: bytes) -> list[Section]:
    """The sections of an ELF file of 64 bits; none of another file."""
    if code[:6] != b"\x7fELF\x02\x01":
        return []
    start, size, count = struct.unpack_from("<Q", code, 0x28)[0], *struct.unpack_from("<HH", code, 0x3A)
    fields = (struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count))
    return [Section(kind, flags, *rest) for _, kind, flags, _, *rest in fields]


def symbols(code: bytes, found: list[Section]) -> Iterator[ElfSymbol]:
    """The symbols of an ELF file, the first of which means none."""
    for table in found:
        for at in table.entries if table.kind == _SYMBOLS else ():
            name, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", code, at)
            first = found[table.link].start + name
            yield ElfSymbol(code[first : code.index(b"\0", first)].decode(), section, value)


def undefined(code: bytes) -> list[str]:
    """The symbols that an ELF file refers to and does not have; the linker refuses those of other files."""
    missing = [s.name for s in symbols(code, sections(code)) if s.section == 0 and s.name]
    return [n for n in missing if n != "_GLOBAL_OFFSET_TABLE_"]


def load(code: bytes, name: str) -> tuple[int, mmap.mmap]:
    """Load an object file.

    Returns:
        The address of a function, and the memory to close when it is no longer used.

    Raises:
        NotLoaded: the file refers to something else, or the system refuses executable memory.
    """
    image, place = _image(code, name)
    address, memory = _executable(image)
    return address + place, memory


@cache
def refusal() -> str:
    """Why the system does not permit code that is made at run time; empty if it does."""
    try:
        _executable(bytearray(1))[1].close()
    except NotLoaded as reason:
        return str(reason)
    return ""


@cache
def _protect() -> Any:
    """The function of the system that changes what memory may be used for."""
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return protect


def _executable(image: bytearray) -> tuple[int, mmap.mmap]:
    """The address of a copy that can be called and not written, and its memory."""
    try:
        memory = mmap.mmap(-1, len(image), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise NotLoaded(f"there is no memory for code: {error}") from error
    memory[:] = image
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    if _protect()(address, len(image), mmap.PROT_READ | mmap.PROT_EXEC):
        memory.close()
        raise NotLoaded(f"the system refuses code that is made at run time: {os.strerror(ctypes.get_errno())}")
    return address, memory


def _image(code: bytes, name: str) -> tuple[bytearray, int]:
    """The bytes in memory, whose first one is at the start of a page, and the place of a function in them."""

    def refuse(reason: str) -> NoReturn:
        raise NotLoaded(f"the code cannot be loaded: {reason}")

    found, image, places = sections(code), bytearray(), dict[int, int]()
    if struct.unpack_from("<HH", code, 0x10) != (1, 62):
        refuse("it is not an object file for this processor")
    for i, s in enumerate(found):
        if s.flags & _IN_MEMORY:
            if s.kind != _CODE or s.flags & _IS_WRITTEN or s.align > mmap.PAGESIZE:
                refuse("it has other sections than code and constants")
            image += bytes(-len(image) % max(s.align, 1))
            places[i] = len(image)
            image += code[s.start : s.start + s.size]
    known = list(symbols(code, found))
    for s in found:
        if s.kind != _RELOCATIONS or s.info not in places:
            continue
        for at in s.entries:
            offset, info, addend = struct.unpack_from("<QQq", code, at)
            kind, to = info & 0xFFFFFFFF, known[info >> 32]
            if kind not in RELATIVE:
                refuse(f"it has a relocation of type {kind}")
            if to.section not in places:
                refuse(f"{to.name or 'a symbol'} is not in it")
            place = places[s.info] + offset
            struct.pack_into("<i", image, place, places[to.section] + to.value + addend - place)
    starts = [places[s.section] + s.value for s in known if s.name == name and s.section in places]
    return image, starts[0] if starts else refuse(f"it has no {name}")
