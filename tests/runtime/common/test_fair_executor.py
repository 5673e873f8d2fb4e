"""Text work of several tenants in few threads."""

from __future__ import annotations

import asyncio
import contextvars
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest
from quire.runtime.common import fair_executor
from quire.runtime.common.errors import GenerationFailed, InvalidRequest, Unavailable
from quire.runtime.common.fair_executor import FairExecutor

NAME: contextvars.ContextVar[str] = contextvars.ContextVar("name")


class Work:
    """Functions that note their order and wait for `go`."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.go = threading.Event()

    def __call__(self, name: str) -> str:
        self.go.wait()
        self.order.append(name)
        if name == "broken":
            raise InvalidRequest("broken")
        return name


@pytest.fixture
async def executor() -> AsyncIterator[FairExecutor]:
    executor = FairExecutor(num_threads=1)
    yield executor
    executor.close()


@pytest.fixture
def work() -> Iterator[Work]:
    work = Work()
    yield work
    work.go.set()  # a test that fails must not leave its thread waiting


async def test_tenants_take_turns(executor: FairExecutor, work: Work) -> None:
    results = [executor.submit("flood", work, f"flood{number}") for number in range(5)]
    results += [executor.submit("b", work, "b0"), executor.submit("c", work, "c0")]
    results.append(executor.submit("b", work, "b1"))
    work.go.set()
    await asyncio.gather(*results)
    assert work.order == ["flood0", "flood1", "b0", "c0", "flood2", "b1", "flood3", "flood4"]


async def test_results_errors_and_context_are_the_functions_own(executor: FairExecutor, work: Work) -> None:
    work.go.set()
    NAME.set("caller")
    assert await executor.submit("a", NAME.get) == "caller"
    with pytest.raises(InvalidRequest, match="broken"):
        await executor.submit("a", work, "broken")
    assert await executor.submit("a", work, "next") == "next"


async def test_a_text_that_is_given_up_is_not_run(executor: FairExecutor, work: Work) -> None:
    running = executor.submit("a", work, "running")
    waiting = executor.submit("b", work, "waiting")
    waiting.cancel()
    await asyncio.sleep(0)
    last = executor.submit("b", work, "last")
    work.go.set()
    await asyncio.gather(running, last)
    assert work.order == ["running", "last"]


async def test_a_text_that_is_given_up_while_it_runs_frees_its_thread_later(executor: FairExecutor, work: Work) -> None:
    executor.submit("a", work, "broken").cancel()
    last = executor.submit("a", work, "last")
    await asyncio.sleep(0)
    work.go.set()
    assert await last == "last"


async def test_a_text_that_is_given_up_while_it_waits_is_released(executor: FairExecutor, work: Work) -> None:
    class Text(str):
        """A text that can be referenced weakly."""

    running = executor.submit("a", work, "running")
    text = Text("waiting")
    kept = weakref.ref(text)
    executor.submit("b", work, text).cancel()
    del text
    await asyncio.sleep(0)
    assert kept() is None
    work.go.set()
    await running


async def test_closing_refuses_what_waits_and_what_comes(executor: FairExecutor, work: Work) -> None:
    running = executor.submit("a", work, "running")
    waiting = executor.submit("a", work, "waiting")
    executor.close()
    with pytest.raises(Unavailable, match="was closed"):
        await waiting
    with pytest.raises(Unavailable, match="was closed"):
        executor.submit("b", work, "late")
    work.go.set()
    assert await running == "running"
    assert work.order == ["running"]


async def test_a_text_that_never_ends_ends_its_request_and_holds_up_no_other(
    executor: FairExecutor, work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def limit(seconds: float) -> None:
        monkeypatch.setattr(fair_executor, "JOB_LIMIT_S", seconds)

    monkeypatch.setattr(fair_executor, "MAX_ABANDONED", 2)
    limit(0.01)
    stuck = executor.submit("a", work, "stuck")
    with pytest.raises(GenerationFailed, match="the text took more than 0 s"):
        await stuck
    while not all(worker.started for worker in executor._threads._workers):  # a busy machine is slow to start a thread
        await asyncio.sleep(0)
    limit(60.0)
    assert await executor.submit("a", len, "next") == 4
    limit(0.01)
    with pytest.raises(GenerationFailed):
        await executor.submit("a", work, "stuck, too")
    with pytest.raises(Unavailable, match="2 texts have taken more than 0 s each"):
        executor.submit("a", len, "one more")
    work.go.set()
    while executor._num_abandoned:
        await asyncio.sleep(0)
    limit(60.0)
    assert await executor.submit("a", len, "one more") == 8


def test_a_text_that_never_ends_lets_the_process_exit() -> None:
    code = """
import asyncio, threading
from quire.runtime.common.fair_executor import FairExecutor
async def main():
    executor = FairExecutor()
    executor.submit("a", threading.Event().wait)
    await asyncio.sleep(0)
    executor.close()
asyncio.run(main())
"""
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60).returncode == 0
