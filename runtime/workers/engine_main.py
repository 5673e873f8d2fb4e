"""The main program of an engine process: an `EngineCore` at the other end of the link.

It must not import text or other sockets. The process ends with its server and ignores terminating signals: the server
handles them and then sends StopEngine.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn, TextIO

import structlog
import uvloop

from ...scheduler import (
    AdmissionEstimate,
    EncodeRequest,
    NotAccepting,
    Refused,
    Request,
    RequestUpdate,
    SchedulerError,
    StepPlan,
)
from ..common.errors import QuireError, Unavailable
from ..common.heap import limit_heap
from ..common.logs import log_to_stderr
from ..engine import CoreListener, EngineCore, Prefilled, StepStats, prefix_snapshot
from .engine_link import (
    STATS_INTERVAL_S,
    TO_ENGINE,
    AdapterAnswer,
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    EngineFailed,
    EngineReady,
    ImagePixels,
    LoadAdapter,
    PixelReceiver,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    SnapshotProgress,
    StartEngine,
    StatsReport,
    StepReport,
    StopEngine,
    ToEngine,
)
from .health import ALIVE, HELD_UP
from .link_end import EngineLink
from .loading import shown_loading, terminal

HEARTBEAT_INTERVAL_S = 0.25
PR_SET_PDEATHSIG = 1

_log = structlog.get_logger("quire.engine")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    limit_heap()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    link_fd, heartbeat_fd = map(int, sys.argv[1:3])
    heartbeats = _Heartbeats(heartbeat_fd)
    threading.Thread(target=heartbeats.send, name="quire-heartbeat", daemon=True).start()
    uvloop.run(_run(socket.socket(fileno=link_fd), heartbeats))
    sys.stderr.flush()
    os._exit(os.EX_OK)  # a normal exit would wait for threads that compute masks


class _Heartbeats:
    """Heartbeats of the process, independent of its event loop; they also announce long calls that hold the GIL."""

    def __init__(self, heartbeat_fd: int) -> None:
        self._fd = heartbeat_fd
        self.current = ALIVE

    def send(self) -> None:
        """Send heartbeats until the server is gone or no longer waits for this process; then exit."""
        while True:
            try:
                os.write(self._fd, self.current)
            except BrokenPipeError:
                os._exit(os.EX_OK)
            time.sleep(HEARTBEAT_INTERVAL_S)

    @contextmanager
    def held_up(self) -> Iterator[None]:
        """Announce that the next heartbeat may be late."""
        self.current = HELD_UP
        os.write(self._fd, HELD_UP)
        try:
            yield
        finally:
            self.current = ALIVE
            os.write(self._fd, ALIVE)


async def _run(end: socket.socket, heartbeats: _Heartbeats) -> None:
    first: asyncio.Future[ToEngine | None] = asyncio.get_running_loop().create_future()  # None: the server is gone
    stopping = asyncio.Event()

    def on_server_gone() -> None:
        stopping.set()
        if not first.done():
            first.set_result(None)

    link = await EngineLink.open(end, TO_ENGINE, first.set_result, on_server_gone)
    start = await first
    if not isinstance(start, StartEngine):
        return
    _configure_logging(start)
    if start.cpus is not None:
        os.sched_setaffinity(0, start.cpus)  # set before threads start and memory is touched
    try:
        with shown_loading(start.config, _terminal(start)) as planned:
            core = await EngineCore.load(start.config, on_planned=planned)
        core.grammars.tables.holding_up = heartbeats.held_up
        await _restore_adapters(core, start.adapters)
        try:
            async with (
                nullcontext()
                if start.snapshot is None
                else prefix_snapshot(core, Path(start.snapshot), lambda num: link.send(SnapshotProgress(num)))
            ):
                await CoreServer(core, link, stopping).run()
        finally:
            await core.close()
    except QuireError as error:
        link.send(EngineFailed(type(error).__name__, str(error)))
    finally:
        link.close()
        await asyncio.sleep(0)  # lets the link write its last messages


async def _restore_adapters(core: EngineCore, adapters: Sequence[tuple[str, str]]) -> None:
    """Load the adapters of a former process, whose requests continue; log each whose files have changed."""
    for key, path in adapters:
        try:
            loaded = await core.load_adapter(key.rpartition("@")[0], path, [key for key, _ in adapters], ())
            reason = "" if loaded.key == key else "its files have changed"
        except QuireError as error:
            reason = str(error)
        if reason:
            _log.error("adapter not loaded again", adapter=key, path=path, reason=reason)


def _terminal(start: StartEngine) -> TextIO | None:
    """Return the terminal for the progress bar, if this is the only engine process of its server."""
    return None if start.log is None or start.cpus is not None else terminal(start.log[0])


def _configure_logging(start: StartEngine) -> None:
    if start.log is None:
        structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    else:
        log_to_stderr(*start.log)
        structlog.contextvars.bind_contextvars(engine=start.name)


class CoreServer:
    """Serves a core to the other end of the link until `stopping` is set."""

    def __init__(self, core: EngineCore, link: EngineLink, stopping: asyncio.Event) -> None:
        self._core = core
        self._link = link
        self._stopping = stopping
        self._pixels = PixelReceiver()
        self._begun: set[int] = set()  # ids of live requests that have been computed
        self._updates: list[RequestUpdate] = []  # unsent updates
        self._flush_handle: asyncio.Handle | None = None
        self._loading: set[asyncio.Task[None]] = set()  # tasks that load adapters

    async def run(self) -> None:
        self._core.start(CoreListener(publish=self._publish, observe=self._observe, begin=self._begin))
        gc.freeze()
        self._link.receive = self._receive
        self._link.send(EngineReady(self._core.info, self._core.kv_bytes))
        sending_stats = asyncio.create_task(self._send_stats())
        await self._stopping.wait()
        await self._core.stop()
        sending_stats.cancel()
        self._flush()

    def _receive(self, message: ToEngine) -> None:
        loop = self._core.engine_loop
        try:
            match message:
                case ImagePixels(pixels):
                    self._pixels.add(pixels)
                case AddRequests():
                    specs = message.specs()
                    images = self._pixels.with_pixels(specs[0].images)
                    requests = message.as_requests([replace(spec, images=images) for spec in specs])
                    is_known = self._core.has_adapter(specs[0].adapter)
                    add = partial(loop.add, *requests) if is_known else partial(_refuse, specs[0].adapter)
                    self._add(requests[0].request_id, add)
                case ReadmitRequest(spec, generated) if not self._core.has_adapter(spec.adapter):
                    self._publish([RequestUpdate(spec.request_id, error=_missing(spec.adapter))])
                case ReadmitRequest(spec, generated):
                    loop.readmit(Request(replace(spec, images=self._pixels.with_pixels(spec.images)), generated))
                case AddEncoding(encode_spec):
                    self._add(encode_spec.request_id, partial(loop.add_encoding, EncodeRequest(encode_spec)))
                case ReadmitEncoding(encode_spec):
                    loop.readmit(EncodeRequest(encode_spec))
                case CancelRequest(request_id):
                    self._core.cancel(request_id)
                case DropRequest(request_id, reason, error):
                    self._core.drop(request_id, reason, error)
                    self._begun.discard(request_id)
                case LoadAdapter():
                    loading = asyncio.create_task(self._load_adapter(message))
                    self._loading.add(loading)
                    loading.add_done_callback(self._loading.discard)
                case StopEngine():
                    self._stopping.set()
        except Exception:
            _exit()

    def _add(self, request_id: int, add: Callable[[], AdmissionEstimate]) -> None:
        """Answer with the outcome of `add`."""
        scheduler = self._core.scheduler
        try:
            answer = AddAnswer(request_id, add(), scheduler.num_waiting)
        except SchedulerError as refusal:
            estimate = refusal.estimate if isinstance(refusal, Refused) else None
            answer = AddAnswer(request_id, estimate, scheduler.num_waiting, type(refusal).__name__, str(refusal))
        self._link.send(answer)

    async def _load_adapter(self, message: LoadAdapter) -> None:
        try:
            loaded = await self._core.load_adapter(message.name, message.path, message.kept, message.leaving)
            answer = AdapterAnswer(message.number, loaded)
        except QuireError as error:
            answer = AdapterAnswer(message.number, None, type(error).__name__, str(error))
        except Exception:
            _exit()
        self._link.send(answer)

    async def _send_stats(self) -> None:
        while True:
            try:
                stats = self._core.stats()
                self._link.send(StatsReport(stats, self._core.scheduler.predicted_wait_s or 0.0))
            except Unavailable:
                self._link.send(StatsReport(None))
            await asyncio.sleep(STATS_INTERVAL_S)

    # CoreListener

    def _begin(self, plan: StepPlan) -> None:
        """Report requests that the step computes for the first time, before it may crash the process."""
        new = [row for row in plan.sequences if row.request_id not in self._begun and row.request_id >= 0]
        if new:
            self._begun.update(row.request_id for row in new)
            self._link.send(RequestsBegun(tuple([Prefilled(row.request_id, row.first_position) for row in new])))
        if plan.encoder:
            ids = dict.fromkeys(each for step in plan.encoder for each in step.request_ids if each not in self._begun)
            if ids:
                self._begun.update(ids)
                self._link.send(RequestsBegun(tuple([Prefilled(each, 0) for each in ids])))

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        """Hold updates until their step is observed; between steps, until the event loop has run this turn."""
        self._updates += updates
        self._begun.difference_update(update.request_id for update in updates if update.ended)
        if self._flush_handle is None:
            self._flush_handle = asyncio.get_running_loop().call_soon(self._flush)

    def _observe(self, step: StepStats | None, prefilled: Sequence[Prefilled]) -> None:
        """Send a step and the updates held for it."""
        if self._flush_handle is not None:
            self._flush_handle.cancel()
            self._flush_handle = None
        updates, self._updates = tuple(self._updates), []
        scheduler = self._core.scheduler
        self._link.send(StepReport(updates, scheduler.num_waiting, scheduler.num_steps, step, tuple(prefilled)))

    def _flush(self) -> None:
        if self._core.is_broken:  # the updates would report failures, but requests can continue in the next process
            _exit()
        if self._updates:
            self._observe(None, ())


def _refuse(adapter: str) -> NoReturn:
    raise NotAccepting(_missing(adapter))


def _missing(key: str) -> str:
    return f"the adapter {key} could not be loaded again after the engine was restarted; load it again"


def _exit() -> NoReturn:
    """Exit immediately without further messages: requests continue in the next process."""
    traceback.print_exc()
    os._exit(os.EX_SOFTWARE)


if __name__ == "__main__":
    main()
