"""Devices: a device is an array namespace and the transfers between it and the host.

`CPU` is NumPy, `CUDA` and `CUDA:1` are CuPy, and `STRICT` is NumPy restricted to CuPy's functions, for tests.
A new device is one subclass of `Device` and one entry of `DEVICES`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from .. import dtypes
from ..errors import DeviceUnavailable, SonnxError
from ..limits import physical_memory
from . import cuda, graphs, namespaces, packing, strict
from .checks import Checks

_Kind: TypeAlias = type[namespaces.Namespace]

_NO_CONTEXT = contextlib.nullcontext()


class OnnxDevice(Protocol):
    """A device of `onnx.backend.base`."""

    @property
    def type(self) -> int | str:
        """The number of ONNX's `DeviceType` (0 CPU, 1 CUDA), or a name."""
        ...

    @property
    def device_id(self) -> int:
        """The ordinal of a GPU."""
        ...


class Device(ABC):
    """A device: an array namespace and the transfers between it and the host.

    `str(device)` is its name with the ordinal, such as "CUDA:1".

    Attributes:
        type: ONNX's name of the kind of device, such as "CPU".
        namespace: the class of the namespace of its arrays.
        is_host: whether its arrays are NumPy arrays.
        captures: whether work on it can be captured as a graph (graphs.py).
        device_id: the ordinal of a GPU; 0 for other devices.
        xp: the namespace of its arrays.
    """

    type: ClassVar[str]
    namespace: ClassVar[_Kind]
    is_host: ClassVar[bool] = False
    captures: ClassVar[bool] = False
    xp: Any

    def __init__(self, device_id: int = 0) -> None:
        """Create the device.

        Args:
            device_id: the ordinal of a GPU; 0 for other devices.

        Raises:
            DeviceUnavailable: this machine does not have the device.
        """
        self.device_id = device_id
        self._check()
        self.xp = _namespace(self.namespace)

    def _check(self) -> None:
        """Raise DeviceUnavailable for an ordinal that this machine does not have."""
        if self.device_id:
            raise _unknown(self.type, self.device_id)

    def __str__(self) -> str:
        """Return the name with the ordinal, such as "CUDA:1"."""
        return f"{self.type}:{self.device_id}" if self.device_id else self.type

    @classmethod
    def current(cls) -> Device:
        """Return the device of this kind on which work is issued now.

        Returns:
            For CUDA, CuPy's current device; for other kinds, the only one.
        """
        return cls()

    @classmethod
    @abstractmethod
    def holding(cls, value: Any) -> Device | None:
        """Return the device of this kind that holds an array.

        Args:
            value: any value.

        Returns:
            The device; None if the value is not an array of this kind of device.
        """

    @property
    def memory(self) -> int:
        """The device's memory in bytes."""
        return physical_memory()

    def put(self, value: Any) -> Any:
        """Copy a value from the host to this device.

        Args:
            value: an array, a list of them, a map or None.  Arrays of this device are returned as they are.

        Returns:
            The value on this device; strings, maps and dtypes that CuPy lacks stay on the host.
        """
        if self.is_host or value is None or is_host_value(value) or self.xp.isarray(value):
            return value
        if isinstance(value, list):
            return [self.put(v) for v in value]
        array = np.asarray(value)
        try:
            with self.active():
                return self.xp.from_host(array)
        except SonnxError as error:
            raise error.locate(dtypes=(dtypes.onnx_name(array.dtype),), shapes=(array.shape,)) from error.__cause__

    def get(self, value: Any) -> Any:
        """Copy a value from this device to the host.

        Args:
            value: an array of this device, a list of them, or a value that is on the host.

        Returns:
            The value as NumPy arrays.
        """
        if isinstance(value, list):
            return [self.get(v) for v in value]
        if not self.xp.isarray(value):
            return value
        with self.active():
            return self.xp.to_host(value)

    def copy(self, value: Any, order: str = "C") -> Any:
        """Copy a value of this device to new memory of this device.

        Args:
            value: an array, or a list of them.
            order: the order in memory, as for `copy` of NumPy.

        Returns:
            The copy.
        """
        if isinstance(value, list):
            return [self.copy(v, order) for v in value]
        with self.active():
            return value.copy(order)

    def cast(self, array: Any, dtype: Any) -> Any:
        """Convert an array of this device to a dtype, as `astype` does.

        Args:
            array: the array.
            dtype: the dtype.

        Returns:
            A new array of this device.
        """
        with self.active():
            return array.astype(dtype)

    def write(self, target: Any, value: Any, index: Any = ...) -> None:
        """Write to elements of an array of this device.

        Args:
            target: the array, which is changed.
            value: a number, an array of the host or an array of this device.
            index: the elements that are written; all by default.
        """
        with self.active():
            target[index] = self.put(value) if isinstance(value, np.ndarray) else value

    def adopt(self, value: Any) -> Any:
        """Take an array that is on a device without copying it.

        Args:
            value: any value.

        Returns:
            The array as one of this device; None if the value is on the host.

        Raises:
            DeviceUnavailable: the array is on another device.
        """
        return None if self.is_host or not self.xp.isarray(value) else value

    def get_all(self, values: Sequence[Any]) -> list[Any]:
        """Copy several values from this device to the host.

        Args:
            values: values as for `get`.

        Returns:
            The values as NumPy arrays.
        """
        return [self.get(v) for v in values]

    def checks(self) -> Checks | None:
        """Return where a run collects checks whose results are read once.

        Returns:
            The checks of a new run; None if each check is read at once, because that does not wait for a device.
        """
        return None

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which work is issued on this device.

        An exception of the device that leaves the context becomes a SonnxError.

        Returns:
            A context manager.
        """
        return _NO_CONTEXT

    def synchronize(self) -> None:  # noqa: B027  # on the host nothing is pending
        """Wait until all work that was issued on this device is complete."""

    def failure(self, error: BaseException, *, waited: bool = False) -> SonnxError | None:
        """Return what an exception of the device's library means for a user.

        Args:
            error: the exception.
            waited: whether each piece of work before the one that failed had been waited for.

        Returns:
            The error to raise; None if the exception is not of the device, but of the values.
        """
        return None


class CpuDevice(Device):
    """The host: NumPy."""

    type = "CPU"
    namespace = namespaces.NumpyNamespace
    is_host = True

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        """Return the host if the value is a NumPy array.

        Args:
            value: any value.

        Returns:
            The host; None for other values.
        """
        return cls() if isinstance(value, np.ndarray) else None


class CudaDevice(Device):
    """A GPU: CuPy."""

    type = "CUDA"
    namespace = namespaces.CupyNamespace
    captures = True

    def _check(self) -> None:
        cuda.check(self.device_id)

    @classmethod
    def current(cls) -> Device:
        """Return CuPy's current device.

        Returns:
            The GPU that is current in this thread.
        """
        return cls(int(_namespace(cls.namespace).module.cuda.Device().id))

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        """Return the GPU that holds a CuPy array.

        Args:
            value: any value.

        Returns:
            The GPU; None for other values.
        """
        return cls(int(value.device.id)) if _is_cupy(value) else None

    def adopt(self, value: Any) -> Any:
        """Take an array of CuPy, or of another library by DLPack or the CUDA array interface, without copying it.

        Args:
            value: any value.

        Returns:
            The CuPy array that shares the memory; None if the value is on the host.

        Raises:
            DeviceUnavailable: the array is on another GPU.
        """
        ordinal = cuda_ordinal(value)
        if ordinal is None:
            return None
        if ordinal != self.device_id:
            raise DeviceUnavailable(
                f"an array must be on {self.type}:{self.device_id}, got one on {self.type}:{ordinal}",
                hint="copy it there, or to the host, first",
            )
        if _is_cupy(value):
            return value
        with self.active():
            return self.xp.module.from_dlpack(value) if _by_dlpack(value) else self.xp.module.asarray(value)

    def get_all(self, values: Sequence[Any]) -> list[Any]:
        """Copy several values to the host; arrays that are not large together are copied at once.

        Args:
            values: values as for `get`.

        Returns:
            The values as NumPy arrays.
        """
        with self.active():
            return packing.unpacked(self.xp, packing.packed(self.xp, values), values, self.get)

    def checks(self) -> Checks | None:
        """Return where a run collects its checks.

        Returns:
            The checks of a new run.
        """
        return Checks(self.xp.module)

    @property
    def memory(self) -> int:
        """The GPU's memory in bytes."""
        return cuda.memory(self.device_id)

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this GPU is CuPy's current one, and exceptions of CUDA become SonnxErrors.

        Returns:
            A context manager.
        """
        return cuda.context(self.device_id)

    def synchronize(self) -> None:
        """Wait until all kernels and copies on this GPU are complete; exceptions of CUDA pass."""
        with graphs.CAPTURES:
            self.xp.module.cuda.Device(self.device_id).synchronize()

    def failure(self, error: BaseException, *, waited: bool = False) -> SonnxError | None:
        """Return what an exception of CuPy means for a user.

        Args:
            error: the exception.
            waited: whether all kernels before the one that failed had been waited for.

        Returns:
            The error to raise; None if the exception is not of CUDA.
        """
        return cuda.failure(error, self.device_id, waited=waited)


class StrictDevice(Device):
    """NumPy with CuPy's restrictions, for tests without a GPU."""

    type = "STRICT"
    namespace = strict.StrictNamespace

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        """Return the device if the value is a StrictArray.

        Args:
            value: any value.

        Returns:
            The device; None for other values.
        """
        return cls() if isinstance(value, strict.StrictArray) else None


_DLPACK_CUDA = 2
"""DLPack's number of the memory of a CUDA device."""

DEVICES: dict[str, type[Device]] = {kind.type: kind for kind in (CpuDevice, CudaDevice, StrictDevice)}
"""The classes of devices by name."""


def _unknown(type: str, device_id: int) -> DeviceUnavailable:
    if type in DEVICES:
        return DeviceUnavailable(f"the ordinal of {type} must be 0, got {device_id}", hint=f"pass {type!r}")
    return DeviceUnavailable(f"a device must be one of {', '.join(DEVICES)}, got {type!r}", hint="pass 'CPU', 'CUDA' or 'CUDA:1'")


@cache
def _namespace(kind: Any) -> Any:
    """The only instance of a namespace class."""
    return namespaces.numpy if kind is namespaces.NumpyNamespace else kind()


def device_count(type: str) -> int:
    """Count the devices of a kind.

    Args:
        type: "CPU", "CUDA" or "STRICT".

    Returns:
        The number of devices that this machine has; 0 for an unknown kind.
    """
    return cuda.situation()[0] if type == "CUDA" else int(type in DEVICES)


DeviceLike: TypeAlias = Device | OnnxDevice | str
"""A Device, its name ("CPU", "CUDA", "CUDA:1", "STRICT"), or a device of `onnx.backend.base`."""


def resolve(device: DeviceLike, device_id: int | None = None) -> Device:
    """Return the Device that a name or an object means.

    Args:
        device: "CPU", "CUDA", "CUDA:1", "STRICT", a device of `onnx.backend.base`, or a Device.
        device_id: the ordinal of a GPU; None for the one in the name, or 0.

    Returns:
        The device.

    Raises:
        DeviceUnavailable: the name is unknown, or this machine does not have the device.
    """
    if isinstance(device, Device):
        return device
    kind: Any = getattr(device, "type", None)
    if kind is not None:  # onnx.backend.base.Device: an enum and an ordinal
        name, ordinal = str({0: "CPU", 1: "CUDA"}.get(kind, kind)), str(getattr(device, "device_id", 0))
    else:
        name, _, ordinal = str(device).partition(":")
        name = name.upper()
    if ordinal and not ordinal.isdecimal():
        raise DeviceUnavailable(
            f"the ordinal of a device must be an integer that is not negative, got {device!r}", hint="pass 'CUDA:1'"
        )
    if ordinal and device_id is not None and int(ordinal) != device_id:
        raise DeviceUnavailable(f"device {device!r} and device_id={device_id} contradict each other", hint="pass one of them")
    number = int(ordinal or 0) if device_id is None else device_id
    if name not in DEVICES:
        raise _unknown(name, number)
    return DEVICES[name](number)


def restore(name: str) -> Device:
    """Return the device of a model or a tensor that was pickled.

    Args:
        name: the name of the device, `str(device)`.

    Returns:
        The device.

    Raises:
        DeviceUnavailable: this machine does not have the device.
    """
    try:
        return resolve(name)
    except DeviceUnavailable as error:
        error.message = f"what was pickled is on the device {name}: {error.message}"
        error.hint = "send it to a process that has this device, or prepare the model on the CPU before pickling it"
        raise


def device_of_namespace(xp: namespaces.Namespace) -> Device:
    """Return the device of a namespace.

    Args:
        xp: a namespace of a kind in `DEVICES`.

    Returns:
        The device; for CUDA, the current one.
    """
    return next(kind.current() for kind in DEVICES.values() if isinstance(xp, kind.namespace))


def device_of(value: Any) -> Device:
    """Return the device that holds a value.

    Args:
        value: an array of any namespace, or another value.

    Returns:
        The device of the array; the CPU for other values.
    """
    return next((d for kind in DEVICES.values() if (d := kind.holding(value)) is not None), CpuDevice())


def _is_cupy(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "cupy" and hasattr(value, "__cuda_array_interface__")


def _by_dlpack(value: Any) -> bool:
    return hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__")


def cuda_ordinal(value: Any) -> int | None:
    """Return the ordinal of the GPU that holds an array of any library.

    Args:
        value: any value.

    Returns:
        The ordinal; None for values that are not CUDA arrays by DLPack or the CUDA array interface.

    Raises:
        DeviceUnavailable: this machine has no GPU that could hold the array.
    """
    if _is_cupy(value):
        return int(value.device.id)
    if isinstance(value, (np.ndarray, np.generic)):
        return None
    if _by_dlpack(value):
        kind, ordinal = value.__dlpack_device__()
        return int(ordinal) if int(kind) == _DLPACK_CUDA else None
    described = getattr(value, "__cuda_array_interface__", None)
    if described is None:
        return None
    pointer = described["data"][0]
    if not pointer:  # of an empty array
        return 0
    cause = cuda.situation()[1]
    if cause is not None:
        raise cause.error(0)
    return int(_namespace(namespaces.CupyNamespace).module.cuda.runtime.pointerGetAttributes(pointer).device)


def is_host_value(value: Any) -> bool:
    """Check whether a value stays on the host on every device.

    Args:
        value: an array, a list or a map.

    Returns:
        True for strings, maps, dtypes that CuPy lacks, and lists that contain such values.
    """
    if isinstance(value, np.ndarray):
        return value.dtype in dtypes.HOST_ONLY
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(is_host_value(v) for v in value)
