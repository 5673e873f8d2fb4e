"""The run of a batch: order, the number of requests at a time, held answers, errors that end it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest
from quire.runtime.common.errors import Unavailable
from quire.runtime.server.batches import run as batch_run
from quire.runtime.server.batches.lines import BatchLine, LineAnswer
from quire.runtime.server.batches.run import AnsweredLine, FixedSlots, OrderedRun

Send = Callable[[BatchLine], Awaitable[LineAnswer]]


def lines(count: int) -> list[tuple[int, bytes]]:
    form = '{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{}}'
    return [(number, (form % number).encode()) for number in range(count)]


async def run(send: Send, count: int, slots: int) -> list[str]:
    """Return the ids in the order in which they are written."""
    written: list[AnsweredLine] = []
    await OrderedRun(send, written.append, FixedSlots(slots)).run(lines(count))
    return [json.loads(each.data)["custom_id"] for each in written]


class Gates:
    """A `send` that answers when the test says so."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Event] = {}
        self.begun: list[str] = []

    async def send(self, line: BatchLine) -> LineAnswer:
        self.begun.append(line.custom_id)
        await self.open.setdefault(line.custom_id, asyncio.Event()).wait()
        return LineAnswer(200, b"{}")

    def answer(self, *ids: int) -> None:
        for each in ids:
            self.open.setdefault(str(each), asyncio.Event()).set()


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_answers_are_in_the_order_of_the_lines() -> None:
    gates = Gates()
    running = asyncio.create_task(run(gates.send, 5, 3))
    await settle()
    assert gates.begun == ["0", "1", "2"]
    gates.answer(2)
    await settle()
    assert gates.begun == ["0", "1", "2", "3"]
    gates.answer(1, 0, 4, 3)
    assert await running == ["0", "1", "2", "3", "4"]


async def test_answers_wait_for_an_earlier_line_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MAX_HELD", 3)
    gates = Gates()
    gates.answer(*range(1, 9))
    running = asyncio.create_task(run(gates.send, 9, 2))
    await settle()
    assert gates.begun == ["0", "1", "2", "3"]
    gates.answer(0)
    assert await running == [str(number) for number in range(9)]


async def test_the_error_of_a_line_ends_the_run_after_the_lines_before_it() -> None:
    written: list[AnsweredLine] = []
    gates = Gates()
    gates.answer(0, 1, 3)

    async def send(line: BatchLine) -> LineAnswer:
        if line.custom_id == "2":
            raise Unavailable("the engine is gone")
        return await gates.send(line)

    with pytest.raises(Unavailable, match="gone"):
        await OrderedRun(send, written.append, FixedSlots(10)).run(lines(6))
    assert [json.loads(each.data)["custom_id"] for each in written] == ["0", "1"]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


async def test_a_run_that_cannot_write_returns_all_its_slots() -> None:
    """The line that has just entered has not begun when the answer before it cannot be written."""
    gates = Gates()
    gates.answer(*range(6))
    slots = FixedSlots(2)

    def write(_: AnsweredLine) -> None:
        raise Unavailable("the disk is full")

    with pytest.raises(Unavailable, match="full"):
        await OrderedRun(gates.send, write, slots).run(lines(6))
    async with asyncio.timeout(10):
        await slots.enter()
        await slots.enter()
