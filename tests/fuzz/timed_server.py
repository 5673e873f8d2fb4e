"""`quire` whose event loop notes how much CPU time its turns take; started by hostile_http.py.

usage: timed_server.py FILE ARGUMENTS OF quire

CPU time does not depend on the other programs of the machine. Work that takes more than `LEAST_S` is written to the
file at the end, as JSON: pairs of a moment of the monotonic clock and CPU seconds, of turns, in which no other client
is answered, and of runs of turns between which the loop did not wait. The event loop is asyncio's own, which takes more
CPU time than uvloop.
"""

from __future__ import annotations

import asyncio
import json
import selectors
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
from quire.runtime.cli.main import main

LEAST_S = 0.0002
WAITED_S = 0.00005  # time in a call that did not find events at once


class TimedSelector(selectors.EpollSelector):
    """A selector between whose calls the turns of an event loop are."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[float, float]] = []  # end, CPU seconds
        self.runs: list[tuple[float, float]] = []
        self._run_s = 0.0  # CPU time since the loop waited
        self._began_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events, and note the turn before."""
        turn_s = time.thread_time() - self._began_s
        now = time.monotonic()
        if turn_s > LEAST_S:
            self.turns.append((now, turn_s))
        self._run_s += turn_s
        found = super().select(timeout)
        if time.monotonic() - now > WAITED_S:
            if self._run_s > LEAST_S:
                self.runs.append((now, self._run_s))
            self._run_s = 0.0
        self._began_s = time.thread_time()
        return found


def run(file: Path, command: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine as uvloop does, in a loop that is timed."""
    selector = TimedSelector()
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
            return runner.run(command)
    finally:
        file.write_text(json.dumps({"turns": selector.turns, "runs": selector.runs}))


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    uvloop.run = lambda command: run(path, command)
    main()
