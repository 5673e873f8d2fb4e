"""Threads that run jobs which may take long, or never end. Must not import what the jobs are."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

SLOW_S = 10.0  # a job that takes longer holds up no others
MAX_SLOW = 2  # slow jobs that run beside others: each takes memory, and time of a core
STUCK_S = 60.0  # a job that takes longer is not counted: it may never end
PATIENCE_S = 0.002  # that a call waits for what the thread of the last one does then
WORTHWHILE_S = 0.00025  # of waiting, or a twentieth of what the call then takes; after more, the next ones do not
MAX_IMPATIENT = 256  # calls that do not wait after one that waited too long: 2, and twice as many each time in a row

Job = Callable[[], "Job | None"]  # returns what its thread runs next, if that is known
Result = TypeVar("Result")


class JobThreads:
    """Daemon threads that run `num_threads` jobs at a time, in order. Others take the place of those with slow jobs."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._num_threads = num_threads
        self._name = name
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._workers: list[_Worker] = []
        self._slow: list[_Worker] = []  # those that others have replaced
        self._last = _FollowUp()  # of the last call
        self._last.end()
        self._num_impatient = 0  # calls from now on that do not wait for it
        self._next_impatient = 2  # after the next call that waits too long

    def submit(self, job: Job) -> None:
        """Run a job, which must not raise, when those before it have begun."""
        self._queue.put(job)
        self.replace_slow()

    async def call(
        self,
        function: Callable[[], Result],
        then: Callable[[], None] | None = None,
        waited: Callable[[], None] | None = None,
    ) -> Result:
        """Run a function in a thread and return its result. The thread calls `then` when the result is on its way.

        The thread runs the next call after `then`, if that ends in time: it would have to wait for a core or the GIL
        beside another thread that begins. Else another thread runs the next call, and `waited` is called before.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()
        previous, follow_up = self._last, _FollowUp()
        self._last = follow_up
        offered = begun = time.monotonic()

        def tell(outcome: Callable[[], None]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda: None if done.done() else outcome())

        def run() -> Job | None:
            nonlocal begun
            begun = time.monotonic()
            try:
                result = function()
            except BaseException as error:
                tell(partial(done.set_exception, error))
            else:
                tell(partial(done.set_result, result))
                if then is not None:
                    then()
            return follow_up.end()

        def wait_no_longer() -> None:
            job = previous.take()
            if job is not None:
                if waited is not None:
                    waited()
                self._submit_now(job)

        if self._num_impatient or not previous.offer(run):
            self._num_impatient = max(0, self._num_impatient - 1)
            self._submit_now(run)
            return await done
        timer = loop.call_later(PATIENCE_S, wait_no_longer)
        result = await done
        timer.cancel()
        self._note_wait(begun - offered, time.monotonic() - begun)
        return result

    def _note_wait(self, waited_s: float, took_s: float) -> None:
        """Let the next calls not wait, if this one has waited too long."""
        if waited_s <= max(WORTHWHILE_S, took_s / 20):
            self._next_impatient = 2
            return
        self._num_impatient = self._next_impatient
        self._next_impatient = min(MAX_IMPATIENT, 2 * self._next_impatient)

    def _submit_now(self, job: Job) -> None:
        """Submit a job that waits for no thread."""
        if all(worker.started for worker in self._workers):
            self._workers.append(_Worker(self._queue, self._name))
        self.submit(job)

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


class _FollowUp:
    """What a thread does after it has sent a result, and the next call, which it may run afterwards.

    The thread and the event loop share it. Only one of them gets the call: `deque.popleft` is atomic.
    """

    __slots__ = ("_has_ended", "_offered")

    def __init__(self) -> None:
        self._has_ended = False
        self._offered: deque[Job] = deque()

    def offer(self, job: Job) -> bool:
        """Let the thread run a job next. Return False if it has ended already, and does not."""
        if self._has_ended:
            return False
        self._offered.append(job)
        return not self._has_ended or self.take() is None

    def take(self) -> Job | None:
        """Return the job if it is still offered."""
        try:
            return self._offered.popleft()
        except IndexError:
            return None

    def end(self) -> Job | None:
        """Note that the thread is free, and return what it runs next."""
        self._has_ended = True
        return self.take()


class _Worker:
    """A thread, and since when it runs its job."""

    def __init__(self, queue: SimpleQueue[Job | None], name: str) -> None:
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
            self._queue.put(None)  # for the next thread
            return False
        while job is not None:
            self.started = time.monotonic()
            job = job()
        self.started = 0.0
        return True
