"""Starting an engine process and cleaning up after a failure; stopping it, and its work until then.

The engine process is a script that does what the test needs.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Awaitable, Callable
from errno import EMFILE
from pathlib import Path
from typing import Any, NoReturn

import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.memory import MemoryLimit
from quire.runtime.workers import engine_process
from quire.runtime.workers.engine_link import FromEngine, StartEngine
from quire.runtime.workers.engine_process import PROGRAM, EngineProcess, describe_exit
from quire.runtime.workers.link_end import EngineLink
from structlog.testing import capture_logs

Stopped = Callable[..., Awaitable[str | None]]

START = StartEngine(EngineConfig(), None, "prefixes", "engine-0", None)
START_WITHOUT_SNAPSHOT = StartEngine(EngineConfig(), None, None, "engine-0", None)


def no_descriptors(*_: Any, **__: Any) -> NoReturn:
    raise OSError(EMFILE, "Too many open files")


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("where", "name"), [(os, "pipe"), (subprocess, "Popen"), (EngineLink, "open")], ids=lambda each: each
)
async def test_a_failed_start_leaves_no_process_and_no_descriptor(
    where: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    processes = children()
    files = descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(where, name, no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            await EngineProcess.spawn(START, lambda message: None, lambda: None)
    assert children() <= processes
    assert descriptors() <= files


SCRIPT = """
import msgspec, os, socket, sys, time
from quire.runtime.protocol.framing import with_prefix
from quire.runtime.workers.engine_link import EngineFailed, SnapshotProgress, StatsReport
link = socket.socket(fileno=int(sys.argv[1]))
def send(message):
    link.sendall(with_prefix(msgspec.msgpack.encode(message)))
link.recv(1 << 16)
"""


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Stopped:
    async def stopped(script: str, start: StartEngine = START) -> str | None:
        """Start a process that runs `script` and stop it; return the result of `stop`."""
        monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", "-c", SCRIPT + script))
        process = await EngineProcess.spawn(start, lambda message: None, lambda: None)
        process.ready.cancel()  # the process has started
        return await process.stop()

    return stopped


async def test_messages_of_a_killed_process_are_not_received(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The messages have arrived and are unread when the process is killed. No descriptor of the process remains."""
    has_sent = tmp_path / "sent"
    received: list[FromEngine] = []
    files = descriptors()
    script = f"send(StatsReport(None)); open({str(has_sent)!r}, 'w'); time.sleep(600)"
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", "-c", SCRIPT + script))
    process = await EngineProcess.spawn(START, received.append, lambda: None)
    while not has_sent.exists():
        time.sleep(0.005)  # noqa: ASYNC251 - the event loop must not read the message
    await process.kill()
    await process.closed.wait()
    await asyncio.sleep(0)
    assert received == []
    assert descriptors() <= files


async def test_a_process_that_exits_by_itself_has_done_its_work(stopped: Stopped) -> None:
    assert await stopped("") is None


async def test_a_process_that_is_killed_while_it_stops_is_reported(stopped: Stopped) -> None:
    assert await stopped("os.kill(os.getpid(), 15)") == "it was killed by SIGTERM"


LIMIT = MemoryLimit(2 << 30, 5, "/sys/fs/cgroup/pods/memory.max")
NO_MEMORY = "it was killed by SIGKILL, as the system does when memory runs out; the limit is "


@pytest.mark.parametrize(
    ("status", "limit", "text"),
    [
        (0, LIMIT, "it exited with status 0"),
        (70, LIMIT, "it exited with status 70"),
        (-signal.SIGSEGV, LIMIT, "it was killed by SIGSEGV"),
        (-signal.SIGILL, LIMIT, "it was killed by SIGILL"),
        (-40, LIMIT, "it was killed by signal 40"),
        (-signal.SIGKILL, LIMIT, f"{NO_MEMORY}2,147,483,648 bytes in /sys/fs/cgroup/pods/memory.max"),
        (-signal.SIGKILL, None, f"{NO_MEMORY}the 1,073,741,824 bytes of this machine"),
    ],
)
def test_the_end_of_a_process_in_words(
    status: int, limit: MemoryLimit | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "killing_limit", lambda: limit)
    monkeypatch.setattr(engine_process, "machine_memory_bytes", lambda: 1 << 30)
    assert describe_exit(status) == text


@pytest.mark.parametrize(
    ("script", "ending"),
    [
        ("os.kill(os.getpid(), 11)", "it was killed by SIGSEGV"),
        ("os.kill(os.getpid(), 9)", f"{NO_MEMORY}2,147,483,648 bytes in /sys/fs/cgroup/pods/memory.max"),
        ("sys.exit(3)", "it exited with status 3"),
        ("link.close(); os.kill(os.getpid(), 6)", "it was killed by SIGABRT"),
    ],
)
async def test_a_process_that_ends_before_it_is_ready_says_how(
    script: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-P", "-c", SCRIPT + script))
    monkeypatch.setattr(engine_process, "killing_limit", lambda: LIMIT)
    process = await EngineProcess.spawn(START, lambda message: None, lambda: None)
    with pytest.raises(Unavailable) as failure:
        await process.ready
    assert str(failure.value) == f"the engine process ended before it was ready: {ending}"
    await process.kill()


async def test_an_error_of_saving_is_reported(stopped: Stopped) -> None:
    assert await stopped("send(EngineFailed('SnapshotNotSaved', 'the disk is full'))") == "the disk is full"


async def test_an_error_is_reported_that_arrives_after_the_exit(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_without_reading(process: EngineProcess, timeout_s: float) -> None:
        transport = process.link._transport
        assert transport is not None
        transport.pause_reading()
        await process._wait(60)
        asyncio.get_running_loop().call_later(0.01, transport.resume_reading)

    monkeypatch.setattr(EngineProcess, "_wait_for_stop", wait_without_reading)
    assert await stopped("send(EngineFailed('SnapshotNotSaved', 'the disk is full'))") == "the disk is full"


async def test_a_process_may_take_as_long_as_it_writes(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "_wait_for_stop", wait_for_message(is_one=True))
    assert await stopped("for number in range(1, 6): send(SnapshotProgress(number)); time.sleep(0.01)") is None


async def test_a_process_that_writes_nothing_is_killed(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "_wait_for_stop", wait_for_message())
    problem = await stopped("send(SnapshotProgress(1)); send(SnapshotProgress(1)); time.sleep(600)")
    assert problem == "it was killed: no progress for 20 s"


async def test_a_process_without_a_snapshot_is_killed_soon(stopped: Stopped) -> None:
    assert await stopped("time.sleep(600)", START_WITHOUT_SNAPSHOT) == "it was killed: no progress for 1 s"


async def test_a_process_that_has_closed_its_link_has_done_its_work(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system needs long to reclaim its memory."""

    async def until_closed(process: EngineProcess, timeout_s: float) -> None:
        await process.closed.wait()

    monkeypatch.setattr(EngineProcess, "_wait_for_stop", until_closed)
    assert await stopped("link.close(); time.sleep(600)") is None


async def test_a_process_that_a_signal_has_stopped_is_killed_and_keeps_no_snapshot_waiting(stopped: Stopped) -> None:
    problem = await stopped("os.kill(os.getpid(), 19)")
    assert problem == "it was killed: it is stopped by a signal or a debugger"


async def test_a_killed_process_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system does not end a process inside an uninterruptible call."""
    monkeypatch.setattr(engine_process, "COMMAND", (sys.executable, "-c", "import time; time.sleep(600)"))
    process = await EngineProcess.spawn(START, lambda message: None, lambda: None)
    with monkeypatch.context() as patch, capture_logs() as logs:
        patch.setattr(process._process, "kill", lambda: None)
        assert await process.kill(0.0) == -9
    assert [(line["log_level"], line["pid"]) for line in logs] == [("error", process.pid)]
    assert await process.kill() == -9


SERVER = """
import asyncio, os, signal, sys
from quire.runtime.common.config import EngineConfig
from quire.runtime.workers import engine_process
from quire.runtime.workers.engine_link import StartEngine
start = StartEngine(EngineConfig(), None, None, "engine-0", None)
engine_process.COMMAND = (sys.executable, "-P", "-c", PROGRAM)
async def main():
    process = await engine_process.EngineProcess.spawn(start, lambda message: None, lambda is_held_up: None)
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
"""


def server(program: str, then: str) -> list[str]:
    """Return the command of a server that starts an engine process with `program` and waits for its end or stop.

    The server then runs `then`.
    """
    return [sys.executable, "-c", f"PROGRAM = {program!r}{SERVER}    {then}\nasyncio.run(main())"]


def test_a_process_that_is_stopped_while_it_starts_ends_with_its_server() -> None:
    """The process has not run yet, so the system does not end it with its server."""
    program = f"import os; os.kill(os.getpid(), 19); {PROGRAM}"
    command = server(program, "print(process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, rest = process.stdout.readline(), process.stdout.read()  # the engine process has the file, too
    assert (int(pid) > 0, rest, process.returncode) == (True, "", -9)


def test_a_process_is_not_interrupted_at_a_terminal_and_may_write_there() -> None:
    """The terminal sends signals to the server's process group, and stops other groups that write (`stty tostop`)."""
    terminal, end = os.openpty()
    settings = termios.tcgetattr(end)
    settings[3] |= termios.TOSTOP
    termios.tcsetattr(end, termios.TCSANOW, settings)
    program = PROGRAM.partition("from quire")[0] + "os.write(2, b'loading'); raise SystemExit(3)"
    then = (
        "print(end.si_status, os.getsid(process.pid) == os.getsid(0), os.getpgid(process.pid) == process.pid); "
        "await process.kill()"
    )
    script = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {server(program, then)[2]}"
    done = subprocess.run(
        [sys.executable, "-c", script],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=end,
        text=True,
        start_new_session=True,
        check=True,
    )
    os.close(end)
    assert done.stdout == "3 True True\n"
    assert os.read(terminal, 100) == b"loading"
    os.close(terminal)


def wait_for_message(*, is_one: bool = False) -> Callable[[EngineProcess, float], Awaitable[None]]:
    """Return a function that waits for the next message or the exit instead of the time limit.

    `is_one`: messages that arrive together count as one.
    """
    arrived = asyncio.Semaphore(0)
    is_counting = False

    async def wait(process: EngineProcess, timeout_s: float) -> None:
        nonlocal is_counting
        if not is_counting:
            is_counting = True
            receive = process.link.receive
            process.link.receive = lambda message: (receive(message), arrived.release())[0]
        waits = [asyncio.ensure_future(each) for each in (arrived.acquire(), process._wait(60))]
        _, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in pending:
            each.cancel()
        while is_one and not arrived.locked():
            await arrived.acquire()

    return wait
