"""An event loop on its own thread: whoever waits gets an answer, and closing leaves nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.common.loop_thread import LoopThread


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


def test_results_and_errors_come_back() -> None:
    thread = LoopThread("t")
    assert thread.run(value(3)) == 3
    with pytest.raises(ZeroDivisionError):
        thread.run(fail())
    thread.close()


async def fail() -> None:
    raise ZeroDivisionError


def test_after_closing_everything_is_refused() -> None:
    thread = LoopThread("the thing")
    thread.close()
    thread.close()
    with pytest.raises(Unavailable, match="the thing is closed"):
        thread.run(value(1))
    assert "the thing" not in [running.name for running in threading.enumerate()]


def test_a_program_that_forgets_to_close_still_ends() -> None:
    program = (
        "from quire.runtime.common.loop_thread import LoopThread; import asyncio\n"
        "async def begin(): globals()['task'] = asyncio.create_task(asyncio.Event().wait())\n"
        "thread = LoopThread('t'); thread.run(begin())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_farewell_decides_what_others_see() -> None:
    thread = LoopThread("t")
    gate = thread.run(make_gate())

    async def farewell() -> None:
        gate.set_exception(KeyError("gone"))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, wait_for(gate))
        thread.run(until_waited_for(gate))
        thread.on_close = farewell
        thread.close()
        with pytest.raises(KeyError, match="gone"):
            waiting.result(5)


async def make_gate() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def wait_for(gate: asyncio.Future[int]) -> int:
    return await gate


async def until_waited_for(gate: asyncio.Future[int]) -> None:
    while not gate._callbacks:  # type: ignore[attr-defined]
        await asyncio.sleep(0)


def test_what_no_farewell_ends_is_cancelled_and_told() -> None:
    thread = LoopThread("the thing")
    cleaned: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, forever())
        while not thread._awaited:
            pass
        thread.run(value(0))
        thread.close()
        with pytest.raises(Unavailable, match="was closed meanwhile"):
            waiting.result(5)
    assert cleaned == ["yes"]


def test_a_failing_farewell_is_raised_and_the_thread_still_ends() -> None:
    thread = LoopThread("t")
    thread.on_close = fail
    with pytest.raises(ZeroDivisionError):
        thread.close()
    thread.close()
    assert not thread._thread.is_alive()


def test_interrupting_the_caller_cancels_what_it_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("t")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def interrupted(self: object) -> None:
        thread_started.wait(5)
        raise KeyboardInterrupt

    thread_started = threading.Event()

    async def started() -> None:
        thread_started.set()
        await forever()

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.run(started())
    assert cancelled.wait(5)
    thread.close()
