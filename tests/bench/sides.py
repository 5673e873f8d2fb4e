"""Programs that are compared in one run: each side is a separate process, which sleeps while another one works.

Must not import the code of a side: the environments of the sides have different packages.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

ROUND_S = 0.3  # each side repeats a task for this long, and at least once
REST_S = 0.1  # rest before a side works, so that threads of the one before cease to spin


class Side:
    """A process that runs `serve`. Ended by `close`."""

    def __init__(self, command: Sequence[object]) -> None:
        """Start it and wait until it has loaded."""
        self._process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def seconds(self, task: Any) -> float:
        """Return the median seconds of a call with the task."""
        assert self._process.stdin is not None
        time.sleep(REST_S)
        print(json.dumps(task), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.communicate()

    def _answer(self) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # skip what libraries print
                return float(json.loads(line)["seconds"])
        raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")


def serve(prepare: Callable[[Any], Callable[[], object]]) -> None:
    """Time the calls that `prepare` makes of a parent's tasks, until it ends. Each kind of task is run once before."""
    print(json.dumps({"seconds": 0}), flush=True)
    warm: set[str] = set()
    for line in sys.stdin:
        run = prepare(json.loads(line))
        if line not in warm:
            warm.add(line)
            run()  # allocates, and compiles where a side does
        print(json.dumps({"seconds": _median_seconds(run)}), flush=True)


def _median_seconds(run: Callable[[], object]) -> float:
    times: list[float] = []
    while sum(times) < ROUND_S:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
