"""Listening sockets, where the tests of a whole server do not reach."""

from __future__ import annotations

import resource
import socket

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.server.listen import allow_open_files, is_loopback, listen_tcp


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


@pytest.mark.parametrize(
    ("limits", "wanted", "set_to"),
    [
        ((1024, 4096), 2000, (2000, 4096)),
        ((1024, 4096), 9000, (4096, 4096)),
        ((1024, resource.RLIM_INFINITY), 9000, (9000, resource.RLIM_INFINITY)),
        ((2048, 4096), 2000, None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 2000, None),
    ],
)
def test_open_files_are_raised_up_to_the_hard_limit(
    limits: tuple[int, int], wanted: int, set_to: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_limits.append(limits))
    allow_open_files(wanted)
    assert set_limits == ([] if set_to is None else [set_to])
