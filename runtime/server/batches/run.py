"""The run of a batch: lines in, answers out, in the same order, several at a time. Must not import files or sockets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple, Protocol

from .lines import BatchLine, LineAnswer, LineRefused, answer_line, read_line, refusal_line

MAX_HELD = 4096  # answers that wait for the answer of an earlier line
MAX_HELD_BYTES = 64 << 20


class Slots(Protocol):
    """The number of requests that may run at a time."""

    async def enter(self) -> None:
        """Wait until one more request may run."""

    def leave(self) -> None:
        """Note that a request has ended."""


class AnsweredLine(NamedTuple):
    """The answer line of one line."""

    data: bytes
    is_error: bool


class OrderedRun:
    """Answers lines, and writes the answers in the order of the lines.

    `send` answers one request, and raises only what ends the whole run.
    """

    def __init__(
        self,
        send: Callable[[BatchLine], Awaitable[LineAnswer]],
        write: Callable[[AnsweredLine], None],
        slots: Slots,
        read: Callable[[int, bytes], BatchLine] = read_line,
    ) -> None:
        self._send = send
        self._write = write
        self._slots = slots
        self._read = read
        self._pending: deque[asyncio.Task[AnsweredLine]] = deque()
        self._held_bytes = 0

    async def run(self, lines: Iterable[tuple[int, bytes]]) -> None:
        """Answer all lines, each with its number. Raises what `send` raises; then later answers are not written."""
        try:
            for number, line in lines:
                await self._slots.enter()
                task = asyncio.create_task(self._answer(number, line))
                task.add_done_callback(self._leave)  # This covers a task that is cancelled before it begins.
                self._pending.append(task)
                self._write_ready()
                while len(self._pending) > MAX_HELD or self._held_bytes > MAX_HELD_BYTES:
                    await self._write_next()
                    self._write_ready()
            while self._pending:
                await self._write_next()
        finally:
            for task in self._pending:
                task.cancel()
            await asyncio.gather(*self._pending, return_exceptions=True)
            self._pending.clear()

    async def _answer(self, number: int, line: bytes) -> AnsweredLine:
        try:
            request = self._read(number, line)
        except LineRefused as refusal:
            answered = AnsweredLine(refusal_line(number, line, refusal), True)
        else:
            answer = await self._send(request)
            answered = AnsweredLine(answer_line(request, answer), answer.is_error)
        self._held_bytes += len(answered.data)
        return answered

    def _leave(self, _: asyncio.Task[AnsweredLine]) -> None:
        self._slots.leave()

    def _write_ready(self) -> None:
        while self._pending and self._pending[0].done():
            self._write_first(self._pending.popleft().result())

    async def _write_next(self) -> None:
        answered = await self._pending[0]
        self._pending.popleft()
        self._write_first(answered)

    def _write_first(self, answered: AnsweredLine) -> None:
        self._held_bytes -= len(answered.data)
        self._write(answered)


class FixedSlots:
    """A fixed number of requests at a time."""

    def __init__(self, number: int) -> None:
        self._semaphore = asyncio.Semaphore(number)

    async def enter(self) -> None:
        """See `Slots.enter`."""
        await self._semaphore.acquire()

    def leave(self) -> None:
        """See `Slots.leave`."""
        self._semaphore.release()
