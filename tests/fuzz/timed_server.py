"""The command `quire` with an event loop whose turns are timed; started by hostile_http.py.

usage: timed_server.py FILE ARGUMENTS OF quire

CPU time does not depend on the other programs of the machine. At the end, FILE contains a JSON object:
* `turns`: turns of the loop. During a turn, no other client is answered.
* `runs`: sequences of turns between which the loop did not wait.

Each is a list of pairs: the time of its end by the monotonic clock, and its CPU seconds, if these are more than
`LEAST_S`. The event loop is asyncio's own, which takes more CPU time than uvloop.
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
WAITED_S = 0.00005  # a longer call of `select` has waited for events


class TimedSelector(selectors.EpollSelector):
    """A selector that times the turns of its event loop: the code between two calls of `select`."""

    def __init__(self) -> None:
        super().__init__()
        self.turns: list[tuple[float, float]] = []  # end, CPU seconds
        self.runs: list[tuple[float, float]] = []
        self._run_s = 0.0  # CPU time since the loop waited
        self._began_s = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Note the turn that has ended, and wait for events."""
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
    """Run a coroutine as `uvloop.run` does, in a timed loop."""
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
