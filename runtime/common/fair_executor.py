"""`FairExecutor`: runs the text work of all tenants in a few threads; the tenants take turns.

A tenant that floods the server with long texts delays others only by its running texts, not by its waiting ones, which
the server limits in bytes. A tokenizer whose expressions never end holds its thread for ever: its request ends after
`JOB_LIMIT_S`, another thread takes its place, and the process can exit. Must not import tokenizers or templates.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from .errors import GenerationFailed, Unavailable
from .job_threads import JobThreads, Outcome, outcome_of

NUM_THREADS = 2  # rendering holds the GIL: more threads would delay the event loop
JOB_LIMIT_S = 60.0  # limit for one text: a text of a million tokens takes some seconds
MAX_ABANDONED = 4  # threads whose texts exceeded the limit

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Job(NamedTuple):
    result: asyncio.Future[Any]
    call: list[Callable[[], Any]]  # emptied when the caller gives up, so that the text is freed


class FairExecutor:
    """An executor on the event loop that calls `submit`."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = JobThreads(num_threads, "quire-text")
        self._num_idle = num_threads
        self._num_abandoned = 0
        self._is_closed = False
        self._waiting: dict[str, deque[_Job]] = {}  # jobs by tenant; the first tenant's turn is next

    def submit(self, tenant: str, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Return the future result of `function(*args)`. Raises Unavailable after `close`.

        The function sees the caller's context variables. Cancelling the future releases the text, unless the function
        runs.
        """
        if self._is_closed:
            raise _closed()
        if self._num_abandoned == MAX_ABANDONED:
            raise Unavailable(f"{MAX_ABANDONED} texts have taken more than {JOB_LIMIT_S:.0f} s each and have not ended")
        context = contextvars.copy_context()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(result, [lambda: context.run(function, *args)])
        self._waiting.setdefault(tenant, deque()).append(job)
        result.add_done_callback(lambda _: job.call.clear())
        self._run_next()
        return result

    def close(self) -> None:
        """Refuse waiting and new jobs with Unavailable. Functions that run end by themselves. Idempotent."""
        self._is_closed = True
        for jobs in self._waiting.values():
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(_closed())
        self._waiting.clear()
        self._threads.close()

    def _run_next(self) -> None:
        """Give idle threads to the tenants in turn."""
        while self._num_idle and self._waiting and self._num_abandoned < MAX_ABANDONED:
            tenant, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[tenant]
            if jobs:
                self._waiting[tenant] = jobs  # behind the other tenants
            if not job.result.done():
                self._num_idle -= 1
                self._run(job)

    def _run(self, job: _Job) -> None:
        """Run a job in an idle thread."""
        loop = asyncio.get_running_loop()
        is_abandoned = False

        def abandon() -> None:
            nonlocal is_abandoned
            is_abandoned = True
            self._num_idle += 1
            self._num_abandoned += 1
            if not job.result.done():
                job.result.set_exception(GenerationFailed(f"the text took more than {JOB_LIMIT_S:.0f} s"))
            self._run_next()

        def tell(outcome: Outcome) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, outcome)

        def end(outcome: Outcome) -> None:
            timer.cancel()
            if is_abandoned:
                self._num_abandoned -= 1
            else:
                self._num_idle += 1
            outcome.settle(job.result)
            self._run_next()

        timer = loop.call_later(JOB_LIMIT_S, abandon)
        function = job.call[0]
        self._threads.submit(lambda: tell(outcome_of(function)), at_once=True)


def _closed() -> Unavailable:
    return Unavailable("the engine was closed before this text was tokenized; try again")
