"""`quire info`, `quire serve` and its metrics under real limits: affinity, cpusets and CPU quotas of this kernel.

The tests create and remove cgroups, v1 or v2, and are skipped where that is not allowed. `tests/kernels/test_cpus.py`
has the cases that one machine cannot have together.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | {
    "QUIRE_TUNE": "off",
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # an editable install may rebuild with these tools
}
QUIRE = (sys.executable, "-P", "-m", "quire.runtime.cli.main")
CPUS = sorted(os.sched_getaffinity(0))

MakeGroup = Callable[..., Path]


def home_of_groups(controller: str) -> Path:
    """Return a folder in which a cgroup of `controller` can be created: this process's in v1, the mount's in v2."""
    own = dict(re.findall(r"^\d+:(.*):(.*)$", Path("/proc/self/cgroup").read_text(), re.M))
    mount = r"^\S+ \S+ \S+ / (\S+) .* - (cgroup2?) \S+ (\S+)$"
    for mount_point, kind, options in re.findall(mount, Path("/proc/self/mountinfo").read_text(), re.M):
        if kind == "cgroup" and controller in options.split(","):
            return Path(mount_point + next(own[names] for names in own if controller in names.split(",")))
        if kind == "cgroup2" and controller in Path(mount_point, "cgroup.subtree_control").read_text().split():
            return Path(mount_point)
    pytest.skip(f"no cgroup hierarchy with the {controller} controller is mounted here")


@pytest.fixture
def make_group() -> Iterator[MakeGroup]:
    """Return `make_group(home, settings)`, which creates a cgroup in the folder `home` and writes its files."""
    made: list[Path] = []

    def make(home: Path, settings: dict[str, str]) -> Path:
        folder = home / f"quire-test-{os.getpid()}-{len(made)}"
        try:
            folder.mkdir()
            made.append(folder)
            for name, value in settings.items():
                (folder / name).write_text(value)
        except OSError as error:
            pytest.skip(f"cgroups cannot be created here: {error}")
        return folder

    yield make
    for folder in reversed(made):
        folder.rmdir()


@pytest.fixture
def make_quota(make_group: MakeGroup) -> Callable[[float], Path]:
    """Return a function that creates a cgroup with a quota of `cpus`."""

    def make(cpus: float) -> Path:
        home = home_of_groups("cpu")
        quota = str(round(cpus * 100_000))
        if (home / "cgroup.controllers").exists():
            return make_group(home, {"cpu.max": f"{quota} 100000"})
        return make_group(home, {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": quota})

    return make


def inside(group: Path, *command: str) -> tuple[str, ...]:
    """Return a command that runs `command` as a member of the cgroup."""
    return "sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group), *command


def threads_line(*command: str) -> str:
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith("threads"))


def test_affinity_limits_threads() -> None:
    alone = (
        sys.executable,
        "-c",
        f"import os, sys; os.sched_setaffinity(0, {{{CPUS[-1]}}}); os.execvp(sys.argv[1], sys.argv[1:])",
    )
    assert threads_line(*alone, *QUIRE, "info") == "threads    1  (affinity and cpuset allow 1)"


def test_a_cpuset_limits_threads(make_group: MakeGroup) -> None:
    home = home_of_groups("cpuset")
    settings = {"cpuset.cpus": str(CPUS[-1])}
    if not (home / "cgroup.controllers").exists():
        settings["cpuset.mems"] = (home / "cpuset.mems").read_text()
    group = make_group(home, settings)
    assert threads_line(*inside(group, *QUIRE, "info")) == "threads    1  (affinity and cpuset allow 1)"


@pytest.mark.parametrize("cpus", [0.5, len(CPUS) - 0.5, len(CPUS) + 0.5])
def test_a_quota_limits_threads(make_quota: Callable[[float], Path], cpus: float) -> None:
    group = make_quota(cpus)
    line = threads_line(*inside(group, *QUIRE, "info"))
    if cpus > len(CPUS):
        assert line == f"threads    {len(CPUS)}  (affinity and cpuset allow {len(CPUS)})"
    else:
        assert line.startswith(f"threads    {max(1, int(cpus))}  (quota of {cpus:g} CPUs in {group}/cpu.")


def test_the_quota_of_a_parent_group_counts(make_quota: Callable[[float], Path], make_group: MakeGroup) -> None:
    parent = make_quota(0.5)
    child = make_group(parent, {})
    assert f"(quota of 0.5 CPUs in {parent}/cpu." in threads_line(*inside(child, *QUIRE, "info"))


def test_a_quota_is_found_in_a_cgroup_namespace(make_quota: Callable[[float], Path], tmp_path: Path) -> None:
    """In a container, the cgroup is named / and may be mounted anywhere."""
    group = make_quota(0.5)
    kind = "cgroup2" if (group / "cgroup.controllers").exists() else "cgroup -o cpu"
    mount = ("sh", "-c", f'mount -t {kind} none "$0" && exec "$@"', str(tmp_path))
    contained = inside(group, "unshare", "--cgroup", "--mount", *mount)
    if subprocess.run((*contained, "true"), capture_output=True, check=False).returncode:
        pytest.skip("namespaces or mounts are not allowed here")
    assert f"(quota of 0.5 CPUs in {tmp_path}/cpu." in threads_line(*contained, *QUIRE, "info")


def test_ready_line_and_metrics_give_the_reason_for_the_threads(make_quota: Callable[[float], Path]) -> None:
    group = make_quota(0.5)
    ports = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
    serve = inside(group, *QUIRE, "serve", *ports, "--kv-cache-memory", "4MiB")
    with subprocess.Popen(
        serve, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            ready = server.stdout.readline()
            address = re.search(r"metrics (\S+)", ready)
            assert address is not None
            with urllib.request.urlopen(address[1], timeout=60) as page:
                metrics = page.read().decode()
        finally:
            server.terminate()
    assert f"1 threads (quota of 0.5 CPUs in {group}/cpu." in ready
    assert re.search(rf'quire_cpu_info{{.*threads="1",threads_reason="quota of 0.5 CPUs in {group}/cpu\.', metrics)
