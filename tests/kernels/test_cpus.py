"""Thread counts from cgroup files: v1, v2, nested, fractional, invalid, mounted anywhere, in namespaces."""

import os
import platform

import pytest
from quire.kernels import available_cpus, cpus

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
JOINT = "33 32 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.fixture(autouse=True)
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.fixture
def system(tmp_path):
    """Write a root folder with /proc/self/cgroup, /proc/self/mountinfo and quotas in microseconds per 100 ms."""

    def write(group, mounts, quotas):
        files = {"proc/self/cgroup": group, "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts}
        for folder, quota in quotas.items():
            if "cgroup2" in mounts and "cpuacct" not in folder:
                files[f"{folder}/cpu.max"] = f"{quota} 100000\n"
            else:
                files |= {f"{folder}/cpu.cfs_quota_us": f"{quota}\n", f"{folder}/cpu.cfs_period_us": "100000\n"}
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("group", "quotas", "threads", "decided_by"),
    [
        ("/", {}, 8, None),
        ("/", {"": "max"}, 8, None),
        ("/", {"": "nonsense"}, 8, None),
        ("/", {"": 9900000}, 8, None),
        ("/", {"": 50000}, 1, "0.5 CPUs in /sys/fs/cgroup/cpu.max"),
        ("/a/b", {"/a/b": 250000}, 2, "2.5 CPUs in /sys/fs/cgroup/a/b/cpu.max"),
        ("/a/b", {"/a": 300000, "/a/b": "max"}, 3, "3 CPUs in /sys/fs/cgroup/a/cpu.max"),
        ("/a/b", {"": 200000, "/a": 300000}, 2, "2 CPUs in /sys/fs/cgroup/cpu.max"),
        ("/a/b", {"/a": 400000, "/a/b": 300000}, 3, "3 CPUs in /sys/fs/cgroup/a/b/cpu.max"),
        ("/a/b", {"/a/c": 100000, "/b": 100000, "/a/b/c": 100000}, 8, None),
    ],
)
def test_v2_takes_the_smallest_quota_of_the_group_and_its_parents(system, group, quotas, threads, decided_by):
    root = system(f"0::{group}\n", V2, {f"sys/fs/cgroup{folder}": quota for folder, quota in quotas.items()})
    budget = available_cpus(root)
    assert budget.threads == threads
    assert budget.reason == (f"quota of {decided_by}" if decided_by else "affinity and cpuset allow 8")


@pytest.mark.parametrize(("quota", "threads"), [(400000, 4), (150000, 1), (-1, 8)])
def test_v1_joint_controllers(system, quota, threads):
    group = "4:cpu,cpuacct:/x\n3:cpuset:/y\n2:memory:/y\n"
    assert available_cpus(system(group, JOINT, {"sys/fs/cgroup/cpu,cpuacct/x": quota})).threads == threads


def test_v1_beside_v2_as_systemd_mounts_them(system):
    unified = V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    root = system("3:cpu,cpuacct:/x\n0::/y\n", unified + JOINT, {"sys/fs/cgroup/cpu,cpuacct/x": 200000})
    assert available_cpus(root).reason == "quota of 2 CPUs in /sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us"


@pytest.mark.parametrize("mount_point", ["/sys/fs/cgroup/cpu", "/dev/cgroups", "/mnt/c g"])
def test_a_controller_is_found_through_the_mount_table(system, mount_point):
    mount = JOINT.replace("/sys/fs/cgroup/cpu,cpuacct", mount_point.replace(" ", r"\040"))
    assert available_cpus(system("4:cpuacct,cpu:/x\n", mount, {f"{mount_point[1:]}/x": 300000})).threads == 3


@pytest.mark.parametrize(
    ("group", "mount_root", "folder", "threads"),
    [
        ("/docker/1f", "/docker/1f", "", 2),  # a container without a cgroup namespace: the mount shows its own group
        ("/docker/1f/x", "/docker/1f", "x", 2),
        ("/docker/2e", "/docker/1f", "", 8),  # another container's group
        ("/docker/2e", "/docker/1f", "docker/2e", 8),
        ("/", "/..", "", 2),  # mounted before the namespace was made: a parent of unknown name
        ("/../x", "/..", "x", 2),  # moved to a sibling of the namespace's root
        ("/../x", "/", "", 8),  # moved out of the mounted hierarchy
        ("/../../x", "/..", "", 8),
    ],
)
def test_a_group_is_looked_up_relative_to_the_mount(system, group, mount_root, folder, threads):
    mount = V2.replace(" / /sys", f" {mount_root} /sys")
    assert available_cpus(system(f"0::{group}\n", mount, {f"sys/fs/cgroup/{folder}": 200000})).threads == threads


def test_a_system_without_cgroup_files(tmp_path):
    assert available_cpus(tmp_path).threads == 8


@pytest.mark.parametrize(
    ("shown", "name"),
    [("vendor_id\t: V\nmodel name\t: First\n\nmodel name\t: Second\n", "First"), ("", platform.machine())],
)
def test_the_first_processor_gives_the_name_or_else_its_architecture(
    monkeypatch: pytest.MonkeyPatch, shown: str, name: str
) -> None:
    monkeypatch.setattr(cpus, "read_system_file", lambda path: shown)
    cpus._first_processor.cache_clear()
    try:
        assert cpus.processor_name() == name
    finally:
        cpus._first_processor.cache_clear()
