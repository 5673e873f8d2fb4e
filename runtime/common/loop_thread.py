"""An event loop on its own thread, for the synchronous classes (`LLM`, `Client`) over asynchronous code.

Every call of `run` returns or raises, even if another thread closes the loop in the meantime. After `close` the thread
and every coroutine on its loop have ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401  # registers its exit function first, so that it runs after ours
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar
from weakref import WeakSet

from .errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """A thread that runs an event loop until `close`, or until the interpreter exits.

    Any thread may call `run`; interrupting the caller (Ctrl-C) cancels its coroutine. `on_close`, if set, is run by
    `close` before anything is cancelled.
    """

    def __init__(self, name: str) -> None:
        self.on_close: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._leave = asyncio.Event()
        self._submitting = threading.Lock()  # nothing is submitted to a loop that will not run it
        self._closing: Future[None] | None = None
        self._awaited: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        _open_threads.add(self)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise what it raised. Raises Unavailable when closed."""
        with self._submitting:
            if self._closing is not None:
                coroutine.close()
                raise Unavailable(f"{self._name} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return self._result(future)

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
                self._loop.call_soon_threadsafe(self._leave.set)  # if `_close` was cancelled before it began
            self._thread.join()

    def begin_close(self) -> Future[None] | None:
        """Begin to close without waiting; None if closing has begun before.

        Finalizers use it: the garbage collector may run them on any thread, this one included.
        """
        with self._submitting:
            if self._closing is not None:
                return None
            _open_threads.discard(self)
            self._closing = asyncio.run_coroutine_threadsafe(self._close(set(self._awaited)), self._loop)
            return self._closing

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


_open_threads: WeakSet[LoopThread] = WeakSet()


def _close_all() -> None:
    for thread in list(_open_threads):
        with contextlib.suppress(Exception):  # the interpreter is exiting, so an error cannot be handled
            thread.close()


# Functions of `atexit` run too late: the thread pools in which engines compute and tokenize have ended by then.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]
