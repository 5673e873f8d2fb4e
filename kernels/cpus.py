"""The processor, and the number of threads this process may use: affinity, cpuset and the cgroup's CPU quota.

A quota is rounded down, but to at least 1.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cgroups import group_folders, read_system_file


@dataclass(frozen=True, slots=True)
class CpuBudget:
    """A number of threads, and the limit that decided it."""

    threads: int
    reason: str


def available_cpus(root: Path = Path("/")) -> CpuBudget:
    """Return min(affinity, cgroup `cpu.max` (v2) or `cpu.cfs_quota_us` (v1)), rounded down, at least 1.

    A cpuset is part of the affinity mask. Tests pass another `root`, with files of their own.
    """
    affinity = len(os.sched_getaffinity(0))
    budget = CpuBudget(affinity, f"affinity and cpuset allow {affinity}")
    for path, cpus in _quotas(root):
        if cpus < budget.threads:
            budget = CpuBudget(max(1, math.floor(cpus)), f"quota of {cpus:g} CPUs in /{path.relative_to(root)}")
    return budget


def processor_name() -> str:
    """Return the processor's name, or its architecture if the system does not show the name."""
    return _first_processor().get("model name") or platform.machine()


def processor_id() -> str:
    """Return the processor's name with its model, stepping and cache size, as far as the system shows them."""
    lines = _first_processor()
    shown = ("vendor_id", "cpu family", "model", "model name", "stepping", "cache size", "CPU implementer", "CPU part")
    return "; ".join([platform.machine(), *(f"{name} {lines[name]}" for name in shown if name in lines)])


@functools.cache
def _first_processor() -> dict[str, str]:
    """Return the fields of the first processor in the system's list."""
    first = read_system_file(Path("/proc/cpuinfo")).partition("\n\n")[0]
    return dict(re.findall(r"^([\w ]+?)\s*: (.*)$", first, re.MULTILINE))


def _quotas(root: Path) -> Iterator[tuple[Path, float]]:
    """Yield the quotas of this process's cgroups and of all their parents."""
    for folder, is_v1 in group_folders("cpu", root):
        path, cpus = _v1_quota(folder) if is_v1 else _v2_quota(folder)
        if cpus is not None:
            yield path, cpus


def _v2_quota(folder: Path) -> tuple[Path, float | None]:
    path = folder / "cpu.max"
    quota, _, period = read_system_file(path).partition(" ")
    return path, _ratio(quota, period)


def _v1_quota(folder: Path) -> tuple[Path, float | None]:
    path = folder / "cpu.cfs_quota_us"
    return path, _ratio(read_system_file(path), read_system_file(folder / "cpu.cfs_period_us"))


def _ratio(quota: str, period: str) -> float | None:
    """Return quota / period; None where there is no limit (`max`, -1 or an unreadable value)."""
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None
