"""`LoopThread`: every call of `run` returns or raises, and closing ends the thread and its coroutines."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from quire.runtime.common.errors import NotOpen, Unavailable
from quire.runtime.common.loop_thread import LoopThread


async def value(result: int) -> int:
    await asyncio.sleep(0)
    return result


def test_run_returns_results_and_raises_errors() -> None:
    thread = LoopThread("t")
    assert thread.run(value(3)) == 3
    with pytest.raises(ZeroDivisionError):
        thread.run(fail())
    thread.close()


async def fail() -> None:
    raise ZeroDivisionError


def test_run_raises_after_close() -> None:
    thread = LoopThread("this client")
    thread.close()
    thread.close()
    with pytest.raises(NotOpen, match="this client is closed"):
        thread.run(value(1))
    assert "this client" not in [running.name for running in threading.enumerate()]


def test_a_program_ends_without_closing_its_threads() -> None:
    program = (
        "from quire.runtime.common.loop_thread import LoopThread; import asyncio\n"
        "async def begin(): globals()['task'] = asyncio.create_task(asyncio.Event().wait())\n"
        "thread = LoopThread('t'); thread.run(begin())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("pools", [False, True])
def test_a_child_made_by_fork_ends_and_finds_the_loop_closed(pools: bool) -> None:
    program = (
        "from quire.runtime.common.loop_thread import LoopThread; import asyncio, multiprocessing, os, sys\n"
        "def child():\n"
        "    coroutine = asyncio.sleep(0)\n"
        "    try: thread.run(coroutine)\n"
        "    except Exception as error: print(error, flush=True)\n"
        f"thread = LoopThread('this loop', uses_thread_pools={pools}); thread.run(asyncio.sleep(0))\n"
        "process = multiprocessing.get_context('fork').Process(target=child); process.start(); process.join()\n"
        "pid = os.fork()\n"
        "if not pid: sys.exit(0)\n"
        "print(process.exitcode, os.waitpid(pid, 0)[1], thread.run(asyncio.sleep(0, 'open')))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["this loop of the parent process is closed", "0 0 open"]


def test_a_loop_without_thread_pools_outlives_the_main_thread() -> None:
    program = (
        "from quire.runtime.common.loop_thread import LoopThread; import asyncio, threading\n"
        "thread = LoopThread('t')\n"
        "def work():\n"
        "    threading.main_thread().join()\n"
        "    print(thread.run(asyncio.sleep(0.05, 'done')))\n"
        "threading.Thread(target=work).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_on_close_decides_the_outcome_of_waiting_calls() -> None:
    thread = LoopThread("t")
    gate = thread.run(make_gate())

    async def fail_the_gate() -> None:
        gate.set_exception(KeyError("gone"))

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, wait_for(gate))
        thread.run(until_awaited(gate))
        thread.on_close = fail_the_gate
        thread.close()
        with pytest.raises(KeyError, match="gone"):
            waiting.result(60)


async def make_gate() -> asyncio.Future[int]:
    return asyncio.get_running_loop().create_future()


async def wait_for(gate: asyncio.Future[int]) -> int:
    return await gate


async def until_awaited(gate: asyncio.Future[int]) -> None:
    while not gate._callbacks:  # type: ignore[attr-defined]
        await asyncio.sleep(0)


def test_waiting_calls_raise_if_on_close_does_not_end_them() -> None:
    thread = LoopThread("this client")
    cleaned: list[str] = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleaned.append("yes")

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.run, forever())
        while not thread._awaited:
            time.sleep(0.001)
        thread.run(value(0))
        thread.close()
        with pytest.raises(Unavailable, match="was closed in the meantime"):
            waiting.result(60)
    assert cleaned == ["yes"]


def test_close_raises_the_error_of_on_close_and_ends_the_thread() -> None:
    thread = LoopThread("t")
    thread.on_close = fail
    with pytest.raises(ZeroDivisionError):
        thread.close()
    thread.close()
    assert not thread._thread.is_alive()


def test_interrupting_run_cancels_its_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    thread = LoopThread("t")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    def raise_interrupt(self: object) -> None:
        thread_started.wait(60)
        raise KeyboardInterrupt

    thread_started = threading.Event()

    async def started() -> None:
        thread_started.set()
        await forever()

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            thread.run(started())
    assert cancelled.wait(60)
    thread.close()
