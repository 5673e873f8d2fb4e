"""Memory limits from the files of /proc and /sys: cgroups v1 and v2, nested, hybrid, in containers; process limits."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quire.runtime.common.memory import (
    MemoryLimit,
    deciding_limit,
    free_memory_bytes,
    killing_limit,
    machine_memory_bytes,
    memory_limits,
)

MIB = 1 << 20
MACHINE = 8192 * MIB
AVAILABLE = 6000 * MIB
NO_LIMIT_V1 = 9223372036854771712
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"

Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Make a machine of 8 GiB, 6,000 MiB of them available; return its root folder."""
    pages = MACHINE // os.sysconf("SC_PAGE_SIZE")
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: pages if name == "SC_PHYS_PAGES" else sysconf(name))

    def make(group: str = "", mounts: str = "", groups: dict[str, str] | None = None, **proc: str) -> Path:
        texts = {"proc/meminfo": f"MemTotal: 8388608 kB\nMemAvailable: {AVAILABLE >> 10} kB\nCached: 5 kB\n"}
        texts |= {"proc/self/cgroup": group, "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts}
        texts |= {f"sys/fs/cgroup/{name}": text for name, text in (groups or {}).items()}
        texts |= {f"proc/self/{name}": text for name, text in proc.items()}
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def test_without_limits_the_machine_decides(machine: Machine) -> None:
    root = machine("0::/a\n", V2, {"a/memory.max": "max\n", "a/memory.current": f"{MIB}\n"})
    assert (machine_memory_bytes(root), free_memory_bytes(root)) == (MACHINE, AVAILABLE)
    assert killing_limit(root) is None


def test_a_system_that_says_nothing_is_taken_for_a_gibibyte(tmp_path: Path) -> None:
    assert free_memory_bytes(tmp_path) == 1 << 30
    assert memory_limits(tmp_path) == []


@pytest.mark.parametrize("holder", ["", "pods/", "pods/pod7/", "pods/pod7/main/"])
def test_v2_a_limit_counts_wherever_it_is_set(machine: Machine, holder: str) -> None:
    files = {f"{holder}memory.max": f"{1000 * MIB}\n", f"{holder}memory.current": f"{100 * MIB}\n"}
    root = machine("0::/pods/pod7/main\n", V2, files)
    assert (machine_memory_bytes(root), free_memory_bytes(root)) == (1000 * MIB, 900 * MIB)
    assert str(killing_limit(root)) == f"1,048,576,000 bytes in /sys/fs/cgroup/{holder}memory.max"


def test_v2_groups_beside_the_own_do_not_count(machine: Machine) -> None:
    root = machine(
        "0::/a/b\n", V2, {"a/c/memory.max": "4096\n", "b/memory.max": "4096\n", "a/b/d/memory.max": "4096\n"}
    )
    assert machine_memory_bytes(root) == MACHINE


def test_v2_the_parent_that_others_have_filled_leaves_the_least(machine: Machine) -> None:
    files = {"memory.max": f"{3000 * MIB}", "memory.current": f"{2900 * MIB}"}
    files |= {"a/memory.max": f"{2000 * MIB}", "a/memory.current": "0"}
    root = machine("0::/a\n", V2, files)
    assert (machine_memory_bytes(root), free_memory_bytes(root)) == (2000 * MIB, 100 * MIB)


def test_the_limit_that_decides_is_the_one_that_leaves_the_least(machine: Machine) -> None:
    files = {"memory.max": f"{7000 * MIB}", "memory.current": "0"}
    assert deciding_limit(machine("0::/a\n", V2, files)) is None  # the machine has 6,000 MiB
    files |= {"a/memory.max": f"{2000 * MIB}", "a/memory.current": f"{500 * MIB}"}
    assert deciding_limit(machine("0::/a\n", V2, files)) == MemoryLimit(
        2000 * MIB, 500 * MIB, "/sys/fs/cgroup/a/memory.max"
    )


def test_cached_files_of_a_group_are_free(machine: Machine) -> None:
    stat = f"anon 5\nfile {700 * MIB}\ninactive_file {600 * MIB}\nactive_file {100 * MIB}\nunevictable 3\n"
    files = {"memory.max": f"{1000 * MIB}", "memory.current": f"{900 * MIB}", "memory.stat": stat}
    assert free_memory_bytes(machine("0::/\n", V2, files)) == 800 * MIB


def test_a_group_above_its_limit_has_no_free_memory(machine: Machine) -> None:
    assert free_memory_bytes(machine("0::/\n", V2, {"memory.max": "4096", "memory.current": "8192"})) == 0


def test_v2_the_high_mark_limits_and_does_not_kill(machine: Machine) -> None:
    files = {"a/memory.high": f"{500 * MIB}", "a/memory.max": f"{600 * MIB}", "a/memory.current": "0"}
    root = machine("0::/a\n", V2, files)
    assert free_memory_bytes(root) == 500 * MIB
    assert str(killing_limit(root)) == "629,145,600 bytes in /sys/fs/cgroup/a/memory.max"


@pytest.mark.parametrize(
    ("text", "limit"), [("nonsense\n", MACHINE), ("", MACHINE), (f"{MACHINE}", MACHINE), ("0\n", 0)]
)
def test_v2_odd_limits(machine: Machine, text: str, limit: int) -> None:
    assert machine_memory_bytes(machine("0::/\n", V2, {"memory.max": text})) == limit


@pytest.mark.parametrize("holder", ["", "docker/", "docker/1f/"])
def test_v1_a_limit_counts_wherever_it_is_set(machine: Machine, holder: str) -> None:
    files = {f"memory/{name}memory.limit_in_bytes": f"{NO_LIMIT_V1}\n" for name in ("", "docker/", "docker/1f/")}
    files |= {f"memory/{holder}memory.limit_in_bytes": f"{1000 * MIB}\n"}
    files |= {f"memory/{holder}memory.usage_in_bytes": f"{300 * MIB}\n"}
    files |= {f"memory/{holder}memory.stat": f"inactive_file 7\ntotal_inactive_file {200 * MIB}\n"}
    root = machine("3:cpuset:/\n4:memory:/docker/1f\n2:cpu:/x\n", V1, files)
    assert (machine_memory_bytes(root), free_memory_bytes(root)) == (1000 * MIB, 900 * MIB)
    assert str(killing_limit(root)) == f"1,048,576,000 bytes in /sys/fs/cgroup/memory/{holder}memory.limit_in_bytes"


def test_v1_says_what_parents_allow_that_a_container_does_not_see(machine: Machine) -> None:
    mount = V1.replace(" / /sys", " /docker/1f /sys")
    files = {"memory/memory.limit_in_bytes": f"{NO_LIMIT_V1}"}
    files |= {"memory/memory.stat": f"cache 0\nhierarchical_memory_limit {700 * MIB}\ntotal_cache 0\n"}
    root = machine("4:memory:/docker/1f\n", mount, files)
    assert machine_memory_bytes(root) == 700 * MIB
    assert str(killing_limit(root)) == "734,003,200 bytes in /sys/fs/cgroup/memory/memory.stat"


def test_hybrid_mounts_have_the_limit_in_v1(machine: Machine) -> None:
    unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    root = machine("4:memory:/x\n0::/y\n", unified + V1, {"memory/x/memory.limit_in_bytes": f"{100 * MIB}"})
    assert machine_memory_bytes(root) == 100 * MIB


@pytest.mark.parametrize(
    ("group", "mount_root", "folder", "seen"),
    [
        ("/docker/1f", "/docker/1f", "", True),  # no cgroup namespace: the mount shows the own group
        ("/docker/1f/x", "/docker/1f", "x/", True),
        ("/docker/2e", "/docker/1f", "", False),  # another container's group
        ("/", "/..", "", True),  # mounted before the namespace was made
        ("/../x", "/", "", False),
    ],
)
def test_containers(machine: Machine, group: str, mount_root: str, folder: str, seen: bool) -> None:
    mount = V2.replace(" / /sys", f" {mount_root} /sys")
    root = machine(f"0::{group}\n", mount, {f"{folder}memory.max": f"{MIB}"})
    assert machine_memory_bytes(root) == (MIB if seen else MACHINE)


@pytest.mark.parametrize(("name", "counted"), [("Max address space", "VmSize"), ("Max data size    ", "VmData")])
def test_limits_of_the_process_count_what_it_has_mapped(machine: Machine, name: str, counted: str) -> None:
    limits = f"{LIMITS}{name}         {2000 * MIB}            unlimited            bytes     \n"
    root = machine(limits=limits, status=f"Name:\tquire\n{counted}:\t  {500 << 10} kB\nThreads:\t4\n")
    assert (machine_memory_bytes(root), free_memory_bytes(root)) == (2000 * MIB, 1500 * MIB)
    assert killing_limit(root) is None


def test_unlimited_processes(machine: Machine) -> None:
    limits = f"{LIMITS}Max address space         unlimited            unlimited            bytes     \n"
    assert machine_memory_bytes(machine(limits=limits)) == MACHINE
