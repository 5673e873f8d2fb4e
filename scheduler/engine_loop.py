"""The engine loop: plan a step, run it, commit its result, publish its updates; wait when there is no work.

Must not import model runners or readers of results: `execute`, `publish` and `observe` are passed in. Every accepted
request ends exactly once, whatever `execute` does and however the loop ends. Its end is published, unless the caller of
`Scheduler.finish` received it as a return value.

Everything runs on one event loop; only `execute` may leave it while its step runs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .admission import AdmissionEstimate, NotAccepting, StepMismatch
from .plan import StepPlan, StepResult
from .request import EncodeRequest, Request, RequestUpdate
from .scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A step that was run and committed, and the seconds spent on it besides running it."""

    plan: StepPlan
    result: StepResult
    schedule_s: float
    commit_s: float
    publish_s: float


Execute = Callable[[StepPlan], Awaitable[StepResult]]  # suspends while the step runs; an exception fails that step only
Publish = Callable[[Sequence[RequestUpdate]], None]  # must not raise
Observe = Callable[[FinishedStep], None]  # must not raise


class EngineLoop:
    """Runs steps while there is work. `publish` is called between steps and may finish requests.

    `observe` is called with every finished step after it is published. Call `start` on a running event loop, and
    `close` at the end.
    """

    def __init__(self, scheduler: Scheduler, execute: Execute, publish: Publish, observe: Observe) -> None:
        self._scheduler = scheduler
        self._execute = execute
        self._publish = publish
        self._observe = observe
        self._task: asyncio.Task[None] | None = None
        self._accepting = True
        self._closing: str | None = None  # error of the requests that have not ended when `close` is called
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # set while every accepted request has ended
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None  # timer for the earliest deadline
        self._timer_at = 0.0

    async def _run(self) -> None:
        """Plan, run, commit and publish steps until `close` is called or something breaks."""
        try:
            while self._closing is None:
                started = time.perf_counter()
                plan = self._scheduler.schedule()
                if plan is None:
                    await self._wait_for_work()
                    continue
                schedule_s = time.perf_counter() - started
                try:
                    result = await self._execute(plan)
                except Exception as error:
                    self._publish(self._scheduler.abandon(f"step {plan.step_id} failed: {error!r}"))
                else:
                    executed = time.perf_counter()
                    updates = self._commit(result)
                    committed = time.perf_counter()
                    self._publish(updates)
                    published = time.perf_counter()
                    self._observe(FinishedStep(plan, result, schedule_s, committed - executed, published - committed))
                self._note_idle()
        finally:
            self._accepting = False
            if self._timer is not None:
                self._timer.cancel()
            self._end_all(self._closing or "the engine stopped unexpectedly")

    @property
    def is_broken(self) -> bool:
        """Whether the loop has ended without a call of `close`, so that no further step runs."""
        return self._task is not None and self._task.done() and self._closing is None

    def start(self, ended: Callable[[], None] | None = None) -> None:
        """Start the loop. `ended` is called when it is over for any reason, after the last `publish`."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="quire-engine-loop")
        if ended is not None:
            self._task.add_done_callback(lambda _: ended())

    def check_room(self, tenant: str, count: int = 1) -> None:
        """Raise NotAccepting or QueueFull if `add` would: a cheap check before a prompt is tokenized."""
        self._check_accepting()
        self._scheduler.check_room(tenant, count)

    def add(self, request: Request, *forks: Request) -> AdmissionEstimate:
        """Queue a request and `forks` of it. Raises NotAccepting, or what `Scheduler.add` raises, changing nothing."""
        self._check_accepting()
        estimate = self._scheduler.add(request, *forks)
        self._begin_work()
        return estimate

    def add_encoding(self, request: EncodeRequest) -> AdmissionEstimate:
        """Queue texts to encode. Raises NotAccepting, or what `Scheduler.add_encoding` raises, changing nothing."""
        if not request.spec.is_continuation or self._closing is not None:
            self._check_accepting()
        estimate = self._scheduler.add_encoding(request)
        self._begin_work()
        return estimate

    def readmit(self, request: Request | EncodeRequest) -> None:
        """Queue a request that another scheduler accepted. Raises what `Scheduler.readmit` raises."""
        self._scheduler.readmit(request)
        self._begin_work()

    def cancel(self, request_id: int) -> None:
        """End a request in any state; unknown ids are ignored.

        Its end is published now, or after the step in flight if the request is part of it.
        """
        update = self._scheduler.finish(request_id, "cancelled")
        if update is not None:
            self._publish_ends((update,))

    async def drain(self) -> None:
        """Accept no more requests and return when every accepted request has ended."""
        self._accepting = False
        await self._idle.wait()

    async def close(self, error: str = "the engine was closed") -> None:
        """Let the step in flight finish, then end all remaining requests with `error`. Idempotent.

        Raises the exception that broke the loop, if there was one.
        """
        self._accepting = False
        self._closing = error
        self._wake.set()
        if self._task is None:
            self._end_all(error)
            return
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.result()

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _commit(self, result: StepResult) -> list[RequestUpdate]:
        try:
            return self._scheduler.commit(result)
        except StepMismatch as error:
            return self._scheduler.abandon(str(error))

    def _begin_work(self) -> None:
        self._idle.clear()
        self._wake.set()
        self._set_timer()

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise NotAccepting("no new requests are accepted: the engine is draining or closed")

    def _publish_ends(self, updates: Sequence[RequestUpdate]) -> None:
        self._publish(updates)
        self._note_idle()

    def _set_timer(self) -> None:
        """Keep one timer for the earliest deadline; a timer that fires for an ended request is set again."""
        deadline = self._scheduler.next_deadline
        if deadline is None or (self._timer is not None and self._timer_at <= deadline):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        delay = max(0.0, deadline - self._scheduler.now())
        self._timer = asyncio.get_running_loop().call_later(delay, self._expire)

    def _expire(self) -> None:
        self._timer = None
        updates = self._scheduler.expire()
        if updates:
            self._publish_ends(updates)
        self._set_timer()

    def _end_all(self, error: str) -> None:
        try:
            self._publish(self._scheduler.end_all(error))
        finally:
            self._idle.set()

    def _note_idle(self) -> None:
        if not self._scheduler.has_work:
            self._idle.set()
