"""Find, load and check oneDNN's shared library.

The library is looked for once, at the first call of `library`: the file named by the environment variable SONNX_ONEDNN, or else
the one of the wheel `onednn-cpu-gomp`, then the system's.  SONNX_ONEDNN=off hides it.  A process without the library, or on an
x86-64 processor without AVX2, computes everything in NumPy; `missing` tells the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_char_p, c_double, c_float, c_int, c_int64, c_size_t, c_uint, c_void_p
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from .constants import ISA, RUNTIMES, STATUS
from .signals import HAS_MASKS, SignalBlock

VARIABLE: Final = "SONNX_ONEDNN"
WHEEL: Final = "onednn-cpu-gomp"
FILE: Final = "libdnnl.so.3"

REQUIRED: Final = "AVX2 is needed"
"""Part of the reason if the processor, or the variable that limits oneDNN, has only older instructions, whose code has faults."""

LOWEST: Final = 0x7
"""The number of AVX2 in `constants.ISA`; those of newer instruction sets include it."""

X86: Final = ("x86_64", "AMD64")

_LETTERS: dict[str, Any] = {
    "p": c_void_p,  # a handle, an array, or the address of a result
    "s": c_char_p,
    "i": c_int,
    "u": c_uint,
    "q": c_int64,
    "z": c_size_t,
    "f": c_float,
    "d": c_double,
}

_CREATORS = {  # the parameters between `out` and the attributes, which are the first and the last of each
    "reorder": "pppp",
    "concat": "ppiip",
    "sum": "ppipp",
    "binary": "pippp",
    "reduction": "pippff",
    "matmul": "ppppp",
    "convolution_forward": "piipppppppp",
    "convolution_backward_data": "pippppppp" + "p",
    "convolution_backward_weights": "pipppppppp" + "p",
    "deconvolution_forward": "piipppppppp",
    "deconvolution_backward_data": "pippppppp" + "p",
    "deconvolution_backward_weights": "pipppppppp" + "p",
    "pooling_forward": "piippppppp",
    "pooling_backward": "pippppppp" + "p",
    "eltwise_forward": "piippff",
    "eltwise_backward": "pipppff" + "p",
    "softmax_forward": "piippi",
    "softmax_backward": "pipppi" + "p",
    "lrn_forward": "piippqfff",
    "lrn_backward": "pipppqfff" + "p",
    "batch_normalization_forward": "pippfu",
    "batch_normalization_backward": "pipppfu" + "p",
    "layer_normalization_forward": "pipppfu",
    "layer_normalization_backward": "pippppfu" + "p",
    "prelu_forward": "pippp",
    "prelu_backward": "pppppp" + "p",
    "resampling_forward": "piippp",
    "resampling_backward": "pippp" + "p",
    "shuffle_forward": "pippiq",
    "shuffle_backward": "pppiq" + "p",
    "vanilla_rnn_forward": "piii" + "p" * 7 + "uff",
    "vanilla_rnn_backward": "piii" + "p" * 14 + "uff" + "p",
    "lstm_forward": "pii" + "p" * 11 + "u",
    "lstm_backward": "pii" + "p" * 22 + "u" + "p",
    "gru_forward": "pii" + "p" * 7 + "u",
    "gru_backward": "pii" + "p" * 14 + "u" + "p",
    "lbr_gru_forward": "pii" + "p" * 7 + "u",
    "lbr_gru_backward": "pii" + "p" * 14 + "u" + "p",
}

_SIGNATURES: dict[str, tuple[str, Any]] = {  # the parameters, and the result; a status if it is c_int
    "version": ("", c_void_p),
    "get_effective_cpu_isa": ("", c_int),
    "engine_create": ("piz", c_int),
    "stream_create": ("ppu", c_int),
    "stream_wait": ("p", c_int),
    "memory_desc_create_with_strides": ("pipip", c_int),
    "memory_desc_create_with_tag": ("pipii", c_int),
    "memory_desc_create_with_string_tag": ("pipis", c_int),
    "memory_desc_create_submemory": ("pppp", c_int),
    "memory_desc_reshape": ("ppip", c_int),
    "memory_desc_permute_axes": ("ppp", c_int),
    "memory_desc_clone": ("pp", c_int),
    "memory_desc_destroy": ("p", c_int),
    "memory_desc_query": ("pip", c_int),
    "memory_desc_equal": ("pp", c_int),
    "memory_desc_get_size": ("p", c_size_t),
    "memory_create": ("pppp", c_int),
    "memory_set_data_handle": ("pp", c_int),
    "memory_get_data_handle": ("pp", c_int),
    "memory_destroy": ("p", c_int),
    "primitive_attr_create": ("p", c_int),
    "primitive_attr_destroy": ("p", c_int),
    "primitive_attr_set_scratchpad_mode": ("pi", c_int),
    "primitive_attr_set_fpmath_mode": ("pi", c_int),
    "primitive_attr_set_post_ops": ("pp", c_int),
    "primitive_attr_set_scales_mask": ("pii", c_int),
    "primitive_attr_set_zero_points_mask": ("pii", c_int),
    "primitive_attr_set_rnn_data_qparams": ("pff", c_int),
    "primitive_attr_set_rnn_weights_qparams": ("pqip", c_int),
    "post_ops_create": ("p", c_int),
    "post_ops_destroy": ("p", c_int),
    "post_ops_len": ("p", c_int),
    "post_ops_append_sum": ("pfii", c_int),
    "post_ops_append_eltwise": ("piff", c_int),
    "post_ops_append_binary": ("pip", c_int),
    "post_ops_append_prelu": ("pi", c_int),
    "primitive_desc_query": ("piip", c_int),
    "primitive_desc_query_md": ("pii", c_void_p),
    "primitive_desc_destroy": ("p", c_int),
    "primitive_desc_next_impl": ("p", c_int),
    "primitive_create": ("pp", c_int),
    "primitive_execute": ("ppip", c_int),
    "primitive_destroy": ("p", c_int),
    "get_primitive_cache_capacity": ("p", c_int),
    "set_primitive_cache_capacity": ("i", c_int),
} | {f"{name}_primitive_desc_create": ("p" + middle + "p", c_int) for name, middle in _CREATORS.items()}


_RANGES = {"i": (-(2**31), 2**31), "u": (0, 2**32), "q": (-(2**63), 2**63), "z": (0, 2**64)}
"""The integers that a parameter holds, from the first to before the last; ctypes would cut others without an error."""

_INTEGERS = {
    name: tuple((place, *_RANGES[letter]) for place, letter in enumerate(letters) if letter in _RANGES)
    for name, (letters, _) in _SIGNATURES.items()
}
"""The parameters that are integers: their places, and their ranges."""


class OneDnnError(Exception):
    """A call of oneDNN failed.  Internal: the caller computes the node in another way.

    Attributes:
        status: the number that oneDNN returned.
        call: the call.
    """

    def __init__(self, status: int, call: str) -> None:
        super().__init__(f"oneDNN: {call}: {STATUS.get(status, f'status {status}')}")
        self.status = status
        self.call = call


class Unimplemented(OneDnnError):
    """oneDNN does not compute this, or not fast, or not exactly: status 2 or 3, slow reference code, saturating int8 code."""


class NotTrusted(Unimplemented):
    """oneDNN computes this by code that is not trusted, or else not fast."""


def failure(status: int, call: str) -> OneDnnError:
    """The exception for a status that is not 0."""
    return (Unimplemented if status in (2, 3) else OneDnnError)(status, call)


class _Version(ctypes.Structure):
    _fields_ = [
        ("major", c_int),
        ("minor", c_int),
        ("patch", c_int),
        ("hash", c_char_p),
        ("cpu_runtime", c_uint),
        ("gpu_runtime", c_uint),
    ]


class _Refused(Exception):
    """The file is not a library that this package can use."""


class Library:
    """The loaded library, with one engine (the CPU) and one stream for the process.

    Attributes:
        path: the file, as it was loaded.
        version: (major, minor, patch).
        hash: the commit that the library was built from.
        runtime: "sequential", "OpenMP" or "TBB".
        isa: the newest instruction set that the library uses on this machine, such as "avx512_core_vnni".
        functions: the C functions by name without the prefix `dnnl_`, as far as the library has them.
        engine: the handle of the engine.
        stream: the handle of the stream.
        execute: the C function `dnnl_primitive_execute`, to be called with `BoundPrimitive.args`, objects of ctypes; it returns a
            status, 0 is success.
        execute_blocking: the same while signals wait, after the number of threads of the primitive; see `signals`.
    """

    def __init__(self, path: str) -> None:
        try:
            dll = ctypes.CDLL(path)
        except OSError as error:
            raise _Refused(f"{path}: {error}") from None
        self.functions: dict[str, Callable[..., Any]] = {}
        for name, (letters, result) in _SIGNATURES.items():
            if hasattr(dll, f"dnnl_{name}"):
                function = self.functions[name] = dll[f"dnnl_{name}"]
                function.argtypes = [_LETTERS[letter] for letter in letters]
                function.restype = result
        if "version" not in self.functions:
            raise _Refused(f"{path} is not oneDNN: it has no function dnnl_version")
        info = ctypes.cast(self.functions["version"](), ctypes.POINTER(_Version)).contents
        self.path = path
        self.version: tuple[int, int, int] = (info.major, info.minor, info.patch)
        self.hash = (info.hash or b"").decode(errors="replace")
        text = ".".join(map(str, self.version))
        if info.major != 3:
            raise _Refused(f"{path} is oneDNN {text}; a version 3.x is needed")
        if info.cpu_runtime not in RUNTIMES:
            raise _Refused(f"{path} is built for CPU runtime {info.cpu_runtime}; OpenMP, TBB or sequential is needed")
        self.runtime = RUNTIMES[info.cpu_runtime]
        self.execute = dll["dnnl_primitive_execute"]  # without types of parameters, which ctypes would check at every call
        isa = self.functions["get_effective_cpu_isa"]()
        self.isa = ISA.get(isa, hex(isa))
        if platform.machine() in X86 and isa & LOWEST != LOWEST:
            raise _Refused(f"the processor's level is {self.isa}; {REQUIRED}")
        engine, stream = c_void_p(), c_void_p()
        try:
            self.call("engine_create", ctypes.byref(engine), 1, 0)
            self.call("stream_create", ctypes.byref(stream), engine, 1)
        except OneDnnError as error:
            raise _Refused(f"{path}: {error}") from None
        self.engine, self.stream = engine, stream  # never destroyed: primitives may outlive `reset`
        self._set_threads = self._max_threads = self._pause = self._parallel = None
        if self.runtime == "OpenMP":
            self._set_threads = self._openmp(dll, "omp_set_num_threads", None, c_int)
            self._max_threads = self._openmp(dll, "omp_get_max_threads", c_int)
            self._pause = self._openmp(dll, "omp_pause_resource_all", c_int, c_int)  # of OpenMP 5
            self._parallel = self._openmp(dll, "GOMP_parallel", None)
        self.execute_blocking = SignalBlock(self.execute, dll, self._max_threads) if HAS_MASKS else None

    @staticmethod
    def _openmp(dll: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any] | None:
        """A function of the OpenMP runtime that the library is linked with: found through the library itself."""
        if not hasattr(dll, name):
            return None
        function = dll[name]
        function.argtypes, function.restype = arguments, result
        return function

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function that returns a status.

        Args:
            name: the function, without `dnnl_`.
            *arguments: its arguments.

        Raises:
            Unimplemented: the library has no such function, or returned status 2 or 3; or its type of a parameter cannot hold an
                integer.
            OneDnnError: it returned another status than 0.
        """
        for place, low, high in _INTEGERS[name]:
            if not low <= arguments[place] < high:
                raise Unimplemented(2, f"{name} with {arguments[place]}, which must be from {low} to {high - 1}")
        function = self.functions.get(name)
        status = 3 if function is None else function(*arguments)
        if status:
            raise failure(status, name)

    def create(self, name: str, *arguments: Any) -> int:
        """Call a function that writes a handle to its first argument.

        Args:
            name: the function, without `dnnl_`.
            *arguments: the arguments after the first one.

        Returns:
            The handle.

        Raises:
            Unimplemented: the library has no such function, or returned status 2 or 3.
            OneDnnError: it returned another status than 0.
        """
        out = c_void_p()
        self.call(name, ctypes.byref(out), *arguments)
        return out.value or 0


_lock = threading.Lock()
_state: tuple[Library | None, str] | None = None


def _candidates() -> Iterator[str]:
    """The files to try; a file that the user names is the only one."""
    named = os.environ.get(VARIABLE, "")
    if named:
        yield named
        return
    try:
        files = metadata.files(WHEEL) or []  # the library is outside of site-packages: only the wheel's record knows where
    except metadata.PackageNotFoundError:
        files = []
    yield from (str(Path(str(f.locate())).resolve()) for f in files if f.name == FILE)
    yield FILE


def _find() -> tuple[Library | None, str]:
    if os.environ.get(VARIABLE) == "off":
        return None, f"{VARIABLE}=off"
    reasons = []
    for path in _candidates():
        try:
            return Library(path), ""
        except _Refused as error:
            reasons.append(str(error))
    return None, "; ".join(dict.fromkeys(reasons))


def _loaded() -> tuple[Library | None, str]:
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = _find()
    return _state


def library() -> Library | None:
    """The library, loaded by the first call.

    Returns:
        The library; None if it is absent or was refused.
    """
    return (_state or _loaded())[0]


def missing() -> str:
    """Why there is no library.

    Returns:
        The reason, one for each file that was tried; "" if the library is loaded.
    """
    return _loaded()[1]


def needed() -> Library:
    """The library, for a caller that cannot do without it.

    Returns:
        The library.

    Raises:
        OneDnnError: there is none.
    """
    found = library()
    if found is None:
        raise OneDnnError(5, f"load the library ({missing()})")
    return found


def reset() -> None:
    """Forget the library, so that the next call of `library` looks for it again.  For tests; existing handles stay valid."""
    global _state
    with _lock:
        _state = None


def threads() -> int:
    """The number of threads for primitives that this thread creates or runs.

    Returns:
        The number; 1 without the library or with a sequential one.
    """
    found = library()
    if found is None or found.runtime == "sequential":
        return 1
    return int(found._max_threads()) if found._max_threads else os.cpu_count() or 1


def set_threads(n: int) -> None:
    """Set the number of threads for primitives that this thread creates or runs.

    OpenMP keeps the number for each calling thread.  A primitive keeps the number of its creation: it is fast only if it runs
    with the same.  No effect without OpenMP.

    Args:
        n: the number.

    Raises:
        ValueError: the number is smaller than 1.
    """
    if n < 1:
        raise ValueError(f"the number of threads must be at least 1, got {n}")
    found = library()
    if found is not None and found._set_threads:
        found._set_threads(n)


def exchange_threads(n: int) -> int:
    """Set the number of threads for primitives that this thread creates or runs, unless it has it.

    Args:
        n: the number.

    Returns:
        The number before, for `set_threads`; 0 if nothing was set.
    """
    found = library()
    if found is None or not (found._set_threads and found._max_threads):
        return 0
    before = int(found._max_threads())
    if before == n:
        return 0
    found._set_threads(n)
    return before


def thread_switch(n: int) -> list[tuple[Callable[[int], Any], tuple[int]]]:
    """The call that sets the number of threads of the thread that runs it, as a function and its arguments.

    Args:
        n: the number.

    Returns:
        One call; none without OpenMP.
    """
    found = library()
    return [(found._set_threads, (n,))] if found is not None and found._set_threads else []


def parallel_region() -> int:
    """Return the address of GNU OpenMP's function that runs another one on several threads; 0 if there is none."""
    found = library()
    function: Any = None if found is None else found._parallel
    return 0 if function is None else ctypes.cast(function, ctypes.c_void_p).value or 0


def sets_threads(function: Callable[..., Any]) -> bool:
    """Whether a function is that of `thread_switch`."""
    found = library()
    return found is not None and function is found._set_threads


@contextmanager
def using_threads(n: int) -> Iterator[None]:
    """Use a number of threads within a `with` block, in this thread.

    Args:
        n: the number.

    Yields:
        Nothing.
    """
    before = exchange_threads(n)
    try:
        yield
    finally:
        if before:
            set_threads(before)


def _before_fork() -> None:
    """End the idle threads of the forking thread: a child that believes them to exist hangs in its first parallel region."""
    found = _state[0] if _state else None
    if found is not None and found._pause:
        found._pause(1)  # omp_pause_soft: the next parallel region starts threads again


def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_renew_lock)
