"""Several runs at rising load, for the curve of latency against throughput. An interrupted sweep can be continued.

A sweep ends with the first point at which the server is saturated; beyond it only queues and errors grow. The server is
saturated at a point if

* its output throughput grew by less than a tenth of the load's growth, relative to the point before (from 4 to 8
  requests per second the load grows by 100 %, so the throughput must grow by 10 %), or
* more than half of the requests failed.
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
from .results import LoadTestRun

SATURATED_SHARE = 0.1
MAX_FAILED_SHARE = 0.5
SWEEP_FILE = "settings.json"

Kind = Literal["rate", "concurrency"]


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """One load: requests per second (open loop, inf: all at once), or concurrent requests (closed loop)."""

    kind: Kind
    load: float

    @property
    def label(self) -> str:
        return f"{self.load:g} requests/s" if self.kind == "rate" else f"{self.load:g} at a time"

    @property
    def file_name(self) -> str:
        return f"{self.kind}-{self.load:g}.json"


def parse_sweep(text: str) -> tuple[LoadPoint, ...]:
    """Parse request rates `1,2,4,inf`, or numbers of concurrent requests `concurrency:1,8,32`. Raises ConfigError.

    The lowest load comes first.
    """
    kind, _, loads = text.rpartition(":")
    numbers = [load.strip() for load in loads.split(",")]
    allowed = r"[1-9]\d{0,5}" if kind == "concurrency" else r"\d{1,6}(?:\.\d{1,6})?|inf"
    if kind not in ("", "rate", "concurrency") or not all(re.fullmatch(allowed, number) for number in numbers):
        raise ConfigError(
            f"sweep: {text!r} is not allowed; write request rates as in 1,2,4,inf or whole numbers of requests at a "
            "time as in concurrency:1,8,32"
        )
    found = sorted({float(number) for number in numbers})
    if len(found) < len(numbers) or found[0] == 0:
        raise ConfigError(f"sweep: {text!r} is not allowed; every load must be above 0 and named once")
    return tuple(LoadPoint("concurrency" if kind == "concurrency" else "rate", load) for load in found)


async def run_sweep(
    points: Sequence[LoadPoint], run: Callable[[LoadPoint], Awaitable[LoadTestRun]], folder: SweepFolder | None = None
) -> list[LoadTestRun]:
    """Run the points until one saturates the server, except the points whose runs the folder already has.

    Raises ConfigError when the folder cannot be used, and the errors of `run`.
    """
    runs: list[LoadTestRun] = []
    for point in points:
        saved = folder.load(point) if folder else None
        runs.append(saved or await run(point))
        if folder and not saved:
            folder.save(point, runs[-1])
        if is_saturated(points[: len(runs)], runs):
            break
    return runs


def is_saturated(points: Sequence[LoadPoint], runs: Sequence[LoadTestRun]) -> bool:
    """Return whether the last of these runs saturated the server."""
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
    """The folder in which a sweep saves its runs, and their common settings.

    Raises ConfigError when the folder cannot be written or holds runs with other settings.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        named = path / SWEEP_FILE
        wanted = msgspec.json.format(msgspec.json.encode(settings, order="sorted", enc_hook=str)) + b"\n"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not named.exists():
                named.write_bytes(wanted)
            found = named.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be used for a sweep: {error.strerror or error}") from error
        if found != wanted:
            raise ConfigError(f"{path} holds a sweep with other settings (see {SWEEP_FILE}); name another folder")

    def load(self, point: LoadPoint) -> LoadTestRun | None:
        path = self._path / point.file_name
        return LoadTestRun.load(path) if path.exists() else None

    def save(self, point: LoadPoint, run: LoadTestRun) -> None:
        run.save(self._path / point.file_name)
