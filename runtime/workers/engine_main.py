"""The engine process: a `EngineCore` at the other end of the link.

It must not know users, text or sockets other than the link's. One invariant: it does not outlive its server; signals to
end are the server's to handle, which then says so.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

import structlog
import uvloop

from ...scheduler import Refused, Request, RequestUpdate, SchedulerError, StepPlan
from ..common.errors import QuireError, Unavailable
from ..common.logs import log_to_stderr
from ..engine import CoreListener, EngineCore, Prefilled, StepStats, prefix_snapshot
from .engine_link import (
    BEAT_INTERVAL_S,
    TO_ENGINE,
    Add,
    Answer,
    Beat,
    Begun,
    Cancel,
    Channel,
    Drop,
    Failed,
    FromEngine,
    Readmit,
    Ready,
    Report,
    Start,
    Stop,
    ToEngine,
)

PR_SET_PDEATHSIG = 1


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link, heartbeat = map(int, sys.argv[1:])
    threading.Thread(target=_beat, args=(heartbeat,), name="quire-heartbeat", daemon=True).start()
    uvloop.run(_run(socket.socket(fileno=link)))


def _beat(heartbeat: int) -> None:
    """In a thread of its own: whatever the event loop does, the process lives."""
    while True:
        os.write(heartbeat, b".")
        time.sleep(BEAT_INTERVAL_S)


async def _run(end: socket.socket) -> None:
    messages: asyncio.Queue[ToEngine | None] = asyncio.Queue()  # None: the server is gone
    channel = await Channel.open(end, TO_ENGINE, messages.put_nowait, lambda: messages.put_nowait(None))
    start = await messages.get()
    if not isinstance(start, Start):
        return
    _log_as(start)
    if start.cpus is not None:
        os.sched_setaffinity(0, start.cpus)  # before there are threads, and before memory is touched
    telling: asyncio.Task[None] | None = None
    try:
        core = await EngineCore.load(start.config)
        try:
            async with nullcontext() if start.snapshot is None else prefix_snapshot(core, Path(start.snapshot)):
                telling = asyncio.create_task(_tell_stats(core, channel))
                await _Served(core, channel).run(messages)
        finally:
            await core.close()
    except QuireError as error:
        channel.send(Failed(type(error).__name__, str(error)))
    finally:
        if telling is not None:
            telling.cancel()
        channel.close()
        await asyncio.sleep(0)  # so that what was written leaves


def _log_as(start: Start) -> None:
    if start.log is None:
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    else:
        log_to_stderr(*start.log)
        structlog.contextvars.bind_contextvars(engine=start.name)


async def _tell_stats(core: EngineCore, channel: Channel) -> None:
    while True:
        try:
            channel.send(Beat(core.stats()))
        except Unavailable:
            channel.send(Beat(None))
        await asyncio.sleep(BEAT_INTERVAL_S)


class _Served:
    """A core, told what to do and asked what happened over the link."""

    def __init__(self, core: EngineCore, channel: Channel) -> None:
        self._core = core
        self._channel = channel
        self._begun: set[int] = set()  # of live requests
        self._updates: list[RequestUpdate] = []  # to be reported
        self._flushing: asyncio.Handle | None = None

    async def run(self, messages: asyncio.Queue[ToEngine | None]) -> None:
        """Until the server says Stop, or is gone."""
        self._core.start(CoreListener(self._publish, observe=self._observe, begin=self._begin))
        gc.freeze()
        self._send(Ready(self._core.info, self._core.runner.capacity.memory.kv_bytes))
        while (message := await messages.get()) is not None and not isinstance(message, Stop):
            try:
                await self._handle(message)
            except Exception:
                _die()
        await self._core.stop()
        self._flush()

    async def _handle(self, message: ToEngine) -> None:
        match message:
            case Add():
                self._send(await self._add(message))
            case Readmit(spec, generated):
                self._core.readmit(Request(spec, generated))
            case Cancel(request_id):
                self._core.cancel(request_id)
            case Drop(request_id, reason, error):
                self._core.drop(request_id, reason, error)
                self._begun.discard(request_id)

    async def _add(self, message: Add) -> Answer:
        requests = [Request(spec) for spec in message.requests]
        first, stats = requests[0].request_id, self._core.scheduler
        try:
            return Answer(first, await self._core.add(requests), stats.num_waiting)
        except SchedulerError as refusal:
            estimate = refusal.estimate if isinstance(refusal, Refused) else None
            return Answer(first, estimate, stats.num_waiting, type(refusal).__name__, str(refusal))

    # What the core tells.

    def _begin(self, plan: StepPlan) -> None:
        """Said before the step, for the case that the process dies of it."""
        new = [row for row in plan.sequences if row.request_id not in self._begun and row.request_id >= 0]
        if new:
            self._begun.update(row.request_id for row in new)
            self._send(Begun(tuple([Prefilled(row.request_id, row.first_position) for row in new])))

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Held until the step that brought them is observed, or this turn of the loop is over."""
        self._updates += updates
        self._begun.difference_update(update.request_id for update in updates if update.ended)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _observe(self, step: StepStats, prefilled: Sequence[Prefilled]) -> None:
        self._report(step, tuple(prefilled))

    def _flush(self) -> None:
        if self._core.is_broken:  # what it reports are the endings of those that can go on elsewhere
            _die()
        if self._updates:
            self._report()

    def _report(self, step: StepStats | None = None, prefilled: tuple[Prefilled, ...] = ()) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        updates, self._updates = tuple(self._updates), []
        scheduler = self._core.scheduler
        self._send(Report(updates, scheduler.num_waiting, scheduler.num_steps, step, prefilled))

    def _send(self, message: FromEngine) -> None:
        self._channel.send(message)


def _die() -> NoReturn:
    """At once, with nothing more said: the server has the log, and goes on where this process was."""
    traceback.print_exc()
    os._exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
