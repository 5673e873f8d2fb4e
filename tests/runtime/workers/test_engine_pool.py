"""Several engine processes are one core: where requests go, and their combined reports."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from quire.kernels.cpus import CpuBudget
from quire.runtime.common.config import EngineConfig
from quire.runtime.common.errors import ConfigError, Unavailable
from quire.runtime.engine.stats import COUNTERS, COUNTERS_BY_NAME
from quire.runtime.workers import EnginePool, engine_pool, supervisor
from quire.runtime.workers.engine_link import AddRequests, CancelRequest, DropRequest, ReadmitRequest, StatsReport
from quire.runtime.workers.engine_pool import total_info
from quire.runtime.workers.router import MAX_MORE_REQUESTS, MAX_MORE_WAIT_S
from quire.runtime.workers.token_log import MAX_LOST_HOSTS
from quire.scheduler import CannotMeetDeadline, NotAccepting, QueueFull

from tests.support.engine_processes import (
    ESTIMATE,
    FakeListener,
    FakeProcess,
    FakeSpawner,
    core_info,
    engine_stats,
    new_requests,
    until,
)

PAGE_SIZE = core_info().page_size
PROMPT = tuple(range(4 * PAGE_SIZE))
AT_0, AT_1 = b"0", b"1"  # conversations whose homes, of two engines, are the first and the second


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> FakeSpawner:
    spawner = FakeSpawner()
    monkeypatch.setattr(supervisor, "EngineProcess", spawner)
    monkeypatch.setattr(engine_pool, "place", lambda count: [frozenset({cpu}) for cpu in range(count)])
    return spawner


@asynccontextmanager
async def launched(num_processes: int, listener: FakeListener, **config: Any) -> AsyncIterator[EnginePool]:
    pool = await EnginePool.launch(EngineConfig(**config), num_processes=num_processes)
    pool.start(listener.listener())
    try:
        yield pool
    finally:
        await pool.close()


@pytest.fixture
async def pool(processes: FakeSpawner, listener: FakeListener) -> AsyncIterator[EnginePool]:
    """Launch a pool of two engines."""
    async with launched(2, listener) as pool:
        yield pool


def engine_with(processes: FakeSpawner, request_id: int) -> str:
    """Name of the engine that received a request."""
    (name,) = [process.start.name for process in processes.started if request_id in process.sent_ids()]
    return name


async def restart(pool: EnginePool, process: FakeProcess, status: int = 1) -> None:
    """Let a process end, and wait for its successor."""
    (index,) = [index for index, member in enumerate(pool.members) if member.pid == process.pid]
    num_restarts = pool.members[index].num_restarts
    process.exit(status)
    await until(lambda: pool.members[index].num_restarts > num_restarts)


# One engine


async def test_one_engine_gets_everything(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(1, listener, max_num_waiting=2) as pool:
        for request_id in (1, 2):
            await pool.add(new_requests(request_id))
        assert processes.last.sent_ids() == [1, 2]
        assert processes.last.start.cpus is None, "all that are allowed"
        assert processes.last.start.snapshot is None
        processes.last.tell_stats(waiting=2)
        with pytest.raises(QueueFull, match="the queue is full: 2 of 2"):
            pool.check_room("", 1)


async def test_the_engine_process_decides_about_a_full_queue(processes: FakeSpawner, listener: FakeListener) -> None:
    """The pool's last report may be old: `check_room` is a first look, `add` asks the engine."""
    async with launched(1, listener, max_num_waiting=2) as pool:
        processes.last.tell_stats(waiting=2)
        await pool.add(new_requests(1))
        assert processes.last.sent_ids() == [1]


# Where requests go


async def test_a_conversation_goes_to_its_home(pool: EnginePool, processes: FakeSpawner) -> None:
    for request_id, key in enumerate((AT_1, AT_0, AT_1, AT_0), 1):
        await pool.add(new_requests(request_id, conversation=key))
    assert processes.of("engine-0").sent_ids() == [2, 4]
    assert processes.of("engine-1").sent_ids() == [1, 3]


async def test_conversations_with_the_same_beginning_reach_every_engine(
    processes: FakeSpawner, listener: FakeListener
) -> None:
    async with launched(4, listener) as pool:
        for number in range(32):
            request = new_requests(number, prompt=(*PROMPT, number), conversation=b"%d" % number)
            await pool.add(request)
            processes.started[[number in each.sent_ids() for each in processes.started].index(True)].finish(number)
        assert min(len(process.sent_ids()) for process in processes.started) >= 4


async def test_a_saturated_home_is_left(pool: EnginePool, processes: FakeSpawner) -> None:
    """The engines report their waits, and the answer to a new request has a newer wait."""
    await pool.add(new_requests(1, conversation=AT_0))
    processes.of("engine-0").reply(StatsReport(engine_stats(), predicted_wait_s=2 * MAX_MORE_WAIT_S))
    await pool.add(new_requests(2, conversation=AT_0))
    assert engine_with(processes, 2) == "engine-1"
    processes.of("engine-0").reply(StatsReport(engine_stats(), predicted_wait_s=0.0))
    processes.of("engine-0").estimate = replace(ESTIMATE, predicted_wait_s=2 * MAX_MORE_WAIT_S)
    await pool.add(new_requests(3, conversation=AT_0))
    await pool.add(new_requests(4, conversation=AT_0))
    assert [engine_with(processes, request_id) for request_id in (3, 4)] == ["engine-0", "engine-1"]


async def test_requests_of_other_api_servers_saturate_a_home(pool: EnginePool, processes: FakeSpawner) -> None:
    processes.of("engine-0").tell_stats(running=MAX_MORE_REQUESTS, waiting=1)
    await pool.add(new_requests(1, conversation=AT_0))
    assert engine_with(processes, 1) == "engine-1"
    processes.of("engine-0").tell_stats(running=MAX_MORE_REQUESTS)
    await pool.add(new_requests(2, conversation=AT_0))
    assert engine_with(processes, 2) == "engine-0"


async def test_requests_that_an_engine_has_not_reported_saturate_a_home(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    for request_id in range(MAX_MORE_REQUESTS + 2):
        await pool.add(new_requests(request_id, conversation=AT_0))
    assert processes.of("engine-1").sent_ids() == [MAX_MORE_REQUESTS + 1]


async def test_the_predicted_wait_is_that_of_the_member_where_it_is_shortest(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    for name, wait_s in (("engine-0", 0.5), ("engine-1", 0.25)):
        processes.of(name).reply(StatsReport(engine_stats(), predicted_wait_s=wait_s))
    assert pool.predicted_wait_s == 0.25


async def test_a_refused_request_does_not_saturate_an_engine(pool: EnginePool, processes: FakeSpawner) -> None:
    first = processes.of("engine-0")
    first.answers_adds = False
    adding = asyncio.create_task(pool.add(new_requests(1, conversation=AT_0)))
    await asyncio.sleep(0.01)
    first.refuse(1, "CannotMeetDeadline", replace(ESTIMATE, predicted_wait_s=2 * MAX_MORE_WAIT_S))
    with pytest.raises(CannotMeetDeadline):
        await adding
    first.answers_adds = True
    await pool.add(new_requests(2, conversation=AT_0))
    assert engine_with(processes, 2) == "engine-0"


async def test_a_restarted_engine_has_no_wait(pool: EnginePool, processes: FakeSpawner) -> None:
    processes.of("engine-0").reply(StatsReport(engine_stats(), predicted_wait_s=2 * MAX_MORE_WAIT_S))
    await restart(pool, processes.of("engine-0"))
    await pool.add(new_requests(1, conversation=AT_0))
    assert engine_with(processes, 1) == "engine-0"


async def test_a_request_goes_to_an_engine_with_room(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(2, listener, max_num_waiting=2) as pool:
        await pool.add(new_requests(1, prompt=PROMPT))
        processes.of("engine-0").tell_stats(waiting=2)
        pool.check_room("", 1)
        await pool.add(new_requests(2, prompt=PROMPT))
        assert engine_with(processes, 2) == "engine-1"
        processes.of("engine-1").tell_stats(waiting=2)
        with pytest.raises(QueueFull, match="2 of 2"):
            pool.check_room("", 1)
        processes.of("engine-0").tell_stats(waiting=0)
        pool.check_room("", 1)


async def test_a_request_goes_rather_to_an_engine_that_is_not_being_restarted(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    processes.makes_ready = False
    processes.of("engine-0").exit(1)
    await until(lambda: len(processes.started) == 3)
    await pool.add(new_requests(1))
    assert engine_with(processes, 1) == "engine-1"
    processes.of("engine-1").exit(1)
    await until(lambda: len(processes.started) == 4)
    adding = asyncio.create_task(pool.add(new_requests(2)))
    await asyncio.sleep(1)
    for process in processes.started[2:]:
        processes.make_ready(process)
    await adding


async def test_all_samples_of_a_request_go_to_one_engine(pool: EnginePool, processes: FakeSpawner) -> None:
    await pool.add(new_requests(1, 2, 3))
    (message,) = processes.of("engine-0").sent
    assert isinstance(message, AddRequests)
    assert processes.of("engine-1").sent == []


async def test_a_refused_request_belongs_to_no_engine_any_more(pool: EnginePool, processes: FakeSpawner) -> None:
    first, second = processes.of("engine-0"), processes.of("engine-1")
    first.answers_adds = False
    adding = asyncio.create_task(pool.add(new_requests(1, 2)))
    await asyncio.sleep(0.01)
    first.refuse(1, "QueueFull")
    with pytest.raises(QueueFull):
        await adding
    num_sent = len(first.sent)
    for request_id in (1, 2):
        pool.cancel(request_id)
        pool.drop(request_id)
    assert len(first.sent) == num_sent
    assert [member.num_requests for member in pool.members] == [0, 0]
    first.answers_adds = True
    await pool.add(new_requests(3))
    await pool.add(new_requests(1, conversation=AT_1))
    pool.cancel(1)
    assert second.sent[-1] == CancelRequest(1), "an id that was refused is free again"
    assert [member.num_requests for member in pool.members] == [1, 1]


async def test_a_request_whose_caller_left_belongs_to_no_engine_any_more(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    """The caller leaves before or just after its request has been accepted."""
    first = processes.of("engine-0")
    first.answers_adds = False
    for request_ids, answered in (((1, 2), False), ((3, 4), True)):
        adding = asyncio.create_task(pool.add(new_requests(*request_ids)))
        await asyncio.sleep(0.01)
        if answered:
            first.accept(request_ids[0])
        adding.cancel()
        await asyncio.wait([adding])
        assert [member.num_requests for member in pool.members] == [0, 0]
        dropped = [message.request_id for message in first.sent if isinstance(message, DropRequest)]
        assert set(request_ids) <= set(dropped)


async def test_cancel_and_drop_reach_the_engine_that_has_the_request(pool: EnginePool, processes: FakeSpawner) -> None:
    await pool.add(new_requests(1))
    await pool.add(new_requests(2, conversation=AT_1))
    pool.cancel(2)
    pool.drop(1, None, "the user left")
    assert processes.of("engine-0").sent[-1] == DropRequest(1, None, "the user left")
    assert processes.of("engine-1").sent[-1] == CancelRequest(2)
    pool.cancel(7)
    pool.drop(7)
    assert [len(process.sent) for process in processes.started] == [2, 2]


async def test_updates_and_failures_of_all_engines_are_published(
    pool: EnginePool, processes: FakeSpawner, listener: FakeListener
) -> None:
    await pool.add(new_requests(1))
    await pool.add(new_requests(2, conversation=AT_1))
    processes.of("engine-0").generate(1, 5)
    processes.of("engine-1").finish(2, 6)
    assert (listener.tokens(1), listener.tokens(2)) == ([5], [6])
    assert listener.ends() == {2: "length"}
    processes.error = OSError("no memory")
    processes.of("engine-0").begin(1)
    processes.of("engine-0").exit(1)
    await until(lambda: 1 in listener.failures)
    assert "no memory" in str(listener.failures[1])
    with pytest.raises(Unavailable):
        pool.members[0].stats()
    await pool.add(new_requests(3))
    assert engine_with(processes, 3) == "engine-1"


# Requests of a lost process


def generated_at(process: FakeProcess) -> dict[int, tuple[int, ...]]:
    """Return the tokens of each request that a process was given to continue."""
    return {each.request.request_id: each.generated for each in process.sent if isinstance(each, ReadmitRequest)}


async def test_requests_of_a_killed_process_go_on_at_once_in_another(
    pool: EnginePool, processes: FakeSpawner, listener: FakeListener
) -> None:
    first, second = processes.of("engine-0"), processes.of("engine-1")
    processes.makes_ready = False
    await pool.add(new_requests(1))
    await pool.add(new_requests(2))
    first.begin(1)
    first.generate(1, 5, 6)
    first.exit(-signal.SIGKILL)
    await until(lambda: len(generated_at(second)) == 2)
    assert generated_at(second) == {1: (5, 6), 2: ()}
    assert [member.num_requests for member in pool.members] == [0, 2]
    second.finish(1, 7)
    second.finish(2, 8)
    assert (listener.tokens(1), listener.tokens(2)) == ([5, 6, 7], [8])
    assert listener.ends() == {1: "length", 2: "length"}


async def test_a_suspect_stays_with_its_process_and_what_waited_beside_it_does_not(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    first, second = processes.of("engine-0"), processes.of("engine-1")
    await pool.add(new_requests(1))
    await pool.add(new_requests(2))
    first.begin(1)
    first.exit(1)
    await until(lambda: len(processes.started) == 3)
    await until(lambda: bool(processes.last.sent))
    assert set(generated_at(second)) == {2}
    assert set(generated_at(processes.last)) == {1}


async def test_a_request_beneath_which_processes_are_killed_is_not_moved_for_ever(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    await pool.add(new_requests(1))
    homes = []
    for _ in range(MAX_LOST_HOSTS + 1):
        (home,) = [index for index, member in enumerate(pool.members) if member.num_requests]
        homes.append(home)
        processes.of(f"engine-{home}").begin(1)
        await restart(pool, processes.of(f"engine-{home}"), -signal.SIGKILL)
    assert homes == [0, 1, 0, 0]


async def test_without_another_process_requests_wait_for_the_first_that_is_ready(
    pool: EnginePool, processes: FakeSpawner, listener: FakeListener
) -> None:
    interrupted: list[list[int]] = []
    pool.start(replace(listener.listener(), interrupted=lambda ids: interrupted.append(list(ids))))
    processes.makes_ready = False
    await pool.add(new_requests(1))
    await pool.add(new_requests(2, conversation=AT_1))
    for name in ("engine-1", "engine-0"):
        processes.of(name).exit(-signal.SIGKILL)
    await until(lambda: len(processes.started) == 4)
    assert sorted(interrupted) in ([[1], [2]], [[1, 2], []], [[], [1, 2]])
    processes.make_ready(processes.of("engine-1"))
    await until(lambda: len(generated_at(processes.of("engine-1"))) == 2)


async def test_draining_waits_for_requests_that_move(
    pool: EnginePool, processes: FakeSpawner, listener: FakeListener
) -> None:
    await pool.add(new_requests(1))
    draining = asyncio.create_task(pool.drain())
    await asyncio.sleep(0.01)
    processes.of("engine-0").exit(-signal.SIGKILL)
    await until(lambda: pool.members[1].num_requests == 1)
    await asyncio.sleep(0.1)
    assert not draining.done()
    processes.of("engine-1").finish(1, 5)
    await draining
    assert listener.ends() == {1: "length"}


# Their combined reports


async def test_stats_are_sums(pool: EnginePool, processes: FakeSpawner) -> None:
    processes.of("engine-0").tell_stats(step=5, running=1, pages_total=50)
    processes.of("engine-1").tell_stats(step=7, running=2, pages_total=50)
    stats = pool.stats()
    assert (stats.step, stats.running, stats.pages_total) == (12, 3, 100)
    for name, reasons in (("engine-0", {"pages": 2}), ("engine-1", {"pages": 1, "quota": 4})):
        processes.of(name).reply(StatsReport(msgspec.structs.replace(engine_stats(), waiting_by_reason=reasons)))
    assert pool.stats().waiting_by_reason == {"pages": 3, "quota": 4}


async def test_counts_by_name_do_not_fall_while_one_engine_is_restarted(
    pool: EnginePool, processes: FakeSpawner
) -> None:
    for name, counts in (("engine-0", {"prompt": 2}), ("engine-1", {"prompt": 1, "forced": 4})):
        processes.of(name).tell_stats(**dict.fromkeys(COUNTERS_BY_NAME, counts))
    processes.makes_ready = False
    processes.of("engine-0").exit(1)
    await until(lambda: len(processes.started) == 3)
    stats = pool.stats()
    assert [getattr(stats, name) for name in COUNTERS_BY_NAME] == [{"prompt": 3, "forced": 4}] * len(COUNTERS_BY_NAME)


async def test_counters_do_not_fall_while_one_engine_is_restarted(pool: EnginePool, processes: FakeSpawner) -> None:
    counted = {name: 10 + place for place, name in enumerate(COUNTERS)}
    for name in ("engine-0", "engine-1"):
        processes.of(name).tell_stats(**counted, running=1)
    processes.makes_ready = False
    processes.of("engine-0").exit(1)
    await until(lambda: len(processes.started) == 3)
    stats = pool.stats()
    assert {name: getattr(stats, name) for name in COUNTERS} == {name: 2 * count for name, count in counted.items()}
    assert stats.running == 1, "only of engines that compute"
    processes.make_ready(processes.of("engine-0"))
    await until(lambda: pool.members[0].pid is not None)
    assert pool.stats().restarts == 1


async def test_there_are_no_stats_while_no_engine_computes(pool: EnginePool, processes: FakeSpawner) -> None:
    with pytest.raises(Unavailable, match="restarted"):
        pool.stats()


async def test_info_is_of_all_engines(pool: EnginePool) -> None:
    one = core_info()
    assert pool.info == core_info(num_pages=2 * one.num_pages, threads=2 * one.threads, num_processes=2)
    shorter = core_info(max_model_len=one.max_model_len - 1)
    for infos in ([one, shorter], [shorter, one]):
        assert total_info(infos).max_model_len == shorter.max_model_len, "requests must fit every engine"


async def test_memory_and_threads_are_for_all_engines_together(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(2, listener, kv_cache_memory=64 << 20, kv_cache_share=0.5):
        configs = [process.start.config for process in processes.started]
        assert [config.kv_cache_memory for config in configs] == [32 << 20] * 2
        assert [config.kv_cache_share for config in configs] == [0.25] * 2
        assert [process.start.cpus for process in processes.started] == [{0}, {1}]
        assert [config.threads for config in configs] == [1, 1]


async def test_a_cpu_quota_is_divided_between_engines(
    processes: FakeSpawner, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each engine may run on 8 CPUs, and a container's quota of 6 threads is for both."""
    monkeypatch.setattr(engine_pool, "place", lambda _: [frozenset(range(8)), frozenset(range(8, 16))])
    monkeypatch.setattr(engine_pool, "pick_cpus", lambda _: CpuBudget(6, "a quota"))
    async with launched(2, listener):
        assert [process.start.config.threads for process in processes.started] == [3, 3]


async def test_each_engine_has_a_snapshot_of_its_own(processes: FakeSpawner) -> None:
    pool = await EnginePool.launch(EngineConfig(), num_processes=2, snapshot="/cache/prefixes")
    assert [process.start.snapshot for process in processes.started] == ["/cache/prefixes.0", "/cache/prefixes.1"]
    await pool.close()


async def test_each_engine_has_endpoints_of_its_own(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(2, listener, kv_events="tcp://*:5557", kv_events_replay="ipc:///run/kv"):
        configs = [process.start.config for process in processes.started]
        assert [config.kv_events for config in configs] == ["tcp://*:5557", "tcp://*:5558"]
        assert [config.kv_events_replay for config in configs] == ["ipc:///run/kv", "ipc:///run/kv.1"]
    for endpoint in ("tcp://*:65535", "tcp://*", "tcp://*:a"):
        with pytest.raises(ConfigError, match=r"kv_events: .* has no port for engine process 1"):
            await EnginePool.launch(EngineConfig(kv_events=endpoint), num_processes=2)
    assert len(processes.started) == 2


async def test_an_engine_that_cannot_start_ends_the_others(processes: FakeSpawner) -> None:
    processes.makes_ready = False
    launching = asyncio.create_task(EnginePool.launch(EngineConfig(), num_processes=2))
    await until(lambda: len(processes.started) == 2)
    first, second = processes.started
    processes.make_ready(first)
    await asyncio.sleep(1)
    second.ready.set_exception(ConfigError("no memory"))
    with pytest.raises(ConfigError, match="no memory"):
        await launching
    assert first.status is not None
    assert second.status is not None


async def test_an_engine_that_cannot_be_stopped_keeps_no_other_from_stopping(
    processes: FakeSpawner, listener: FakeListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise OSError("no descriptor")

    async with launched(2, listener) as pool:
        await pool.add(new_requests(1))
        await pool.add(new_requests(2, conversation=AT_1))
        monkeypatch.setattr(processes.of("engine-0"), "stop", fail)
        with pytest.raises(OSError, match="no descriptor"):
            await pool.close()
        assert processes.of("engine-1").was_asked_to_stop
    assert listener.ends() == {1: "Unavailable", 2: "Unavailable"}
    assert listener.num_ended == 1


async def test_the_end_of_a_pool_is_the_end_of_its_last_engine(processes: FakeSpawner, listener: FakeListener) -> None:
    async with launched(2, listener) as pool:
        await pool.add(new_requests(1))
        await pool.add(new_requests(2, conversation=AT_1))
        draining = asyncio.create_task(pool.drain())
        await asyncio.sleep(1)
        with pytest.raises(NotAccepting, match="draining"):
            pool.check_room("", 1)
        processes.of("engine-0").finish(1)
        await asyncio.sleep(1)
        assert not draining.done()
        processes.of("engine-1").finish(2)
        await draining
        assert listener.num_ended == 0
        await pool.stop()
        assert listener.num_ended == 1
        await pool.stop()
    assert listener.num_ended == 1
    assert all(process.status is not None for process in processes.started)
