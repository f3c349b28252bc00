"""Where arrays live: a device is an array namespace and the way there and back.

`CPU` is NumPy, `CUDA` and `CUDA:1` are CuPy, and `STRICT` is NumPy that offers only what CuPy offers, for tests.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import numpy as np

from . import arrays
from .errors import DeviceUnavailable
from .limits import physical_memory
from .operator import is_host_value


class Device:
    """A device by ONNX's name for it.

    type: "CPU", "CUDA" or "STRICT".  device_id: the ordinal of a GPU, 0 elsewhere.
    Raises DeviceUnavailable when this machine has no such device.
    """

    def __init__(self, type: str, device_id: int = 0) -> None:
        self.type = type
        self.device_id = device_id
        self.xp = _namespace(type, device_id)

    def __str__(self) -> str:
        return f"{self.type}:{self.device_id}" if self.device_id else self.type

    @property
    def is_host(self) -> bool:
        return self.xp is arrays.numpy

    @property
    def memory(self) -> int:
        """Bytes of memory of this device, or of the machine."""
        if self.type == "CUDA":
            return int(self.xp.module.cuda.Device(self.device_id).mem_info[1])
        return physical_memory()

    def put(self, value: Any) -> Any:
        """A host value (array, sequence, map or None) on this device; what a device cannot hold stays on the host."""
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
        return self.xp.module.cuda.Device(self.device_id) if self.type == "CUDA" else contextlib.nullcontext()


def of(xp: arrays.Namespace) -> Device:
    """The device whose namespace this is."""
    if xp is arrays.numpy:
        return Device("CPU")
    if isinstance(xp, arrays.StrictNamespace):
        return Device("STRICT")
    return Device("CUDA", int(xp.module.cuda.Device().id))


def holding(value: Any) -> Device:
    """The device on which an array lies."""
    if isinstance(value, arrays.StrictArray):
        return Device("STRICT")
    if hasattr(value, "__cuda_array_interface__"):
        return Device("CUDA", int(value.device.id))
    return Device("CPU")


@cache
def _namespace(type: str, device_id: int) -> arrays.Namespace:
    if type == "CPU" and device_id == 0:
        return arrays.numpy
    if type == "STRICT" and device_id == 0:
        return arrays.StrictNamespace()
    if type == "CUDA":
        count, why = _gpus()
        if device_id < count:
            return arrays.CupyNamespace()
        raise DeviceUnavailable(f"CUDA:{device_id} was asked for; there are {count} CUDA devices{why}",
                                hint="use device='CPU', or install the [gpu] extra on a machine with a GPU")  # fmt: skip
    raise DeviceUnavailable(f"device {type!r} (ordinal {device_id}) was asked for; there are CPU and CUDA",
                            hint="write 'CPU', 'CUDA' or 'CUDA:1'")  # fmt: skip


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


def resolve(device: Any) -> Device:
    """A Device from "CPU", "CUDA:1", onnx's Device, or a Device; raises DeviceUnavailable."""
    if isinstance(device, Device):
        return device
    kind: Any = getattr(device, "type", None)
    if kind is not None:  # onnx.backend.base.Device: an enum and an ordinal
        name = {0: "CPU", 1: "CUDA"}.get(kind, kind)
        return Device(str(name), int(getattr(device, "device_id", 0)))
    name, _, ordinal = str(device).partition(":")
    if ordinal and not ordinal.isdecimal():
        raise DeviceUnavailable(f"device {device!r}: {ordinal!r} is not an ordinal", hint="write 'CUDA:1'")
    return Device(name.upper(), int(ordinal or 0))
