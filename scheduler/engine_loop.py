"""The asyncio loop around a scheduler: wait for work, schedule, execute, commit, publish.

`execute` and `publish` are injected; it must not know what computes a step nor who reads the results. The one
invariant: every request it accepted ends exactly once, whatever `execute` does and however the loop ends; its ending is
published, unless the caller of `Scheduler.finish` got it in hand.

Everything here runs on one event loop; only `execute` may leave it, for the duration of its step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .admission import AdmissionEstimate, NotAccepting, StepMismatch
from .plan import StepPlan, StepResult
from .request import FinishReason, Request, RequestUpdate
from .scheduler import Scheduler

Execute = Callable[[StepPlan], Awaitable[StepResult]]  # suspends while it computes; raising fails that step only
Publish = Callable[[Sequence[RequestUpdate]], None]  # must not raise


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """One step that was executed and committed, and the seconds spent around its execution."""

    plan: StepPlan
    result: StepResult
    schedule_s: float
    commit_s: float
    publish_s: float


Observe = Callable[[FinishedStep], None]  # must not raise


class EngineLoop:
    """Runs steps as long as there is work. `publish` is called between steps and may finish or cancel requests, then
    `observe` is told of the step.

    `start` it on a running event loop, and `close` it in the end.
    """

    def __init__(
        self, scheduler: Scheduler, execute: Execute, publish: Publish, observe: Observe | None = None
    ) -> None:
        self._scheduler = scheduler
        self._execute = execute
        self._publish = publish
        self._observe = observe
        self._task: asyncio.Task[None] | None = None
        self._accepting = True
        self._closing: str | None = None  # the error that requests left over by `close` end with
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # no request is alive
        self._idle.set()
        self._timer: asyncio.TimerHandle | None = None  # of the earliest deadline
        self._timer_at = 0.0

    @property
    def num_steps(self) -> int:
        """Finished steps; readiness is that this advances while work exists."""
        return self._scheduler.num_steps

    @property
    def is_broken(self) -> bool:
        """The loop has ended without being asked to: nothing will be computed any more."""
        return self._task is not None and self._task.done() and self._closing is None

    def start(self, ended: Callable[[], None] | None = None) -> None:
        """`ended` is called when the loop is over, asked for or not, and nothing will be published any more."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="quire-engine-loop")
        if ended is not None:
            self._task.add_done_callback(lambda _: ended())

    def check_room(self, tenant: str, count: int = 1) -> None:
        """Raises NotAccepting or QueueFull where `add` would: a cheap look before a prompt is prepared."""
        self._check_accepting()
        self._scheduler.check_room(tenant, count)

    def add(self, request: Request, *forks: Request) -> AdmissionEstimate:
        """Queue a request and `forks` of it. Raises NotAccepting, or what `Scheduler.add` raises, changing nothing."""
        self._check_accepting()
        estimate = self._scheduler.add(request, *forks)
        self._begin_work()
        return estimate

    def readmit(self, request: Request) -> None:
        """Queue a request that was accepted elsewhere. Raises what `Scheduler.readmit` raises."""
        self._scheduler.readmit(request)
        self._begin_work()

    def cancel(self, request_id: int) -> None:
        """Legal in every state, idempotent. The ending is published now, or after the step the request is part of."""
        self.finish(request_id, "cancelled")

    def finish(self, request_id: int, reason: FinishReason | None = None, error: str | None = None) -> None:
        """End a request from outside, as `cancel` does, for any reason or with an error."""
        update = self._scheduler.finish(request_id, reason, error)
        if update is not None:
            self._publish_ends((update,))

    async def drain(self) -> None:
        """Accept nothing more and return once every accepted request has ended."""
        self._accepting = False
        await self._idle.wait()

    async def close(self, error: str = "the engine was closed") -> None:
        """Let the step in flight end, then end every request that is left with `error`. Idempotent.

        Raises what broke the loop, if something did.
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

    def _begin_work(self) -> None:
        self._idle.clear()
        self._wake.set()
        self._watch_deadlines()

    def _check_accepting(self) -> None:
        if not self._accepting:
            raise NotAccepting("no new requests are accepted: the engine is draining or closed")

    def _publish_ends(self, updates: Sequence[RequestUpdate]) -> None:
        self._wake.set()  # their pages may let others in
        self._publish(updates)
        self._note_idle()

    def _watch_deadlines(self) -> None:
        """One timer, for the earliest deadline. It goes off for one that has ended before too, and looks again."""
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
        self._watch_deadlines()

    async def _run(self) -> None:
        try:
            while self._closing is None:
                start = time.perf_counter()
                plan = self._scheduler.schedule()
                if plan is None:
                    await self._wait_for_work()
                else:
                    await self._step(plan, time.perf_counter() - start)
        finally:
            self._accepting = False
            if self._timer is not None:
                self._timer.cancel()
            self._end_all(self._closing or "the engine stopped unexpectedly")

    async def _wait_for_work(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    async def _step(self, plan: StepPlan, schedule_s: float) -> None:
        try:
            result = await self._execute(plan)
        except Exception as error:
            self._publish(self._scheduler.abandon(f"step {plan.step_id} failed: {error!r}"))
        else:
            self._finish_step(plan, result, schedule_s)
        self._note_idle()

    def _finish_step(self, plan: StepPlan, result: StepResult, schedule_s: float) -> None:
        executed = time.perf_counter()
        updates = self._commit(result)
        committed = time.perf_counter()
        self._publish(updates)
        if self._observe is not None:
            published = time.perf_counter()
            self._observe(FinishedStep(plan, result, schedule_s, committed - executed, published - committed))

    def _commit(self, result: StepResult) -> list[RequestUpdate]:
        try:
            return self._scheduler.commit(result)
        except StepMismatch as error:
            return self._scheduler.abandon(str(error))

    def _end_all(self, error: str) -> None:
        try:
            self._publish(self._scheduler.end_all(error))
        finally:
            self._idle.set()

    def _note_idle(self) -> None:
        if not self._scheduler.has_work:
            self._idle.set()
