"""The output of `quire loadtest`: the progress line and the result."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from quire.runtime.tools.loadtest.console import lateness, print_result, print_sweep, progress_line, shown_progress
from quire.runtime.tools.loadtest.records import RequestRecord
from quire.runtime.tools.loadtest.results import LoadTestRun, RunOptions, summarize
from quire.runtime.tools.loadtest.sender import LoadProgress


def printed(capsys: pytest.CaptureFixture[str], *records: RequestRecord, **options: Any) -> list[str]:
    result = summarize(records, RunOptions(backend="quire", duration_s=2.0, **options))
    print_result(result, ("ttft", "tpot", "itl", "e2el"), (50, 99))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def served(delay_s: float = 0.0) -> RequestRecord:
    return RequestRecord(0, 10, 2, 1.0, 1.0 + delay_s, [1.5, 1.75], [1, 1], 1.75, "length")


def test_the_result_has_vllms_words(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, served(), goodput={"ttft": 600})
    for line in (
        "Successful requests: 1",
        "Benchmark duration (s): 2.00",
        "Request goodput (req/s): 0.50",
        "Median TTFT (ms): 500.00",
        "P99 E2EL (ms): 750.00",
    ):
        assert line in lines
    assert not any("late" in line or "Cancelled" in line or "Error" in line for line in lines)


def test_vectors_have_no_latencies_of_further_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    vectors = RequestRecord(0, 10, 1, 1.0, 1.0, [1.75], [1], 1.75, "stop")
    lines = printed(capsys, vectors, extra={"task": "embed"})
    assert {"Embedded texts: 1", "Median TTFT (ms): 750.00", "P99 E2EL (ms): 750.00"} <= set(lines)
    assert not any("TPOT" in line or "ITL" in line for line in lines)
    summary = summarize([vectors], RunOptions(backend="quire", duration_s=2.0, extra={"task": "embed"}))
    assert summary["median_tpot_ms"] == 0.0
    print_sweep([LoadTestRun(label="1", started_s=0.0, summary=summary, records=[vectors])], ("ttft", "itl"), (99,))
    assert "load ok failed tokens/s TTFT p50 / p99 ms" in " ".join(capsys.readouterr().out.split())


def test_a_late_generator_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, served(delay_s=0.25), generator_delays_s=[0.25])
    assert any(
        line.startswith("Schedule delay (ms): p99 250.00; counted from the schedule, E2EL p99") for line in lines
    )
    late, on_time = (
        summarize([served()], RunOptions(backend="quire", duration_s=2.0, generator_delays_s=[delay_s]))
        for delay_s in (0.25, 0.001)
    )
    assert lines[0].startswith("Warning: the load generator itself was late (p99 250.00 ms)")
    warning = lateness(late, (50, 99))
    assert warning is not None
    assert warning.startswith("the load generator itself was late (p99 250.00 ms): it could not keep up")
    assert lateness(on_time, (50, 99)) is None


def test_a_sweep_is_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    summary = summarize([served()], RunOptions(backend="quire", duration_s=2.0))
    runs = [
        LoadTestRun(label=label, started_s=0.0, summary=summary, records=[served()])
        for label in ("1 requests/s", "2 requests/s")
    ]
    print_sweep(runs, ("ttft", "itl"), (50, 99))
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[0] == "Sweep"
    assert lines[1] == "load ok failed tokens/s TTFT p50 / p99 ms ITL p50 / p99 ms"
    assert lines[3:] == [
        "1 requests/s 1 0 1.0 500.0 / 500.0 250.0 / 250.0",
        "2 requests/s 1 0 1.0 500.0 / 500.0 250.0 / 250.0",
    ]


def test_the_result_lists_errors(capsys: pytest.CaptureFixture[str]) -> None:
    failed = [
        RequestRecord(index, 10, 2, 1.0, 1.0, ended_s=1.0, error="the [bold] queue is full", error_code="HTTP_503")
        for index in range(3)
    ]
    lines = printed(capsys, served(), *failed)
    assert lines[-2:] == ["Errors: 3 x HTTP_503", "the [bold] queue is full"]


def test_the_progress_line() -> None:
    progress = LoadProgress(total=2000, sent=1500, done=1200, failed=3, tokens=5)
    assert progress_line(progress, 1234.5) == (
        "sent 1,500 of 2,000   done 1,200   running 300   failed 3   1,234 tokens/s"
    )
    assert progress_line(LoadProgress(sent=1), 0).startswith("sent 1   done 0")


async def test_progress_is_drawn_on_a_terminal_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("quire.runtime.tools.loadtest.console.PROGRESS_INTERVAL_S", 0.001)
    for quiet in (True, False):
        with shown_progress(LoadProgress(sent=7), quiet=quiet):
            await asyncio.sleep(0.02)
        assert ("sent 7" in capsys.readouterr().err) != quiet
    await asyncio.sleep(0.005)
    assert capsys.readouterr().err == ""
