"""The cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


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
    return os.cpu_count() or 1


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
