"""How many engine processes, and which CPUs each runs on: one per NUMA node, or as many as asked for.

Reads the system only; `root` lets a test inject files. One invariant: every allowed CPU belongs to exactly one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from ..common.errors import ConfigError

NODES = "sys/devices/system/node"


def place(num_processes: int, allowed: frozenset[int] | None = None, root: Path = Path("/")) -> list[frozenset[int]]:
    """CPUs of each process; 0: one for each node that has any. Raises ConfigError for more than there are CPUs."""
    allowed = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = [node & allowed for node in numa_nodes(root) if node & allowed] or [allowed]
    if num_processes in (0, len(nodes)):
        return nodes
    if num_processes > len(allowed):
        raise ConfigError(f"engine_processes must be at most {len(allowed)}, one per CPU, not {num_processes}")
    # CPUs of one node lie together, so that few processes cross a border.
    return _shares([cpu for node in nodes for cpu in sorted(node)], num_processes)


def numa_nodes(root: Path = Path("/")) -> list[frozenset[int]]:
    """CPUs of each node, in the order of their numbers; none where the system does not tell."""
    folders = [path for path in (root / NODES).glob("node[0-9]*") if path.name[4:].isdigit()]
    lists = [_read(path / "cpulist") for path in sorted(folders, key=lambda path: int(path.name[4:]))]
    return [parse_cpu_list(text) for text in lists if text]


def parse_cpu_list(text: str) -> frozenset[int]:
    """`0-3,8,10-11`, as the kernel writes it."""
    cpus: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _shares(cpus: Sequence[int], count: int) -> list[frozenset[int]]:
    """As even as can be."""
    bounds = [len(cpus) * i // count for i in range(count + 1)]
    return [frozenset(cpus[start:end]) for start, end in pairwise(bounds)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
