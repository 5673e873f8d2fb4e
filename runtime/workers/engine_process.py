"""One engine process, seen from the server: its start, its end of the link, its heartbeat and its exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import structlog

from ..common import errors
from ..common.memory import killing_limit, machine_memory_bytes
from .engine_link import (
    FROM_ENGINE,
    EngineFailed,
    EngineReady,
    FromEngine,
    SnapshotProgress,
    StartEngine,
    StopEngine,
)
from .health import HELD_UP, TICK_S
from .link_end import EngineLink

SAVE_TIMEOUT_S = 20.0  # time to finish the step in flight, and to write the next bytes of its snapshot
STOP_TIMEOUT_S = 1.0  # time to exit without a snapshot
EXIT_TIMEOUT_S = 1.0  # time between the end of its link and its exit, in either order
KILL_TIMEOUT_S = 10.0  # time for the system to end the process and reclaim its memory
STOPPED_TICKS = 4  # ticks after which a process stopped by a signal or a debugger is killed
POLL_S = 0.005  # pause between two checks for the exit of a process that is about to end
# The process ends with its server, even while it imports: prctl(PR_SET_PDEATHSIG, SIGKILL) comes first. It exits if the
# server has already ended. It may write to a terminal even where background processes may not (`stty tostop`).
PROGRAM = (
    "import ctypes, os, signal, sys; ctypes.CDLL(None).prctl(1, 9); os.getppid() == int(sys.argv[3]) or os._exit(0); "
    "signal.signal(signal.SIGTTOU, signal.SIG_IGN); "
    "from quire.runtime.common.quick_imports import quick_imports\n"
    "with quick_imports(): from quire.runtime.workers.engine_main import main\n"
    "main()"
)
COMMAND = (sys.executable, "-P", "-c", PROGRAM)

_log = structlog.get_logger("quire.supervisor")


class EngineProcess:
    """Made by `spawn`.

    `ready` is set when the model is loaded, or gets the error that prevented it. `closed` is set when the process has
    closed its end of the link, which it does by exiting.
    """

    link: EngineLink

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        receive: Callable[[FromEngine], None],
        on_heartbeat: Callable[[bool], None],
        heartbeat_fd: int,
        *,
        saves: bool,
    ) -> None:
        self.ready: asyncio.Future[EngineReady] = asyncio.get_running_loop().create_future()
        self.closed = asyncio.Event()
        self._process = process
        self._pass_on = receive
        self._on_heartbeat = on_heartbeat
        self._heartbeat_fd = heartbeat_fd
        self._saves = saves  # the process writes a snapshot when it stops
        self._snapshot_bytes = 0  # bytes of the snapshot on disk
        self._failure: str | None = None  # failure that the process reported after its start
        self._failing_start: asyncio.Task[None] | None = None  # waits for the status of a process that was never ready

    @classmethod
    async def spawn(
        cls, start: StartEngine, receive: Callable[[FromEngine], None], on_heartbeat: Callable[[bool], None]
    ) -> EngineProcess:
        """Start a process. `receive` gets every message except EngineReady, EngineFailed and SnapshotProgress.

        Raises OSError, for example for too many open files, leaving neither a process nor a descriptor behind.
        """
        with ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            with theirs:
                heartbeat_fd, their_heartbeat_fd = os.pipe()
                undo.callback(os.close, heartbeat_fd)
                try:
                    process = _started(theirs.fileno(), their_heartbeat_fd)
                finally:
                    os.close(their_heartbeat_fd)
            engine = cls(process, receive, on_heartbeat, heartbeat_fd, saves=start.snapshot is not None)
            try:
                engine.link = await EngineLink.open(ours, FROM_ENGINE, engine._receive, engine._on_closed)
            except BaseException:
                process.kill()
                await engine._wait(KILL_TIMEOUT_S)
                raise
            undo.pop_all()
        asyncio.get_running_loop().add_reader(heartbeat_fd, engine._read_heartbeat)
        engine.link.send(start)
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped by a signal or a debugger."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    async def stop(self) -> str | None:
        """Let the process end its requests, write its snapshot and exit. Return the error, or None.

        The process may continue as long as it writes bytes to the disk. It is killed after SAVE_TIMEOUT_S without any,
        after STOP_TIMEOUT_S without a snapshot, and if a signal or a debugger stops it.
        """
        self.link.receive = self._receive
        self.link.send(StopEngine())
        limit_s = SAVE_TIMEOUT_S if self._saves else STOP_TIMEOUT_S
        num_bytes = -1
        while self._process.poll() is None and self._snapshot_bytes > num_bytes:
            num_bytes = self._snapshot_bytes
            await self._wait_for_stop(limit_s)
        has_ended = self._process.returncode is not None
        if has_ended:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await self.closed.wait()  # the last message has been received
        elif not self.closed.is_set():  # otherwise its work is done, and the system is reclaiming its memory
            why = "it is stopped by a signal or a debugger" if self.is_stopped else f"no progress for {limit_s:g} s"
            self._failure = f"it was killed: {why}"
        status = await self.kill(EXIT_TIMEOUT_S)
        return self._failure or (describe_exit(status) if has_ended and status else None)

    async def wait_after_close(self) -> None:
        """Wait for the real exit status of a process that closed its link before it exited."""
        await self._wait(EXIT_TIMEOUT_S)

    async def kill(self, timeout_s: float = KILL_TIMEOUT_S) -> int:
        """Kill the process and return its exit status, negative for a signal. Its further messages are ignored.

        Idempotent, also for stopped and exited processes. A process that the system does not end within `timeout_s` is
        left behind.
        """
        self._process.kill()
        self.link.receive = _ignore
        self.link.close()
        self._stop_reading_heartbeat()
        self._on_closed()
        await self._wait(timeout_s)
        if self._process.returncode is None:
            _log.error("a killed engine process has not ended and is left behind", pid=self.pid, seconds=timeout_s)
            return -signal.SIGKILL
        return self._process.returncode

    async def _wait_for_stop(self, timeout_s: float) -> None:
        """Wait until the process exits, at most `timeout_s`, and less if it is in the stopped state."""
        give_up_at = asyncio.get_running_loop().time() + timeout_s
        num_stopped = 0
        while self._process.returncode is None and num_stopped < STOPPED_TICKS:
            left_s = give_up_at - asyncio.get_running_loop().time()
            if left_s <= 0:
                return
            await self._wait(min(TICK_S, left_s))
            num_stopped = num_stopped + 1 if self.is_stopped else 0

    async def _wait(self, timeout_s: float) -> None:
        """Wait for the exit of the process, at most `timeout_s`."""
        now = asyncio.get_running_loop().time
        give_up_at = now() + timeout_s
        while self._process.poll() is None and now() < give_up_at:  # noqa: ASYNC110 - the exit of a process is no event
            await asyncio.sleep(POLL_S)

    def _receive(self, message: FromEngine) -> None:
        match message:
            case EngineReady():
                self.ready.set_result(message)
                self.link.receive = self._pass_on  # `stop` takes the link back, for reports about the snapshot
            case EngineFailed(error, text) if not self.ready.done():
                self._fail(getattr(errors, error, errors.Unavailable)(text))
            case EngineFailed(_, text):
                self._failure = text
            case SnapshotProgress(num_bytes):
                self._snapshot_bytes = num_bytes
            case _:
                self._pass_on(message)

    def _on_closed(self) -> None:
        self.closed.set()
        if not self.ready.done() and self._failing_start is None:
            self._failing_start = asyncio.create_task(self._fail_start(), name="quire-failing-start")

    async def _fail_start(self) -> None:
        await self._wait(EXIT_TIMEOUT_S)
        status = self._process.returncode
        ending = "it closed its link" if status is None else describe_exit(status)
        self._fail(errors.Unavailable(f"the engine process ended before it was ready: {ending}"))

    def _fail(self, error: errors.QuireError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # marked as retrieved, because possibly no task waits for it

    def _read_heartbeat(self) -> None:
        if beats := os.read(self._heartbeat_fd, 4096):
            self._on_heartbeat(beats.endswith(HELD_UP))
        else:
            self._stop_reading_heartbeat()

    def _stop_reading_heartbeat(self) -> None:
        """Idempotent."""
        if self._heartbeat_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._heartbeat_fd)
            os.close(self._heartbeat_fd)
            self._heartbeat_fd = -1


def _started(link_fd: int, heartbeat_fd: int) -> subprocess.Popen[bytes]:
    """Start a process with its ends of the link and of the heartbeat. Raises OSError."""
    return subprocess.Popen(
        (*COMMAND, str(link_fd), str(heartbeat_fd), str(os.getpid())),
        pass_fds=(link_fd, heartbeat_fd),
        stdin=subprocess.DEVNULL,
        # A process group of the server's session: Ctrl-C in a terminal reaches the server only, and when the server
        # ends, the system continues a stopped process of the group, which then ends.
        process_group=0,
    )


def describe_exit(status: int) -> str:
    """Describe an exit status with the name of the signal, and for SIGKILL with the memory limit."""
    if status >= 0:
        return f"it exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal
        name = f"signal {-status}"
    if status != -signal.SIGKILL:
        return f"it was killed by {name}"
    limit = killing_limit() or f"the {machine_memory_bytes():,} bytes of this machine"
    return f"it was killed by {name}, as the system does when memory runs out; the limit is {limit}"


def _ignore(message: FromEngine) -> None:
    """Ignore messages of a killed process."""
