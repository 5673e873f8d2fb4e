"""An engine at the other end of a link as a core whose requests outlive its processes: each ends exactly once.

This file has the request log and the calls to the engine; the supervisor's source opens the processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import cast

import msgspec
import structlog

from ...scheduler import (
    DEADLINE_PASSED,
    AdmissionEstimate,
    EncodeRequest,
    EncodeSpec,
    FinalCounters,
    FinishReason,
    NotAccepting,
    QueuedRequest,
    QueueFull,
    Request,
    RequestUpdate,
)
from ..common.config import EngineConfig
from ..common.errors import DeadlineExceeded, Quarantined, Unavailable
from ..engine import CoreInfo, CoreListener, EngineStats, LoadedAdapter
from ..engine.stats import NO_STATS, counters_of
from .adapter_loads import AdapterLoads
from .engine_counters import EngineCounters
from .engine_link import (
    AdapterAnswer,
    AddAnswer,
    AddEncoding,
    AddRequests,
    CancelRequest,
    DropRequest,
    FromEngine,
    LogOptions,
    ReadmitEncoding,
    ReadmitRequest,
    RequestsBegun,
    SpecT,
    StartEngine,
    StatsReport,
    StepReport,
    ToEngine,
    as_read,
)
from .health import HealthTimeouts
from .pending_adds import PendingAdd, PendingAdds, admission_of
from .router import MemberLoad
from .supervisor import RESTART_TIMEOUT_S, EngineSource, ProcessSource, Supervisor
from .token_log import ClosedRequest, EndedRequests, LoggedRequest, TokenLog

QUARANTINE_REASON = (
    "the engine crashed twice while it computed this request, the second time with no other request that could have "
    "been the cause; it is not tried again"
)

_log = structlog.get_logger("quire.supervisor")


class SupervisedEngine:
    """Implements `engine.Core` and `ProcessOwner`. Made by `launch`."""

    info: CoreInfo

    def __init__(
        self,
        source: EngineSource,
        max_num_waiting: int,
        timeouts: HealthTimeouts,
        restart_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._max_num_waiting = max_num_waiting
        self._clock = clock
        self._supervisor = Supervisor(source, timeouts, restart_timeout_s, self)
        self._listener = CoreListener()
        self._tokens = TokenLog(clock)
        self._pending_adds = PendingAdds()
        self._adapters = AdapterLoads(source.adapters)
        self._num_waiting = 0  # last reported by the process
        self._predicted_wait_s = 0.0  # last reported by the process
        self._counters = EngineCounters()
        self._num_replayed = self._num_quarantined = 0
        self._down: str | None = None  # reason why processes fail to start; requests are refused in the meantime
        self._leaving = False  # draining or stopped; new requests are refused
        self._stopped = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._log = _log.bind(engine=source.name)

    @classmethod
    async def launch(
        cls,
        config: EngineConfig,
        timeouts: HealthTimeouts | None = None,
        *,
        restart_timeout_s: float = RESTART_TIMEOUT_S,
        cpus: frozenset[int] | None = None,
        snapshot: str | None = None,
        name: str = "engine",
        log: LogOptions | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> SupervisedEngine:
        """Return an engine whose first process is ready. Raises ModelError, ConfigError or Unavailable."""
        source = ProcessSource(StartEngine(config, cpus, snapshot, name, log))
        engine = cls(source, config.max_num_waiting, timeouts or HealthTimeouts(), restart_timeout_s, clock)
        ready = await engine._supervisor.launch()
        engine.info = msgspec.structs.replace(ready.info, num_processes=1)
        return engine

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, waiting ones included."""
        return len(self._tokens) + len(self._pending_adds)

    @property
    def load(self) -> MemberLoad:
        """The load for a router; an engine host's load includes the requests of other API servers."""
        stats = self._counters.stats
        num_reported = 0 if stats is None else stats.running + stats.waiting
        return MemberLoad(max(self.num_requests, num_reported), self._predicted_wait_s)

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    @property
    def lost_snapshot(self) -> str | None:
        """The reason why `stop` could not save the snapshot; None without a snapshot or a failure."""
        return self._supervisor.lost_snapshot

    @property
    def is_ready(self) -> bool:
        return self._supervisor.process is not None

    @property
    def takes_requests(self) -> bool:
        """Whether requests of a lost member can continue here."""
        return self.is_ready

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the process, by its last report, and requests that wait to be added."""
        return self._num_waiting + self._pending_adds.num_sequences

    @property
    def pid(self) -> int | None:
        """Process id; None while no process is ready."""
        return None if self._supervisor.process is None else self._supervisor.process.pid

    # engine.Core

    def start(self, listener: CoreListener) -> None:
        self._listener = listener

    def check_room(self, tenant: str, count: int) -> None:
        """Raise QueueFull or NotAccepting by the last report of the process, which alone knows each tenant's limits."""
        self._check_accepting()
        num_waiting = self.num_waiting
        if num_waiting + count > self._max_num_waiting:
            stats = self._counters.stats
            num_pages = 0 if stats is None else stats.pages_free + stats.pages_cached
            raise QueueFull(
                f"the queue is full: {num_waiting} of {self._max_num_waiting} requests wait",
                AdmissionEstimate(num_waiting, 0, num_pages),
            )

    async def add(self, requests: Sequence[QueuedRequest]) -> AdmissionEstimate:
        """See `Core.add`. Raises DeadlineExceeded, too. If the caller is cancelled, the request is removed."""
        first = requests[0]
        is_continuation = isinstance(first, EncodeRequest) and first.spec.is_continuation
        if not is_continuation or self._stopped or self._down is not None:
            self._check_accepting()
        pending = self._pending_adds.add(requests)
        self._idle.clear()
        self._send_next()
        deadline = first.spec.deadline
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                answer = await pending.answer
        except BaseException as error:
            self._withdraw(pending)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded("the request's deadline passed while it waited for an engine") from None
            raise
        return admission_of(answer)

    async def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """See `Core.add_encoding`."""
        return await self.add((request,))

    async def load_adapter(self, name: str, path: str, kept: Sequence[str], leaving: Sequence[str]) -> LoadedAdapter:
        """See `Core.load_adapter`."""
        if self._supervisor.process is None:
            raise Unavailable(self._down or "the engine is being restarted")
        return await self._adapters.load(self._send, name, path, kept, leaving)

    def give_up(self) -> list[LoggedRequest]:
        """Remove and return the requests that wait for the next process, except suspects, for another engine."""
        given_up = self._tokens.give_up_unsent()
        if given_up:
            self._log.warning("requests moved", count=len(given_up))
        self._note_idle()
        return given_up

    def readmit(self, entry: LoggedRequest) -> None:
        """Continue a request that was accepted elsewhere, after the tokens it has. Limits do not apply."""
        self._idle.clear()
        self._tokens.adopt(entry)
        self._send_next()

    def cancel(self, request_id: int) -> None:
        if self._tokens.cancel(request_id):
            self._send(CancelRequest(request_id))
        elif (closed := self._tokens.forget(request_id)) is not None:  # no process had it
            self._listener.publish([_cancelled(closed)])
            self._note_left()

    def drop(
        self, request_id: int, reason: FinishReason | None = None, error: str | None = None
    ) -> FinalCounters | None:
        closed = self._tokens.forget(request_id)
        if closed is not None and closed.was_sent:
            self._send(DropRequest(request_id, reason, error))
        self._note_left()
        return None if closed is None else closed.counters

    def stats(self) -> EngineStats:
        if self._supervisor.process is None or self._counters.stats is None:
            raise Unavailable(self._down or "the engine is being restarted")
        return self._total()

    def counters(self) -> EngineStats:
        """Return the counters of EngineStats over all processes, even while none is ready."""
        return counters_of(self._total())

    def _total(self) -> EngineStats:
        counted_here = msgspec.structs.replace(
            NO_STATS,
            restarts=self.num_restarts,
            replayed_requests=self._num_replayed,
            quarantined_requests=self._num_quarantined,
        )
        return self._counters.total(counted_here)

    async def drain(self) -> None:
        self._leaving = True
        await self._idle.wait()

    async def stop(self) -> None:
        if self._stopped:
            return
        self._leaving = self._stopped = True
        try:
            await self._supervisor.stop()
        finally:
            self._fail_all("the engine was closed")
            self._listener.ended()

    async def close(self) -> None:
        await self.stop()

    # ProcessOwner

    def receive(self, message: FromEngine) -> None:
        match message:
            case StepReport(updates, num_waiting, num_steps, step, prefilled):
                self._num_waiting = num_waiting
                self._supervisor.health.note_step(num_steps, has_work=True)
                was_replaying = self._tokens.is_replaying
                recorded = [self._tokens.record(update) for update in updates]
                self._listener.publish([update for update in recorded if update is not None])
                if step is not None:
                    self._listener.observe(step, prefilled)
                if was_replaying or not self._tokens:
                    self._note_left()
            case StatsReport(None):
                self._supervisor.health.note_broken()
            case StatsReport(EngineStats() as stats, predicted_wait_s):
                num_running = stats.running + stats.encoder_running
                num_waiting = stats.waiting + stats.encoder_waiting
                self._supervisor.health.note_step(stats.step, num_running + num_waiting > 0)
                self._counters.stats = stats
                self._num_waiting = num_waiting
                self._predicted_wait_s = predicted_wait_s
            case RequestsBegun(requests):
                self._tokens.note_begun(requests)
                self._listener.begun(requests)
            case AddAnswer():
                self._on_answer(message)
            case AdapterAnswer():
                self._adapters.answered(message)

    def on_process_ready(self) -> None:
        self._down = None
        if self._tokens:
            self._log.info("replaying requests", count=len(self._tokens))
        self._send_next()
        self._listener.resumed()

    def on_process_exit(self, from_outside: bool, reason: str) -> None:
        self._forget_stats()
        self._adapters.fail_all("the engine was lost while it loaded the adapter; try again")
        self._num_quarantined += self._pending_adds.on_process_exit(from_outside)
        self._end(self._tokens.on_process_exit(from_outside), f"{QUARANTINE_REASON}; the engine process: {reason}")
        self._listener.interrupted(self._tokens.unsent_ids)

    def on_restarts_failing(self, reason: str) -> None:
        self._down = reason
        self._fail_all(reason)

    def on_tick(self) -> None:
        """End requests whose deadline passed while no process has them; a process ends its own requests."""
        if late := self._tokens.expire():
            self._listener.publish(
                [RequestUpdate(each.request_id, error=DEADLINE_PASSED, counters=each.counters) for each in late]
            )
            self._note_idle()

    def _on_answer(self, answer: AddAnswer) -> None:
        self._num_waiting = answer.num_waiting
        if answer.estimate is not None and answer.refusal is None:
            self._predicted_wait_s = answer.estimate.predicted_wait_s or 0.0
        pending = self._pending_adds.answered(answer.request_id)
        if pending is None:  # the caller left
            return
        if answer.refusal is None:  # logged before the caller runs, because the next message may concern these requests
            for request in pending.requests:
                self._tokens.add(request)
        pending.answer.set_result(answer)
        self._note_left()

    # Helpers

    def _forget_stats(self) -> None:
        """Keep the counters of a process that is gone, and nothing else that it reported."""
        self._counters.forget_process()
        self._num_waiting = 0
        self._predicted_wait_s = 0.0

    def _end(self, ended: EndedRequests, quarantine_reason: str) -> None:
        """Report requests that left the log when their process exited."""
        self._num_quarantined += len(ended.quarantined)
        if ended.cancelled:
            self._listener.publish([_cancelled(closed) for closed in ended.cancelled])
        for closed in ended.quarantined:
            self._listener.fail(closed.request_id, Quarantined(quarantine_reason), closed.counters)
        self._note_idle()

    def _send(self, message: ToEngine) -> None:
        if (process := self._supervisor.process) is not None:
            process.link.send(message)

    def _send_next(self) -> None:
        """Send the requests that the process may have now: first the replays that the log allows, then new requests."""
        if (process := self._supervisor.process) is not None:
            for entry in self._tokens.next_to_send():
                self._num_replayed += 1
                process.link.send(self._readmit_message(entry))
            if not self._tokens.is_replaying:
                for pending in self._pending_adds.send():
                    process.link.send(self._add_message(pending.requests))

    def _add_message(self, requests: Sequence[QueuedRequest]) -> AddRequests | AddEncoding:
        """Return the message that asks the process to accept the requests of one `PendingAdd`."""
        first = requests[0]
        if isinstance(first, EncodeRequest):
            return AddEncoding(self._for_link(first.spec))
        sampled = [each for each in requests if isinstance(each, Request)]
        generated = tuple([tuple(each.generated) for each in sampled])
        return AddRequests.of([self._for_link(each.spec) for each in sampled], generated)

    def _readmit_message(self, entry: LoggedRequest) -> ReadmitRequest | ReadmitEncoding:
        request = entry.request
        if isinstance(request, Request):
            return ReadmitRequest(as_read(self._for_link(request.spec)), tuple(entry.generated))
        return ReadmitEncoding(self._for_link(cast(EncodeSpec, request.spec)))

    def _for_link(self, spec: SpecT) -> SpecT:
        """Return `spec` in the form for the other end."""
        return spec

    def _withdraw(self, pending: PendingAdd) -> None:
        """Remove requests whose caller left, from this log and from the process."""
        is_sent = self._pending_adds.remove(pending)
        for request in pending.requests:
            closed = self._tokens.forget(request.request_id)
            if is_sent or (closed is not None and closed.was_sent):
                self._send(DropRequest(request.request_id, None, "the caller left"))
        self._note_left()

    def _fail_all(self, reason: str) -> None:
        for closed in self._tokens.forget_all():
            self._listener.fail(closed.request_id, Unavailable(reason), closed.counters)
        self._pending_adds.refuse_all(NotAccepting(reason))
        self._adapters.fail_all(reason)
        self._note_idle()

    def _note_left(self) -> None:
        """Send the requests that waited for others, which have been answered, are no longer suspects or have ended."""
        self._send_next()
        self._note_idle()

    def _note_idle(self) -> None:
        if not self.num_requests:
            self._idle.set()

    def _check_accepting(self) -> None:
        if self._leaving:
            raise NotAccepting("no new requests are accepted: the engine is draining or closed")
        if self._down is not None:
            raise NotAccepting(self._down)


def _cancelled(closed: ClosedRequest) -> RequestUpdate:
    return RequestUpdate(closed.request_id, finish_reason="cancelled", counters=closed.counters)
