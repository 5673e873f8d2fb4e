"""Tasks that do not end when they are cancelled."""

from __future__ import annotations

import asyncio

import pytest
from quire.runtime.common import tasks as tasks_module
from quire.runtime.common.tasks import end_tasks
from structlog.testing import capture_logs


async def test_tasks_that_end_are_waited_for() -> None:
    ended = []

    async def ends_late() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            ended.append(1)

    running = [asyncio.create_task(ends_late()) for _ in range(2)]
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end_tasks(running, "connections")
        await end_tasks([], "connections")
    assert (ended, logs) == ([1, 1], [])


async def test_a_task_that_waits_again_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "END_TIMEOUT_S", 0.02)
    num_cancelled = 0

    async def waits_again() -> None:
        nonlocal num_cancelled
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                num_cancelled += 1

    task = asyncio.create_task(waits_again())
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end_tasks([task], "connections")
        await task
    assert (num_cancelled, logs) == (2, [])


async def test_a_task_that_never_ends_is_left_behind_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "END_TIMEOUT_S", 0.02)
    release = asyncio.Event()

    async def never_ends() -> None:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    task = asyncio.create_task(never_ends())
    await asyncio.sleep(0)
    with capture_logs() as logs:
        await end_tasks([task], "connections")
    assert [(line["event"], line["what"], line["count"]) for line in logs] == [("tasks left behind", "connections", 1)]
    release.set()
    await task


async def test_the_error_of_a_task_is_logged() -> None:
    async def fails() -> None:
        raise ValueError("no")

    task = asyncio.create_task(fails())
    await asyncio.wait([task])
    with capture_logs() as logs:
        await end_tasks([task], "a supervisor")
    assert [(line["event"], line["what"], str(line["exc_info"])) for line in logs] == [
        ("a task failed", "a supervisor", "no")
    ]
