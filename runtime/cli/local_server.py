"""A `quire serve` process on free ports, for commands that start their own server.

The process has ended when the context is left, also after an error, an interrupt or SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import IO, Any

from ..common.errors import Unavailable

START_TIMEOUT_S = 60
SERVER_STOP_TIMEOUT_S = 10
FREE_PORTS = ("--port", "0", "--operator-port", "0", "--openai-port", "0")
QUIET_FLAGS = ("--log-level", "error")
TERMINATED = 128 + signal.SIGTERM  # exit status


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server."""

    address: str  # address for clients
    metrics_url: str
    api_url: str  # the base URL for OpenAI's clients
    ready_line: str


@contextlib.asynccontextmanager
async def local_server(
    *flags: str, start_timeout_s: float = START_TIMEOUT_S, own_group: bool = False
) -> AsyncIterator[LocalServer]:
    """Run a server on the bundled model, or with `flags`, and without QUIRE_* variables.

    Raises Unavailable with the server's error if it does not start. With `own_group`, Ctrl-C on the terminal does not
    reach the server.

    SIGTERM cancels the calling task and then exits with `TERMINATED`; only the main thread can handle signals.
    """
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    terminated = asyncio.Event()
    assert task is not None, "called in a task"

    def terminate() -> None:
        terminated.set()
        task.cancel()

    handles_signals = threading.current_thread() is threading.main_thread()
    if handles_signals:
        loop.add_signal_handler(signal.SIGTERM, terminate)
    group: dict[str, Any] = {"process_group": 0} if own_group else {}  # uvloop does not take the argument
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "quire.runtime.cli.main", "serve", *FREE_PORTS, *QUIET_FLAGS, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            **group,
            env={name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")},
        )
        try:
            line = await _ready_line(process, start_timeout_s)
            found = re.search(r"clients (\S+)\s+metrics (\S+)\s+api (\S+)", line)
            if found is None:
                raise Unavailable(f"the server did not start: {_last_line(errors)}")
            yield LocalServer(found[1], found[2], found[3], line)
        except asyncio.CancelledError:
            if terminated.is_set():
                raise SystemExit(TERMINATED) from None
            raise
        finally:
            await _stop(process)
            if handles_signals:
                loop.remove_signal_handler(signal.SIGTERM)


async def _ready_line(process: asyncio.subprocess.Process, timeout_s: float) -> str:
    """Return the ready line, empty if the process ended or printed nothing in time."""
    assert process.stdout is not None, "stdout is a pipe"
    try:
        async with asyncio.timeout(timeout_s):
            return (await process.stdout.readline()).decode().strip()
    except TimeoutError:
        return ""


def _last_line(errors: IO[bytes]) -> str:
    """Return the last line that the server wrote to standard error."""
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines() or ["it was not ready in time"]
    return lines[-1].removeprefix("quire: ")


async def _stop(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(SERVER_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
