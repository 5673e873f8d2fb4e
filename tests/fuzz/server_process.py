"""Start `quire serve` as a process, and measure it from outside: memory, descriptors, pages, metrics.

The process and its children are gone when `start_server` ends. `RawClient` sends arbitrary bytes to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire.runtime.net.address import UnixAddress, parse_address
from quire.runtime.protocol.codec import Decoder, encode
from quire.runtime.protocol.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    SERVER_FRAMES,
    Frame,
    Hello,
    ServerFrame,
    Welcome,
)

MIB = 1 << 20
SHORT_TIMEOUTS = {  # settings without a flag, so that abandoned requests end within a short run
    "QUIRE_RESUME_TIMEOUT_MS": "3000",
    "QUIRE_IDEMPOTENCY_WINDOW_MS": "30000",
    "QUIRE_CREDIT_TIMEOUT_MS": "3000",
    "QUIRE_HANDSHAKE_TIMEOUT_MS": "5000",
    "QUIRE_FRAME_TIMEOUT_MS": "5000",
    "QUIRE_WRITE_TIMEOUT_MS": "5000",
}
PORTS = ("--port", "--operator-port", "--openai-port")
SETTLE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@dataclass(frozen=True)
class Endpoint:
    """The addresses of a server, and the settings of its clients."""

    address: str
    metrics_url: str
    token: str | None = None
    ca: str | None = None  # certificate file; None: no TLS

    @property
    def tls(self) -> ssl.SSLContext | None:
        return None if self.ca is None else ssl.create_default_context(cafile=self.ca)


@dataclass(frozen=True)
class Vitals:
    """One sample of the server: bytes of resident memory, descriptors of all its processes, pages by state."""

    server_rss: int  # resident memory of the API server process
    engines_rss: int
    descriptors: int
    threads: int  # threads of all its processes
    series: int  # number of series in /metrics
    pages: dict[str, int]
    pages_total: int
    live: int  # requests running or waiting

    @property
    def rss(self) -> int:
        return self.server_rss + self.engines_rss

    @property
    def pages_balance(self) -> bool:
        return sum(self.pages[state] for state in ("owned", "cached", "free")) == self.pages_total

    def __str__(self) -> str:
        pages = " ".join(f"{state} {self.pages[state]}" for state in ("owned", "cached", "free"))
        return (
            f"server {self.server_rss / MIB:7.1f} MiB  engines {self.engines_rss / MIB:7.1f} MiB  "
            f"descriptors {self.descriptors:5}  threads {self.threads:3}  series {self.series:4}  live {self.live:4}  "
            f"pages {pages}"
        )


class ServerProcess:
    """A running `quire serve`."""

    def __init__(self, process: subprocess.Popen[str], ready: str, log: IO[str]) -> None:
        self.address = ready.partition("clients ")[2].split()[0]
        self.openai_address = ready.partition("api http://")[2].partition("/")[0]  # empty without one
        self.endpoint = Endpoint(self.address, ready.partition("metrics ")[2].split()[0])
        self._process = process
        self._log = log

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def engines(self) -> list[int]:
        """Return the process ids of the engines."""
        return descendants(self._process.pid)

    def open_files(self) -> set[str]:
        """Return the targets of the API server process's descriptors."""
        folder = f"/proc/{self._process.pid}/fd"
        targets = set()
        for entry in os.listdir(folder):
            with contextlib.suppress(OSError):
                targets.add(f"{entry} -> {os.readlink(f'{folder}/{entry}')}")
        return targets

    def server_rss(self) -> int:
        """Return the bytes of resident memory of the API server process."""
        return _rss(self._process.pid)

    def rss(self) -> int:
        """Return the bytes of resident memory of all its processes."""
        return sum(map(_rss, (self._process.pid, *self.engines())))

    def pinned_share(self) -> float:
        """Return the share of the KV pages that are pinned. Raises OSError or KeyError if it cannot be read."""
        metrics = self._metrics()
        pages = sum(value for series, value in metrics.items() if series.startswith("quire_kv_pages{"))
        return metrics["quire_kv_pages_pinned"] / pages

    def kill(self) -> None:
        """Kill the API server process with SIGKILL, and wait until it is gone."""
        self._process.kill()
        self._process.wait()

    async def terminate(self) -> int:
        """Send SIGTERM and return the exit status, negative for a signal. Raises TimeoutExpired."""
        self._process.terminate()
        return await asyncio.to_thread(self._process.wait, STOP_TIMEOUT_S)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def vitals(self) -> Vitals:
        pid = self._process.pid
        engines = self.engines()
        metrics = self._metrics()
        pages = {state: int(metrics[f'quire_kv_pages{{state="{state}"}}']) for state in ("owned", "cached", "free")}
        return Vitals(
            server_rss=self.server_rss(),
            engines_rss=sum(map(_rss, engines)),
            descriptors=sum(map(_descriptors, (pid, *engines))),
            threads=sum(map(_threads, (pid, *engines))),
            series=len(metrics),
            pages=pages,
            pages_total=self._pages_total(pages),
            live=int(metrics["quire_num_requests_running"] + metrics["quire_num_requests_waiting"]),
        )

    async def settled(self, descriptors: float = math.inf) -> Vitals:
        """Wait until no request is live, no page owned and at most `descriptors` open, or until a timeout."""
        for _ in range(int(SETTLE_TIMEOUT_S / 0.1)):
            try:
                vitals = await asyncio.to_thread(self.vitals)
            except KeyError:  # metrics are missing while an engine is being replaced
                await asyncio.sleep(0.1)
                continue
            if vitals.live == 0 and vitals.pages["owned"] == 0 and vitals.descriptors <= descriptors:
                break
            await asyncio.sleep(0.1)
        return vitals

    def _metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.endpoint.metrics_url, timeout=30) as answer:
            text = answer.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in samples}

    def _pages_total(self, pages: dict[str, int]) -> int:
        """Return the number of pages at the first sample; it must not change."""
        if not hasattr(self, "_total"):
            self._total = sum(pages[state] for state in ("owned", "cached", "free"))
        return self._total


@contextlib.contextmanager
def start_server(
    *flags: str, variables: Mapping[str, str] = SHORT_TIMEOUTS, program: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """Serve the bundled model on free ports, unless `flags` say otherwise. `log` returns its log.

    Variables of the environment override `variables`. `program` is run instead of `quire`.
    """
    ports = [part for port in PORTS if port not in flags for part in (port, "0")]
    command = [*(program or [str(Path(sys.executable).with_name("quire"))]), "serve", *ports, *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**variables, **os.environ}
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            if not re.search(r"clients \S+ .*metrics \S+", ready):
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read()}")
            print(ready, flush=True)
            yield ServerProcess(process, ready, log)
        finally:
            _stop(process)
            if process.stdout is not None:
                process.stdout.close()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    children = descendants(process.pid)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        process.wait()


class RawClient:
    """One connection that sends any bytes and reads frames. A ProtocolError is an error of the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        self._arrived: list[ServerFrame] = []
        self.welcome: Welcome | None = None

    @classmethod
    async def open(
        cls, endpoint: Endpoint, hello: bool = True, *, session: str | None = None, source: str | None = None
    ) -> RawClient:
        """Connect, from the local address `source` if given. Without `hello`, send nothing."""
        address = parse_address(endpoint.address)
        if isinstance(address, UnixAddress):
            client = cls(*await asyncio.open_unix_connection(address.path))
        else:
            local = None if source is None else (source, 0)
            streams = await asyncio.open_connection(address.host, address.port, ssl=endpoint.tls, local_addr=local)
            client = cls(*streams)
        if hello:
            client.send(Hello((PROTOCOL_VERSION,), token=endpoint.token, session=session))
            answer = await client.receive()
            client.welcome = answer if isinstance(answer, Welcome) else None
        return client

    @property
    def is_welcome(self) -> bool:
        return self.welcome is not None

    def send(self, *frames: Frame) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(b"".join(map(encode, frames)))

    async def receive(self) -> ServerFrame | None:
        """Return the next frame; None when the connection is closed."""
        while not self._arrived:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._arrived += self._decoder.feed(data)  # type: ignore[arg-type]  # Malformed is only for GENERATE
        return self._arrived.pop(0)

    async def discard(self) -> None:
        """Read until the connection is closed, and drop the bytes."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1 << 16):
                pass

    def abort(self) -> None:
        self.writer.transport.abort()


def descendants(pid: int) -> list[int]:
    """Return the ids of all processes below `pid`."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # the process ended in the meantime
    found = []
    wave = [pid]
    while wave := [child for child, parent in parents.items() if parent in wave]:
        found += wave
    return found


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _threads(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
