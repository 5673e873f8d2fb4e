"""Threads for jobs that may take long or never end. Must not import any job."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

SLOW_S = 10.0  # time after which another thread takes over for the jobs that wait
MAX_SLOW = 2  # slow jobs that run in addition to others: each takes memory, and time of a core
STUCK_S = 60.0  # a job that takes longer is not counted: it may never end

Result = TypeVar("Result")


class Outcome(NamedTuple):
    """The end of a call: its result, or its error."""

    result: Any = None
    error: BaseException | None = None

    def settle(self, future: asyncio.Future[Any]) -> None:
        """Give the outcome to a future, unless that is done."""
        if future.done():
            return
        if self.error is None:
            future.set_result(self.result)
        else:
            future.set_exception(self.error)


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Call a function. An exception that no future takes is the cause of another one."""
    try:
        return Outcome(function())
    except StopIteration as error:
        refused = RuntimeError("the function raised StopIteration, which no future takes")
        refused.__cause__ = error
        return Outcome(error=refused)
    except BaseException as error:
        return Outcome(error=error)


class JobThreads:
    """Daemon threads that run `num_threads` jobs at a time, in order.

    A thread with a slow job is replaced by another one.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._slow: list[_Worker] = []  # workers that were replaced

    def submit(self, job: Callable[[], None], *, at_once: bool = False) -> None:
        """Run a job, which must not raise, after all earlier jobs have begun.

        `at_once`: if all threads have a job, a spare one is started.
        """
        if at_once and all(worker.started for worker in self._workers):
            self._workers.append(_Worker(self._queue, self._name))
        self._queue.put(job)
        self.replace_slow()

    def call(self, function: Callable[[], Result], then: Callable[[], None] | None = None) -> asyncio.Future[Result]:
        """Run a function in a thread at once; return its future result. The thread then calls `then`.

        So no call waits for another call's `then`.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def run() -> None:
            outcome = outcome_of(function)
            if not loop.is_closed():
                loop.call_soon_threadsafe(outcome.settle, done)
            if then is not None and outcome.error is None:
                then()

        self.submit(run, at_once=True)
        return done

    def replace_slow(self) -> None:
        """Let other threads run the jobs that wait for slow ones. A thread with a slow job ends after it."""
        now = time.monotonic()
        self._slow = [worker for worker in self._slow if now - STUCK_S < worker.started]
        for worker in self._workers:
            if 0 < worker.started < now - SLOW_S and len(self._slow) < MAX_SLOW:
                worker.is_replaced = True
                self._slow.append(worker)
        self._workers = [worker for worker in self._workers if not worker.is_replaced]
        while len(self._workers) < self._num_threads:
            self._workers.append(_Worker(self._queue, self._name))

    def close(self) -> None:
        """End the threads when the jobs that were submitted have ended."""
        self._queue.put(None)


class _Worker:
    """A thread, and since when it runs its job."""

    def __init__(self, queue: SimpleQueue[Callable[[], None] | None], name: str) -> None:
        self.started = 0.0  # time.monotonic(); 0: it has no job
        self.is_replaced = False
        self._queue = queue
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while not self.is_replaced:
            job = self._queue.get()
            if job is None:
                self._queue.put(None)  # None ends the next thread too
                return
            self.started = time.monotonic()
            job()
            self.started = 0.0
            del job  # the thread keeps no job while it waits
