"""A CUDA device that is emulated by the processor, for tests: CuPy's own wheel runs on it, unchanged.

CuPy calls CUDA's driver, its runtime, its compiler and its libraries.  `install()` puts stand-ins in their places:

    driver and runtime   runtime.cpp    memory of two devices, copies, launches; streams.h: what is ordered, by which events;
                                        capture.h: graphs that streams capture
    compiler             compiler.py    g++ compiles the kernels; device.h: what CUDA C++ adds, and flushed subnormal numbers
    cuBLAS, cuSOLVER, cuFFT             cublas.cpp, cusolver.cpp, cufft.cpp
    thrust, cub          host.py        NumPy; cub.h: cub's functions in kernels

It finds: names and types that CuPy lacks, work on the wrong device, reads of memory that nothing has written, accesses outside
an array, host pointers in launches, work of two streams that no event orders, copies from and to pinned memory for which the host
does not wait, results that depend on the order of threads and numbers that two threads read and write without an atomic (both
with `order("both")`), copies and synchronizations that nobody wanted (it counts all of them); the same at each launch of a graph,
and what a stream that captures cannot take, work that a capture leaves out, graphs that use memory which was freed, and those
that run twice at a time.
It cannot find: reads before an array, faults of CUDA's own libraries, differences of the processors' arithmetic (fused
multiplication and addition, fast intrinsics, casts out of range), numbers and draws of the host that a capture has frozen (a
replay with other inputs shows them), memory that a pool reuses while a graph needs it, speed.  Branches of graphs are not
emulated, nor copies from and to the host in them: a capture refuses them.  Streams of two devices are not compared, and two
parts of one allocation are one array for streams.

With tests/fakecuda in PYTHONPATH, `python -m fakecuda COMMAND ...` runs a command, and all processes that it starts, on the
emulated devices; `pytest -m fakecuda` runs the tests that need them.  Linux on x86-64 only.

Environment variables change what a process sees:

    FAKECUDA_DEVICES      the number of devices (2)
    FAKECUDA_MEMORY_MIB   the memory of each device (8192)
    FAKECUDA_DRIVER       the version of the driver (13000); 0: there is none
    FAKECUDA_WITHOUT      libraries that are absent, such as "nvrtc,cublas"
    FAKECUDA_NULL         1: the null device, which counts launches and copies and executes none: real sizes in seconds.  What is
                          read back contains 0xFF, so that nothing may depend on values.  `kernel_bytes` counts the bytes of
                          the arrays that kernels, products, copies and memsets read and write; see `logging`
    FAKECUDA_POOL         1: CuPy's pool of memory, as on a device; otherwise every allocation is exact
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

CUPY = "14.2.0"
"""The version of CuPy whose functions the stand-ins replace."""

ENVIRONMENT = "SONNX_FAKECUDA"
"""The environment variable that makes a process of `python -m fakecuda` install the emulation when it imports CuPy."""

NAMES = (
    "launches", "products", "to_host", "to_device", "on_device", "between_devices", "memsets", "synchronizations", "events",
    "allocations", "to_host_bytes", "to_device_bytes", "between_devices_bytes", "foreign", "races",
    "unordered", "host_pointers", "memory_queries", "kernel_bytes", "graphs", "graph_nodes",
)  # fmt: skip
"""The names of the counts, in the order of runtime.cpp.

`graphs` counts launches of graphs, and `graph_nodes` what these execute: kernels, products, copies and memsets, which the other
counts do not contain.
"""


class Unavailable(Exception):
    """The emulation cannot run here; the message names what is absent."""


def install() -> None:
    """Put the stand-ins in their places in this process; CuPy must not have been imported.

    Raises:
        Unavailable: g++, CuPy, its version, CUDA's headers or the processor do not allow it.
        RuntimeError: CuPy was imported before, or lacks a function that a stand-in replaces.
    """
    from . import installation

    installation.install()


def counts() -> dict[str, int]:
    """Return what the devices have done since the last `reset`.

    Returns:
        The number of each kind of event; bytes for the names that end in `_bytes`.
    """
    from . import installation

    driver = installation.driver()
    return {name: driver.fake_count(i) for i, name in enumerate(NAMES)}


@contextlib.contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count what a block of code does on the devices.

    Yields:
        A dict that holds the counts after the block.
    """
    before = counts()
    during: dict[str, int] = {}
    yield during
    during.update({name: value - before[name] for name, value in counts().items()})


def reset() -> None:
    """Forget counts, the report and the fault of a kernel; a device would need a new process for the last."""
    from . import installation

    installation.driver().fake_reset()


def report() -> list[str]:
    """Return what the driver found wrong since the last call.

    Returns:
        One line for each use of an array of another device or of an unfinished one, host pointer, race, and fault.
    """
    from . import installation

    return str(installation.driver().fake_report().decode()).splitlines()


def used(device: int) -> int:
    """Return the number of bytes that are allocated on a device.

    Args:
        device: the ordinal.

    Returns:
        The number of bytes.
    """
    from . import installation

    return int(installation.driver().fake_used(device))


def nodes(graph: Any) -> int:
    """Return the number of nodes of an executable graph, as `graph_nodes` counts them.

    Args:
        graph: the graph that `cupy.cuda.Stream.end_capture` has returned.

    Returns:
        The number of kernels, products, copies and memsets.
    """
    from . import installation

    return int(installation.driver().fake_graph_nodes(graph.graphExec))


class Work(NamedTuple):
    """What the null device was told to do.

    Attributes:
        in_graph: whether it is a node of a graph that was launched.
        kernels: the number of kernels of which it consists.
        bytes: what it reads and writes: each of its arrays once, in whole if a kernel indexes it by itself, and the whole
            allocation if the driver is passed an address only.
        flops: the operations of a product.
        name: the kernel, the function of a library, "a copy" or "a memset".
    """

    in_graph: bool
    kernels: int
    bytes: int
    flops: int
    name: str


@contextlib.contextmanager
def logging() -> Iterator[list[Work]]:
    """Log what a block of code lets the null device do.

    Yields:
        A list that holds the work after the block.
    """
    from . import installation

    driver = installation.driver()
    driver.fake_log(1)
    works: list[Work] = []
    try:
        yield works
    finally:
        for line in driver.fake_work().decode().splitlines():
            in_graph, kernels, size, flops, name = line.split(" ", 4)
            works.append(Work(in_graph == "1", int(kernels), int(size), int(flops), name))
        driver.fake_log(0)


@contextlib.contextmanager
def order(which: str) -> Iterator[None]:
    """Choose the order in which the threads of a kernel run.

    Args:
        which: "ascending", "descending", or "both": each kernel runs in both orders, and different bits are reported as a race.
    """
    from . import installation

    now = installation.order()
    before = now.value
    now.value = ("ascending", "descending", "both").index(which)
    try:
        yield
    finally:
        now.value = before


@contextlib.contextmanager
def copies(when: str) -> Iterator[None]:
    """Choose when asynchronous copies from pinned memory read it.

    Args:
        when: "late", the default: when the next work of their stream begins; or "early", when they are requested.
    """
    from . import installation

    now = installation.copies()
    before = now.value
    now.value = ("early", "late").index(when)
    try:
        yield
    finally:
        now.value = before


def environment() -> dict[str, str]:
    """Return the environment for processes that run on the emulated devices.

    Returns:
        A copy of the environment of this process, with the variables added.
    """
    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # with sitecustomize.py
    paths = [folder, *(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != folder)]
    return {**os.environ, ENVIRONMENT: "1", "PYTHONPATH": os.pathsep.join(paths)}
