"""Several runs at rising load, for the throughput-latency curve; a sweep that was interrupted goes on where it was.

It must not know how a run is driven: it is given a function that makes one. One invariant: the points are run in order
of load, and none after the first at which the server is saturated:

* its output throughput grew by less than a tenth of what the load grew by, relative to the point before (from 4 to 8
  requests per second, the load grows by 100 %: below 10 % more tokens per second, the server gives no more), or
* more than half of the requests failed.

That point is part of the curve; beyond it, queues and errors grow and nothing else does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ...common.errors import ConfigError
from .run import Run

SATURATED_SHARE = 0.1
MAX_FAILED_SHARE = 0.5
SETTINGS_FILE = "settings.json"

Kind = Literal["rate", "concurrency"]


@dataclass(frozen=True, slots=True)
class Point:
    """A load: requests per second (open loop, inf: all at once), or requests at a time (closed loop)."""

    kind: Kind
    load: float

    @property
    def label(self) -> str:
        return f"{self.load:g} requests/s" if self.kind == "rate" else f"{self.load:g} at a time"

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.load:g}.json"


def parse_sweep(text: str) -> tuple[Point, ...]:
    """`1,2,4,inf` are request rates, `concurrency:1,8,32` requests at a time; lowest first. Raises ConfigError."""
    kind, _, loads = text.rpartition(":")
    numbers = [load.strip() for load in loads.split(",")]
    allowed = r"[1-9]\d{0,5}" if kind == "concurrency" else r"\d{1,6}(?:\.\d{1,6})?|inf"
    if kind not in ("", "rate", "concurrency") or not all(re.fullmatch(allowed, number) for number in numbers):
        raise ConfigError(
            f"--sweep: {text!r} is not allowed; write request rates as in 1,2,4,inf or whole numbers of requests at a "
            "time as in concurrency:1,8,32"
        )
    found = sorted({float(number) for number in numbers})
    if len(found) < len(numbers) or found[0] == 0:
        raise ConfigError(f"--sweep: {text!r} is not allowed; every load must be above 0 and named once")
    return tuple(Point("concurrency" if kind == "concurrency" else "rate", load) for load in found)


async def run_sweep(
    points: Sequence[Point], run: Callable[[Point], Awaitable[Run]], folder: SweepFolder | None = None
) -> list[Run]:
    """Run the points until one saturates the server; what the folder has already is not run again.

    Raises ConfigError when the folder cannot be used, and what `run` raises.
    """
    runs: list[Run] = []
    for point in points:
        kept = folder.load(point) if folder else None
        runs.append(kept or await run(point))
        if folder and not kept:
            folder.save(point, runs[-1])
        if is_saturated(points[: len(runs)], runs):
            break
    return runs


def is_saturated(points: Sequence[Point], runs: Sequence[Run]) -> bool:
    """Whether the last of these runs is the last that tells something."""
    last = runs[-1].summary
    if last["failed"] > MAX_FAILED_SHARE * (last["completed"] + last["failed"]):
        return True
    if len(runs) < 2:
        return False
    before, after = (float(run.summary["output_throughput"]) for run in runs[-2:])
    if before <= 0 or math.isinf(points[-1].load):
        return before > 0
    load_growth = points[-1].load / points[-2].load - 1
    return after / before - 1 < SATURATED_SHARE * load_growth


class SweepFolder:
    """Where a sweep keeps its runs. `settings` are all that they have in common.

    Raises ConfigError when it cannot be written or holds the runs of other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        named = path / SETTINGS_FILE
        wanted = msgspec.json.format(msgspec.json.encode(settings, order="sorted", enc_hook=str)) + b"\n"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not named.exists():
                named.write_bytes(wanted)
            found = named.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot keep a sweep: {error.strerror or error}") from error
        if found != wanted:
            raise ConfigError(f"{path} holds a sweep with other settings (see {SETTINGS_FILE}); name another folder")

    def load(self, point: Point) -> Run | None:
        path = self._path / point.file_name
        return Run.load(path) if path.exists() else None

    def save(self, point: Point, run: Run) -> None:
        run.save(self._path / point.file_name)
