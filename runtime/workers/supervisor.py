"""Keeps one engine running: opens it, watches its health, and opens another when it is gone.

An engine is a spawned process, or a connection to another machine: a source opens it. Must not import the scheduler.
The owner of the requests is notified by callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from ..common.errors import Unavailable
from ..common.tasks import end_tasks
from .engine_link import EngineReady, FromEngine, StartEngine, ToEngine
from .engine_process import EngineProcess, describe_exit
from .health import TICK_S, HealthMonitor, HealthTimeouts

FIRST_PAUSE_S = 0.2  # pause after a failed start; each further one doubles it
MAX_PAUSE_S = 5.0
RESTART_TIMEOUT_S = 30.0  # time that requests wait for the next process while its start fails
LOADING_TIMEOUTS = HealthTimeouts(heartbeat_s=60.0, stall_s=float("inf"))  # imports take 15 s under a load of 20

_log = structlog.get_logger("quire.supervisor")


class Sender(Protocol):
    def send(self, message: ToEngine) -> None:
        """Write `message` without waiting; drop it when the other end is closed."""


class OpenEngine(Protocol):
    """An engine at the other end of a link; `EngineProcess` documents each member."""

    ready: asyncio.Future[EngineReady]
    closed: asyncio.Event

    @property
    def link(self) -> Sender: ...
    @property
    def pid(self) -> int | None:
        """Process id; None on another machine."""

    @property
    def is_stopped(self) -> bool: ...
    async def stop(self) -> str | None: ...
    async def wait_after_close(self) -> None: ...
    async def kill(self) -> int: ...


class EngineSource(Protocol):
    """The source of the engines of one supervisor, one after another."""

    what: str  # object that it opens, for log lines
    name: str
    snapshot: str | None  # file that a stopped engine writes
    adapters: dict[str, str]  # key -> folder of each adapter that the next engine must have

    def ending(self, status: int) -> str:
        """Return the reason why the last engine closed its link. `status` is the result of its `kill`."""

    async def open(self, receive: Callable[[FromEngine], None], on_heartbeat: Callable[[bool], None]) -> OpenEngine:
        """Open an engine, which may not be ready yet. On failure, raises the cause and cleans up."""

    def note_ready(self, ready: EngineReady) -> None:
        """Note the description of an engine. Raises the reason if it is unusable."""


class ProcessSource:
    """Spawns processes with the configuration of the first."""

    what = "engine process"

    def __init__(self, start: StartEngine) -> None:
        self.start = start
        self.name = start.name
        self.snapshot = start.snapshot
        self.adapters: dict[str, str] = {}

    async def open(self, receive: Callable[[FromEngine], None], on_heartbeat: Callable[[bool], None]) -> OpenEngine:
        """See `EngineSource.open`."""
        start = msgspec.structs.replace(self.start, adapters=tuple(self.adapters.items()))
        return await EngineProcess.spawn(start, receive, on_heartbeat)

    def ending(self, status: int) -> str:
        """See `EngineSource.ending`."""
        return describe_exit(status)

    def note_ready(self, ready: EngineReady) -> None:
        """Keep the values that the process derived from the machine's state for the next processes."""
        if lora := self.start.config.lora:
            self.adapters.update({ready.info.adapters[name]: path for name, path in lora.items()})
        config = msgspec.structs.replace(
            self.start.config,
            lora={},
            max_loras=self.start.config.max_loras or len(lora) or None,
            kv_cache_memory=ready.kv_bytes or None,  # an encoder has none
            max_model_len=ready.info.max_model_len,
            threads=ready.info.threads,
            isa=ready.info.isa,
        )
        self.start = msgspec.structs.replace(self.start, config=config)


class ProcessOwner(Protocol):
    """The owner of the requests that the process computes."""

    def receive(self, message: FromEngine) -> None: ...
    def on_process_ready(self) -> None: ...
    def on_process_exit(self, from_outside: bool, reason: str) -> None:
        """`from_outside`: another process killed or stopped it, so no request can have been the cause."""

    def on_restarts_failing(self, reason: str) -> None:
        """No process has started for `restart_timeout_s`. Called again after each further failed start."""

    def on_tick(self) -> None:
        """Do the work that is due; called every TICK_S, even while no process is ready."""


class Supervisor:
    def __init__(
        self, source: EngineSource, timeouts: HealthTimeouts, restart_timeout_s: float, owner: ProcessOwner
    ) -> None:
        self.process: OpenEngine | None = None  # None while no engine is ready
        self.health = HealthMonitor(timeouts)
        self.num_opened = 0  # engines that were ready
        self.lost_snapshot: str | None = None  # reason why `stop` could not save the snapshot
        self._source = source
        self._timeouts = timeouts
        self._restart_timeout_s = restart_timeout_s
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self._log = _log.bind(engine=source.name)

    @property
    def num_restarts(self) -> int:
        return max(0, self.num_opened - 1)

    async def launch(self) -> EngineReady:
        """Open the first engine and keep one open from then on. Raises the error that prevents its start."""
        process, ready = await self._open()
        self._use(process)
        self._log.debug(f"{self._source.what} ready", pid=process.pid)
        self.start(process)
        return ready

    def start(self, process: OpenEngine | None = None) -> None:
        """Keep an engine open from now on, beginning with `process` if there is one. Returns immediately."""
        self._task = asyncio.create_task(self._run(process), name=f"quire-supervisor-{self._source.name}")

    async def stop(self) -> None:
        """Stop the process and start no other; log whether it saved its snapshot. Idempotent."""
        if self._task is None:
            return
        task = self._task
        self._task = None
        await end_tasks([task], f"supervisor of {self._source.name}")
        snapshot = self._source.snapshot
        problem = None
        if self.process is not None:
            problem = await self.process.stop()
            self.process = None
        elif snapshot is not None:
            problem = "no engine process was running"
        if problem is not None:
            self._log.error("engine process did not stop well", reason=problem, snapshot=snapshot)
            if snapshot is not None:
                self.lost_snapshot = f"the prefix cache was not saved to {snapshot}: {problem}"

    async def _run(self, process: OpenEngine | None) -> None:
        try:
            while True:
                if process is not None:
                    self._owner.on_process_exit(*await self._watch(process))
                process = await self._reopen()
        finally:
            if process is not None and self.process is not process:  # cancelled while the process was being replaced
                await process.kill()

    async def _watch(self, process: OpenEngine) -> tuple[bool, str]:
        """Wait until the process exits or has to be killed. Return whether the cause was external, and the reason."""
        problem = None
        while problem is None and not process.closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await process.closed.wait()
            self._owner.on_tick()
            problem = self.health.check()
        was_stopped = process.is_stopped
        self.process = None
        if problem is None:
            await process.wait_after_close()
        status = await process.kill()
        reason = problem or self._source.ending(status)
        self._log.error(f"{self._source.what} lost", pid=process.pid, status=status, reason=reason)
        return was_stopped or (problem is None and status == -signal.SIGKILL), reason

    async def _reopen(self) -> OpenEngine:
        """Try until an engine is ready, with growing pauses. Notify the owner after `restart_timeout_s`.

        The time counts from the first failed start: loading has no time limit.
        """
        now = asyncio.get_running_loop().time
        num_failures = 0
        pause_s = FIRST_PAUSE_S
        failing_at = math.inf
        while True:
            try:
                process, _ = await self._open()
            except Exception as error:  # any error, such as too many open files: the cause may be temporary
                num_failures += 1
                failing_at = min(failing_at, now() + self._restart_timeout_s)
                self._log.error(f"{self._source.what} not ready", attempt=num_failures, reason=str(error))
                left_s = failing_at - now()
                if left_s <= 0:
                    self._owner.on_restarts_failing(f"the engine cannot be restarted: {error}")
                await self._pause(pause_s if left_s <= 0 else min(pause_s, left_s))
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            else:
                self._use(process)
                self._log.info(f"{self._source.what} ready", pid=process.pid, restarts=self.num_restarts)
                return process

    async def _pause(self, seconds: float) -> None:
        while seconds > 0:
            await asyncio.sleep(min(TICK_S, seconds))
            seconds -= TICK_S
            self._owner.on_tick()

    async def _open(self) -> tuple[OpenEngine, EngineReady]:
        """Open an engine and wait until it is ready. Raises the error that prevents that."""
        self.health = HealthMonitor(LOADING_TIMEOUTS)
        process = await self._source.open(
            self._owner.receive, lambda is_held_up: self.health.note_heartbeat(is_held_up)
        )
        try:
            while not process.ready.done():
                await asyncio.wait([process.ready], timeout=TICK_S)
                self._owner.on_tick()
                if (problem := self.health.check()) is not None:
                    raise Unavailable(f"the {self._source.what} hangs while it starts: {problem}")
            ready = process.ready.result()
            self._source.note_ready(ready)
            return process, ready
        except BaseException:
            await process.kill()
            raise

    def _use(self, process: OpenEngine) -> None:
        self.process = process
        self.num_opened += 1
        self.health = HealthMonitor(self._timeouts)
        self._owner.on_process_ready()
