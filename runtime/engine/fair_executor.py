"""`FairExecutor`: runs the text work of all tenants in a few threads; the tenants take turns.

A tenant that floods the server with long texts delays others by the texts that run, not by those that wait, which the
server limits in bytes. Must not import tokenizers or templates.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from ..common.errors import Unavailable

NUM_THREADS = 2  # rendering holds the GIL: more threads would delay the event loop

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class _Job(NamedTuple):
    result: asyncio.Future[Any]
    call: list[Callable[[], Any]]  # emptied when the caller gives up, so that its text is not kept


class FairExecutor:
    """Lives on the event loop that calls `submit`."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="quire-text")
        self._num_idle = num_threads
        self._is_closed = False
        self._waiting: dict[str, deque[_Job]] = {}  # by tenant; the first one's turn is next

    def submit(self, tenant: str, function: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Return the future result of `function(*args)`. Raises Unavailable after `close`.

        The function sees the caller's context variables. Cancelling the future releases the text, unless the function
        runs.
        """
        if self._is_closed:
            raise _closed()
        context = contextvars.copy_context()
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        job = _Job(result, [lambda: context.run(function, *args)])
        self._waiting.setdefault(tenant, deque()).append(job)
        result.add_done_callback(lambda _: job.call.clear())
        self._run_next()
        return result

    def close(self) -> None:
        """Refuse what waits and what comes with Unavailable. Functions that run end by themselves. Idempotent."""
        self._is_closed = True
        for jobs in self._waiting.values():
            for job in jobs:
                if not job.result.done():
                    job.result.set_exception(_closed())
        self._waiting.clear()
        self._threads.shutdown(wait=False)

    def _run_next(self) -> None:
        """Give idle threads to the tenants in turn."""
        while self._num_idle and self._waiting:
            tenant, jobs = next(iter(self._waiting.items()))
            job = jobs.popleft()
            del self._waiting[tenant]
            if jobs:
                self._waiting[tenant] = jobs  # behind the other tenants
            if not job.result.done():
                self._num_idle -= 1
                self._run(job)

    def _run(self, job: _Job) -> None:
        def on_done(done: asyncio.Future[Any]) -> None:
            self._num_idle += 1
            if not job.result.done():
                if done.cancelled():
                    job.result.cancel()
                elif (error := done.exception()) is not None:
                    job.result.set_exception(error)
                else:
                    job.result.set_result(done.result())
            elif not done.cancelled():
                done.exception()  # seen: the caller has given up
            self._run_next()

        running = asyncio.get_running_loop().run_in_executor(self._threads, job.call[0])
        running.add_done_callback(on_done)


def _closed() -> Unavailable:
    return Unavailable("the engine was closed before this text was tokenized; try again")
