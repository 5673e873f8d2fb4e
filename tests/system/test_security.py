"""TLS over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

TLS = Path(__file__).resolve().parents[1] / "data" / "tls"
SETTINGS = {"tls_cert": str(TLS / "cert.pem"), "tls_key": str(TLS / "key.pem")}
Serve = Callable[..., Awaitable[Any]]


def trusting() -> ssl.SSLContext:
    return ssl.create_default_context(cafile=TLS / "cert.pem")


async def test_a_request_over_tls(serve: Serve) -> None:
    system = await serve(**SETTINGS)
    client = await system.raw(ssl=trusting())
    client.send("GENERATE", 1, "x", {"max_tokens": 6})
    *_, done = await client.until("DONE", "ERROR")
    assert done[:3] == ["DONE", 1, "length"]
    assert client.writer.get_extra_info("ssl_object").version() == "TLSv1.3"


async def test_an_old_tls_version_is_refused(serve: Serve) -> None:
    system = await serve(**SETTINGS)
    old = trusting()
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await system.raw(ssl=old)


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x00\x00\x00\x09\x92\xa6CANCEL\x05"])
async def test_who_does_not_shake_hands_is_cut(serve: Serve, sent: bytes) -> None:
    system = await serve(**SETTINGS, handshake_timeout_ms=50)
    plain = await system.raw(hello=False)
    plain.writer.write(sent)
    async with asyncio.timeout(5):
        assert await plain.receive() == []
