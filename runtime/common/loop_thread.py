"""An event loop on its own thread, for the synchronous classes (`LLM`, `Client`) over asynchronous code.

Every call of `run` returns or raises, even if another thread closes the loop in the meantime. After `close` the thread
and every coroutine on its loop have ended. In a child made by fork, where the thread does not run, the loop is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures.thread  # noqa: F401  # registers its exit function first, so that it runs after ours
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from weakref import WeakSet

import uvloop

from .errors import NotOpen, Unavailable

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until `close`, or until the interpreter exits.

    Any thread may call `run`; interrupting the caller (Ctrl-C) cancels its coroutine. `on_close`, if set, is run by
    `close` before anything is cancelled. A loop that `uses_thread_pools` is closed when the main thread ends, because
    Python ends thread pools then; any other loop stays open until the last thread that is not a daemon has ended.
    """

    def __init__(self, name: str, *, uses_thread_pools: bool = False) -> None:
        self.on_close: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._name = name
        self._loop = uvloop.new_event_loop()
        self._leave = asyncio.Event()
        self._submitting = threading.Lock()  # nothing is submitted to a loop that will not run it
        self._closing: Future[None] | None = None
        self._awaited: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        (_open_with_pools if uses_thread_pools else _open_without_pools).add(self)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise what it raised.

        Raises NotOpen when closed, Unavailable if the loop is closed before the coroutine has ended.
        """
        future: Future[T] | None = None
        try:
            with self._submitting:
                if self._closing is not None:
                    coroutine.close()
                    raise NotOpen(f"{self._name} is closed")
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
                self._awaited.add(future)
            future.add_done_callback(self._awaited.discard)
            return self._result(future)
        except BaseException:  # an interrupt may also come before the coroutine is waited for
            if future is not None:
                future.cancel()
            raise

    def close(self) -> None:
        """Run `on_close`, wait until every call of `run` has its outcome, and end the thread. Idempotent.

        Coroutines that `on_close` does not end are cancelled. Raises what `on_close` raises.
        """
        closing = self.begin_close()
        if closing is None:
            return
        try:
            self._result(closing)
        finally:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._leave.set)  # `_close` may have been cancelled first
            self._thread.join()

    def begin_close(self) -> Future[None] | None:
        """Begin to close without waiting; None if closing has begun before.

        Finalizers use it: the garbage collector may run them on any thread, this one included.
        """
        with self._submitting:
            if self._closing is not None:
                return None
            _open_with_pools.discard(self)
            _open_without_pools.discard(self)
            self._closing = asyncio.run_coroutine_threadsafe(self._close(set(self._awaited)), self._loop)
            return self._closing

    def become_closed(self) -> None:
        """Close without a thread: in a child process, after fork."""
        self._name += " of the parent process"
        self._submitting = threading.Lock()  # another thread of the parent may have held the old one
        self._closing = Future()
        self._closing.set_result(None)

    async def _close(self, awaited: set[Future[Any]]) -> None:
        try:
            if self.on_close is not None:
                await self.on_close()
                await asyncio.gather(*map(asyncio.wrap_future, awaited), return_exceptions=True)
        finally:
            self._leave.set()

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise Unavailable(f"{self._name} was closed in the meantime") from None
        except BaseException:
            future.cancel()
            raise

    def _main(self) -> None:
        """Run the loop. On leaving, the runner cancels all tasks and ends async generators and helper threads."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._leave.wait())


_open_with_pools: WeakSet[LoopThread] = WeakSet()
_open_without_pools: WeakSet[LoopThread] = WeakSet()


def _close_all(threads: WeakSet[LoopThread]) -> None:
    for thread in list(threads):
        with contextlib.suppress(Exception):  # the interpreter is exiting, so an error cannot be handled
            thread.close()


def _forget_parent() -> None:
    for threads in (_open_with_pools, _open_without_pools):
        for thread in list(threads):
            thread.become_closed()
        threads.clear()


# Functions of `atexit` run too late for engines: the thread pools in which they compute and tokenize ended by then.
threading._register_atexit(_close_all, _open_with_pools)  # type: ignore[attr-defined]
atexit.register(_close_all, _open_without_pools)
os.register_at_fork(after_in_child=_forget_parent)
