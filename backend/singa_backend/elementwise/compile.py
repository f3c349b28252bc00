"""Machine code of LLVM text: optimised, kept in the user's cache by what it computes, loaded, called with the address of a frame.

llvmlite is optional, and imported when the first text is compiled; on systems other than Linux on x86-64 when code is loaded.
Code refers to no symbol outside of itself.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from .. import machine
from ..errors import InvalidInput
from ..io.files import private_folder, write_bytes
from .load import HERE, NotLoaded, load, refusal, undefined

if TYPE_CHECKING:
    from types import ModuleType

PASSES = ("sroa", "instruction_combine", "simplify_cfg", "loop_rotate", "instruction_combine")
"""LLVM's passes for a text of more than `LONG` lines, for which all of its own take several times as long and gain nothing."""

LONG = 1000
"""The lines of a text that has its loops and vectors as code is to have them."""

VARIABLE = "SONNX_MACHINE_CODE"
"""The environment variable: `off` for no machine code, `wait` to compile what is missing before a first run goes on."""

FORM = 3
"""The form of the files in the cache and of frames."""

SOURCES = ("builder", "compile", "expression", "functions", "machine_code", "primitives")
"""The modules that decide on the code of an expression: what they made before they changed is not used."""

LEVELS: dict[str, tuple[str, str, str]] = {
    "avx2": ("x86_64-unknown-linux-gnu", "x86-64", "+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+cx16,+sahf"),
    "avx512": (
        "x86_64-unknown-linux-gnu",
        "x86-64",
        "+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe,+popcnt,+cx16,+sahf",
    ),
    "aarch64": ("aarch64-unknown-linux-gnu", "generic", "+neon"),
}
LEVELS["vnni"] = (*LEVELS["avx512"][:2], LEVELS["avx512"][2] + ",+avx512vnni")
LEVELS["dotprod"] = (*LEVELS["aarch64"][:2], LEVELS["aarch64"][2] + ",+dotprod")
"""For each level the triple, the processor and its features."""

CEILING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""The environment variables that limit oneDNN's instructions, and so those of machine code."""

_CEILINGS = {"SSE41": "", "AVX": "", "AVX2": "avx2", "AVX2_VNNI": "avx2", "AVX2_VNNI_2": "avx2", "AVX512_CORE": "avx512"}
"""The level of each value that is a limit; "" for instructions that machine code does not do without."""

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
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        options.loop_vectorization = options.slp_vectorization = options.loop_interleaving = False
        builder = llvm.create_pass_builder(self.target, options)
        passes = builder.getModulePassManager()
        if text.count("\n") > LONG:
            passes = llvm.create_new_module_pass_manager()
            for name in PASSES:
                getattr(passes, f"add_{name}_pass")()
        passes.run(module, builder)
        code: bytes = self.target.emit_object(module)
        if missing := undefined(code):
            raise NotCompiled(f"the code calls {', '.join(missing)}")
        return code


class Compiled:
    """A function in memory.

    Attributes:
        call: calls it with the address of a frame; the code is freed with it.
        address: of the function.
        notes: what else its emitter knows.
    """

    def __init__(self, address: int, free: Callable[[], None], notes: str = "") -> None:
        self.address, self.notes = address, notes
        self.call: Callable[[int], None] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)
        weakref.finalize(self.call, free).atexit = False  # a __del__ would run before _LIVE forgets the object


def _free(tracker: Any) -> None:
    """Free code; a process that forks has the lock, because llvmlite's own lock is not renewed in the child."""
    with _LOCK:
        tracker.close()


@cache
def _imported() -> ModuleType | str:
    """llvmlite, or why it cannot be used, which no later attempt changes."""
    try:
        llvm = import_module("llvmlite.binding")
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.check_jit_execution()
    except (ImportError, RuntimeError) as error:
        return f"llvmlite cannot be imported: {error}"
    except OSError as error:
        return f"the system refuses code that is made at run time: {error}"
    return llvm


def _llvm() -> ModuleType:
    llvm = _imported()
    if isinstance(llvm, str):
        raise NotCompiled(llvm)
    return llvm


def available() -> str:
    """Why machine code is not made here.

    Returns:
        The reason; empty if it is.
    """
    if _chosen() == "off":
        return f"{VARIABLE} is off"
    return "the limit of instructions is below AVX2" if _ceiling() == "" else _missing()


def waits() -> bool:
    """Whether a first run waits for code that must be compiled."""
    return _chosen() == "wait"


def _chosen() -> str:
    return os.environ.get(VARIABLE, "").lower()


def level() -> str:
    """The level of the instructions of machine code, a key of `LEVELS`: the highest of this processor, or a limit below it."""
    own, most = _own_level(), _ceiling()
    order = ["avx2", "avx512", "vnni"]
    return own if most is None or own not in order else min(own, most, key=order.index)


def _ceiling() -> str | None:
    """The level that the environment sets as a limit; None without one."""
    return _CEILINGS.get(next((os.environ[n] for n in CEILING if n in os.environ), "").upper())


@cache
def _own_level() -> str:
    flags = {f.replace("_", "") for f in _flags()}
    if not HERE and not _llvm().get_process_triple().startswith("x86_64"):
        return "dotprod" if "dotprod" in flags else "aarch64"
    wide = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"} <= flags
    return "vnni" if wide and "avx512vnni" in flags else "avx512" if wide else "avx2"


def _allowed() -> str | None:
    """The features that code may use, in LLVM's words; None for all of this processor."""
    return None if _ceiling() is None or level() == _own_level() else LEVELS[level()][2]


def _flags() -> set[str]:
    """The features of this processor, in the words of Linux or of LLVM."""
    if HERE:
        return set(machine.features().get("flags", "").split())
    with _LOCK:
        return {name for name, there in _llvm().get_host_cpu_features().items() if there}


@cache
def _missing() -> str:
    """Why machine code cannot be made here; on Linux on x86-64 without importing llvmlite."""
    try:
        spec = find_spec("llvmlite")
    except ImportError:  # an import hook forbids it
        spec = None
    if spec is None:
        return "llvmlite is not installed"
    kind = "x86_64"
    if not HERE:
        try:
            kind = _llvm().get_process_triple().split("-")[0]
        except NotCompiled as reason:
            return str(reason)
        if kind.startswith(("aarch64", "arm64")):
            return ""
    if kind != "x86_64":
        return f"there is no machine code for {kind}"
    if not {"avx2", "fma"} <= _flags():
        return "the processor lacks AVX2 or FMA"
    return refusal() if HERE else ""


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
        level: a key of `LEVELS`.
    """
    _llvm().initialize_all_targets()
    _llvm().initialize_all_asmprinters()
    return _machine(*LEVELS[level], jit=False)


def _machine(triple: str, cpu: str, features: str, jit: bool) -> Machine:
    processors = _llvm().Target.from_triple(triple)
    model = "small" if HERE else "jitdefault" if jit else "default"
    return Machine(
        cpu, features, processors.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel=model, jit=jit)
    )


@cache
def _linker() -> Any:
    return _llvm().create_lljit_compiler(native().target)


def compiled(what: str, name: str, text: Callable[[], str], features: str | None = None, notes: str = "") -> Compiled:
    """A function, from memory, from the cache, or compiled.

    Args:
        what: differs if the texts differ that the emitter makes.
        name: of the function.
        text: makes the module, if it is compiled.
        features: of the processor, in LLVM's words; those of `level` on this one by default.
        notes: what `kept` is to know of it.

    Raises:
        NotCompiled: the text has no machine code.
    """
    features = _allowed() if features is None else features
    with _LOCK:
        found = kept(what, name, features)
        if found is None:
            key, module = _key(what, name, features), text()
            code = native(features).object(module)
            found = _LIVE.setdefault(key, _loaded(code, name, notes))
            _write(key, notes, code)
        return found


def kept(what: str, name: str, features: str | None = None) -> Compiled | None:
    """A function from memory or from the cache; None if it must be compiled.

    Raises:
        NotCompiled: there is no machine code here.
    """
    if reason := available():
        raise NotCompiled(reason)
    key = _key(what, name, _allowed() if features is None else features)
    found = _LIVE.get(key)
    if found is None and (content := _read(key)) is not None:
        notes, _, code = content.partition(b"\0")
        found = _LIVE.setdefault(key, _loaded(code, name, notes.decode()))
    return found


def _key(what: str, name: str, features: str | None) -> str:
    """The digest of what decides on code."""
    return hashlib.sha256("\n".join((_here(), str(features), name, what)).encode()).hexdigest()


@cache
def _here() -> str:
    """What decides on the code of all expressions: the emitter, LLVM, and the processor."""
    try:
        emitter = [hashlib.sha256(Path(__file__).with_name(f"{name}.py").read_bytes()).hexdigest() for name in SOURCES]
        package = find_spec("llvmlite")
        version = b"" if package is None else Path(str(package.origin)).with_name("_version.py").read_bytes()
    except OSError as error:
        raise NotCompiled(f"what made kept code is unknown: {error}") from error
    processor = machine.features()
    if not HERE:
        host = native()
        processor = {"model": host.cpu, "flags": host.features, "triple": host.target.triple}
    return repr((FORM, emitter, version, processor))


def _loaded(code: bytes, name: str, notes: str) -> Compiled:
    if HERE:
        try:
            address, memory = load(code, name)
        except NotLoaded as error:
            raise NotCompiled(str(error)) from error
        return Compiled(address, memory.close, notes)
    with _LOCK:
        builder = _llvm().JITLibraryBuilder().add_object_img(code).export_symbol(name)
        try:
            tracker = builder.link(_linker(), f"elementwise{next(_NUMBERS)}")
        except RuntimeError as error:
            raise NotCompiled(f"the code cannot be linked: {error}") from error
        return Compiled(int(tracker[name]), partial(_free, tracker), notes)


# The cache: a file has the digest of what follows, the notes, a zero, and the code


@cache
def folder() -> Path:
    """The folder of the cache, which only the user may write."""
    return Path(platformdirs.user_cache_dir("sonnx", appauthor=False)) / "machine-code"


def _home(makes: bool = False) -> Path | None:
    """The folder, created if need be; None if there is none, or others could write it."""
    home = folder()
    return home if private_folder(home, makes) else None


def _read(key: str) -> bytes | None:
    """The notes and the code of a key; None if there are none, or the file is damaged."""
    if (home := _home()) is None:
        return None
    try:
        with open(f"{home}/{key}", "rb", buffering=0) as file:
            content = file.read()
    except OSError:
        return None
    digest, code = content[:32], content[32:]
    return code if hashlib.sha256(key.encode() + code).digest() == digest else None


def _write(key: str, notes: str, code: bytes) -> None:
    """Keep the notes and the code of a key, whole or not at all."""
    code = notes.encode() + b"\0" + code
    if (home := _home(makes=True)) is not None:
        with suppress(InvalidInput):
            write_bytes(home / key, hashlib.sha256(key.encode() + code).digest() + code, parents=False)
