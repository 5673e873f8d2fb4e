"""Listening sockets, where the tests of a whole server do not reach."""

from __future__ import annotations

import resource
import socket
import stat
from pathlib import Path

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.net.listen import fit_connections, is_loopback, listen_tcp, listen_unix


async def test_accepted_sockets_send_small_frames_at_once() -> None:
    listening = await listen_tcp("127.0.0.1", 0)
    listening.socket.setblocking(True)
    with socket.create_connection(listening.socket.getsockname()):
        accepted, _ = listening.socket.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    listening.close()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
async def test_loopback(host: str, expected: bool) -> None:
    assert await is_loopback(host) is expected


async def test_no_host_means_every_address() -> None:
    assert not await is_loopback("")


async def test_an_unknown_host_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        await is_loopback("no such host")


def test_an_old_socket_does_not_remove_the_file_of_its_successor(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    old = listen_unix(path)
    path.unlink()
    new = listen_unix(path)
    old.close()
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    new.close()
    assert not path.exists()


@pytest.mark.parametrize(
    ("limits", "fits", "set_to"),
    [
        ((1024, 4096), 1700, (2000, 4096)),
        ((1024, 1500), 1200, (1500, 1500)),
        ((1024, resource.RLIM_INFINITY), 1700, (2000, resource.RLIM_INFINITY)),
        ((2048, 4096), 1700, None),
        ((301, 301), 1, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 1700, None),
    ],
)
def test_connections_that_fit_beside_the_reserved_files(
    limits: tuple[int, int], fits: int, set_to: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The soft limit is raised up to the hard one."""
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_limits.append(limits))
    assert fit_connections(1700, 300) == fits
    assert [each for each in set_limits if each != limits] == ([] if set_to is None else [set_to])


def test_no_room_for_a_client_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    with pytest.raises(ConfigError, match=r"may open 256 files, and 300 are reserved.*ulimit -n 2000"):
        fit_connections(1700, 300)
