"""Devices: a device is an array namespace, and the transfers between it and the host.

`CPU` is NumPy, `CUDA` and `CUDA:1` are CuPy, and `STRICT` is NumPy that offers only what CuPy offers, for tests.
A new device is one subclass of `Device` and one entry of `DEVICES`.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from .. import dtypes
from ..errors import DeviceUnavailable
from ..limits import physical_memory
from . import namespaces, strict

_Kind: TypeAlias = type[namespaces.Namespace]


class OnnxDevice(Protocol):
    """A device of `onnx.backend.base`.  type: a number of its `DeviceType`, or a name.  device_id: the ordinal of a GPU."""

    @property
    def type(self) -> int | str: ...

    @property
    def device_id(self) -> int: ...


class Device(ABC):
    """A device by ONNX's name for it.

    type: its name.  device_id: the ordinal of a GPU, 0 for other devices.  xp: the namespace of its arrays.
    """

    type: ClassVar[str]
    namespace: ClassVar[_Kind]
    is_host: ClassVar[bool] = False
    xp: Any

    def __init__(self, device_id: int = 0) -> None:
        """Raises DeviceUnavailable if this machine does not have the device."""
        self.device_id = device_id
        self._check()
        self.xp = _namespace(self.namespace)

    def _check(self) -> None:
        """Raise DeviceUnavailable for an ordinal that this machine does not have."""
        if self.device_id:
            raise _unknown(self.type, self.device_id)

    def __str__(self) -> str:
        return f"{self.type}:{self.device_id}" if self.device_id else self.type

    @classmethod
    def current(cls) -> Device:
        """The device of this kind on which work is issued now."""
        return cls()

    @classmethod
    @abstractmethod
    def holding(cls, value: Any) -> Device | None:
        """The device of this kind that holds an array, if one does."""

    @property
    def memory(self) -> int:
        """Bytes of memory of this device."""
        return physical_memory()

    def put(self, value: Any) -> Any:
        """Copy a host value (array, sequence, map or None) to this device; a value that it cannot hold stays on the host."""
        if self.is_host or value is None or is_host_value(value):
            return value
        if isinstance(value, list):
            return [self.put(v) for v in value]
        return self.xp.from_host(np.asarray(value))

    def get(self, value: Any) -> Any:
        """The value on the host."""
        if isinstance(value, list):
            return [self.get(v) for v in value]
        return self.xp.to_host(value) if self.xp.isarray(value) else value

    def active(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which work on this device is issued."""
        return contextlib.nullcontext()


class CpuDevice(Device):
    """The host: NumPy."""

    type = "CPU"
    namespace = namespaces.NumpyNamespace
    is_host = True

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        return cls() if isinstance(value, np.ndarray) else None


class CudaDevice(Device):
    """A GPU: CuPy."""

    type = "CUDA"
    namespace = namespaces.CupyNamespace

    def _check(self) -> None:
        count, why = _gpus()
        if self.device_id >= count:
            raise DeviceUnavailable(
                f"CUDA:{self.device_id} was requested; there are {count} CUDA devices{why}",
                hint="use device='CPU', or install the [gpu] extra on a machine with a GPU",
            )

    @classmethod
    def current(cls) -> Device:
        return cls(int(_namespace(cls.namespace).module.cuda.Device().id))

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        return cls(int(value.device.id)) if hasattr(value, "__cuda_array_interface__") else None

    @property
    def memory(self) -> int:
        return int(self.active().mem_info[1])

    def active(self) -> Any:
        return self.xp.module.cuda.Device(self.device_id)


class StrictDevice(Device):
    """NumPy with CuPy's restrictions."""

    type = "STRICT"
    namespace = strict.StrictNamespace

    @classmethod
    def holding(cls, value: Any) -> Device | None:
        return cls() if isinstance(value, strict.StrictArray) else None


DEVICES: dict[str, type[Device]] = {kind.type: kind for kind in (CpuDevice, CudaDevice, StrictDevice)}
"""The kinds of devices by name."""


def _unknown(type: str, device_id: int) -> DeviceUnavailable:
    return DeviceUnavailable(
        f"device {type!r} (ordinal {device_id}) was requested; there are CPU and CUDA", hint="write 'CPU', 'CUDA' or 'CUDA:1'"
    )


@cache
def _namespace(kind: Any) -> Any:
    """The one namespace of a kind."""
    return namespaces.numpy if kind is namespaces.NumpyNamespace else kind()


@cache
def _gpus() -> tuple[int, str]:
    try:
        import cupy
    except ImportError:
        return 0, " (CuPy is not installed)"
    try:
        return int(cupy.cuda.runtime.getDeviceCount()), ""
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return 0, f" ({error})"


def device_count(type: str) -> int:
    """How many devices of a kind this machine has."""
    return _gpus()[0] if type == "CUDA" else int(type in DEVICES)


DeviceLike: TypeAlias = Device | OnnxDevice | str
"""A Device, its name ("CPU", "CUDA", "CUDA:1", "STRICT"), or a device of `onnx.backend.base`."""


def resolve(device: DeviceLike, device_id: int | None = None) -> Device:
    """A Device from "CPU", "CUDA:1", a device of onnx.backend.base, or a Device.

    device_id: the ordinal, for a name without one.  Raises DeviceUnavailable.
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
        raise DeviceUnavailable(f"device {device!r}: {ordinal!r} is not an ordinal", hint="write 'CUDA:1'")
    number = int(ordinal or 0) if device_id is None else device_id
    if name not in DEVICES:
        raise _unknown(name, number)
    return DEVICES[name](number)


def device_of_namespace(xp: namespaces.Namespace) -> Device:
    """The device whose namespace this is; for CUDA, the current device."""
    return next(kind.current() for kind in DEVICES.values() if isinstance(xp, kind.namespace))


def device_of(value: Any) -> Device:
    """The device that holds an array; the CPU for values of other kinds."""
    return next((d for kind in DEVICES.values() if (d := kind.holding(value)) is not None), CpuDevice())


def is_host_value(value: Any) -> bool:
    """Whether a value stays on the host on every device: strings, maps, and dtypes that CuPy lacks."""
    if isinstance(value, np.ndarray):
        return value.dtype in dtypes.HOST_ONLY
    if isinstance(value, dict):
        return True
    return isinstance(value, list) and any(is_host_value(v) for v in value)
