"""Whether this machine can compute with CUDA, why not, and what an exception of CuPy means."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..errors import DeviceFailure, DeviceUnavailable, ResourceExhausted, SonnxError
from ..limits import format_bytes

_MISSING = re.compile(r"Failure finding \"?(?:lib)?(\w+)|lib(\w+)\.so\S*: cannot open shared object file")
"""The messages of libraries of CUDA that are not found, by CuPy's loader and by the system's."""

_NAMES = {"cublas": "cuBLAS", "cublasLt": "cuBLAS", "cufft": "cuFFT", "cusolver": "cuSOLVER", "cusparse": "cuSPARSE"}

_OUT_OF_MEMORY = (
    "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "CUBLAS_STATUS_ALLOC_FAILED", "CUFFT_ALLOC_FAILED",
    "CUSOLVER_STATUS_ALLOC_FAILED",
)  # fmt: skip
"""How the messages of CUDA's libraries begin when the device is out of memory."""


class Cause(NamedTuple):
    """Why CUDA cannot be used.

    Attributes:
        code: the code of the error.
        text: the reason, in words.
        hint: what to do.
    """

    code: str
    text: str
    hint: str

    def error(self, ordinal: int) -> DeviceUnavailable:
        """Return the error to raise.

        Args:
            ordinal: the number of the device that was requested.

        Returns:
            A new error.
        """
        return DeviceUnavailable(f"CUDA:{ordinal} cannot be used: {self.text}", code=self.code, hint=self.hint)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def install() -> str:
    """Return the command that installs CuPy and CUDA's libraries, for the CuPy that is installed, if any.

    Returns:
        The command.
    """
    try:
        import cupy

        old = cupy.cuda.runtime.runtimeGetVersion() < 13000
    except Exception:
        return "pip install 'sonnx[gpu]' for drivers of CUDA 13, 'sonnx[gpu12]' for those of CUDA 12"
    return f"pip install 'sonnx[{'gpu12' if old else 'gpu'}]'"


@cache
def situation() -> tuple[int, Cause | None]:
    """Count the devices; no device is used.

    Returns:
        The number of devices that can be used, and why there are none.
    """
    otherwise = "use device='CPU'"
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return 0, Cause("SX501", f"CuPy is installed, but its import fails: {error}", install())
        return 0, Cause("SX501", "CuPy is not installed", f"{otherwise}, or on a machine with a GPU: {install()}")
    except Exception as error:
        return 0, Cause("SX501", f"CuPy is installed, but its import fails: {error}", install())
    runtime = cupy.cuda.runtime
    needed = runtime.runtimeGetVersion()
    try:
        driver = runtime.driverGetVersion()
    except runtime.CUDARuntimeError:  # of a driver of which only parts are installed
        driver = 0
    if not driver:
        hint = f"{otherwise}, or install the driver of the GPU; in a container: docker run --gpus all"
        return 0, Cause("SX502", "there is no NVIDIA driver (libcuda.so.1)", hint)
    if driver // 1000 < needed // 1000:
        text = f"the NVIDIA driver supports CUDA {_version(driver)}, and this CuPy needs CUDA {needed // 1000}"
        other = ", or: pip uninstall cupy-cuda13x; pip install 'sonnx[gpu12]'" if driver // 1000 == 12 else ""
        return 0, Cause("SX503", text, f"install a newer driver{other}")
    try:
        count = int(runtime.getDeviceCount())
        reason = "the NVIDIA driver finds no device"
    except runtime.CUDARuntimeError as error:
        count, reason = 0, f"the NVIDIA driver finds no usable device ({error})"
    if not count:
        hint = f"{otherwise}, or check the output of nvidia-smi and the environment variable CUDA_VISIBLE_DEVICES"
        return 0, Cause("SX504", reason, hint)
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
        from cupy_backends.cuda.libs import cublas  # noqa: F401
    except Exception as error:
        return 0, _cause_of(error)
    return count, None


_tried: set[int] = set()


def check(ordinal: int) -> None:
    """Check that a device exists, and that it has once computed a kernel and a product in this process.

    Args:
        ordinal: the number of the device.

    Raises:
        DeviceUnavailable: it does not exist, or it did not compute.
    """
    count, cause = situation()
    if cause is not None:
        raise cause.error(ordinal)
    if not 0 <= ordinal < count:
        text = f"the ordinal of a CUDA device must be below their number, {count}, got CUDA:{ordinal}"
        raise DeviceUnavailable(text, hint=f"pass {' or '.join(f'CUDA:{i}' for i in range(min(count, 8)))}")
    if ordinal not in _tried:
        try:
            with context(ordinal):
                _try()
        except SonnxError as error:
            text = f"CUDA:{ordinal} exists, but cannot compute: {error.message}"
            raise DeviceUnavailable(text, code=error.code, hint=error.hint) from error
        except Exception as error:  # a first use may fail in ways that `failure` does not know
            text = f"CUDA:{ordinal} exists, but cannot compute: {type(error).__name__}: {_short(str(error))}"
            raise DeviceUnavailable(text, code="SX509", hint="sonnx doctor shows what is installed") from error
        _tried.add(ordinal)


_PRODUCT = [[14, 20], [30, 44]]


def _try() -> None:
    """Compute a kernel and a product of which the results are known."""
    import cupy

    from .products import matmul

    x = cupy.asarray([[1, 2], [3, 4]], "float32")
    found = cupy.asnumpy(matmul(cupy, x + x, x)).tolist()
    if found != _PRODUCT:
        raise DeviceFailure(
            f"the product of two small matrices must be {_PRODUCT}, got {found}",
            code="SX507",
            hint="use another device, and check this one, for example by nvidia-smi -q",
        )


def kernel_cache() -> Path:
    """Return the folder in which CuPy keeps compiled kernels.

    Returns:
        The folder, which need not exist.
    """
    return Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")


def _is_unwritable_cache(error: BaseException) -> bool:
    """Whether an error is that of CuPy when it writes a compiled kernel."""
    if not isinstance(error, OSError):
        return False
    return error.errno == errno.ENOSPC or (isinstance(error.filename, str) and kernel_cache() in Path(error.filename).parents)


def _cause_of(error: BaseException) -> Cause:
    """The cause of an exception that is not of a kernel: a library or a part of CUDA is absent."""
    missing = _MISSING.search(str(error))
    name = next(filter(None, missing.groups()), "") if missing else ""
    if name.startswith("nvrtc"):
        return Cause("SX505", "NVRTC, which compiles the kernels, is not installed (libnvrtc.so)", install())
    what = f"{_NAMES[name]} is not installed (lib{name}.so)" if name in _NAMES else f"a library of CUDA is absent: {error}"
    return Cause("SX506", what, install())


def failure(error: BaseException, ordinal: int, *, waited: bool = False) -> SonnxError | None:
    """Return what an exception of CuPy means for a user.

    Args:
        error: the exception.
        ordinal: the device that was computing.
        waited: whether all kernels before the one that failed had been waited for.

    Returns:
        The error to raise; None if the exception is not of a device, but of the values.
    """
    kind, text = type(error), str(error)
    if kind.__module__.startswith("cupy.cuda.memory") or text.startswith(_OUT_OF_MEMORY):
        return ResourceExhausted(
            f"CUDA:{ordinal} is out of memory: {_short(text).rstrip('.')}{_free(ordinal)}",
            code="SX613",
            hint="use a smaller batch, or a device with more memory; nvidia-smi lists what else uses this one",
        )
    if _is_unwritable_cache(error):
        return DeviceFailure(
            f"a kernel cannot be kept for CUDA:{ordinal}: {_short(text)}",
            code="SX508",
            hint=f"make space in {kernel_cache()} and make it writable, or set CUPY_CACHE_DIR to another folder",
        )
    if isinstance(error, (ImportError, OSError)) or kind.__module__.startswith("cuda.pathfinder"):
        if not _MISSING.search(text):
            return None
        cause = _cause_of(error)
        return DeviceFailure(f"CUDA:{ordinal} cannot compute this: {cause.text}", code=cause.code, hint=cause.hint)
    if kind.__module__ == "cupy.cuda.compiler" or "nvrtc" in kind.__module__:
        return DeviceFailure(
            f"a kernel cannot be compiled for CUDA:{ordinal}: {_short(text)}",
            code="SX508",
            hint=f"CUDA's headers may be absent: {install()}; sonnx doctor shows what is installed",
        )
    if kind.__module__.startswith(("cupy_backends.cuda", "cupy.cuda")):
        new = "use a new process: after most failures of a kernel, no other can run in this one"
        late = "; a kernel fails after it was started, so an earlier node may be the cause: run(validate=True) waits for each"
        return DeviceFailure(f"CUDA:{ordinal} failed: {_short(text)}", code="SX509", hint=new if waited else new + late)
    return None


def _short(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:3])[:400]


def _free(ordinal: int) -> str:
    """How much memory of a device is free, as the end of a message; "" if it does not answer."""
    import cupy

    try:
        with cupy.cuda.Device(ordinal):
            free, total = cupy.cuda.runtime.memGetInfo()
    except Exception:
        return ""
    return f"; {format_bytes(free)} of {format_bytes(total)} are free"


@cache
def memory(ordinal: int) -> int:
    """Return the memory of a device, which is read once.

    Args:
        ordinal: the number of the device.

    Returns:
        The number of bytes.
    """
    import cupy

    with context(ordinal):
        return int(cupy.cuda.runtime.memGetInfo()[1])


class context(contextlib.AbstractContextManager[None]):
    """A context in which a device is CuPy's current one; an exception of the device that leaves it becomes a SonnxError."""

    def __init__(self, ordinal: int) -> None:
        import cupy

        self._ordinal = ordinal
        self._device: Any = cupy.cuda.Device(ordinal)

    def __enter__(self) -> None:
        self._device.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._device.__exit__(kind, error, trace)
        if error is not None and not isinstance(error, SonnxError):
            found = failure(error, self._ordinal)
            if found is not None:
                raise found from error
