"""The supervisor: one engine process as a core that does not die. It starts it, watches it, and when it is gone starts
another and replays the token log.

It must not know text or sockets other than the link's. One invariant: every request it accepted ends exactly once,
however many processes it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from ...scheduler import (
    DEADLINE_PASSED,
    AdmissionEstimate,
    CannotMeetDeadline,
    FinishReason,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Request,
    RequestUpdate,
    TooLong,
)
from ..common.config import EngineConfig
from ..common.errors import DeadlineExceeded, Quarantined, QuireError, Unavailable
from ..engine import CoreInfo, CoreListener, EngineStats
from .engine_link import (
    Add,
    Answer,
    Beat,
    Begun,
    Cancel,
    Drop,
    FromEngine,
    LogForm,
    Readmit,
    Ready,
    Report,
    Start,
    as_read,
)
from .engine_process import EngineProcess
from .health import TICK_S, HealthMonitor
from .pending_adds import PendingAdd, PendingAdds
from .token_log import TokenLog

PATIENCE = 3  # starts that may fail in a row before those who wait are told
LONGEST_PAUSE_S = 10.0  # between two attempts
LOADING_TIMEOUT_S = 15.0  # without a sign of life while it loads
REFUSALS = {refusal.__name__: refusal for refusal in (QueueFull, CannotMeetDeadline, TooLong, PageQuotaExceeded)}
COUNTERS = (  # of EngineStats: a new process counts from 0
    "step",
    "prefix_queries_tokens",
    "prefix_hits_tokens",
    "preemptions",
    "preemptions_spilled",
    "recomputed_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
)

_log = structlog.get_logger("quire.supervisor")


@dataclass(frozen=True, slots=True)
class HealthTimeouts:
    """How long an engine process may go without a pulse, and how long a step may take it."""

    heartbeat_timeout_s: float = 1.0
    stall_timeout_s: float = 30.0


class SupervisedEngine:
    """Implements `engine.Core`. Make one with `launch`."""

    def __init__(
        self, start: Start, max_num_waiting: int, timeouts: HealthTimeouts, clock: Callable[[], float]
    ) -> None:
        self._start = start
        self._max_num_waiting = max_num_waiting
        self._timeouts = timeouts
        self._log = _log.bind(engine=start.name)
        self._listener: CoreListener | None = None
        self._process: EngineProcess | None = None  # that is ready
        self._info: CoreInfo | None = None
        self._health = HealthMonitor(timeouts.heartbeat_timeout_s, timeouts.stall_timeout_s)
        self._broken = False  # its loop ended, while the process lives
        self._clock = clock
        self._tokens = TokenLog(clock)
        self._pending_adds = PendingAdds()
        self._num_waiting = 0
        self._stats: EngineStats | None = None  # of this process, None before its first beat
        self._before = dict.fromkeys(COUNTERS, 0)  # counted in former lives
        self._counts = {"restarts": 0, "replayed_requests": 0, "quarantined_requests": 0}
        self._down: str | None = None  # why nothing is accepted until a process is ready again
        self._leaving = False  # nothing is accepted any more
        self._idle = asyncio.Event()
        self._idle.set()
        self._supervising: asyncio.Task[None] | None = None

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        timeouts: HealthTimeouts | None = None,
        *,
        cpus: frozenset[int] | None = None,
        snapshot: str | None = None,
        name: str = "engine",
        log: LogForm | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> SupervisedEngine:
        """With the first process ready. Raises what keeps it from starting: ModelError, ConfigError or Unavailable."""
        core = cls(
            Start(config, cpus, snapshot, name, log), config.max_num_waiting, timeouts or HealthTimeouts(), clock
        )
        process, ready = await core._spawn()
        core._keep_shape(ready)
        core._on_process_ready(process)
        core._supervising = asyncio.create_task(core._supervise(process), name=f"quire-supervisor-{name}")
        return core

    # engine.Core

    @property
    def info(self) -> CoreInfo:
        assert self._info is not None, "launched with a process that was ready"
        return self._info

    @property
    def num_requests(self) -> int:
        """That are alive, those on their way included."""
        return len(self._tokens) + len(self._pending_adds)

    @property
    def num_restarts(self) -> int:
        return self._counts["restarts"]

    @property
    def pid(self) -> int | None:
        """Of the engine process; None while there is none that is ready."""
        return None if self._process is None else self._process.pid

    def start(self, listener: CoreListener) -> None:
        self._listener = listener

    def check_room(self, tenant: str, count: int) -> None:
        """By the last that was heard; what a tenant may have, only the engine knows."""
        self._check_accepting()
        waiting = self._num_waiting + self._pending_adds.num_sequences
        if waiting + count > self._max_num_waiting:
            raise QueueFull(
                f"the queue is full: {waiting} of {self._max_num_waiting} requests wait", self._estimate(waiting)
            )

    async def add(self, requests: Sequence[Request]) -> AdmissionEstimate:
        self._check_accepting()
        asked = self._pending_adds.add(requests)
        self._idle.clear()
        self._send_what_may_be()
        try:
            deadline = requests[0].spec.deadline
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                answer = await asked.answer
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed while it waited for an engine") from None
        finally:
            self._take_back(asked)
        return self._accept(requests, answer)

    def cancel(self, request_id: int) -> None:
        match self._tokens.cancel(request_id):
            case Request() as request:
                self._publish([RequestUpdate(request.request_id, finish_reason="cancelled")])
                self._send_what_may_be()
                self._note_idle()
            case True if self._process is not None:  # else it goes with the process that dies now
                self._process.send(Cancel(request_id))

    def drop(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        if self._tokens.forget(request_id) and self._process is not None:
            self._process.send(Drop(request_id, reason, error))
        self._send_what_may_be()
        self._note_idle()

    def stats(self) -> EngineStats:
        if self._process is None or self._stats is None:
            raise Unavailable(self._down or "the engine is being restarted")
        return msgspec.structs.replace(self._stats, **self.counters())

    def counters(self) -> dict[str, int]:
        """Of all lives, by their names in EngineStats, whether there is a process now or not."""
        now = {name: 0 if self._stats is None else getattr(self._stats, name) for name in COUNTERS}
        return {name: before + now[name] for name, before in self._before.items()} | self._counts

    async def drain(self) -> None:
        self._leaving = True
        await self._idle.wait()

    async def stop(self) -> None:
        self._leaving = True
        if self._supervising is None:
            return
        supervising, self._supervising = self._supervising, None
        supervising.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await supervising
        if self._process is not None:
            await self._process.stop()
            self._process = None
        self._end_all("the engine was closed")
        if self._listener is not None:
            self._listener.ended()

    async def close(self) -> None:
        await self.stop()

    # Lives.

    async def _supervise(self, process: EngineProcess) -> None:
        try:
            while True:
                await self._watch_over(process)
                process = await self._restart()
        finally:
            if self._process is not process:  # cancelled between two lives
                await process.end()

    async def _watch_over(self, process: EngineProcess) -> None:
        """Until it is dead, by itself or as not worth waiting for."""
        why = None
        while why is None and not process.ended.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await process.ended.wait()
            self._expire()
            why = "its event loop is broken" if self._broken else self._health.tick()
        by_others = process.is_stopped
        self._process = None  # nobody asks it any more while it goes
        if why is None:
            await process.fall()
        status = await process.end()
        by_others = by_others or (why is None and status == -signal.SIGKILL)
        self._log.error("engine process lost", pid=process.pid, status=status, reason=why or "it ended")
        self._on_process_exit(by_others)

    def _on_process_exit(self, by_others: bool) -> None:
        """What the dead process had is the log's to remember.

        `by_others`: it was killed or stopped from outside, which nothing that it computed can have done.
        """
        if self._stats is not None:
            for name in COUNTERS:
                self._before[name] += getattr(self._stats, name)
        self._stats = None
        self._num_waiting = 0
        self._counts["quarantined_requests"] += self._pending_adds.on_process_exit(by_others)
        buried = self._tokens.on_process_exit(by_others)
        self._publish([RequestUpdate(request.request_id, finish_reason="cancelled") for request in buried.cancelled])
        for request in buried.quarantined:
            self._counts["quarantined_requests"] += 1
            self._fail(
                request.request_id,
                Quarantined(
                    "the engine crashed twice while it computed this request, the second time with no other that could "
                    "have been the cause; it is not tried again"
                ),
            )
        self._note_idle()

    async def _restart(self) -> EngineProcess:
        """Try until a process is ready; whoever waits is told when that takes too long."""
        failures = 0
        while True:
            try:
                process, _ = await self._spawn()
            except (QuireError, OSError) as error:
                failures += 1
                self._log.error("engine process did not start", attempt=failures, reason=str(error))
                if failures == PATIENCE:
                    self._give_up(f"the engine cannot be restarted: {error}")
                await asyncio.sleep(min(LONGEST_PAUSE_S, 0.1 * 2**failures))
            else:
                self._down = None
                self._counts["restarts"] += 1
                self._on_process_ready(process)
                return process

    async def _spawn(self) -> tuple[EngineProcess, Ready]:
        """A process that is ready. Raises what keeps it from that; it is gone then."""
        process = await EngineProcess.spawn(self._start, self._hear, lambda: self._health.note_heartbeat())
        self._health = HealthMonitor(LOADING_TIMEOUT_S, float("inf"))
        try:
            while not process.ready.done():
                await asyncio.wait([process.ready], timeout=TICK_S)
                self._expire()
                if (why := self._health.tick()) is not None:
                    raise Unavailable(f"the engine process hangs while it starts: {why}")
            return process, process.ready.result()
        except BaseException:
            await process.end()
            raise

    def _on_process_ready(self, process: EngineProcess) -> None:
        self._process = process
        self._health = HealthMonitor(self._timeouts.heartbeat_timeout_s, self._timeouts.stall_timeout_s)
        self._broken = False
        tell = self._log.info if self.num_restarts else self._log.debug
        tell("engine process ready", pid=process.pid, replays=len(self._tokens))
        self._send_what_may_be()

    def _expire(self) -> None:
        """Deadlines of those that no engine has; of the others it sees to that itself."""
        if late := self._tokens.expire():
            self._publish([RequestUpdate(request.request_id, error=DEADLINE_PASSED) for request in late])
            self._note_idle()

    def _keep_shape(self, ready: Ready) -> None:
        """What the first process chose by the machine's state holds for all that follow."""
        info = ready.info
        chosen = msgspec.structs.replace(
            self._start.config,
            kv_cache_memory=ready.kv_bytes,
            max_model_len=info.max_model_len,
            threads=info.threads,
            isa=info.isa,
        )
        self._start = msgspec.structs.replace(self._start, config=chosen)
        self._info = msgspec.structs.replace(info, num_processes=1)

    def _give_up(self, why: str) -> None:
        self._down = why
        for request in self._tokens.requests():
            self._tokens.forget(request.request_id)
            self._fail(request.request_id, Unavailable(why))
        self._pending_adds.refuse(why)
        self._note_idle()

    def _end_all(self, error: str) -> None:
        """Nothing will be computed any more."""
        for request in self._tokens.requests():
            self._tokens.forget(request.request_id)
            self._publish([RequestUpdate(request.request_id, error=error)])
        self._pending_adds.refuse(error)
        self._note_idle()

    # Talking.

    def _send_what_may_be(self) -> None:
        """Replays first, as the log allows them, then newcomers."""
        if self._process is None:
            return
        for request in self._tokens.next_to_send():
            self._counts["replayed_requests"] += 1
            self._process.send(Readmit(as_read(request.spec), tuple(request.output_token_ids)))
        if self._tokens.is_replaying:
            return
        for asked in self._pending_adds.send():
            self._process.send(Add(tuple([as_read(request.spec) for request in asked.requests])))

    def _take_back(self, asked: PendingAdd) -> None:
        """It is answered, or its asker has left."""
        if self._pending_adds.leave(asked):
            self._disown(asked)
        self._send_what_may_be()
        self._note_idle()

    def _disown(self, asked: PendingAdd) -> None:
        if self._process is not None:
            for request in asked.requests:
                self._process.send(Drop(request.request_id, None, "its asker has left"))

    def _accept(self, requests: Sequence[Request], answer: Answer) -> AdmissionEstimate:
        if answer.refusal is None:
            assert answer.estimate is not None, "an accepted request has one"
            return answer.estimate
        if answer.estimate is None:
            raise NotAccepting(answer.message)
        raise REFUSALS[answer.refusal](answer.message, answer.estimate)

    def _hear(self, message: FromEngine) -> None:
        match message:
            case Report():
                self._take_report(message)
            case Beat(None):
                self._broken = True
            case Beat(EngineStats() as stats):
                self._health.note_step(stats.step, stats.running + stats.waiting > 0)
                self._stats, self._num_waiting = stats, stats.waiting
            case Begun(requests):
                self._tokens.note_begun(requests)
            case Answer(request_id):
                self._take_answer(request_id, message)

    def _take_answer(self, request_id: int, answer: Answer) -> None:
        self._num_waiting = answer.num_waiting
        asked = self._pending_adds.answered(request_id)
        if asked is None:
            return
        if asked.answer.done():  # its asker leaves in this very turn
            self._disown(asked)
            return
        if answer.refusal is None:  # before its asker can know: what happens next is already ours to remember
            for request in asked.requests:
                self._tokens.add(request)
        asked.answer.set_result(answer)
        self._send_what_may_be()

    def _take_report(self, report: Report) -> None:
        self._num_waiting = report.num_waiting
        self._health.note_step(report.num_steps, has_work=True)
        updates = [update for update in report.updates if self._tokens.take(update)]
        if updates:
            self._publish(updates)
        if report.step is not None and self._listener is not None:
            self._listener.observe(report.step, report.prefilled)
        self._send_what_may_be()
        self._note_idle()

    def _publish(self, updates: Sequence[RequestUpdate]) -> None:
        if self._listener is not None:
            self._listener.publish(updates)

    def _fail(self, request_id: int, error: QuireError) -> None:
        if self._listener is not None:
            self._listener.fail(request_id, error)

    def _note_idle(self) -> None:
        if not self.num_requests:
            self._idle.set()

    def _check_accepting(self) -> None:
        if self._leaving:
            raise NotAccepting("no new requests are accepted: the engine is draining or closed")
        if self._down is not None:
            raise NotAccepting(self._down)

    def _estimate(self, position: int) -> AdmissionEstimate:
        stats = self._stats
        return AdmissionEstimate(position, 0, 0 if stats is None else stats.pages_free + stats.pages_cached)
