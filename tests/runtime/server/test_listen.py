"""Listening sockets beyond what the system tests see through a server."""

from __future__ import annotations

import socket

import pytest
from quire.runtime.errors import ConfigError
from quire.runtime.server.listen import is_loopback, listen_tcp


async def test_small_frames_leave_at_once() -> None:
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


async def test_an_unknown_host() -> None:
    with pytest.raises(ConfigError, match="cannot be resolved"):
        await is_loopback("no such host")
