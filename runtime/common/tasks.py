"""Ends tasks within a time limit, so that a stuck task does not delay a shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import structlog

END_TIMEOUT_S = 1.0

_log = structlog.get_logger("quire.shutdown")


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], what: str) -> None:
    """Cancel tasks, and again after half of `END_TIMEOUT_S`. Log errors, and the tasks still running at the end."""
    asked = set(tasks)
    pending = {task for task in asked if not task.done()}
    for _ in range(2):
        if pending:
            for task in pending:
                task.cancel()
            _, pending = await asyncio.wait(pending, timeout=END_TIMEOUT_S / 2)
    if pending:
        _log.error("tasks left behind", what=what, count=len(pending), seconds=END_TIMEOUT_S)
    for task in asked - pending:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task failed", what=what, exc_info=error)
