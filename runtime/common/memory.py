"""The memory that this process may take: the machine's, and the limits of cgroups and of the process itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...kernels.cgroups import group_folders, read_system_file

UNKNOWN_BYTES = 1 << 30  # free memory assumed where the system does not report it
V1_FILES = ("memory.limit_in_bytes",)
V2_FILES = ("memory.max", "memory.high")
STAT = "memory.stat"
SLOWS_DOWN = "memory.high"  # a limit that slows the group's processes; the kernel kills one at the other limits
PROCESS_LIMITS = {"Max address space": "VmSize", "Max data size": "VmData"}  # `ulimit -v` and `-d` -> counted size


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of this process, or of a group of processes that contains it."""

    limit_bytes: int
    used_bytes: int  # use without cached files, which the kernel drops when a group needs the memory
    where: str  # the file or the name of the limit

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def __str__(self) -> str:
        return f"{self.limit_bytes:,} bytes in {self.where}"


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return all limits below the memory of this machine. `root` lets tests provide the files of /proc and /sys."""
    return _below_machine([*_group_limits(root), *_process_limits(root)])


def killing_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the lowest limit at which the kernel kills a process, None without one."""
    kills = [limit for limit in _below_machine(_group_limits(root)) if not limit.where.endswith(SLOWS_DOWN)]
    return min(kills, key=lambda limit: limit.limit_bytes, default=None)


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory of this machine, or the lowest limit of this process."""
    return min([_physical_bytes(), *(limit.limit_bytes for limit in memory_limits(root))])


def free_memory_bytes(root: Path = Path("/")) -> int:
    """Return the memory that the system has available now, within all limits of this process."""
    limit = deciding_limit(root)
    return _available_bytes(root) if limit is None else limit.free_bytes


def deciding_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the limit that leaves the least free memory; None if the machine itself has less."""
    limit = min(memory_limits(root), key=lambda limit: limit.free_bytes, default=None)
    return limit if limit is not None and limit.free_bytes < _available_bytes(root) else None


def _below_machine(limits: Iterable[MemoryLimit]) -> list[MemoryLimit]:
    return [limit for limit in limits if limit.limit_bytes < _physical_bytes()]


def _group_limits(root: Path) -> Iterator[MemoryLimit]:
    """Yield the limits of all groups of this process, first the limits with a file of their own.

    Then come the limits that v1 shows for all parents together, because a container does not see every parent.
    """
    folders = [(folder, is_v1, _used_bytes(folder, is_v1=is_v1)) for folder, is_v1 in group_folders("memory", root)]
    for folder, is_v1, used in folders:
        for name in V1_FILES if is_v1 else V2_FILES:
            if (limit := _number(folder / name)) is not None:
                yield MemoryLimit(limit, used, _shown(folder / name, root))
    for folder, _, used in folders:
        if (limit := _fields(folder / STAT, " ").get("hierarchical_memory_limit")) is not None:
            yield MemoryLimit(limit, used, _shown(folder / STAT, root))


def _used_bytes(folder: Path, *, is_v1: bool) -> int:
    """Return the memory that a group uses with its children, without cached files."""
    stat = _fields(folder / STAT, " ")
    prefix = "total_" if is_v1 else ""
    cached = sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return max(0, (_number(folder / ("memory.usage_in_bytes" if is_v1 else "memory.current")) or 0) - cached)


def _shown(path: Path, root: Path) -> str:
    return f"/{path.relative_to(root)}"


def _process_limits(root: Path) -> Iterator[MemoryLimit]:
    used = _fields(root / "proc/self/status", ":")
    for line in read_system_file(root / "proc/self/limits").splitlines():
        for name, counted in PROCESS_LIMITS.items():
            soft = line.removeprefix(name).split()[0] if line.startswith(name) else ""
            if soft.isdigit():
                yield MemoryLimit(int(soft), used.get(counted, 0) * 1024, f"{name!r} of the process")


def _available_bytes(root: Path) -> int:
    kib = _fields(root / "proc/meminfo", ":").get("MemAvailable")
    return UNKNOWN_BYTES if kib is None else kib * 1024


def _physical_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _fields(path: Path, separator: str) -> dict[str, int]:
    """Return the lines `name: number` of a file, by name."""
    pattern = rf"^(\w+){separator}\s*(\d+)"
    return {name: int(number) for name, number in re.findall(pattern, read_system_file(path), re.MULTILINE)}


def _number(path: Path) -> int | None:
    text = read_system_file(path).strip()
    return int(text) if text.isdigit() else None
