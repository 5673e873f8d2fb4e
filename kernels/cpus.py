"""How many threads this process may really use: affinity, cpuset and the cgroup's CPU quota, and why.

Reads the system only; `root` lets a test inject files. One invariant: the answer is at least 1 and never more than the
quota rounded down.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class CpuBudget:
    threads: int
    reason: str  # which limit decided


def available_cpus(root: Path = Path("/")) -> CpuBudget:
    """min(affinity, cgroup `cpu.max` (v2) or `cpu.cfs_quota_us` (v1)), rounded down, at least 1.

    A cpuset shows in the affinity mask, so it needs no reading of its own.
    """
    affinity = len(os.sched_getaffinity(0))
    budget = CpuBudget(affinity, f"affinity mask of {affinity} CPUs")
    for path, cpus in _quotas(root):
        if cpus < budget.threads:
            budget = CpuBudget(max(1, math.floor(cpus)), f"quota of {cpus:g} CPUs in {path}")
    return budget


def _quotas(root: Path) -> list[tuple[Path, float]]:
    """Every quota that applies: of this process's cgroups and of all their parents."""
    found: list[tuple[Path, float | None]] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += [(path, _v2_quota(_read(path))) for path in _upwards(root / "sys/fs/cgroup", group, "cpu.max")]
        elif "cpu" in controllers.split(","):
            base = root / "sys/fs/cgroup" / controllers
            found += [(path, _v1_quota(path)) for path in _upwards(base, group, "cpu.cfs_quota_us")]
    return [(path, cpus) for path, cpus in found if cpus is not None]


def _upwards(base: Path, group: str, name: str) -> list[Path]:
    folder = base / group.lstrip("/")
    return [parent / name for parent in (folder, *folder.parents) if parent == base or base in parent.parents]


def _v2_quota(text: str) -> float | None:
    parts = text.split()
    if len(parts) != 2 or parts[0] == "max":
        return None
    return _ratio(*parts)


def _v1_quota(path: Path) -> float | None:
    return _ratio(_read(path), _read(path.with_name("cpu.cfs_period_us")))


def _ratio(quota: str, period: str) -> float | None:
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
