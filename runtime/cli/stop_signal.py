"""The end of a command that serves: the first SIGINT or SIGTERM drains it, the second exits immediately.

During the start, the first signal ends the start.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
import uvloop

from ..common.errors import QuireError
from .interrupts import INTERRUPTED, exit_status

CANCEL_TIMEOUT_S = 1.0  # time to end a start; a thread that loads a model may not end in time
THREADS_TIMEOUT_S = 0.5  # time for threads that process a text, after everything else is closed
ERROR_TIMEOUT_S = 5.0  # likewise, if an error has to be printed

_log = structlog.get_logger("quire.shutdown")


def run_until_signal(main: Callable[[StopSignal], Coroutine[Any, Any, None]]) -> None:
    """Run `main` until a signal ended it. Raises KeyboardInterrupt if that was SIGINT."""
    if uvloop.run(_then_exit(main)) == signal.SIGINT:
        raise KeyboardInterrupt


async def _then_exit(main: Callable[[StopSignal], Coroutine[Any, Any, None]]) -> signal.Signals:
    """Run `main` until a signal ended it, and log the signal.

    Afterwards, neither the event loop nor the interpreter waits for threads.
    """
    try:
        number = await until_signal(main)
    except QuireError as error:
        _exit_soon(exit_status(error), ERROR_TIMEOUT_S, str(error))
        raise
    _log.info("stopped", signal=number.name)
    _exit_soon(INTERRUPTED if number == signal.SIGINT else 0, THREADS_TIMEOUT_S)
    return number


async def until_signal(main: Callable[[StopSignal], Coroutine[Any, Any, None]]) -> signal.Signals:
    """Run `main` until a signal ended it, and return the signal."""
    stop = StopSignal()
    running = asyncio.create_task(main(stop))
    stop.cancel_start = running.cancel
    try:
        await running
    except asyncio.CancelledError:
        if stop.number is None:
            raise
    assert stop.number is not None, "the command runs until a signal"
    return stop.number


class StopSignal:
    """The first SIGINT or SIGTERM: ends a start, or lets `wait` return. The second exits, also as process 1."""

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.cancel_start: Callable[[], object] | None = None  # callback while the model loads
        self._received = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # SIGHUP is ignored until the server can reload

    async def wait(self) -> None:
        await self._received.wait()

    def _on_signal(self, number: signal.Signals) -> None:
        if self.number is not None:
            os._exit(128 + number)
        self.number = number
        self._received.set()
        if self.cancel_start is not None:
            self.cancel_start()
            asyncio.get_running_loop().call_later(CANCEL_TIMEOUT_S, os._exit, 128 + number)


def _exit_soon(status: int, timeout_s: float, error: str | None = None) -> None:
    """Exit with `status` after a time, because the interpreter waits for threads without a limit."""
    timer = threading.Timer(timeout_s, _exit_now, (status, error))
    timer.daemon = True
    timer.start()


def _exit_now(status: int, error: str | None) -> None:
    main = threading.main_thread()
    if running := [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]:
        _log.warning("threads left behind", names=sorted(running), error=error)
    os._exit(status)
