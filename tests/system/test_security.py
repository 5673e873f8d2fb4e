"""TLS over real sockets, and the log of a real server, which contains no key and no prompt."""

from __future__ import annotations

import asyncio
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from quire import AsyncClient, SamplingParams
from quire.runtime.cli.token import new_key
from quire.runtime.common.errors import InvalidRequest, Unauthenticated
from quire.runtime.common.settings import read_toml
from quire.runtime.net import acceptor
from quire.runtime.server.tenancy import auth
from quire.runtime.server.tenancy.auth import Keyring

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
async def test_a_connection_without_a_tls_handshake_is_closed(serve: Serve, sent: bytes) -> None:
    system = await serve(**SETTINGS, handshake_timeout_ms=50)
    plain = await system.raw(hello=False)
    plain.writer.write(sent)
    async with asyncio.timeout(30):
        assert await plain.receive() == []


async def test_the_last_frame_arrives_over_tls(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS has no half-close."""
    monkeypatch.setattr(acceptor, "LINGER_S", 0.05)
    system = await serve(**SETTINGS)
    client = await system.raw(ssl=trusting())
    client.send("FROB")
    assert (await client.receive())[:3] == ["ERROR", None, "INVALID_ARGUMENT"]
    assert await client.receive() == []


async def test_many_reloads_during_one_cause_one_more(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    num_reloads = 0

    async def slow_reload(keyring: Keyring, check: object) -> None:
        nonlocal num_reloads
        num_reloads += 1
        await gate.wait()

    monkeypatch.setattr(Keyring, "reload", slow_reload)
    server = (await serve()).server
    for expected in (1, 1):
        for _ in range(100):
            server.reload()
        for _ in range(20):
            await asyncio.sleep(0)
        assert num_reloads == expected
    gate.set()
    for _ in range(20):
        await asyncio.sleep(0)
    assert num_reloads == 2


async def test_the_start_reads_the_file_of_keys_once(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tmp_path / "tokens.toml"
    paths = []

    def read(path: Path, what: str) -> dict[str, Any]:
        paths.append(path)
        return read_toml(path, what)

    tokens.write_text(f'[acme]\nkeys = ["{"0" * 64}"]')
    monkeypatch.setattr(auth, "read_toml", read)
    await serve(auth_tokens=str(tokens))
    assert paths == [tokens]


SECRET_WORDS = "A prompt of secret words"
PORTS = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
SERVE = (sys.executable, "-m", "quire.runtime.cli.main", "serve", *PORTS, "--in-process")
LOGGED = ("--kv-cache-memory", "8MiB", "--log-format", "json", "--log-level", "debug")


async def test_the_log_of_a_real_server_contains_no_key_and_no_prompt(tmp_path: Path) -> None:
    """Admit and refuse clients, reload a new key by SIGHUP, then a broken file."""
    tokens = tmp_path / "tokens.toml"
    log = tmp_path / "log"
    keys, (first, second) = zip(*(new_key("acme") for _ in range(2)), strict=True)
    tokens.write_text(first)
    tokens.chmod(0o600)
    with log.open("wb") as stderr:
        command = (*SERVE, *LOGGED, "--auth-tokens", str(tokens))
        server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert server.stdout is not None
        address = json.loads(await server.stdout.readline())["clients"]
        await generate(address, keys[0])
        for wrong in (keys[1], "another key", None):
            with pytest.raises(Unauthenticated):
                await generate(address, wrong)
        for text, outcome in ((second, "tokens reloaded"), ("[acme", "not reloaded")):
            tokens.write_text(text)
            server.send_signal(signal.SIGHUP)
            async with asyncio.timeout(60):
                while outcome not in log.read_text():
                    await asyncio.sleep(0.01)
        with pytest.raises(InvalidRequest):
            await generate(address, keys[1], temperature=-1.0)
        await generate(address, keys[1])
    finally:
        server.terminate()
        await server.wait()
    text = log.read_text()
    assert not [secret for secret in (*keys, "another key", "secret words") if secret in text]
    lines = [json.loads(line) for line in text.splitlines()]
    requests = [line for line in lines if line["event"].startswith("request ")]
    assert [line["event"] for line in requests] == ["request ended", "request refused", "request ended"]
    assert all(line["tenant"] == "acme" and line["client_id"] >= 0 for line in requests)
    assert len({line["connection"] for line in requests}) == 3
    assert [line["code"] for line in lines if line["event"] == "connection refused"] == ["UNAUTHENTICATED"] * 3


async def generate(address: str, token: str | None, temperature: float = 0.0) -> None:
    async with AsyncClient(address, token=token) as client:
        async for chunk in client.generate(SECRET_WORDS, SamplingParams(max_tokens=4, temperature=temperature)):
            assert chunk.first_index >= 0
