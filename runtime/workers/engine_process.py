"""One life of an engine process: its start, its end of the link, its death.

It must not know requests or whether another life follows. One invariant: after `end` the process is gone and reaped.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from ..common import errors
from .engine_link import FROM_ENGINE, Channel, Failed, FromEngine, Ready, Start, Stop, ToEngine

STOP_TIMEOUT_S = 20.0  # for what it does at the end, such as writing a snapshot
FALL_TIMEOUT_S = 1.0  # from the end of its link to its exit
COMMAND = (sys.executable, "-P", "-m", "quire.runtime.workers.engine_main")


class EngineProcess:
    """`take` gets what it says, `note_heartbeat` is called as long as it lives, `ended` is set when the link is gone.

    `ready` comes when the model is loaded; or the typed error that kept it from that, Unavailable if it died.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        take: Callable[[FromEngine], None],
        note_heartbeat: Callable[[], None],
        heartbeat: int,
    ) -> None:
        self.ended = asyncio.Event()
        self.ready: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._process = process
        self._take = take
        self._note_heartbeat = note_heartbeat
        self._heartbeat = heartbeat  # file descriptor
        self._channel: Channel | None = None
        self._is_heard = True

    @classmethod
    async def spawn(
        cls, start: Start, take: Callable[[FromEngine], None], note_heartbeat: Callable[[], None]
    ) -> EngineProcess:
        """Raises OSError when the system gives no process."""
        ours, theirs = socket.socketpair()
        heartbeat, beating = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *COMMAND,
                *(str(theirs.fileno()), str(beating)),
                pass_fds=(theirs.fileno(), beating),
                stdin=asyncio.subprocess.DEVNULL,
            )
        except BaseException:
            ours.close()
            os.close(heartbeat)
            raise
        finally:
            theirs.close()
            os.close(beating)
        engine = cls(process, take, note_heartbeat, heartbeat)
        asyncio.get_running_loop().add_reader(heartbeat, engine._read_heartbeat)
        engine._channel = await Channel.open(ours, FROM_ENGINE, engine._hear, engine._lose)
        engine._channel.send(start)
        return engine

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        if self._channel is not None:
            self._channel.send(message)

    @property
    def is_stopped(self) -> bool:
        """Whether somebody has stopped it (SIGSTOP, a debugger): it has not got stuck."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
        except OSError:
            return False

    async def stop(self) -> None:
        """Let it end what it does and exit by itself, if it does so in time."""
        self.send(Stop())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._process.wait()
        await self.end()

    async def fall(self) -> None:
        """Its link went first: let it end as it does, so that the status is its own."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FALL_TIMEOUT_S):
                await self._process.wait()

    async def end(self) -> int:
        """`kill`, and wait until it is gone. Its exit status, negative for a signal."""
        self.kill()
        return await self._process.wait()

    def kill(self) -> None:
        """Whatever state it is in; nothing of it is heard any more. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)  # also ends a stopped one
        self._is_heard = False
        if self._channel is not None:
            self._channel.close()
        self._stop_reading_heartbeat()
        self._lose()

    def _read_heartbeat(self) -> None:
        if os.read(self._heartbeat, 4096):
            self._note_heartbeat()
        else:
            self._stop_reading_heartbeat()

    def _stop_reading_heartbeat(self) -> None:
        """Idempotent."""
        if self._heartbeat >= 0:
            asyncio.get_running_loop().remove_reader(self._heartbeat)
            os.close(self._heartbeat)
            self._heartbeat = -1

    def _hear(self, message: FromEngine) -> None:
        if not self._is_heard:
            return
        if isinstance(message, Ready):
            self.ready.set_result(message)
        elif isinstance(message, Failed):
            self._fail(getattr(errors, message.error, errors.Unavailable)(message.message))
        else:
            self._take(message)

    def _lose(self) -> None:
        self.ended.set()
        self._fail(errors.Unavailable("the engine process ended before it was ready"))

    def _fail(self, error: errors.QuireError) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved: nobody may wait for it
