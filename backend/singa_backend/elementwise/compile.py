"""Machine code of LLVM text: optimised, kept in the user's cache by its digest, linked, called with the address of a frame.

llvmlite is optional and is imported when the first text is compiled.  Code refers to no symbol outside of itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import stat
import struct
import tempfile
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

if TYPE_CHECKING:
    from types import ModuleType

VARIABLE = "SONNX_MACHINE_CODE"
"""The environment variable that hides llvmlite if it is `off`."""

FORM = 1
"""The form of the files in the cache and of frames."""

LEVELS: dict[str, tuple[str, str, str]] = {
    "avx2": ("x86_64-unknown-linux-gnu", "x86-64", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+cx16,+sahf"),
    "avx512": (
        "x86_64-unknown-linux-gnu",
        "x86-64",
        "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+cx16,+sahf",
    ),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", "+neon"),
}
"""For each level the triple, the processor and its features."""

_LOCK = threading.RLock()
_NUMBERS = itertools.count()
_LIVE: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()


class NotCompiled(Exception):
    """A text has no machine code; the message names the reason."""


if hasattr(os, "register_at_fork"):  # no thread compiles while a process forks, so the child's locks are free
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@dataclass(frozen=True)
class Machine:
    """What code is for.

    Attributes:
        cpu: the processor, in LLVM's words.
        features: of the processor.
        target: the target machine of llvmlite.
    """

    cpu: str
    features: str
    target: Any

    def object(self, text: str) -> bytes:
        """The object file of a text.

        Raises:
            NotCompiled: the text is not valid, or its code would need symbols outside of itself.
        """
        llvm = _llvm()
        try:
            module = llvm.parse_assembly(text)
            module.verify()
        except RuntimeError as error:
            raise NotCompiled(f"the text is not valid: {error}") from error
        module.triple, module.data_layout = self.target.triple, str(self.target.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=3)
        options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
        builder = llvm.create_pass_builder(self.target, options)
        builder.getModulePassManager().run(module, builder)
        code: bytes = self.target.emit_object(module)
        if missing := undefined(code):
            raise NotCompiled(f"the code calls {', '.join(missing)}")
        return code


class Compiled:
    """A function in memory.

    Attributes:
        call: calls it with the address of a frame; the code is freed with it.
        address: of the function.
    """

    def __init__(self, tracker: Any, name: str) -> None:
        self.address = int(tracker[name])
        self.call: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        weakref.finalize(self.call, _free, tracker).atexit = False  # a __del__ would run before _LIVE forgets the object


def _free(tracker: Any) -> None:
    """Free code; a process that forks has the lock, because llvmlite's own lock is not renewed in the child."""
    with _LOCK:
        tracker.close()


@cache
def _llvm() -> ModuleType:
    llvm = import_module("llvmlite.binding")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm


def available() -> str:
    """Why machine code is not made here.

    Returns:
        The reason; empty if it is.
    """
    return f"{VARIABLE} is off" if os.environ.get(VARIABLE, "").lower() == "off" else _missing()


@cache
def _missing() -> str:
    """Why machine code cannot be made here."""
    with _LOCK:
        try:
            llvm = _llvm()
            llvm.check_jit_execution()
        except ImportError:
            return "llvmlite is not installed"
        except OSError as error:
            return f"the system refuses code that is made at run time: {error}"
        features, triple = llvm.get_host_cpu_features(), llvm.get_process_triple()
        if triple.startswith(("aarch64", "arm64")):
            return ""
        if not triple.startswith("x86_64"):
            return f"there is no machine code for {triple.split('-')[0]}"
        return "" if features.get("avx2") and features.get("fma") else "the processor lacks AVX2 or FMA"


@cache
def native(features: str | None = None) -> Machine:
    """This processor, or one of its kind with the features only that are named."""
    llvm = _llvm()
    triple = llvm.get_process_triple()
    cpu = llvm.get_host_cpu_name() if features is None else "x86-64" if triple.startswith("x86_64") else "generic"
    wanted = llvm.get_host_cpu_features().flatten() if features is None else features
    return _machine(triple, cpu, wanted, jit=True)


@cache
def target(level: str) -> Machine:
    """The processors of a level, for objects that need not run here.

    Args:
        level: "avx2", "avx512" or "aarch64".
    """
    _llvm().initialize_all_targets()
    _llvm().initialize_all_asmprinters()
    return _machine(*LEVELS[level], jit=False)


def _machine(triple: str, cpu: str, features: str, jit: bool) -> Machine:
    found = _llvm().Target.from_triple(triple)
    model = "jitdefault" if jit else "default"
    return Machine(
        cpu, features, found.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel=model, jit=jit)
    )


@cache
def _linker() -> Any:
    return _llvm().create_lljit_compiler(native().target)


def compiled(text: str, name: str, features: str | None = None) -> Compiled:
    """The function of a text, from memory, from the cache, or compiled.

    Args:
        text: a module.
        name: of the function in it.
        features: of the processor, in LLVM's words; those of this one by default.

    Raises:
        NotCompiled: the text has no machine code.
    """
    if reason := available():
        raise NotCompiled(reason)
    with _LOCK:
        machine, key = native(features), _key(text, features)
        found = _LIVE.get(f"{key} {name}")
        if found is None:
            code = _read(key)
            if code is None:
                code = machine.object(text)
                _write(key, code)
            found = _LIVE[f"{key} {name}"] = Compiled(_linked(code, name), name)
        return found


def is_kept(text: str, name: str, features: str | None = None) -> bool:
    """Whether the code of a text is in memory or in the cache, so that nothing must be compiled."""
    key = _key(text, features)
    return f"{key} {name}" in _LIVE or ((home := _home()) is not None and (home / key).exists())


def _key(text: str, features: str | None) -> str:
    """The digest of a text, and of what decides on its code."""
    machine, version = native(features), ".".join(map(str, _llvm().llvm_version_info))
    return hashlib.sha256("\n".join((str(FORM), version, machine.cpu, machine.features, text)).encode()).hexdigest()


def _linked(code: bytes, name: str) -> Any:
    builder = _llvm().JITLibraryBuilder().add_object_img(code).export_symbol(name)
    try:
        return builder.link(_linker(), f"elementwise{next(_NUMBERS)}")
    except RuntimeError as error:
        raise NotCompiled(f"the code cannot be linked: {error}") from error


def undefined(code: bytes) -> list[str]:
    """The symbols that an ELF file refers to and does not have; the linker refuses those of other files."""
    if code[:5] != b"\x7fELF\x02":
        return []
    start, size, count = struct.unpack_from("<Q", code, 0x28)[0], *struct.unpack_from("<HH", code, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, start + i * size) for i in range(count)]
    found = []
    for _, kind, _, _, place, length, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        names = sections[link][4]
        for at in range(place + entry, place + length, entry):
            name, _, _, section = struct.unpack_from("<IBBH", code, at)
            if section == 0 and name:
                first = names + name
                found.append(code[first : code.index(b"\0", first)].decode())
    return [n for n in found if n != "_GLOBAL_OFFSET_TABLE_"]


# The cache: a file has the digest of its code, then the code


def folder() -> Path:
    """The folder of the cache, which only the user may write."""
    return Path(platformdirs.user_cache_dir("sonnx", appauthor=False)) / "machine-code"


def _private(info: os.stat_result) -> bool:
    """Whether nobody else can change a file or a folder; Windows keeps the user's folders private."""
    return os.name == "nt" or (info.st_uid == os.getuid() and not info.st_mode & 0o022)


def _home() -> Path | None:
    """The folder, created if need be; None if others could write it, or there cannot be one."""
    home = folder()
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(home, 0o700)
        info = os.lstat(home)
    except OSError:
        return None
    return home if stat.S_ISDIR(info.st_mode) and _private(info) else None


def _read(key: str) -> bytes | None:
    """The code of a key; None if there is none, or the file is damaged or not the user's."""
    if (home := _home()) is None:
        return None
    try:
        with open(home / key, "rb") as file:
            if not _private(os.fstat(file.fileno())):
                return None
            digest, code = file.read(32), file.read()
    except OSError:
        return None
    return code if hashlib.sha256(key.encode() + code).digest() == digest else None


def _write(key: str, code: bytes) -> None:
    """Keep the code of a key, whole or not at all."""
    if (home := _home()) is None:
        return
    try:
        handle, part = tempfile.mkstemp(dir=home, prefix=".part")
    except OSError:
        return
    try:
        with open(handle, "wb") as file:
            file.write(hashlib.sha256(key.encode() + code).digest() + code)
        os.replace(part, home / key)
    except OSError:
        with suppress(OSError):
            os.unlink(part)
