"""Engine hosts as processes, and a proxy on their link that delays, cuts and swallows its bytes.

Standalone, so that tests, campaigns and benchmarks can use it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

SECRET = "a secret of at least 16 bytes"
STOP_TIMEOUT_S = 30.0
PIECE_BYTES = 1 << 16


class HostProcess:
    """A running `quire engine-host`, of the bundled model unless the flags name another."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        self._folder = folder
        self._flags = flags
        self._port = "0"  # port of the first start; later starts take it again
        self.start()

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises SystemExit with its log if it does not start."""
        secret = self._folder / "secret"
        secret.write_text(SECRET)
        command = (str(Path(sys.executable).with_name("quire")), "engine-host", "--secret-file", str(secret))
        address = ("--listen", f"127.0.0.1:{self._port}")
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *address, *self._flags], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self.process.stdout is not None
        ready = self.process.stdout.readline()
        if "engine host ready: " not in ready:
            raise SystemExit(f"the engine host did not start: {self.log()}")
        self.address = ready.partition("ready: ")[2].split()[0]
        self._port = self.address.rpartition(":")[2]

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def processes(self) -> list[int]:
        """Return the ids of the host and of its engine processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [self.process.pid, *map(int, children.split())]

    def signal(self, number: signal.Signals) -> None:
        """Signal the host and its engine processes."""
        for pid in self.processes():
            os.kill(pid, number)

    def kill(self) -> None:
        """Kill the host; the kernel then kills its engine processes."""
        self.process.kill()
        self._wait()

    def close(self) -> None:
        """End the processes, stopped ones included."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self._wait()
            except subprocess.TimeoutExpired:
                self.kill()

    def _wait(self) -> None:
        self.process.wait(STOP_TIMEOUT_S)
        if self.process.stdout is not None:
            self.process.stdout.close()


@contextmanager
def running_hosts(count: int, *flags: str) -> Iterator[list[HostProcess]]:
    """Start hosts one after another; end them on leaving."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        hosts = []
        for index in range(count):
            own = Path(folder) / str(index)
            own.mkdir()
            hosts.append(HostProcess(own, flags))
            stack.callback(hosts[-1].close)
        yield hosts


class LinkProxy:
    """A proxy to one address. Swallowed bytes are lost without a trace, as on a machine that is cut off."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.delay_s = 0.0
        self.is_blackhole = False
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Close all connections."""
        for task in self._tasks:
            task.cancel()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on one connection until either side closes it."""
        host, _, port = self._target.rpartition(":")
        ends = [writer]
        try:
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            ends.append(up_writer)
            directions = [
                asyncio.create_task(self._pass(reader, up_writer)), asyncio.create_task(self._pass(up_reader, writer))
            ]  # fmt: skip
            self._tasks.update(directions)
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for direction in directions:
                direction.cancel()
                self._tasks.discard(direction)
        except OSError:
            pass
        finally:
            for end in ends:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(PIECE_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if not self.is_blackhole:
                    writer.write(data)


@asynccontextmanager
async def proxying(target: str) -> AsyncIterator[LinkProxy]:
    """Run a proxy to `target`."""
    proxy = LinkProxy(target)
    async with await asyncio.start_server(proxy.serve, "127.0.0.1", 0) as server:
        proxy.address = "{}:{}".format(*server.sockets[0].getsockname())
        yield proxy
        proxy.cut()
