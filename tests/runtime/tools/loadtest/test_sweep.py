"""Sweeps: which points are run, when the server is saturated, and how an interrupted sweep continues."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.loadtest.records import RequestRecord
from quire.runtime.tools.loadtest.results import LoadTestRun
from quire.runtime.tools.loadtest.server_metrics import MetricsSample, ServerMetrics
from quire.runtime.tools.loadtest.sweep import LoadPoint, SweepFolder, is_saturated, parse_sweep, run_sweep

SETTINGS = {"dataset": "custom", "dataset_path": Path("prompts.jsonl"), "seed": 0}


def make_run(tokens_per_s: float, failed: int = 0) -> LoadTestRun:
    summary = {"completed": 10 - failed, "failed": failed, "output_throughput": tokens_per_s}
    return LoadTestRun(label="a run", started_s=0.0, summary=summary, records=[])


def rates(*loads: float) -> list[LoadPoint]:
    return [LoadPoint("rate", load) for load in loads]


class FakeRunner:
    """Runs points on a server whose throughput is proportional to the load, up to a limit."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.loads: list[float] = []

    async def run(self, point: LoadPoint) -> LoadTestRun:
        self.loads.append(point.load)
        return make_run(min(10 * point.load, self.limit))


@pytest.mark.parametrize(
    ("text", "points"),
    [
        ("4,1,2.5", rates(1, 2.5, 4)),
        ("inf, 8", rates(8, math.inf)),
        ("rate:3", rates(3)),
        ("concurrency:32,1", [LoadPoint("concurrency", 1), LoadPoint("concurrency", 32)]),
    ],
)
def test_points_are_parsed_and_ordered_by_load(text: str, points: list[LoadPoint]) -> None:
    assert list(parse_sweep(text)) == points


@pytest.mark.parametrize(
    "text", ["", "1,,2", "0,1", "-1", "1,1", "nan", "1e3", "users:1", "concurrency:1.5", "concurrency:inf", "x" * 1000]
)
def test_invalid_points_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"sweep: .* is not allowed"):
        parse_sweep(text)


def test_labels_of_points() -> None:
    assert [point.label for point in (*rates(0.5, math.inf), LoadPoint("concurrency", 8))] == [
        "0.5 requests/s",
        "inf requests/s",
        "8 at a time",
    ]


async def test_a_sweep_ends_with_the_first_saturated_point() -> None:
    runner = FakeRunner(limit=40)
    runs = await run_sweep(rates(1, 2, 4, 8, 16), runner.run)
    assert runner.loads == [1, 2, 4, 8]
    assert [run.summary["output_throughput"] for run in runs] == [10, 20, 40, 40]


@pytest.mark.parametrize(
    ("before", "after", "saturated"),
    [
        (make_run(100), make_run(111), False),  # the load doubles, so 10 % more tokens is the limit
        (make_run(100), make_run(109), True),
        (make_run(100), make_run(50), True),
        (make_run(100), make_run(200, failed=6), True),
        (make_run(100), make_run(200, failed=5), False),
        (make_run(0), make_run(0), False),  # growth is undefined
    ],
)
def test_saturation_by_growth_and_by_failures(before: LoadTestRun, after: LoadTestRun, saturated: bool) -> None:
    assert is_saturated(rates(4, 8), [before, after]) is saturated


@pytest.mark.parametrize(("after", "saturated"), [(103, False), (102, True)])
def test_the_growth_that_is_enough_is_a_tenth_of_the_loads(after: int, saturated: bool) -> None:
    """From 4 to 5 requests per second the load grows by 25 %."""
    assert is_saturated(rates(4, 5), [make_run(100), make_run(after)]) is saturated


def test_the_first_point_is_saturated_only_by_failures() -> None:
    assert not is_saturated(rates(1), [make_run(1)])
    assert is_saturated(rates(1), [make_run(1, failed=6)])


async def test_an_interrupted_sweep_is_continued(tmp_path: Path) -> None:
    first = FakeRunner(limit=1000)
    second = FakeRunner(limit=1000)
    await run_sweep(rates(1, 2), first.run, SweepFolder(tmp_path / "sweep", SETTINGS))
    runs = await run_sweep(rates(1, 2, 4), second.run, SweepFolder(tmp_path / "sweep", SETTINGS))
    assert second.loads == [4]
    assert [run.summary["output_throughput"] for run in runs] == [10, 20, 40]


def test_a_sweep_of_other_settings_is_not_continued(tmp_path: Path) -> None:
    SweepFolder(tmp_path, SETTINGS)
    with pytest.raises(ConfigError, match="other settings"):
        SweepFolder(tmp_path, SETTINGS | {"seed": 1})


def test_a_sweep_needs_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used for a sweep"):
        SweepFolder(tmp_path / "file", SETTINGS)


def test_a_saved_run_is_loaded_unchanged(tmp_path: Path) -> None:
    record = RequestRecord(0, 5, 2, 1.0, 1.25, [1.5, 1.75], [1, 1], 2.0, "length", text="é")
    summary: dict[str, Any] = {"completed": 1, "request_rate": "inf", "x_quire": {"seed": 0}}
    sample = MetricsSample(time_s=1.5, running=1.0, kv_usage=0.25, kv_pages={"free": 3.0})
    metrics = ServerMetrics(samples=[sample], failures=2, server={"isa": "avx2"})
    run = LoadTestRun(label="inf", started_s=1.0, summary=summary, records=[record], metrics=metrics)
    run.save(tmp_path / "run.json")
    assert LoadTestRun.load(tmp_path / "run.json") == run


def test_a_file_that_is_not_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"label": 1}')
    with pytest.raises(ConfigError, match="not a saved run"):
        LoadTestRun.load(tmp_path / "run.json")
