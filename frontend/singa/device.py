"""Devices of SINGA's API: where tensors live, and the random streams that belong to each.

dev = device.create_cpu_device()
dev.SetRandSeed(1)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from singa_backend.devices import device as backend
from singa_backend.errors import DeviceUnavailable, InvalidInput


class _Stream:
    """A stream of random numbers.

    state: its seed and the number of draws so far, as a Tensor; None before the first draw.  lock: held during a draw.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.state: Any = None
        self.lock = threading.RLock()

    def start(self, seed: int) -> None:
        with self.lock:
            if self.state is None:
                self.seed = seed
            else:
                self.state.data = np.array([seed, 0], np.int64)


class Device:
    """A device.  Its random numbers come from a counter-based generator: a seed, and the number of draws so far.

    type: "CPU" or "CUDA" ("STRICT" for tests).  device_id: the ordinal of a GPU.
    Raises DeviceUnavailable where the machine has none.
    """

    def __init__(self, type: str = "CPU", device_id: int = 0, seed: int = 0) -> None:
        self.backend = backend.resolve(type, device_id)
        self._shared = _Stream(seed)
        self._own = threading.local()
        self._graph = False
        self.verbosity = 0
        self.skip_iterations = 5

    def __repr__(self) -> str:
        return f"<Device {self.backend}>"

    def __deepcopy__(self, memo: Any) -> Device:
        """A device is one thing: a copied model lives where the model does."""
        return self

    def __reduce__(self) -> Any:
        return resolve, (str(self.backend),)

    def id(self) -> int:
        """-1 for the CPU, else the ordinal of the GPU."""
        return self.backend.device_id if self.backend.type == "CUDA" else -1

    @property
    def _stream(self) -> _Stream:
        """The stream of this thread: the one that it has seeded, or the one that threads share."""
        stream: _Stream = getattr(self._own, "stream", self._shared)
        return stream

    @property
    def random_state(self) -> Any:
        """The seed and the number of draws so far of this thread's stream, as a Tensor; None before the first draw."""
        return self._stream.state

    def SetRandSeed(self, seed: int) -> None:
        """Start the random stream of this thread; the same seed produces the same numbers on every device.

        In the main thread this is the device's stream, which threads that set no seed share.  In any other thread it is a
        stream that only this thread draws from.

        Args:
            seed: an integer of [0, 2**63).

        Raises:
            InvalidInput: `seed` is another value (SX310).
        """
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
            raise InvalidInput(f"a seed is an integer of [0, 2**63), not {seed!r}", code="SX310")
        if threading.current_thread() is not threading.main_thread() and self._stream is self._shared:
            self._own.stream = _Stream(int(seed))
        self._stream.start(int(seed))

    def Sync(self) -> None:
        """Wait until all work on this device is done."""
        if self.backend.type == "CUDA":
            self.backend.xp.module.cuda.Device(self.backend.device_id).synchronize()

    def EnableGraph(self, enable: bool) -> None:
        """Remember that models on this device run as graphs; `Model.compile` says it for one model."""
        self._graph = bool(enable)

    def graph_enabled(self) -> bool:
        return self._graph

    def ResetGraph(self) -> None:
        """Kept for old programs: a graph belongs to its model, and is made anew where shapes change."""

    def RunGraph(self, serial: bool = False) -> None:
        """Kept for old programs: calling the model runs its graph."""

    def SetVerbosity(self, verbosity: int) -> None:
        self.verbosity = int(verbosity)

    def SetSkipIteration(self, skip_iteration: int) -> None:
        self.skip_iterations = int(skip_iteration)

    def PrintTimeProfiling(self) -> None:
        """Kept for old programs; nothing is measured here."""

    def Reset(self) -> None:
        """Start the random stream of this thread at its seed again."""
        if self.random_state is not None:
            self._stream.start(self.random_state.data[0])

    def host(self) -> Device:
        return default_device


DeviceLike: TypeAlias = Device | backend.DeviceLike
"""A Device, or what names one: "CPU", "CUDA", "CUDA:1", "STRICT", or a device of `singa_backend` or `onnx.backend.base`."""

default_device = Device("CPU")
"""The CPU; tensors that name no device live here."""


def get_default_device() -> Device:
    return default_device


def create_cpu_device() -> Device:
    """The CPU.  It is one device: every call returns the same."""
    return default_device


def get_num_gpus() -> int:
    """How many CUDA devices can be used from here."""
    return backend.device_count("CUDA")


def get_gpu_ids() -> list[int]:
    return list(range(get_num_gpus()))


def create_cuda_gpu() -> Device:
    """The first GPU; raises DeviceUnavailable where there is none."""
    return create_cuda_gpu_on(0)


def create_cuda_gpu_on(id: int) -> Device:
    """The GPU of this ordinal; raises DeviceUnavailable where there is none."""
    if id not in _cuda:
        _cuda.setdefault(id, Device("CUDA", id))  # another thread may have been faster
    return _cuda[id]


_cuda: dict[int, Device] = {}


def create_cuda_gpus(num: int) -> list[Device]:
    """The first `num` GPUs."""
    return create_cuda_gpus_on(range(num))


def create_cuda_gpus_on(ids: Sequence[int]) -> list[Device]:
    return [create_cuda_gpu_on(i) for i in ids]


def get_gpu_mem_size(id: int) -> tuple[int, int]:
    """Free and total bytes of a GPU."""
    found = create_cuda_gpu_on(id)
    free, total = found.backend.xp.module.cuda.Device(id).mem_info
    return int(free), int(total)


def device_query(id: int, verbose: bool = False) -> str:
    """What a GPU is, in words."""
    found = create_cuda_gpu_on(id)
    properties: dict[str, Any] = found.backend.xp.module.cuda.runtime.getDeviceProperties(id)
    kept = properties if verbose else {k: properties[k] for k in ("name", "totalGlobalMem", "major", "minor") if k in properties}
    return ", ".join(f"{k}: {v.decode() if isinstance(v, bytes) else v}" for k, v in kept.items())


def enable_lazy_alloc(enable: bool) -> None:
    """Kept for old programs: memory is always taken when it is needed."""


def create_opencl_device() -> Device:
    raise DeviceUnavailable("OpenCL devices are not offered", hint="use create_cpu_device() or create_cuda_gpu()")


def get_num_opencl_platforms() -> int:
    raise DeviceUnavailable("OpenCL devices are not offered", hint="use create_cpu_device() or create_cuda_gpu()")


def get_num_opencl_devices() -> int:
    raise DeviceUnavailable("OpenCL devices are not offered", hint="use create_cpu_device() or create_cuda_gpu()")


def resolve(device: DeviceLike | None) -> Device:
    """A Device from a Device, a name such as "CPU" or "CUDA:1", or None for the CPU."""
    if device is None:
        return default_device
    if isinstance(device, Device):
        return device
    found = backend.resolve(device)
    if found.type == "CPU":
        return default_device
    return create_cuda_gpu_on(found.device_id) if found.type == "CUDA" else Device(found.type, found.device_id)
