"""`quire serve` as a process of its own, and what can be seen of it from outside: memory, descriptors, pages, metrics.

It must not know what is done to the server. One invariant: the process and its children are gone when `served` ends,
and what it wrote to its log is not lost.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quire.runtime.protocol.address import UnixAddress, parse_address
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
PATIENCE = {  # settings without a flag: an abandoned request is kept for less long than a short run lasts
    "QUIRE_RESUME_TIMEOUT_MS": "3000",
    "QUIRE_CREDIT_TIMEOUT_MS": "3000",
    "QUIRE_HANDSHAKE_TIMEOUT_MS": "5000",
    "QUIRE_FRAME_TIMEOUT_MS": "5000",
    "QUIRE_WRITE_TIMEOUT_MS": "5000",
}
SETTLE_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 45.0


@dataclass(frozen=True)
class Vitals:
    """One look at the server. Bytes of resident memory; descriptors of all its processes; pages by state."""

    front_rss: int
    engines_rss: int
    descriptors: int
    series: int  # lines of /metrics
    pages: dict[str, int]
    pages_total: int
    live: int  # requests running or waiting

    @property
    def rss(self) -> int:
        return self.front_rss + self.engines_rss

    @property
    def books_balance(self) -> bool:
        return sum(self.pages[state] for state in ("owned", "cached", "free")) == self.pages_total

    def __str__(self) -> str:
        pages = " ".join(f"{state} {self.pages[state]}" for state in ("owned", "cached", "free"))
        return (
            f"front {self.front_rss / MIB:7.1f} MiB  engines {self.engines_rss / MIB:7.1f} MiB  "
            f"descriptors {self.descriptors:5}  series {self.series:4}  live {self.live:4}  pages {pages}"
        )


class Served:
    def __init__(self, process: subprocess.Popen[str], ready: str, log: IO[str]) -> None:
        self.address = ready.partition("clients ")[2].split()[0]
        self._metrics_url = ready.partition("metrics ")[2].split()[0]
        self._process = process
        self._log = log

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def engines(self) -> list[int]:
        """Process ids."""
        return _descendants(self._process.pid)

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def vitals(self) -> Vitals:
        front = self._process.pid
        engines = self.engines()
        metrics = self._metrics()
        pages = {state: int(metrics[f'quire_kv_pages{{state="{state}"}}']) for state in ("owned", "cached", "free")}
        return Vitals(
            front_rss=_rss(front),
            engines_rss=sum(map(_rss, engines)),
            descriptors=sum(map(_descriptors, (front, *engines))),
            series=len(metrics),
            pages=pages,
            pages_total=self._pages_total(pages),
            live=int(metrics["quire_num_requests_running"] + metrics["quire_num_requests_waiting"]),
        )

    async def settled(self, descriptors: float = math.inf) -> Vitals:
        """Once nothing is live, no page owned and no more descriptors open, or as it is after waiting in vain."""
        for _ in range(int(SETTLE_TIMEOUT_S / 0.1)):
            try:
                vitals = await asyncio.to_thread(self.vitals)
            except KeyError:  # while an engine is being replaced, nobody can tell
                await asyncio.sleep(0.1)
                continue
            if vitals.live == 0 and vitals.pages["owned"] == 0 and vitals.descriptors <= descriptors:
                break
            await asyncio.sleep(0.1)
        return vitals

    def _metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self._metrics_url, timeout=30) as answer:
            text = answer.read().decode()
        samples = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {series: float(value) for series, _, value in samples}

    def _pages_total(self, pages: dict[str, int]) -> int:
        """As the first look found it: nothing may be added or lost from then on."""
        if not hasattr(self, "_total"):
            self._total = sum(pages[state] for state in ("owned", "cached", "free"))
        return self._total


@contextmanager
def served(*flags: str) -> Iterator[Served]:
    """The bundled model on free ports, unless the flags say otherwise. Its log goes to a file that `log` reads."""
    command = [str(Path(sys.executable).with_name("quire")), "serve", "--port", "0", "--http-port", "0", *flags]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env={**PATIENCE, **os.environ}
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            if not re.search(r"clients \S+ .*metrics \S+", ready):
                log.seek(0)
                raise SystemExit(f"the server did not start: {log.read()}")
            print(ready, flush=True)
            yield Served(process, ready, log)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    children = _descendants(process.pid)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        for pid in (process.pid, *children):
            os.kill(pid, signal.SIGKILL)
        process.wait()


class Peer:
    """One connection that sends bytes, right or wrong ones, and reads frames. A ProtocolError is the server's fault."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self._reader = reader
        self._decoder = Decoder(SERVER_FRAMES, MAX_FRAME_BYTES)
        self._arrived: list[ServerFrame] = []
        self.is_welcome = False

    @classmethod
    async def open(cls, address: str, hello: bool = True) -> Peer:
        where = parse_address(address)
        if isinstance(where, UnixAddress):
            peer = cls(*await asyncio.open_unix_connection(where.path))
        else:
            peer = cls(*await asyncio.open_connection(where.host, where.port))
        if hello:
            peer.send(Hello((PROTOCOL_VERSION,)))
            peer.is_welcome = isinstance(await peer.receive(), Welcome)
        return peer

    def send(self, *frames: Frame) -> None:
        if not self.writer.transport.is_closing():
            self.writer.write(b"".join(map(encode, frames)))

    async def receive(self) -> ServerFrame | None:
        """The next frame; None when the connection is closed."""
        while not self._arrived:
            try:
                data = await self._reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._arrived += self._decoder.feed(data)  # type: ignore[arg-type]  # Malformed is only for GENERATE
        return self._arrived.pop(0)

    def abort(self) -> None:
        self.writer.transport.abort()


def _descendants(pid: int) -> list[int]:
    """Processes that this one started, directly or not."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended meanwhile
    found, wave = [], [pid]
    while wave := [child for child, parent in parents.items() if parent in wave]:
        found += wave
    return found


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
