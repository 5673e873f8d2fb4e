"""An event loop on a thread of its own, for the synchronous faces (`LLM`, `Client`) of asynchronous rooms.

It must not know what runs on it. One invariant: whoever waits in `run` gets a result or an error, also when another
thread closes meanwhile; after `close` the thread has ended and every coroutine with it.
"""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any, TypeVar

from .errors import Unavailable

T = TypeVar("T")


class LoopThread:
    """Starts at once. Any thread may `run`; interrupting the caller (Ctrl-C) cancels what it waited for."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = asyncio.new_event_loop()
        self._leave = asyncio.Event()
        self._submitting = threading.Lock()  # nothing is submitted to a loop that will not run it
        self._closed = False
        self._awaited: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a program that forgot to must still end

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, or what it raised. Raises Unavailable when closed."""
        with self._submitting:
            if self._closed:
                coroutine.close()
                raise Unavailable(f"{self._name} is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
            self._awaited.add(future)
        future.add_done_callback(self._awaited.discard)
        return self._result(future)

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Take no more work, run `farewell`, let those who wait in `run` see what it did to them, and end the thread.

        Idempotent. What `farewell` does not end is cancelled.
        """
        with self._submitting:
            if self._closed:
                return
            self._closed = True
            atexit.unregister(self.close)
            others = set(self._awaited)
            parting = asyncio.run_coroutine_threadsafe(farewell(), self._loop) if farewell else None
        try:
            if parting is not None:
                self._result(parting)
                wait(others)
        finally:
            self._loop.call_soon_threadsafe(self._leave.set)
            self._thread.join()

    def _result(self, future: Future[T]) -> T:
        try:
            return future.result()
        except CancelledError:
            raise Unavailable(f"{self._name} was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def _main(self) -> None:
        """The runner cancels leftovers and ends generators and worker threads when it is left."""
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._leave.wait())
