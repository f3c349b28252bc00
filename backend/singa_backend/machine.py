"""The cores and the memory that this process may use, and who else uses them."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def processor(source: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor.

    Args:
        source: the file in which Linux describes the cores.

    Returns:
        Such as "AMD EPYC"; the kind of machine, such as "arm64", if the system does not name the processor.
    """
    try:
        named = re.search(r"^model name\s*:\s*(.+)$", source.read_text(errors="replace"), re.MULTILINE)
    except OSError:
        named = None
    return " ".join(named[1].split()) if named else platform.machine()


def features(source: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """What Linux reports of the first core that decides which instructions it has, and how fast they are; empty elsewhere."""
    found: dict[str, str] = {}
    try:
        with open(source, errors="replace") as lines:
            for line in lines:
                name, _, text = line.partition(":")
                if not name.strip():
                    break
                found[name.strip()] = text.strip()
    except OSError:
        pass
    return {name: found[name] for name in ("vendor_id", "cpu family", "model", "model name", "flags") if name in found}


def usable_cores() -> int:
    """The number of cores that this process may keep busy.

    Returns:
        The number of cores of its affinity mask, or the whole cores of its control group's quota if these are fewer; at least 1.
    """
    allowed = affinity()
    quota = cpu_quota()
    return allowed if quota is None else max(1, min(allowed, int(quota)))


def affinity() -> int:
    """The number of cores that the scheduler may choose for this process.

    Returns:
        The number of cores of the affinity mask; of the machine where there is no such mask.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0)) or 1
    return cores()


@cache
def cpu_quota(root: Path = CGROUPS, memberships: Path = Path("/proc/self/cgroup")) -> float | None:
    """The time on cores that the control groups of this process allow, as containers set it.

    Args:
        root: the folder of the control groups.
        memberships: the file that lists the groups of the process.

    Returns:
        The number of cores, which may be a fraction: the minimum of the group and those that contain it; None without a quota.
    """
    try:
        lines = memberships.read_text().splitlines()
    except OSError:
        return None
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:
            found += [_quota(p / "cpu.max") for p in _ancestors(root, group)]
        elif "cpu" in controllers.split(","):
            for name in (controllers, "cpu"):
                found += [_quota(p / "cpu.cfs_quota_us", p / "cpu.cfs_period_us") for p in _ancestors(root / name, group)]
    return min((q for q in found if q is not None), default=None)


def _ancestors(root: Path, group: str) -> Iterator[Path]:
    """The folders of a group and of those that contain it; in a container the group's own path may not exist."""
    parts = [p for p in group.split("/") if p not in ("", "..")]
    for n in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:n])


def _quota(*files: Path) -> float | None:
    try:
        quota, period = (int(n) for n in " ".join(f.read_text() for f in files).split())
    except (OSError, ValueError):  # a file is missing, or holds "max"
        return None
    return quota / period if quota > 0 and period > 0 else None


def cores() -> int:
    """The number of cores of the machine."""
    return os.cpu_count() or 1


def peak_bytes() -> int | None:
    """The largest memory of this process so far; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak) if sys.platform == "darwin" else int(peak) * 1024


@contextmanager
def without_collections() -> Iterator[None]:
    """The context in which Python does not look for cycles of unused objects.

    What makes many objects that are kept, such as a recorded step with its plan, would start collections of all objects of the
    program, one after the other, each for nothing.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def release_freed_memory() -> None:
    """Return memory that was freed to the system, if the C library keeps it (glibc's malloc_trim)."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # another C library
        return None


def running(file: Path = Path("/proc/loadavg")) -> int:
    """The number of threads of the machine that run now, or could if they had a core.

    Args:
        file: the file that has the number.

    Returns:
        The number, including the caller; 0 if the system does not report it.
    """
    try:
        return int(file.read_text().split()[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0


def waited(tasks: Path = Path("/proc/self/task")) -> float | None:
    """The seconds for which threads of this process were ready to run and had no core, so far.

    Args:
        tasks: the folder of the threads.

    Returns:
        The sum over the threads that exist; None if the system does not report it.
    """
    total = 0
    try:
        for thread in tasks.iterdir():
            try:
                total += int((thread / "schedstat").read_text().split()[1])
            except FileNotFoundError:  # the thread has just ended
                if not thread.exists():
                    continue
                return None
    except (OSError, ValueError, IndexError):
        return None
    return total / 1e9


def used_by_others(seconds: float = 0.2, statistics: Path = Path("/proc/stat")) -> float | None:
    """How many of the cores of the affinity mask other programs use, measured while this thread sleeps.

    Time that a hypervisor assigns to other machines counts as used.

    Args:
        seconds: how long to measure.
        statistics: the file of the times of each core.

    Returns:
        The mean number of cores, 0 or more; None if the system does not report it.
    """
    if not hasattr(os, "sched_getaffinity"):
        return None
    allowed = sorted(os.sched_getaffinity(0))
    try:
        before, own, began = _busy(statistics, allowed), sum(os.times()[:2]), time.monotonic()
        time.sleep(seconds)
        after, took = _busy(statistics, allowed), time.monotonic() - began
    except (OSError, ValueError, KeyError, IndexError):
        return None
    spent = (after - before) / os.sysconf("SC_CLK_TCK") - (sum(os.times()[:2]) - own)
    return max(0.0, spent / took)


def _busy(statistics: Path, numbers: Sequence[int]) -> int:
    """The ticks for which the cores have not been idle."""
    lines = {words[0]: [int(w) for w in words[1:]] for words in map(str.split, statistics.read_text().splitlines()) if words}
    times = [lines[f"cpu{n}"] for n in numbers]
    return sum(t[0] + t[1] + t[2] + t[5] + t[6] + t[7] for t in times)  # not: idle, waiting for a disk, and guests, counted above


@contextmanager
def without_collector() -> Iterator[None]:
    """A context in which Python's cyclic collector does not run: what is read or imported has no garbage."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
