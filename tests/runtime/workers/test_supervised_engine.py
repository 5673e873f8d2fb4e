"""One engine process is replaced when it fails, and every request ends exactly once, with the tokens that it had
generated.

Processes and time are fakes; `tests/system/test_survival.py` kills real ones.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from errno import EMFILE
from typing import Any

import msgspec
import pytest
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import DeadlineExceeded, ModelError, ModelNotFound, Quarantined, Unavailable
from quire.runtime.engine import LoadedAdapter, Prefilled
from quire.runtime.engine.stats import COUNTERS, COUNTERS_BY_NAME
from quire.runtime.workers import HealthTimeouts, supervisor
from quire.runtime.workers.engine_link import (
    AdapterAnswer,
    CancelRequest,
    DropRequest,
    LoadAdapter,
    ReadmitEncoding,
    ReadmitRequest,
)
from quire.runtime.workers.supervised_engine import SupervisedEngine
from quire.scheduler import (
    DEADLINE_PASSED,
    AdmissionEstimate,
    CannotMeetDeadline,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Refused,
    RequestUpdate,
    SampledToken,
    TooLong,
)
from structlog.testing import capture_logs

from tests.support.engine_processes import (
    ESTIMATE,
    STEP_STATS,
    FakeListener,
    FakeProcess,
    FakeSpawner,
    core_info,
    engine_stats,
    loop_clock,
    new_encoding,
    new_requests,
    until,
)

TIMEOUTS = HealthTimeouts(heartbeat_s=1.0, stall_s=30.0)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeSpawner:
    spawner = FakeSpawner()
    monkeypatch.setattr(supervisor, "EngineProcess", spawner)
    return spawner


@asynccontextmanager
async def launched(
    listener: FakeListener, timeouts: HealthTimeouts = TIMEOUTS, **config: Any
) -> AsyncIterator[SupervisedEngine]:
    engine = await SupervisedEngine.launch(EngineConfig(**config), timeouts, clock=loop_clock)
    engine.start(listener.listener())
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def engine(processes: FakeSpawner, listener: FakeListener) -> AsyncIterator[SupervisedEngine]:
    async with launched(listener) as engine:
        yield engine


async def add(engine: SupervisedEngine, *ids: int, **options: Any) -> None:
    """Add requests one after another; each is accepted."""
    for request_id in ids:
        await engine.add(new_requests(request_id, **options))


async def ask(engine: SupervisedEngine, *ids: int) -> list[asyncio.Task[AdmissionEstimate]]:
    """Start to add requests, one task each, and let the tasks send their messages."""
    tasks = [asyncio.create_task(engine.add(new_requests(request_id))) for request_id in ids]
    await asyncio.sleep(0.01)
    return tasks


# Requests and their results


async def test_updates_of_an_accepted_request_are_published(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    assert await engine.add(new_requests(1)) == ESTIMATE
    processes.last.generate(1, 7)
    processes.last.finish(1, 8)
    assert listener.tokens(1) == [7, 8]
    assert listener.ends() == {1: "length"}
    assert engine.num_requests == 0


async def test_a_step_is_observed_after_its_updates_are_published(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    processes.last.finish_step(RequestUpdate(1, (SampledToken(1, 7),)))
    assert listener.tokens(1) == [7]
    assert listener.steps == [(STEP_STATS, (Prefilled(9, 2),), 1)]


@pytest.mark.parametrize("refusal", [QueueFull, CannotMeetDeadline, TooLong, PageQuotaExceeded])
async def test_a_refusal_is_raised_with_its_estimate_and_nothing_of_the_request_remains(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener, refusal: type[Refused]
) -> None:
    processes.last.answers_adds = False
    adding = asyncio.create_task(engine.add(new_requests(1, 2, 3)))
    await asyncio.sleep(0.01)
    processes.last.refuse(1, refusal.__name__)
    with pytest.raises(refusal, match="no") as raised:
        await adding
    assert raised.value.estimate == ESTIMATE
    assert engine.num_requests == 0
    num_sent = len(processes.last.sent)
    for request_id in (1, 2, 3):
        engine.cancel(request_id)
        engine.drop(request_id)
    assert len(processes.last.sent) == num_sent, "the engine process has none of them"
    processes.last.exit(1)
    assert (await processes.next()).sent == [], "none is replayed"
    assert listener.ends() == {}
    async with asyncio.timeout(1):
        await engine.drain()


async def test_a_process_that_accepts_nothing_refuses_without_an_estimate(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.last.answers_adds = False
    (adding,) = await ask(engine, 1)
    processes.last.refuse(1, "NotAccepting", None)
    with pytest.raises(NotAccepting, match="no"):
        await adding


async def test_cancel_and_drop_reach_the_engine_process(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1, 2)
    engine.cancel(1)
    engine.drop(2, "stop", None)
    assert processes.last.sent[-2:] == [CancelRequest(1), DropRequest(2, "stop", None)]
    assert listener.updates == [], "the engine process says when request 1 has ended; request 2 is not mentioned again"
    processes.last.finish(1, reason="cancelled")
    processes.last.generate(2, 5)
    assert listener.ends() == {1: "cancelled"}
    assert listener.tokens(2) == []


async def test_an_engine_does_not_keep_a_request_whose_caller_left(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.last.answers_adds = False
    (adding,) = await ask(engine, 1)
    adding.cancel()
    await asyncio.wait([adding])
    (drop,) = [message for message in processes.last.sent if isinstance(message, DropRequest)]
    assert drop.request_id == 1
    assert engine.num_requests == 0
    processes.last.accept(1)  # a late answer
    assert engine.num_requests == 0


async def test_an_engine_does_not_keep_a_request_whose_caller_leaves_with_the_answer(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.last.answers_adds = False
    (adding,) = await ask(engine, 1)
    adding.cancel()
    processes.last.accept(1)  # the task has not noticed the exit yet
    await asyncio.wait([adding])
    assert any(isinstance(message, DropRequest) and message.request_id == 1 for message in processes.last.sent)
    assert engine.num_requests == 0


async def test_a_caller_that_leaves_before_its_request_is_sent_sends_nothing(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.makes_ready = False
    processes.last.exit(1)
    await processes.next()
    (adding,) = await ask(engine, 1)
    adding.cancel()
    await asyncio.wait([adding])
    processes.make_ready(processes.last)
    await asyncio.sleep(1)
    assert processes.last.sent == []
    assert engine.num_requests == 0


async def test_room_counts_requests_that_wait_in_the_engine_and_those_on_their_way(
    processes: FakeSpawner, listener: FakeListener
) -> None:
    async with launched(listener, max_num_waiting=5) as engine:
        processes.last.answers_adds = False
        adding = asyncio.create_task(engine.add(new_requests(1, 2)))
        await asyncio.sleep(0.01)
        processes.last.tell_stats(waiting=2, pages_free=3, pages_cached=4)
        engine.check_room("tenant", 1)
        with pytest.raises(QueueFull, match="the queue is full: 4 of 5 requests wait") as raised:
            engine.check_room("tenant", 2)
        assert raised.value.estimate.position == 4
        assert raised.value.estimate.pages_free == 7
        processes.last.accept(1)
        await adding
        engine.check_room("tenant", 5)  # the answer said that none wait
        processes.last.finish_step(num_waiting=5)
        with pytest.raises(QueueFull):
            engine.check_room("tenant", 1)
        processes.makes_ready = False
        processes.last.exit(1)
        await processes.next()
        engine.check_room("tenant", 5)  # no process has any


async def test_drain_refuses_new_requests_and_waits_for_the_others(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    await add(engine, 1)
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(1)
    assert not draining.done()
    with pytest.raises(NotAccepting, match="draining"):
        engine.check_room("", 1)
    with pytest.raises(NotAccepting, match="draining"):
        await engine.add(new_requests(2))
    processes.last.finish(1)
    await asyncio.wait_for(draining, 1)


# When a process ends


async def test_tokens_survive_the_process_and_the_next_one_goes_on_behind_them(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1, prompt=(4, 5))
    processes.last.generate(1, 7)
    processes.last.generate(1, 8)
    first = processes.last
    first.exit(1)
    second = await processes.next()
    (readmit,) = second.sent
    assert isinstance(readmit, ReadmitRequest)
    assert readmit.request.prompt_token_ids == (4, 5)
    assert readmit.generated == (7, 8)
    second.finish(1, 9)
    assert listener.tokens(1) == [7, 8, 9]
    assert listener.ends() == {1: "length"}
    assert engine.counters().replayed_requests == 1


async def test_the_next_process_has_the_shape_of_the_first(processes: FakeSpawner, listener: FakeListener) -> None:
    processes.info = core_info(max_model_len=48, threads=3, isa="first")
    async with launched(listener) as engine:
        processes.last.exit(1)
        config = (await processes.next()).start.config
        assert (config.max_model_len, config.threads, config.isa) == (48, 3, "first")
        assert config.kv_cache_memory == 8 << 20
        assert engine.info.num_processes == 1


async def test_a_process_that_sends_no_heartbeat_is_replaced(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    first = processes.last
    first.heartbeats = False
    await processes.next()
    assert first.status == -signal.SIGKILL
    assert engine.num_restarts == 1


async def test_a_process_that_finishes_no_step_while_it_has_work_is_replaced(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    await add(engine, 1)
    processes.last.generate(1, 7)
    await asyncio.sleep(TIMEOUTS.stall_s - 1)
    assert engine.num_restarts == 0
    await asyncio.sleep(2)
    assert engine.num_restarts == 1


async def test_an_idle_process_is_not_replaced(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    for _ in range(4):
        await asyncio.sleep(TIMEOUTS.stall_s / 2)
        processes.last.tell_stats(step=5)
    assert engine.num_restarts == 0


async def test_a_process_that_finishes_steps_is_not_replaced(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    await add(engine, 1)
    for _ in range(4):
        await asyncio.sleep(TIMEOUTS.stall_s / 2)
        processes.last.generate(1, 7)
    assert engine.num_restarts == 0


async def test_a_broken_loop_in_a_live_process_is_noticed(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    before = loop_clock()
    processes.last.tell_broken()
    second = await processes.next()
    assert loop_clock() < before + 1, "long before a stall is assumed"
    assert second.sent_ids() == [1]
    second.finish(1)
    assert listener.ends() == {1: "length"}
    await asyncio.sleep(5)
    assert engine.num_restarts == 1, "the new one is not broken"


async def test_a_process_that_was_replaced_is_not_heard_any_more(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    first = processes.last
    first.exit(1)
    first.finish(1, 99)
    second = await processes.next()
    second.finish(1, 7)
    assert listener.tokens(1) == [7]


async def test_counters_do_not_fall_at_a_restart(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    counted = {name: 10 + place for place, name in enumerate(COUNTERS)}
    processes.last.tell_stats(**counted, running=3)
    before = engine.stats()
    assert before.running == 3
    processes.makes_ready = False
    processes.last.exit(1)
    second = await processes.next()
    assert {name: getattr(engine.counters(), name) for name in COUNTERS} == counted, "while no process is ready"
    processes.make_ready(second)
    await until(lambda: engine.pid is not None)
    assert {name: getattr(engine.counters(), name) for name in COUNTERS} == counted, (
        "before the new process has said anything"
    )
    second.tell_stats(**dict.fromkeys(COUNTERS, 1))
    after = engine.stats()
    assert {name: getattr(after, name) for name in COUNTERS} == {name: count + 1 for name, count in counted.items()}
    assert (after.running, after.restarts) == (0, 1)


async def test_counters_are_summed_over_all_processes(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    for number in (1, 2, 3):
        processes.last.tell_stats(**dict.fromkeys(COUNTERS, 5))
        assert {getattr(engine.counters(), name) for name in COUNTERS} == {5 * number}
        processes.last.exit(1)
        await processes.next()
        await until(lambda: engine.pid is not None)


async def test_counts_by_name_are_summed_over_all_processes(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    for number in (1, 2, 3):
        processes.last.tell_stats(**{name: {"prompt": 5, "forced": 1} for name in COUNTERS_BY_NAME})
        for stats in (engine.stats(), engine.counters()):
            counted = [getattr(stats, name) for name in COUNTERS_BY_NAME]
            assert counted == [{"prompt": 5 * number, "forced": number}] * len(COUNTERS_BY_NAME)
        processes.last.exit(1)
        await processes.next()
        await until(lambda: engine.pid is not None)


async def test_every_number_that_only_grows_is_kept_over_restarts() -> None:
    """A counter that is added to EngineStats has to be added to COUNTERS too; gauges are listed here."""
    gauges = {"running", "waiting", "waiting_by_reason", "encoder_running", "encoder_waiting"}
    gauges |= {"states_total", "states_cached", "states_free", "states_spilled", "states_cached_bytes"}
    gauges |= {name for name in msgspec.structs.asdict(engine_stats()) if name.startswith("pages_")}
    counted_here = {"restarts", "replayed_requests", "quarantined_requests"}
    assert {*COUNTERS, *COUNTERS_BY_NAME} == set(msgspec.structs.asdict(engine_stats())) - gauges - counted_here


async def test_there_are_no_stats_while_no_process_has_told_any(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.last.tell_stats()
    engine.stats()
    processes.makes_ready = False
    processes.last.exit(1)
    await processes.next()
    assert engine.pid is None
    with pytest.raises(Unavailable, match="restarted"):
        engine.stats()
    processes.make_ready(processes.last)
    await asyncio.sleep(0.3)
    with pytest.raises(Unavailable, match="restarted"):
        engine.stats()
    processes.last.tell_stats()
    engine.stats()


async def test_a_request_cancelled_while_no_process_runs_ends_at_once(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1, 2)
    processes.makes_ready = False
    processes.last.exit(1)
    second = await processes.next()
    engine.cancel(1)
    assert listener.ends() == {1: "cancelled"}
    processes.make_ready(second)
    await asyncio.sleep(1)
    assert second.sent_ids() == [2]


@pytest.mark.parametrize("end", ["cancel", "deadline"])
async def test_a_drain_ends_with_the_last_request_between_two_processes(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener, end: str
) -> None:
    await engine.add(new_requests(1, deadline=loop_clock() + 5 if end == "deadline" else None))
    processes.makes_ready = False
    processes.last.exit(1)
    await processes.next()
    draining = asyncio.create_task(engine.drain())
    await asyncio.sleep(0.01)
    if end == "cancel":
        engine.cancel(1)
    await asyncio.wait_for(draining, 10)
    assert listener.ends() == {1: "cancelled" if end == "cancel" else DEADLINE_PASSED}


async def test_a_cancelled_request_whose_process_ends_first_is_cancelled_and_not_replayed(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    engine.cancel(1)
    processes.last.exit(1)
    assert (await processes.next()).sent == []
    assert listener.ends() == {1: "cancelled"}


async def test_a_deadline_that_passes_while_no_process_runs_ends_the_request(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await engine.add(new_requests(1, deadline=loop_clock() + 5))
    await add(engine, 2)
    processes.makes_ready = False
    processes.last.exit(1)
    second = await processes.next()
    await asyncio.sleep(4)
    assert listener.ends() == {}
    await asyncio.sleep(2)
    assert listener.ends() == {1: DEADLINE_PASSED}
    processes.make_ready(second)
    await asyncio.sleep(1)
    assert second.sent_ids() == [2]


async def test_a_deadline_that_passes_while_another_request_is_replayed_alone(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    await engine.add(new_requests(2, deadline=loop_clock() + 5))
    processes.last.begin(1, 2)
    processes.last.exit(1)
    assert (await processes.next()).sent_ids() == [1]
    await asyncio.sleep(6)
    assert listener.ends() == {2: DEADLINE_PASSED}


async def test_a_deadline_that_passes_while_a_request_waits_to_be_added(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.makes_ready = False
    processes.last.exit(1)
    second = await processes.next()
    started = loop_clock()
    with pytest.raises(DeadlineExceeded, match="waited for an engine"):
        await engine.add(new_requests(1, deadline=started + 5))
    assert loop_clock() == pytest.approx(started + 5)
    processes.make_ready(second)
    await asyncio.sleep(1)
    assert second.sent == []


# Which requests may have caused a crash


async def test_several_unanswered_requests_of_a_crash_go_back_one_at_a_time_in_their_order(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.answers_adds = processes.last.answers_adds = False
    adding = await ask(engine, 1, 2, 3)
    assert processes.last.sent_ids() == [1, 2, 3]
    processes.last.exit(1)
    second = await processes.next()
    adding += await ask(engine, 4)
    for request_id in (1, 2, 3):
        assert second.sent_ids()[-1] == request_id, "only the first of them, until it is answered"
        second.accept(request_id)
        await asyncio.sleep(0.01)
    second.accept(4)
    assert await asyncio.gather(*adding) == [ESTIMATE] * 4
    assert engine.counters().quarantined_requests == 0


async def test_a_request_whose_adding_crashes_two_processes_is_quarantined_alone(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.answers_adds = processes.last.answers_adds = False
    adding = await ask(engine, 1, 2, 3)
    processes.last.exit(1)
    second = await processes.next()
    assert second.sent_ids() == [1]
    second.accept(1)
    await asyncio.sleep(0.01)
    assert second.sent_ids() == [1, 2]
    second.exit(1)
    with pytest.raises(Quarantined, match="crashed twice while it accepted this request"):
        await adding[1]
    third = await processes.next()
    assert third.sent_ids() == [1, 3], "accepted ones go back before others are added"
    third.accept(3)
    await asyncio.gather(adding[0], adding[2])
    assert engine.counters().quarantined_requests == 1


async def test_callers_that_wait_to_be_added_keep_their_order_over_a_crash(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.answers_adds = processes.last.answers_adds = False
    sent = await ask(engine, 1, 2)
    processes.makes_ready = False
    processes.last.exit(-signal.SIGKILL)
    second = await processes.next()
    waiting = await ask(engine, 3, 4)
    assert second.sent_ids() == []
    processes.make_ready(second)
    await until(lambda: engine.pid is not None)
    assert second.sent_ids() == [1, 2, 3, 4]
    for request_id in (1, 2, 3, 4):
        second.accept(request_id)
    await asyncio.gather(*sent, *waiting)


async def test_requests_of_a_crash_are_replayed_one_at_a_time_before_new_ones(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    await add(engine, 1, 2)
    processes.last.begin(1, 2)
    processes.last.exit(-signal.SIGSEGV)
    second = await processes.next()
    (new,) = await ask(engine, 3)
    assert second.sent_ids() == [1]
    second.begin(1)
    second.generate(1, 5)
    second.generate(1, 6)
    assert second.sent_ids() == [1, 2]
    second.begin(2)
    second.generate(2, 5)
    second.generate(2, 6)
    assert second.sent_ids() == [1, 2, 3]
    await new


async def test_a_request_whose_computation_crashes_two_processes_is_quarantined_alone(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1, 2)
    processes.last.begin(1, 2)
    processes.last.exit(-signal.SIGSEGV)
    second = await processes.next()
    second.begin(1)
    with capture_logs() as logs:
        second.exit(-signal.SIGILL)
        third = await processes.next()
    assert listener.ends() == {1: "Quarantined"}
    assert str(listener.failures[1]).endswith("; the engine process: it was killed by SIGILL")
    assert [line["reason"] for line in logs if line["event"] == "engine process lost"] == ["it was killed by SIGILL"]
    assert third.sent_ids() == [2]
    third.begin(2)
    third.finish(2)
    third.tell_stats()
    assert engine.stats().quarantined_requests == 1


async def test_texts_run_again_after_a_crash_and_those_that_crash_twice_are_quarantined(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    for request_id in (1, 2):
        assert await engine.add_encoding(new_encoding(request_id)) == ESTIMATE
    processes.last.begin(1, 2)
    processes.last.exit(-signal.SIGSEGV)
    second = await processes.next()
    assert second.sent == [ReadmitEncoding(new_encoding(1).spec)]
    second.begin(1)
    second.exit(-signal.SIGSEGV)
    third = await processes.next()
    assert listener.ends() == {1: "Quarantined"}
    assert third.sent_ids() == [2]
    third.begin(2)
    third.finish(2, reason="stop")
    assert listener.ends() == {1: "Quarantined", 2: "stop"}
    assert engine.num_requests == 0


async def test_later_texts_of_a_request_are_accepted_while_draining(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    await engine.drain()
    with pytest.raises(NotAccepting):
        await engine.add_encoding(new_encoding(1))
    await engine.add_encoding(new_encoding(2, is_continuation=True))
    engine.drop(2, error="the caller left")
    await engine.stop()
    with pytest.raises(NotAccepting):
        await engine.add_encoding(new_encoding(3, is_continuation=True))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=str)
async def test_a_process_killed_or_stopped_from_outside_makes_no_request_a_suspect(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener, number: signal.Signals
) -> None:
    await add(engine, 1, 2)
    for _ in range(3):
        process = processes.last
        process.answers_adds = False
        process.begin(1, 2)
        if number is signal.SIGKILL:
            process.exit(-number)
        else:
            process.is_stopped, process.heartbeats = True, False
        process = await processes.next()
        assert process.sent_ids() == [1, 2], "both at once"
    assert listener.ends() == {}
    assert engine.counters().quarantined_requests == 0


async def test_requests_that_were_being_added_when_a_process_was_killed_are_no_suspects(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    processes.answers_adds = processes.last.answers_adds = False
    adding = await ask(engine, 1, 2)
    for _ in range(3):
        processes.last.exit(-signal.SIGKILL)
        assert (await processes.next()).sent_ids() == [1, 2], "both at once"
    processes.last.accept(1)
    processes.last.accept(2)
    await asyncio.gather(*adding)


async def test_a_process_that_stalls_was_not_killed_from_outside(
    engine: SupervisedEngine, processes: FakeSpawner
) -> None:
    """The supervisor of the process kills it, with the same signal."""
    await add(engine, 1, 2)
    processes.last.begin(1, 2)
    processes.last.heartbeats = False
    assert (await processes.next()).sent_ids() == [1], "one at a time"


# When no process can be started


async def test_what_keeps_the_first_process_from_starting_is_raised(processes: FakeSpawner) -> None:
    processes.error = ModelError("no config.json")
    with pytest.raises(ModelError, match=r"no config\.json"):
        await SupervisedEngine.launch(EngineConfig())
    assert processes.last.status is not None, "the process is gone"


async def test_a_first_process_that_hangs_is_ended(processes: FakeSpawner) -> None:
    processes.makes_ready = False
    launching = asyncio.create_task(SupervisedEngine.launch(EngineConfig()))
    await asyncio.sleep(60)
    assert not launching.done(), "loading may take long while there are heartbeats"
    processes.last.heartbeats = False
    with pytest.raises(Unavailable, match="hangs while it starts"):
        await launching
    assert processes.last.status is not None


async def test_waiting_requests_fail_when_restarts_fail_again_and_again(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    await add(engine, 1)
    processes.error = OSError("no memory")
    processes.last.exit(1)
    await until(lambda: engine.pid is None)
    lost_at = loop_clock()
    (adding,) = await ask(engine, 2)
    with pytest.raises(NotAccepting, match="the engine cannot be restarted: no memory"):
        await adding
    assert loop_clock() - lost_at == pytest.approx(supervisor.RESTART_TIMEOUT_S, abs=1)
    assert listener.ends() == {1: "Unavailable"}
    assert "no memory" in str(listener.failures[1])
    with pytest.raises(NotAccepting, match="cannot be restarted"):
        engine.check_room("", 1)
    with pytest.raises(NotAccepting, match="cannot be restarted"):
        await engine.add(new_requests(3))
    with pytest.raises(Unavailable, match="cannot be restarted"):
        engine.stats()
    processes.error = None
    await until(lambda: engine.pid is not None)
    engine.check_room("", 1)
    await add(engine, 4)
    assert processes.last.sent_ids() == [4]
    assert engine.num_restarts == 1


async def test_failed_starts_are_repeated_with_growing_pauses(engine: SupervisedEngine, processes: FakeSpawner) -> None:
    processes.error = Unavailable("it ended")
    processes.last.exit(1)
    await asyncio.sleep(1)
    at_first = processes.num_attempts
    await asyncio.sleep(60)
    before = processes.num_attempts
    await asyncio.sleep(60)
    assert at_first >= 3
    assert 11 <= processes.num_attempts - before <= 13, "every 5 s"
    assert all(process.status is not None for process in processes.started), "none is left behind"


@pytest.mark.parametrize(
    "error", [OSError(EMFILE, "Too many open files"), RuntimeError("can't start new thread"), MemoryError()], ids=repr
)
async def test_failed_restarts_of_less_than_the_time_limit_are_no_error_of_any_request(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener, error: Exception
) -> None:
    await add(engine, 1)
    processes.error = error
    processes.last.exit(1)
    await asyncio.sleep(supervisor.RESTART_TIMEOUT_S - 1)
    assert processes.num_attempts >= 6
    engine.check_room("", 1)
    (adding,) = await ask(engine, 2)
    processes.error = None
    await until(lambda: engine.pid is not None)
    processes.last.finish(1)
    await adding
    assert listener.ends() == {1: "length"}


async def crash_and_load_for_long(engine: SupervisedEngine, processes: FakeSpawner) -> FakeProcess:
    """End the engine process under request 1; return the next one, which loads for longer than the time limit."""
    await add(engine, 1)
    processes.makes_ready = False
    processes.last.exit(1)
    loading = await processes.next()
    await asyncio.sleep(2 * supervisor.RESTART_TIMEOUT_S)
    return loading


async def test_a_process_that_loads_for_longer_than_the_time_limit_is_no_error_of_any_request(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    loading = await crash_and_load_for_long(engine, processes)
    processes.make_ready(loading)
    await until(lambda: engine.pid is not None)
    loading.finish(1)
    assert listener.ends() == {1: "length"}


async def test_a_start_that_loads_for_long_and_then_fails_is_the_first_failure(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    loading = await crash_and_load_for_long(engine, processes)
    processes.makes_ready = True
    loading.exit(1)
    await until(lambda: engine.pid is not None)
    processes.last.finish(1)
    assert listener.ends() == {1: "length"}


async def test_a_deadline_that_passes_between_failed_starts_ends_its_request_in_time(
    engine: SupervisedEngine, processes: FakeSpawner, listener: FakeListener
) -> None:
    deadline = loop_clock() + 20  # limit: the longest pause
    await add(engine, 1, deadline=deadline)
    processes.error = OSError("no memory")
    processes.last.exit(1)
    await until(lambda: listener.ends() != {})
    assert listener.ends() == {1: DEADLINE_PASSED}
    assert loop_clock() - deadline < 0.5


async def test_starts_that_fail_for_hours_do_not_end_the_attempts(
    engine: SupervisedEngine, processes: FakeSpawner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.2)
    processes.error = OSError("no memory")
    processes.last.exit(1)
    await until(lambda: processes.num_attempts > 1100)
    processes.error = None
    await until(lambda: engine.pid is not None)


# The end


async def test_close_ends_every_request_and_the_process(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(listener) as engine:
        await add(engine, 1)
        processes.last.answers_adds = False
        (adding,) = await ask(engine, 2)
    with pytest.raises(NotAccepting, match="the engine was closed"):
        await adding
    assert listener.ends() == {1: "Unavailable"}
    assert listener.num_ended == 1
    assert processes.last.was_asked_to_stop, "it may write its snapshot"
    assert processes.last.status is not None
    with pytest.raises(NotAccepting):
        engine.check_room("", 1)


async def test_close_during_a_restart_ends_the_new_process(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(listener) as engine:
        await add(engine, 1)
        processes.makes_ready = False
        processes.last.exit(1)
        await processes.next()
        (adding,) = await ask(engine, 2)
        assert engine.pid is None
    with pytest.raises(NotAccepting, match="the engine was closed"):
        await adding
    assert listener.ends() == {1: "Unavailable"}
    assert listener.num_ended == 1
    assert [process.status is not None for process in processes.started] == [True, True]
    await asyncio.sleep(60)
    assert len(processes.started) == 2, "no other is started"


async def test_close_while_a_process_exits(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(listener) as engine:
        await add(engine, 1)
        processes.last.tell_stats()
        processes.last.exit_delay_s = 0.5
        processes.last.exit(1)
        await until(lambda: engine.pid is None)
        with pytest.raises(Unavailable, match="restarted"):
            engine.stats()
    assert processes.last.was_killed
    assert len(processes.started) == 1
    assert listener.ends() == {1: "Unavailable"}


async def test_close_ends_the_process_although_its_supervisor_has_failed(
    processes: FakeSpawner, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(listener) as engine:
        await add(engine, 1)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "on_tick", lambda: 1 / 0)
            await asyncio.sleep(1)
        with capture_logs() as logs:
            await engine.close()
    assert [type(line["exc_info"]) for line in logs if line["event"] == "a task failed"] == [ZeroDivisionError]
    assert processes.last.was_asked_to_stop
    assert listener.ends() == {1: "Unavailable"}


async def test_close_ends_every_request_although_its_process_cannot_be_stopped(
    processes: FakeSpawner, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise OSError("no descriptor")

    async with launched(listener) as engine:
        await add(engine, 1)
        monkeypatch.setattr(processes.last, "stop", fail)
        with pytest.raises(OSError, match="no descriptor"):
            await engine.close()
    assert listener.ends() == {1: "Unavailable"}
    assert listener.num_ended == 1


async def test_close_between_failed_restarts(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(listener) as engine:
        await add(engine, 1)
        processes.error = OSError("no memory")
        processes.last.exit(1)
        await asyncio.sleep(0.5)
    assert list(listener.ends()) == [1]
    num_attempts = processes.num_attempts
    await asyncio.sleep(60)
    assert processes.num_attempts == num_attempts


async def test_a_snapshot_that_was_not_saved_is_reported(processes: FakeSpawner) -> None:
    engine = await SupervisedEngine.launch(EngineConfig(), snapshot="cache.quire")
    processes.last.stop_problem = "the disk is full"
    with capture_logs() as logs:
        await engine.close()
    assert engine.lost_snapshot == "the prefix cache was not saved to cache.quire: the disk is full"
    assert [line["reason"] for line in logs if line["log_level"] == "error"] == ["the disk is full"]


async def test_a_snapshot_is_lost_when_no_process_runs_at_the_end(processes: FakeSpawner) -> None:
    engine = await SupervisedEngine.launch(EngineConfig(), snapshot="cache.quire")
    processes.error = OSError("no memory")
    processes.last.exit(1)
    await until(lambda: engine.pid is None)
    await engine.close()
    assert engine.lost_snapshot is not None
    assert "no engine process was running" in engine.lost_snapshot


async def test_nothing_is_lost_without_a_snapshot_or_when_it_was_saved(processes: FakeSpawner) -> None:
    for snapshot in (None, "cache.quire"):
        engine = await SupervisedEngine.launch(EngineConfig(), snapshot=snapshot)
        await engine.close()
        assert engine.lost_snapshot is None


async def test_stop_is_idempotent(engine: SupervisedEngine, listener: FakeListener) -> None:
    await engine.stop()
    await engine.stop()
    await engine.close()
    assert listener.num_ended == 1


# Adapters


async def test_the_next_process_has_the_adapters_that_are_loaded_and_a_load_in_progress_fails(
    processes: FakeSpawner, listener: FakeListener
) -> None:
    processes.info = core_info(adapters={"a": "a@1", "b": "b@2"})
    async with launched(listener, lora={"a": "A", "b": "B"}, max_loras=2) as engine:
        loading = asyncio.create_task(engine.load_adapter("c", "C", ["b@2"], ["a@1"]))
        await asyncio.sleep(0.01)
        assert processes.last.sent == [LoadAdapter(0, "c", "C", ("b@2",), ("a@1",))]
        processes.last.reply(AdapterAnswer(0, LoadedAdapter("c@3", 10, ("a@1",))))
        assert await loading == LoadedAdapter("c@3", 10, ("a@1",))
        refused = asyncio.create_task(engine.load_adapter("d", "D", [], []))
        await asyncio.sleep(0.01)
        processes.last.reply(AdapterAnswer(1, None, "ModelNotFound", "no folder D"))
        with pytest.raises(ModelNotFound, match="no folder D"):
            await refused
        lost = asyncio.create_task(engine.load_adapter("d", "D", [], []))
        await asyncio.sleep(0.01)
        processes.last.exit(1)
        with pytest.raises(Unavailable, match="the engine was lost while it loaded the adapter; try again"):
            await lost
        process = await processes.next()
        assert process.start.adapters == (("b@2", "B"), ("c@3", "C"))
        assert (process.start.config.lora, process.start.config.max_loras) == ({}, 2)
