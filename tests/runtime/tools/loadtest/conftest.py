"""Virtual time: an event loop whose clock jumps to the next timer, so that times can be compared exactly."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from quire.runtime.tools.loadtest import sender

T = TypeVar("T")


class VirtualSelector(selectors.DefaultSelector):
    """A selector for loops without I/O: waiting advances the clock and returns at once."""

    now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits, and no timer is set"
        self.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual_selector = VirtualSelector()
        super().__init__(self._virtual_selector)

    def time(self) -> float:
        return self._virtual_selector.now_s


@pytest.fixture
def in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Awaitable[T]]], T]:
    """Return a function that runs a coroutine in a virtual loop, with the sender on the loop's clock."""

    def run(work: Callable[[], Awaitable[T]]) -> T:
        loop = VirtualLoop()
        monkeypatch.setattr(sender.time, "perf_counter", loop.time)
        try:
            return loop.run_until_complete(work())
        finally:
            loop.close()
            monkeypatch.undo()

    return run
