"""Keeps one engine process running: starts it, watches its health, and starts another when it is gone.

It must not import the scheduler. The owner of the requests is notified by callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
from typing import Protocol

import msgspec
import structlog

from ..common.errors import Unavailable
from .engine_link import EngineReady, FromEngine, StartEngine
from .engine_process import EngineProcess
from .health import TICK_S, HealthMonitor, HealthTimeouts

FIRST_PAUSE_S = 0.2  # after a failed start; each further one doubles it
MAX_PAUSE_S = 5.0
RESTART_TIMEOUT_S = 30.0  # that requests wait for the next process while its start fails
LOADING_TIMEOUTS = HealthTimeouts(heartbeat_s=15.0, stall_s=float("inf"))

_log = structlog.get_logger("quire.supervisor")


class ProcessOwner(Protocol):
    """The owner of the requests that the process computes."""

    def receive(self, message: FromEngine) -> None: ...
    def on_process_ready(self) -> None: ...
    def on_process_exit(self, from_outside: bool) -> None:
        """`from_outside`: another process killed or stopped it, so no request can have been the cause."""

    def on_restarts_failing(self, reason: str) -> None:
        """No process has started for `restart_timeout_s`. Called again after each further failed start."""

    def on_tick(self) -> None:
        """Do what is due by time; called every TICK_S, whether a process is ready or not."""


class Supervisor:
    def __init__(
        self, start: StartEngine, timeouts: HealthTimeouts, restart_timeout_s: float, owner: ProcessOwner
    ) -> None:
        self.process: EngineProcess | None = None  # None while none is ready
        self.health = HealthMonitor(timeouts)
        self.num_restarts = 0
        self.lost_snapshot: str | None = None  # why `stop` could not save the snapshot
        self._start = start
        self._timeouts = timeouts
        self._restart_timeout_s = restart_timeout_s
        self._owner = owner
        self._task: asyncio.Task[None] | None = None
        self._log = _log.bind(engine=start.name)

    async def launch(self) -> EngineReady:
        """Start the first process and keep it running from then on. Raises the error that prevents its start."""
        process, ready = await self._spawn()
        # What the first process derived from the state of the machine holds for all that follow.
        config = msgspec.structs.replace(
            self._start.config,
            kv_cache_memory=ready.kv_bytes or None,  # an encoder has none
            max_model_len=ready.info.max_model_len,
            threads=ready.info.threads,
            isa=ready.info.isa,
        )
        self._start = msgspec.structs.replace(self._start, config=config)
        self._use(process)
        self._log.debug("engine process ready", pid=process.pid)
        self._task = asyncio.create_task(self._run(process), name=f"quire-supervisor-{self._start.name}")
        return ready

    async def stop(self) -> None:
        """Stop the process and start no other; log whether it saved its snapshot. Idempotent."""
        if self._task is None:
            return
        task, self._task = self._task, None
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        snapshot, problem = self._start.snapshot, None
        if self.process is not None:
            problem = await self.process.stop()
            self.process = None
        elif snapshot is not None:
            problem = "no engine process was running"
        if problem is not None:
            self._log.error("engine process did not stop well", reason=problem, snapshot=snapshot)
            if snapshot is not None:
                self.lost_snapshot = f"the prefix cache was not saved to {snapshot}: {problem}"

    async def _run(self, process: EngineProcess) -> None:
        try:
            while True:
                from_outside = await self._watch(process)
                self._owner.on_process_exit(from_outside)
                process = await self._restart()
        finally:
            if self.process is not process:  # cancelled while the process was being replaced
                await process.kill()

    async def _watch(self, process: EngineProcess) -> bool:
        """Wait until the process exits or has to be killed, and return whether that came from outside."""
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
        self._log.error("engine process lost", pid=process.pid, status=status, reason=problem or "it exited")
        return was_stopped or (problem is None and status == -signal.SIGKILL)

    async def _restart(self) -> EngineProcess:
        """Try until a process is ready, with growing pauses. Notify the owner after `restart_timeout_s`.

        The time counts from the first failed start: a process that is loading may take as long as it needs.
        """
        now = asyncio.get_running_loop().time
        num_failures, pause_s, failing_at = 0, FIRST_PAUSE_S, math.inf
        while True:
            try:
                process, _ = await self._spawn()
            except Exception as error:  # whatever it was, such as too many open files: it may be over at the next start
                num_failures += 1
                failing_at = min(failing_at, now() + self._restart_timeout_s)
                self._log.error("engine process did not start", attempt=num_failures, reason=str(error))
                left_s = failing_at - now()
                if left_s <= 0:
                    self._owner.on_restarts_failing(f"the engine cannot be restarted: {error}")
                await self._pause(pause_s if left_s <= 0 else min(pause_s, left_s))
                pause_s = min(MAX_PAUSE_S, 2 * pause_s)
            else:
                self.num_restarts += 1
                self._use(process)
                self._log.info("engine process restarted", pid=process.pid)
                return process

    async def _pause(self, seconds: float) -> None:
        while seconds > 0:
            await asyncio.sleep(min(TICK_S, seconds))
            seconds -= TICK_S
            self._owner.on_tick()

    async def _spawn(self) -> tuple[EngineProcess, EngineReady]:
        """Start a process and wait until it is ready. Raises the error that prevents that."""
        self.health = HealthMonitor(LOADING_TIMEOUTS)
        process = await EngineProcess.spawn(self._start, self._owner.receive, lambda: self.health.note_heartbeat())
        try:
            while not process.ready.done():
                await asyncio.wait([process.ready], timeout=TICK_S)
                self._owner.on_tick()
                if (problem := self.health.check()) is not None:
                    raise Unavailable(f"the engine process hangs while it starts: {problem}")
            return process, process.ready.result()
        except BaseException:
            await process.kill()
            raise

    def _use(self, process: EngineProcess) -> None:
        self.process = process
        self.health = HealthMonitor(self._timeouts)
        self._owner.on_process_ready()
