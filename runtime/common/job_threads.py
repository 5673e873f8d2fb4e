"""Threads for jobs that may take long or never end. Must not import any job."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

SLOW_S = 10.0  # time after which another thread takes over for the jobs that wait
MAX_SLOW = 2  # slow jobs that run in addition to others: each takes memory, and time of a core
STUCK_S = 60.0  # a job that takes longer is not counted: it may never end

Result = TypeVar("Result")


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

    def submit(self, job: Callable[[], None]) -> None:
        """Run a job, which must not raise, after all earlier jobs have begun."""
        self._queue.put(job)
        self.replace_slow()

    def call(self, function: Callable[[], Result], then: Callable[[], None] | None = None) -> asyncio.Future[Result]:
        """Run a function in a thread; return its future result. The thread then calls `then`.

        If necessary, a spare thread is started, so that no call waits for another call's `then`.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def tell(outcome: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

        def run() -> None:
            try:
                result = function()
            except StopIteration as error:
                refused = RuntimeError("the function raised StopIteration, which no future takes")
                refused.__cause__ = error
                tell(partial(done.set_exception, refused))
                return
            except BaseException as error:
                tell(partial(done.set_exception, error))
                return
            tell(partial(done.set_result, result))
            if then is not None:
                then()

        if all(worker.started for worker in self._workers):
            self._workers.append(_Worker(self._queue, self._name))
        self.submit(run)
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
        while not self.is_replaced and self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next job. Return False if there will be none. The thread keeps no job while it waits."""
        job = self._queue.get()
        if job is None:
            self._queue.put(None)  # None ends the next thread too
            return False
        self.started = time.monotonic()
        job()
        self.started = 0.0
        return True
