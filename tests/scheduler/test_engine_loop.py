"""The engine loop: every accepted request ends once, whatever a step does and however the loop ends."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from quire.scheduler import (
    DEADLINE_PASSED,
    EngineLoop,
    FinishedStep,
    NotAccepting,
    QueueFull,
    Request,
    RequestSpec,
    RequestUpdate,
    StepPlan,
    StepResult,
    TooLong,
)

from tests.scheduler.conftest import Expected, MakeHarness

TIMEOUT_S = 60  # a test that hangs fails


class FakeEngine:
    """An engine loop whose steps can be held, can fail, or can return a wrong result."""

    def __init__(self, harness: Any) -> None:
        self.harness = harness
        self.gate = asyncio.Event()
        self.gate.set()
        self.executing = asyncio.Event()
        self.num_executed = 0
        self.failure: Exception | None = None
        self.distort: Callable[[StepResult], StepResult] = lambda result: result
        self.on_publish: Callable[[RequestUpdate], None] = lambda update: None
        self.observed: list[FinishedStep] = []
        self.loop = EngineLoop(harness.scheduler, self.execute, self.publish, self.observed.append)

    async def execute(self, plan: StepPlan) -> StepResult:
        self.num_executed += 1
        self.executing.set()
        await asyncio.sleep(0)
        await self.gate.wait()
        if self.failure is not None:
            failure = self.failure
            self.failure = None
            raise failure
        return self.distort(self.harness.execute(plan))

    def publish(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            self.harness.note(update)
            self.on_publish(update)

    def add(self, request_id: int, prompt: Sequence[int], max_tokens: int = 4, **options: Any) -> None:
        request = Request(RequestSpec(request_id, prompt, max_tokens=max_tokens, **options))
        self.loop.add(request)
        self.harness.requests[request_id] = request
        self.harness.outputs[request_id] = []


@asynccontextmanager
async def running(harness: Any) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(harness)
    engine.loop.start()
    async with asyncio.timeout(TIMEOUT_S):
        yield engine
        engine.gate.set()
        await engine.loop.close()
    assert harness.scheduler.stats().pages_owned == 0
    assert harness.ended.keys() == harness.requests.keys()


async def test_requests_run_to_their_end(make_harness: MakeHarness, expected: Expected) -> None:
    async with running(make_harness()) as engine:
        engine.add(1, [1] * 5)
        engine.add(2, [2] * 6, max_tokens=7)
        await engine.loop.drain()
        assert engine.harness.outputs == {1: expected([1] * 5, 4), 2: expected([2] * 6, 7)}
        assert engine.harness.scheduler.num_steps == engine.num_executed == 7


async def test_a_request_joins_while_others_run(make_harness: MakeHarness, expected: Expected) -> None:
    async with running(make_harness()) as engine:
        engine.add(1, [1] * 5, max_tokens=9)
        engine.gate.clear()
        await engine.executing.wait()
        engine.add(2, [2] * 5)
        engine.gate.set()
        await engine.loop.drain()
        assert engine.num_executed == 9
        assert engine.harness.outputs[2] == expected([2] * 5, 4)


async def test_the_loop_sleeps_while_there_is_nothing_to_do(make_harness: MakeHarness) -> None:
    harness = make_harness()
    calls = 0
    schedule = harness.scheduler.schedule

    def counted() -> StepPlan | None:
        nonlocal calls
        calls += 1
        return schedule()

    harness.scheduler.schedule = counted
    async with running(harness) as engine:
        for _ in range(50):
            await asyncio.sleep(0)
        assert calls == 1
        engine.add(1, [1], max_tokens=2)
        await engine.loop.drain()
        for _ in range(50):
            await asyncio.sleep(0)
        assert calls == 4  # two steps, and one call that returned None
        assert engine.harness.scheduler.num_steps == 2


async def test_refused_requests_raise_and_leave_nothing(make_harness: MakeHarness) -> None:
    async with running(make_harness(num_pages=4, max_num_waiting=1)) as engine:
        with pytest.raises(TooLong):
            engine.add(1, [1] * 20)
        engine.add(2, [2])
        with pytest.raises(QueueFull):
            engine.add(3, [3])
        await engine.loop.drain()
        assert engine.harness.ended == {2: "length"}


async def test_cancelling_between_and_during_steps(make_harness: MakeHarness) -> None:
    async with running(make_harness(max_num_seqs=1)) as engine:
        engine.add(1, [1] * 5, max_tokens=50)
        engine.add(2, [2] * 5)
        engine.gate.clear()
        await engine.executing.wait()
        engine.loop.cancel(2)
        assert engine.harness.ended == {2: "cancelled"}  # the end comes at once
        engine.loop.cancel(1)
        engine.loop.cancel(1)
        assert 1 not in engine.harness.ended  # the request's pages are in use
        engine.gate.set()
        await engine.loop.drain()
        assert engine.harness.ended == {1: "cancelled", 2: "cancelled"}
        assert engine.num_executed == 1


async def test_publish_may_finish_requests(make_harness: MakeHarness, expected: Expected) -> None:
    async with running(make_harness()) as engine:

        def stop_at_two(update: RequestUpdate) -> None:
            if len(engine.harness.outputs[update.request_id]) == 2 and not update.ended:
                engine.harness.note(engine.harness.scheduler.finish(update.request_id, "stop"))

        engine.on_publish = stop_at_two
        engine.add(1, [1] * 5, max_tokens=9)
        engine.add(2, [2] * 5, max_tokens=9)
        await engine.loop.drain()
        assert engine.harness.ended == {1: "stop", 2: "stop"}
        assert engine.harness.outputs == {1: expected([1] * 5, 2), 2: expected([2] * 5, 2)}
        assert engine.num_executed == 2


async def test_a_failing_step_ends_its_requests_and_the_loop_goes_on(
    make_harness: MakeHarness, expected: Expected
) -> None:
    async with running(make_harness(max_num_seqs=1)) as engine:
        engine.failure = RuntimeError("kernel failed")
        engine.add(1, [1] * 5)
        engine.add(2, [2] * 5)
        await engine.loop.drain()
        assert engine.harness.ended == {1: "step 1 failed: RuntimeError('kernel failed')", 2: "length"}
        assert engine.harness.outputs == {1: [], 2: expected([2] * 5, 4)}


async def test_a_result_that_does_not_match_fails_the_step(make_harness: MakeHarness) -> None:
    async with running(make_harness()) as engine:
        engine.distort = lambda result: StepResult(result.step_id, (), 0.0)
        engine.add(1, [1] * 5)
        await engine.loop.drain()
        assert engine.harness.ended == {1: "step 1 must sample for requests [1], in this order"}


async def test_draining_refuses_new_requests_and_waits_for_accepted_ones(make_harness: MakeHarness) -> None:
    async with running(make_harness()) as engine:
        engine.add(1, [1] * 5)
        drained = asyncio.create_task(engine.loop.drain())
        await asyncio.sleep(0)
        assert not drained.done()
        with pytest.raises(NotAccepting, match="draining or closed"):
            engine.add(2, [2])
        await drained
        assert engine.harness.ended == {1: "length"}


async def test_draining_an_idle_engine_loop_returns(make_harness: MakeHarness) -> None:
    async with running(make_harness()) as engine:
        await engine.loop.drain()


async def test_cancelling_the_last_request_ends_the_drain(make_harness: MakeHarness) -> None:
    harness = make_harness()
    engine = FakeEngine(harness)  # not started: the request stays queued
    engine.add(1, [1] * 5)
    drained = asyncio.create_task(engine.loop.drain())
    await asyncio.sleep(0)
    engine.loop.cancel(1)
    async with asyncio.timeout(TIMEOUT_S):
        await drained


async def test_finished_steps_are_observed_and_failed_ones_are_not(make_harness: MakeHarness) -> None:
    async with running(make_harness()) as engine:
        engine.failure = RuntimeError("kernel failed")
        engine.add(1, [1] * 5)
        await engine.loop.drain()
        assert engine.observed == []
    async with running(make_harness()) as engine:
        engine.add(1, [1] * 5, max_tokens=3)
        await engine.loop.drain()
    assert [len(step.plan.sequences[0].token_ids) for step in engine.observed] == [5, 1, 1]
    assert [step.result.step_id for step in engine.observed] == [step.plan.step_id for step in engine.observed]
    assert all(min(step.schedule_s, step.commit_s, step.publish_s) > 0 for step in engine.observed)


async def test_closing_finishes_the_step_and_ends_other_requests_with_an_error(make_harness: MakeHarness) -> None:
    async with running(make_harness(max_num_seqs=1)) as engine:
        engine.add(1, [1] * 5, max_tokens=50)
        engine.add(2, [2] * 5)
        engine.gate.clear()
        await engine.executing.wait()
        closed = asyncio.create_task(engine.loop.close("shutting down"))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not closed.done()
        assert engine.harness.ended == {}
        engine.gate.set()
        await closed
        assert engine.harness.ended == {1: "shutting down", 2: "shutting down"}
        assert len(engine.harness.outputs[1]) == 1
        await engine.loop.close()
        with pytest.raises(NotAccepting):
            engine.add(3, [3])


async def test_closing_an_engine_loop_that_never_started(make_harness: MakeHarness) -> None:
    engine = FakeEngine(make_harness())
    engine.add(1, [1])
    await engine.loop.close("never started")
    assert engine.harness.ended == {1: "never started"}


async def test_a_cancelled_loop_leaves_no_request_behind(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    engine = FakeEngine(harness)
    engine.loop.start()
    engine.add(1, [1] * 5)
    engine.add(2, [2] * 5)
    engine.gate.clear()
    await engine.executing.wait()
    (loop,) = (task for task in asyncio.all_tasks() if task.get_name() == "quire-engine-loop")
    loop.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await engine.loop.drain()
        await engine.loop.close()
    assert harness.ended == {1: "the engine stopped unexpectedly", 2: "the engine stopped unexpectedly"}
    assert harness.scheduler.stats().pages_owned == 0


async def test_a_broken_loop_ends_every_request_and_close_raises_the_cause(make_harness: MakeHarness) -> None:
    harness = make_harness(max_num_seqs=1)
    engine = FakeEngine(harness)
    engine.loop.start()
    engine.add(1, [1] * 5)
    engine.add(2, [2] * 5)
    assert not engine.loop.is_broken
    harness.pager.pool.num_free -= 1  # the audit of the next step fails
    async with asyncio.timeout(TIMEOUT_S):
        await engine.loop.drain()
        assert engine.loop.is_broken
        with pytest.raises(Exception, match="do not match the lists"):
            await engine.loop.close()
    assert harness.ended == {1: "the engine stopped unexpectedly", 2: "the engine stopped unexpectedly"}


async def test_every_deadline_has_a_timer(make_harness: MakeHarness) -> None:
    """The clock jumps to the next deadline when a request has ended, so no timer waits in real time."""
    async with running(make_harness(max_num_seqs=1)) as engine:
        engine.gate.clear()
        engine.add(1, [1])
        await engine.executing.wait()
        engine.add(2, [2], deadline=90.0)
        engine.add(3, [2], deadline=70.0)
        engine.harness.now = 50.0
        engine.on_publish = lambda update: setattr(engine.harness, "now", engine.harness.now + 20)
        engine.add(4, [2], deadline=50.0)  # earlier than the timer that is set
        while len(engine.harness.ended) < 3:
            await asyncio.sleep(0)
        assert list(engine.harness.ended) == [4, 3, 2]
        assert set(engine.harness.ended.values()) == {DEADLINE_PASSED}


async def test_a_closed_loop_is_not_kept_in_memory_until_the_last_deadline(make_harness: MakeHarness) -> None:
    harness = make_harness()
    async with running(harness) as engine:
        engine.add(1, [1], deadline=harness.now + 3600.0)
        await engine.loop.drain()
    closed = weakref.ref(engine.loop)
    del engine
    await asyncio.sleep(0)
    gc.collect()
    assert closed() is None


async def test_a_deadline_ends_a_request_in_flight_with_its_step(make_harness: MakeHarness) -> None:
    async with running(make_harness()) as engine:
        engine.gate.clear()
        engine.add(1, [1], max_tokens=50, deadline=10.0)
        await engine.executing.wait()
        engine.harness.now = 10.0
        engine.add(2, [2], deadline=9.0)
        while 2 not in engine.harness.ended:
            await asyncio.sleep(0)
        assert 1 not in engine.harness.ended
        engine.gate.set()
        await engine.loop.drain()
        assert engine.harness.ended == {1: DEADLINE_PASSED, 2: DEADLINE_PASSED}


async def test_a_readmitted_request_wakes_an_idle_loop(make_harness: MakeHarness, expected: Expected) -> None:
    async with running(make_harness()) as engine:
        for _ in range(5):
            await asyncio.sleep(0)
        tokens = expected([1] * 5, 4)
        request = Request(RequestSpec(7, [1] * 5, max_tokens=4), tokens[:1])
        engine.harness.requests[7] = request
        engine.harness.outputs[7] = tokens[:1]
        engine.loop.readmit(request)
        await engine.loop.drain()
        assert engine.harness.outputs[7] == tokens


async def test_a_refused_request_does_not_keep_a_drain_waiting(make_harness: MakeHarness) -> None:
    async with running(make_harness(num_pages=4)) as engine:
        with pytest.raises(TooLong):
            engine.add(1, [1] * 20)
        with pytest.raises(QueueFull):
            engine.loop.check_room("", 2000)
        await engine.loop.drain()
        with pytest.raises(NotAccepting):
            engine.loop.check_room("")
