"""Devices of SINGA's API: where tensors are stored, and the streams of random numbers of each device.

dev = device.create_cpu_device()
dev.SetRandSeed(1)
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from singa_backend.devices import device as backend
from singa_backend.errors import DeviceUnavailable, InvalidInput


class _Stream:
    """A stream of random numbers.

    Attributes:
        seed: The seed; after the first draw, `state` holds it.
        state: The seed and the number of draws so far, as a Tensor; None before the first draw.
        lock: Held during a draw.
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


class _StepTimes:
    """Times of the operators in training steps, as `Device.PrintTimeProfiling` prints them.

    The steps of one thread are measured at a time; those of other threads meanwhile are not.

    Attributes:
        steps: The number of steps that were measured, without those that were skipped.
        rows: For each operator of a step, by its position: its name, whether it is of the backward pass, the sum of its times.
        backward: Whether the present step is in its backward pass.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.rows: list[tuple[str, bool, float]] = []
        self.backward = False
        self._skipped = 0
        self._present: list[tuple[str, bool, float]] = []
        self._thread: int | None = None
        self._lock = threading.Lock()

    @property
    def measures(self) -> bool:
        """Whether this thread is in a step that is measured."""
        return self._thread == threading.get_ident()

    @contextmanager
    def step(self, skip: int) -> Iterator[None]:
        """Measure a step, unless it is one of the first `skip`, or within another one."""
        if not self._lock.acquire(blocking=False):
            yield
            return
        self._present, self.backward, self._thread = [], False, threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            try:
                if sys.exception() is None:
                    self._keep(skip)
            finally:
                self._lock.release()

    def _keep(self, skip: int) -> None:
        if self._skipped < skip:
            self._skipped += 1
            return
        same = [r[:2] for r in self.rows] == [p[:2] for p in self._present]
        if self.steps and not same:  # a step of other operators: its times have no place in the sums
            self.steps, self.rows = 0, []
        self.rows = [(n, b, t + (self.rows[i][2] if same else 0.0)) for i, (n, b, t) in enumerate(self._present)]
        self.steps += 1

    def add(self, name: str, seconds: float, backward: bool | None = None) -> None:
        """Add the time of an operator to the present step."""
        self._present.append((name, self.backward if backward is None else backward, seconds))


class Device:
    """A device on which tensors are stored and operators run.

    Random numbers come from a counter-based generator, whose state is a seed and the number of draws so far.

    Args:
        type: "CPU" or "CUDA" ("STRICT" for tests).
        device_id: The ordinal of a GPU; 0 for other devices.
        seed: The seed of the random numbers until `SetRandSeed` is called.

    Raises:
        DeviceUnavailable: The type is unknown, or this machine does not have the device.
    """

    def __init__(self, type: str = "CPU", device_id: int = 0, seed: int = 0) -> None:
        self.backend = backend.resolve(type, device_id or None)
        self._shared = _Stream(seed)
        self._own = threading.local()
        self._graph = False
        self.verbosity = 0
        self.skip_iterations = 5
        self._times = _StepTimes()

    def __repr__(self) -> str:
        return f"<Device {self.backend}>"

    def __deepcopy__(self, memo: Any) -> Device:
        """Return the device itself: a copied model is on the same device as the model."""
        return self

    def __reduce__(self) -> Any:
        return _restored, (str(self.backend),)

    def id(self) -> int:
        """The number of the device.

        Returns:
            The ordinal of the GPU; -1 for a device that is not a GPU.
        """
        return self.backend.device_id if self.backend.type == "CUDA" else -1

    @property
    def _stream(self) -> _Stream:
        """The stream of this thread: its own if it has set a seed, otherwise the one that threads share."""
        stream: _Stream = getattr(self._own, "stream", self._shared)
        return stream

    @property
    def random_state(self) -> Any:
        """The seed and the number of draws so far of this thread's stream, as a Tensor; None before the first draw."""
        return self._stream.state

    def stream(self) -> Any:
        """Return the random state; deprecated: use `random_state`.

        Returns:
            The seed and the number of draws so far, as a Tensor; None before the first draw.
        """
        warnings.warn("Device.stream() is now Device.random_state", DeprecationWarning, stacklevel=2)
        return self.random_state

    def SetRandSeed(self, seed: int) -> None:
        """Restart the random stream of this thread; the same seed produces the same numbers on every device.

        In the main thread this is the stream of the device, which is shared with all threads that set no seed. In any other
        thread it is a stream from which only this thread draws.

        Args:
            seed: An integer in [0, 2**63).

        Raises:
            InvalidInput: `seed` is another value (SX310).
        """
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**63:
            raise InvalidInput(f"the seed must be an integer in [0, 2**63), got {seed!r}", code="SX310")
        if threading.current_thread() is not threading.main_thread() and self._stream is self._shared:
            self._own.stream = _Stream(int(seed))
        self._stream.start(int(seed))

    def Sync(self) -> None:
        """Wait until all work on this device is complete."""
        with self.backend.active():
            self.backend.synchronize()

    def EnableGraph(self, enable: bool) -> None:
        """Set the flag that `graph_enabled` returns; the `use_graph` of `Model.compile` is what makes a model run as a graph.

        Args:
            enable: The value of the flag.
        """
        self._graph = bool(enable)

    def graph_enabled(self) -> bool:
        """Whether `EnableGraph` has set its flag.

        Returns:
            The flag; False before the first call of `EnableGraph`.
        """
        return self._graph

    def ResetGraph(self) -> None:
        """Do nothing; kept for old programs. A graph belongs to its model, which records another one when shapes change."""

    def RunGraph(self, serial: bool = False) -> None:
        """Do nothing; kept for old programs. Calling the model runs its graph.

        Args:
            serial: Ignored.
        """

    def SetVerbosity(self, verbosity: int) -> None:
        """Choose what is measured in training steps from now on: the calls of a Model in training, on the tape or as a graph.

        Args:
            verbosity: 0 for nothing; 1 for the times of the forward and the backward pass; 2 for the time of every operator.

        Raises:
            InvalidInput: `verbosity` is not an integer of at least 0 (SX309).
        """
        level = _count("verbosity", verbosity)
        if level and not self.verbosity:
            self._times = _StepTimes()
        self.verbosity = level

    def SetSkipIteration(self, skip_iteration: int) -> None:
        """Set how many training steps pass before the first one that is measured: they record graphs and fill caches.

        Args:
            skip_iteration: The number of steps; 5 before the first call.

        Raises:
            InvalidInput: `skip_iteration` is not an integer of at least 0 (SX309).
        """
        self.skip_iterations = _count("skip_iteration", skip_iteration)

    def PrintTimeProfiling(self) -> None:
        """Print the times that `SetVerbosity` has requested, as means over the steps that were measured.

        The backward pass includes the updates of the optimizer. For inference see `SingaRep.profile` and `sonnx profile`.
        """
        times = self._times
        lines = ["Time Profiling:"]
        if not self.verbosity:
            lines.append("nothing was measured: call SetVerbosity(1) or SetVerbosity(2) before the training")
        elif not times.steps:
            lines.append(f"no training step was measured after the first {self.skip_iterations} (SetSkipIteration)")
        elif self.verbosity == 1:
            for backward, name in ((False, "Forward"), (True, "Backward")):
                mean = sum(t for _, b, t in times.rows if b == backward) / times.steps
                lines.append(f"{name} Propagation Time : {mean:.6g} sec")
        else:
            lines += [f"OP_ID{i}. {name} : {t / times.steps:.6g} sec" for i, (name, _, t) in enumerate(times.rows)]
        print("\n".join(lines))

    def Reset(self) -> None:
        """Restart the random stream of this thread from its seed."""
        if self.random_state is not None:
            self._stream.start(self.random_state.data[0])

    def host(self) -> Device:
        """The device of the host.

        Returns:
            The CPU.
        """
        return default_device


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise InvalidInput(f"{name} must be an integer of at least 0, got {value!r}", code="SX309")
    return int(value)


DeviceLike: TypeAlias = Device | backend.DeviceLike
"""A Device, its name ("CPU", "CUDA", "CUDA:1", "STRICT"), or a device of `singa_backend` or `onnx.backend.base`."""

default_device = Device("CPU")
"""The CPU, the device of tensors that are created without one."""


def get_default_device() -> Device:
    """The device of tensors that are created without one.

    Returns:
        The CPU; every call returns the same object.
    """
    return default_device


def create_cpu_device() -> Device:
    """The CPU.

    Returns:
        The CPU; every call returns the same object.
    """
    return default_device


def get_num_gpus() -> int:
    """The number of usable CUDA devices.

    Returns:
        The number of devices that CuPy reports; 0 if CuPy is not installed or finds none.
    """
    return backend.device_count("CUDA")


def get_gpu_ids() -> list[int]:
    """The ordinals of the usable CUDA devices.

    Returns:
        The integers from 0 to `get_num_gpus() - 1`.
    """
    return list(range(get_num_gpus()))


def create_cuda_gpu() -> Device:
    """The first GPU.

    Returns:
        The device "CUDA:0"; every call returns the same object.

    Raises:
        DeviceUnavailable: This machine does not have a usable GPU.
    """
    return create_cuda_gpu_on(0)


def create_cuda_gpu_on(id: int) -> Device:
    """The GPU with an ordinal.

    Args:
        id: The ordinal, from 0.

    Returns:
        The device; every call with one ordinal returns the same object.

    Raises:
        DeviceUnavailable: This machine does not have a usable GPU with this ordinal.
    """
    if id not in _cuda:
        try:
            _cuda.setdefault(id, Device("CUDA", id))  # another thread may have been faster
        except DeviceUnavailable as error:
            if "create_cpu_device" not in error.hint:
                other = error.hint.replace(
                    "use device='CPU', or on", "on"
                )  # the name of a device is not what this function takes
                error.hint = "; ".join(filter(None, ["create_cpu_device() needs no GPU", other]))
            raise
    return _cuda[id]


_cuda: dict[int, Device] = {}


def create_cuda_gpus(num: int) -> list[Device]:
    """The first GPUs.

    Args:
        num: The number of GPUs.

    Returns:
        The devices "CUDA:0" to "CUDA:{num - 1}".

    Raises:
        InvalidInput: `num` is not an integer of at least 0 (SX309).
        DeviceUnavailable: This machine has fewer usable GPUs.
    """
    return create_cuda_gpus_on(range(_count("num", num)))


def create_cuda_gpus_on(ids: Sequence[int]) -> list[Device]:
    """The GPUs with some ordinals.

    Args:
        ids: The ordinals, from 0.

    Returns:
        The devices, in the order of `ids`.

    Raises:
        DeviceUnavailable: This machine does not have a usable GPU with one of the ordinals.
    """
    return [create_cuda_gpu_on(i) for i in ids]


def get_gpu_mem_size(id: int) -> tuple[int, int]:
    """The free and the total memory of a GPU.

    Args:
        id: The ordinal, from 0.

    Returns:
        (free, total), in bytes.

    Raises:
        DeviceUnavailable: This machine does not have a usable GPU with this ordinal.
    """
    found = create_cuda_gpu_on(id)
    free, total = found.backend.xp.module.cuda.Device(id).mem_info
    return int(free), int(total)


def device_query(id: int, verbose: bool = False) -> str:
    """Describe a GPU.

    Args:
        id: The ordinal, from 0.
        verbose: Whether to list every property that CUDA reports, not only the name, memory and compute capability.

    Returns:
        The properties, as "name: value" joined by commas; `totalGlobalMem` is in bytes.

    Raises:
        DeviceUnavailable: This machine does not have a usable GPU with this ordinal.
    """
    found = create_cuda_gpu_on(id)
    properties: dict[str, Any] = found.backend.xp.module.cuda.runtime.getDeviceProperties(id)
    kept = properties if verbose else {k: properties[k] for k in ("name", "totalGlobalMem", "major", "minor") if k in properties}
    return ", ".join(f"{k}: {v.decode() if isinstance(v, bytes) else v}" for k, v in kept.items())


def enable_lazy_alloc(enable: bool) -> None:
    """Do nothing; kept for old programs. Memory is always allocated when it is needed.

    Args:
        enable: Ignored.
    """


def create_opencl_device() -> Device:
    """Raise an error; kept for old programs, because OpenCL is not supported.

    Returns:
        Never.

    Raises:
        DeviceUnavailable: Always.
    """
    raise DeviceUnavailable("OpenCL devices are not supported", hint="use create_cpu_device() or create_cuda_gpu()")


def get_num_opencl_platforms() -> int:
    """Raise an error; kept for old programs, because OpenCL is not supported.

    Returns:
        Never.

    Raises:
        DeviceUnavailable: Always.
    """
    raise DeviceUnavailable("OpenCL devices are not supported", hint="use create_cpu_device() or create_cuda_gpu()")


def get_num_opencl_devices() -> int:
    """Raise an error; kept for old programs, because OpenCL is not supported.

    Returns:
        Never.

    Raises:
        DeviceUnavailable: Always.
    """
    raise DeviceUnavailable("OpenCL devices are not supported", hint="use create_cpu_device() or create_cuda_gpu()")


def _restored(name: str) -> Device:
    """The device of a pickled tensor; raises DeviceUnavailable if this machine does not have it."""
    return resolve(backend.restore(name))


def resolve(device: DeviceLike | None) -> Device:
    """Return the Device that a name or an object means.

    Args:
        device: A Device, a name such as "CPU" or "CUDA:1", a device of `singa_backend` or `onnx.backend.base`; None for the CPU.

    Returns:
        The device. The CPU and each GPU are one object each; other names create a new device at every call.

    Raises:
        DeviceUnavailable: The name is unknown, or this machine does not have the device.
    """
    if device is None:
        return default_device
    if isinstance(device, Device):
        return device
    found = backend.resolve(device)
    if found.type == "CPU":
        return default_device
    return create_cuda_gpu_on(found.device_id) if found.type == "CUDA" else Device(found.type, found.device_id)
