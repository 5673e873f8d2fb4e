"""The number of threads this process may use: affinity, cpuset and the cgroup's CPU quota.

A quota is rounded down, but to at least 1.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """A number of threads, and the limit that decided it."""

    threads: int
    reason: str


def available_cpus(root: Path = Path("/")) -> CpuBudget:
    """Return min(affinity, cgroup `cpu.max` (v2) or `cpu.cfs_quota_us` (v1)), rounded down, at least 1.

    A cpuset is part of the affinity mask. `root` lets tests provide the files.
    """
    affinity = len(os.sched_getaffinity(0))
    budget = CpuBudget(affinity, f"affinity and cpuset allow {affinity}")
    for path, cpus in _quotas(root):
        if cpus < budget.threads:
            budget = CpuBudget(max(1, math.floor(cpus)), f"quota of {cpus:g} CPUs in /{path.relative_to(root)}")
    return budget


def _quotas(root: Path) -> Iterator[tuple[Path, float]]:
    """Yield the quotas of this process's cgroups and of all their parents that are mounted here."""
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount_point, mount_root in _mounts(root, "cpu" if controllers else None):
            for folder in _upwards(mount_point, mount_root, PurePosixPath(group)):
                path, cpus = _v1_quota(folder) if controllers else _v2_quota(folder)
                if cpus is not None:
                    yield path, cpus


def _mounts(root: Path, controller: str | None) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the mount points of a v1 controller's hierarchy, or with None of the v2 hierarchy, and their root groups.

    The fields are those of proc_pid_mountinfo(5): `36 35 98:0 GROUP MOUNT_POINT options [tags] - TYPE source options`.
    """
    for line in read_system_file(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        (group, mount_point), (kind, _, options) = mount.split(" ")[3:5], filesystem.split(" ", 2)
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            yield root / _unescaped(mount_point).lstrip("/"), PurePosixPath(_unescaped(group))


def _upwards(mount_point: Path, mount_root: PurePosixPath, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folders of `group` and of its parents, if a mount of `mount_root` contains them.

    Both are relative to the cgroup namespace, and start with `..` if they are outside of it.
    """
    if group.is_relative_to(mount_root):
        below = group.relative_to(mount_root)
    elif set(mount_root.parts[1:]) == {".."}:
        below = PurePosixPath()  # an ancestor outside the namespace; the groups in between have no names here
    else:
        return
    if ".." not in below.parts:
        yield from (mount_point / parent for parent in (below, *below.parents))


def _v2_quota(folder: Path) -> tuple[Path, float | None]:
    path = folder / "cpu.max"
    quota, _, period = read_system_file(path).partition(" ")
    return path, _ratio(quota, period)


def _v1_quota(folder: Path) -> tuple[Path, float | None]:
    path = folder / "cpu.cfs_quota_us"
    return path, _ratio(read_system_file(path), read_system_file(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return quota / period; None for `max`, -1 and anything else that is no limit."""
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def read_system_file(path: Path) -> str:
    """Return the text of a file in /proc or /sys; empty if the system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
