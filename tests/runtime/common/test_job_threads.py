"""Threads of jobs that may take long: which jobs wait for others, and the results of callers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from queue import SimpleQueue

import pytest
from quire.runtime.common import job_threads
from quire.runtime.common.job_threads import JobThreads


@pytest.fixture
def threads() -> Iterator[JobThreads]:
    found = JobThreads(1, "quire-test")
    yield found
    found.close()


def test_jobs_run_in_order_and_wait_for_one_that_is_not_slow(threads: JobThreads) -> None:
    go = threading.Event()
    ran = SimpleQueue[int]()
    threads.submit(lambda: ran.put(0 if go.wait(60) else -1))
    for number in (1, 2):
        threads.submit(lambda number=number: ran.put(number))  # type: ignore[misc]
    threads.replace_slow()
    assert ran.empty()
    go.set()
    assert [ran.get(timeout=60) for _ in range(3)] == [0, 1, 2]


def test_jobs_that_wait_for_a_slow_one_run_in_another_thread_which_stays(
    threads: JobThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    go = threading.Event()
    ended = SimpleQueue[threading.Thread]()

    def stuck() -> None:
        begun.set()
        assert go.wait(60)
        ended.put(threading.current_thread())

    threads.submit(stuck)
    assert begun.wait(60)
    monkeypatch.setattr(job_threads, "SLOW_S", 0.0)
    threads.submit(lambda: ended.put(threading.current_thread()))
    other = ended.get(timeout=60)
    monkeypatch.undo()
    go.set()
    slow = ended.get(timeout=60)
    slow.join(60)
    assert not slow.is_alive(), "it takes no more jobs"
    threads.submit(lambda: ended.put(threading.current_thread()))
    assert ended.get(timeout=60) is other


def test_few_threads_have_slow_jobs_at_a_time(threads: JobThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_threads, "SLOW_S", 0.0)
    go = threading.Event()
    begun = SimpleQueue[int]()

    def wait(number: int) -> None:
        begun.put(number)
        assert go.wait(60)

    for number in range(job_threads.MAX_SLOW + 1):
        threads.submit(partial(wait, number))
        assert begun.get(timeout=60) == number
    threads.submit(partial(wait, 9))
    threads.replace_slow()
    assert begun.empty()
    monkeypatch.setattr(job_threads, "STUCK_S", 0.0)
    threads.replace_slow()
    assert begun.get(timeout=60) == 9, "they are stuck: other jobs wait no longer"
    go.set()


async def test_a_result_is_there_before_the_thread_is_done(threads: JobThreads) -> None:
    go = threading.Event()
    done = threading.Event()

    def then() -> None:
        assert go.wait(60)
        done.set()

    assert await threads.call(lambda: 7, then) == 7
    assert not done.is_set()
    go.set()
    assert await asyncio.to_thread(done.wait, 60)


async def test_a_call_does_not_wait_for_what_follows_the_others(threads: JobThreads) -> None:
    go = threading.Event()
    begun = SimpleQueue[int]()

    def then(number: int) -> None:
        begun.put(number)
        assert go.wait(60)

    for number in range(3):
        assert await threads.call(lambda: "result", partial(then, number)) == "result"
        assert await asyncio.to_thread(begun.get, timeout=60) == number
    go.set()


async def test_an_exception_is_the_callers(threads: JobThreads) -> None:
    with pytest.raises(ZeroDivisionError):
        await threads.call(lambda: 1 // 0, lambda: None)
    assert await threads.call(lambda: 8) == 8


async def test_a_caller_gets_an_error_for_stop_iteration_which_no_future_takes(threads: JobThreads) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.call(lambda: next(iter(())))


async def test_a_caller_may_give_up(threads: JobThreads) -> None:
    begun = threading.Event()
    go = threading.Event()

    def wait() -> bool:
        begun.set()
        return go.wait(60)

    caller = threads.call(wait)
    assert await asyncio.to_thread(begun.wait, 60)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    assert await threads.call(lambda: 9) == 9
