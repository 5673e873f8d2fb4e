"""Divides the CPUs between engine processes: one process for each NUMA node, or a given number of processes.

Every allowed CPU belongs to exactly one process. `root` is the file system's root, for tests.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ...kernels.cgroups import read_system_file
from ..common.errors import ConfigError

NODES = "sys/devices/system/node"


def place(num_processes: int, allowed: frozenset[int] | None = None, root: Path = Path("/")) -> list[frozenset[int]]:
    """Return the CPUs of each process; 0 processes: one for each node with allowed CPUs. Raises ConfigError."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = [node & allowed for node in numa_nodes(root) if node & allowed] or [allowed]
    if num_processes in (0, len(nodes)):
        return nodes
    if num_processes > len(allowed):
        raise ConfigError(f"engine_processes must be at most {len(allowed)}, one per CPU, not {num_processes}")
    # CPUs of a node stay together, so that few processes use the memory of two nodes.
    return _shares([cpu for node in nodes for cpu in sorted(node)], num_processes)


def numa_nodes(root: Path = Path("/")) -> list[frozenset[int]]:
    """Return the CPUs of each node, in the order of node numbers; an empty list where the system has no such files."""
    folders = [path for path in (root / NODES).glob("node[0-9]*") if path.name[4:].isdigit()]
    lists = [
        read_system_file(path / "cpulist").strip() for path in sorted(folders, key=lambda path: int(path.name[4:]))
    ]
    return [parse_cpu_list(text) for text in lists if text]


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse the kernel's format: `0-3,8,10-11`."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _shares(cpus: Sequence[int], count: int) -> list[frozenset[int]]:
    """Divide `cpus` into `count` parts whose sizes differ by at most 1."""
    bounds = [len(cpus) * i // count for i in range(count + 1)]
    return [frozenset(cpus[start:end]) for start, end in pairwise(bounds)]
