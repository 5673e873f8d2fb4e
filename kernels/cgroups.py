"""The control groups of this process, v1 and v2: the folders in which the kernel shows their limits."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple


class GroupFolder(NamedTuple):
    """The folder of one group in the mounted hierarchy of a controller."""

    path: Path
    is_v1: bool


def group_folders(controller: str, root: Path = Path("/")) -> Iterator[GroupFolder]:
    """Yield the folders of this process's groups and of all their parents that are mounted here.

    The v2 hierarchy may lack the controller: a folder without its files has no limit. `root` lets tests provide the
    files.
    """
    for line in read_system_file(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount_point, mount_root in _mounts(root, controller if controllers else None):
            for folder in _upwards(mount_point, mount_root, PurePosixPath(group)):
                yield GroupFolder(folder, bool(controllers))


def _mounts(root: Path, controller: str | None) -> Iterator[tuple[Path, PurePosixPath]]:
    """Yield the mount points and root groups of a v1 controller's hierarchy; None stands for the v2 hierarchy.

    The fields are those of proc_pid_mountinfo(5): `36 35 98:0 GROUP MOUNT_POINT options [tags] - TYPE source options`.
    """
    for line in read_system_file(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        (group, mount_point) = mount.split(" ")[3:5]
        (kind, _, options) = filesystem.split(" ", 2)
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


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), field)


def read_system_file(path: Path) -> str:
    """Return the text of a file in /proc or /sys; empty if the system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
