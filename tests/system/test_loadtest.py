"""`quire loadtest` against a real server in this process: from the command line to table, result and report."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.cli.app import app
from quire.runtime.cli.main import main
from quire.runtime.common.errors import Unavailable
from quire.runtime.model import BUNDLED_MODEL

DATA = Path(__file__).parents[1] / "data"
SMALL = ("--num-prompts", "8", "--random-input-len", "12", "--random-output-len", "6")

Run = Callable[..., Awaitable[dict[str, Any]]]


def call(*arguments: str) -> None:
    app(["loadtest", *arguments], exit_on_error=False, print_error=False, result_action="return_value")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Return a function that runs a load test in a thread, with a loop of its own, and returns the detailed result."""

    async def run(*arguments: str) -> dict[str, Any]:
        saving = ("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json")
        await asyncio.to_thread(call, *saving, *arguments)
        found: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
        return found

    return run


async def test_an_open_loop(serving: Callable[..., Any], run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    async with serving() as real:
        result = await run(
            "--base-url", real.address, *SMALL, "--request-rate", "200", "--num-warmups", "2", "--goodput", "e2el:60000"
        )
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 48)
    assert (result["input_lens"], result["output_lens"]) == ([12] * 8, [6] * 8)
    assert result["request_goodput"] == result["request_throughput"]
    assert all(ttft > 0 for ttft in result["ttfts"])
    assert result["x_quire"]["server_ms"]["prefill"] > 0
    printed = capsys.readouterr().out
    for words in ("Successful requests:", "Median TTFT (ms):", "P99 E2EL (ms):", "Schedule delay (ms):"):
        assert words in printed


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/chat/completions"])
async def test_over_http(serving: Callable[..., Any], run: Run, endpoint: str) -> None:
    async with serving() as real:
        url = f"http://{real.server.openai_address}"
        result = await run(
            *("--backend", "openai", "--base-url", url, "--endpoint", endpoint, "--tokenizer", str(BUNDLED_MODEL)),
            *("--max-concurrency", "4", *SMALL),
        )
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (8, 0, 48)
    assert result["output_lens"] == [6] * 8


async def test_a_closed_loop_with_clients_that_cancel_and_read_slowly(serving: Callable[..., Any], run: Run) -> None:
    behavior = ("--cancel-rate", "0.5", "--slow-reader-rate", "0.3", "--slow-reader-ms", "1", "--num-connections", "2")
    async with serving() as real:
        result = await run("--base-url", real.address, *SMALL, "--max-concurrency", "3", *behavior)
    own = result["x_quire"]
    assert result["failed"] == 0
    assert own["cancelled"] > 0
    assert result["completed"] == 8 - own["cancelled"]
    assert "generator_delay_ms" not in own


async def test_text_and_traces(serving: Callable[..., Any], run: Run) -> None:
    sharegpt = ("--dataset-name", "sharegpt", "--dataset-path", str(DATA / "sharegpt.json"))
    async with serving() as real:
        result = await run("--base-url", real.address, *sharegpt, "--num-prompts", "2")
        assert result["completed"] == 2
        assert all(result["generated_texts"])
        mooncake = (
            "--dataset-name",
            "mooncake",
            "--dataset-path",
            str(DATA / "mooncake.jsonl"),
            "--request-rate",
            "50",
        )
        result = await run("--base-url", real.address, *mooncake)
    assert result["output_lens"] == [2, 1, 3]
    assert result["x_quire"]["cached_tokens"] > 0 or result["max_concurrent_requests"] > 1


async def test_a_sweep_with_a_report(
    serving: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "report.html"
    runs = tmp_path / "runs"
    async with serving() as real:
        metrics = f"http://{real.server.operator_address}/metrics"
        await asyncio.to_thread(
            call,
            *("--base-url", real.address, *SMALL, "--sweep", "concurrency:1,2", "--sweep-dir", str(runs)),
            *("--report", str(report), "--metrics-url", metrics),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
        )
    out, progress = capsys.readouterr()
    assert [line.strip() for line in out.splitlines()].count("Sweep") == 1
    assert "Serving Benchmark Result" not in out
    assert "sweep, 2 of 2: 2 at a time\n" in progress
    assert report.read_text().lower().startswith("<!doctype html>")
    assert sorted(path.name for path in runs.glob("concurrency-*")) == ["concurrency-1.json", "concurrency-2.json"]
    results = [json.loads((tmp_path / f"r-concurrency-{load}.json").read_text()) for load in (1, 2)]
    assert [result["max_concurrency"] for result in results] == [1, 2]
    assert results[0]["x_quire"]["server"]["isa"]
    assert "ttfts" not in results[0]


async def test_without_an_address_a_server_is_started_for_the_run(run: Run) -> None:
    result = await run(*SMALL, "--request-rate", "inf", "--max-concurrency", "4")
    assert (result["completed"], result["failed"]) == (8, 0)
    assert result["x_quire"]["server"]["isa"]


async def test_several_servers_take_turns(serve: Callable[..., Any], run: Run) -> None:
    one, other = await serve(), await serve()
    result = await run("--base-url", f"{one.address},{other.address}", *SMALL, "--max-concurrency", "1")
    assert (result["completed"], result["failed"]) == (8, 0)
    assert abs(len(one.engine.requests) - len(other.engine.requests)) <= 1


@pytest.mark.parametrize(
    ("warmups", "message"),
    [
        ("0", "no request succeeded; the first failed with: "),
        ("1", "a warm-up request failed with OUT_OF_RANGE: prompt of 1000000 tokens"),
    ],
)
async def test_an_error_is_raised_if_every_request_fails(
    warmups: str, message: str, serving: Callable[..., Any], run: Run
) -> None:
    async with serving() as real:
        with pytest.raises(Unavailable, match=message):
            await run(
                "--base-url",
                real.address,
                "--num-warmups",
                warmups,
                "--num-prompts",
                "2",
                "--random-input-len",
                "1000000",
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--base-url", "x:1", "--port", "5"), "leave out --host and --port"),
        (("--base-url", "http://x:1"), "or unix:/path, or use --backend openai for an http URL"),
        (("--backend", "openai", "--deadline-ms", "5"), "--deadline-ms is for --backend quire"),
        (("--backend", "openai", "--tls"), "--tls is for --backend quire"),
        (("--percentile-metrics", "ttft,speed"), "--percentile-metrics: 'speed' is not allowed"),
        (("--metric-percentiles", "50,101"), "--metric-percentiles: '50,101' is not allowed"),
        (("--metric-percentiles", "high"), "--metric-percentiles: 'high' is not allowed"),
        (("--goodput", "itl:5"), "--goodput: 'itl:5' is not allowed"),
        (("--metadata", "tp"), "write KEY=VALUE"),
        (("--sweep", "fast"), "--sweep: 'fast' is not allowed"),
        (("--sweep-dir", "x"), "--sweep-dir is where a --sweep keeps its runs"),
        (("--vocab-size", "0"), "--vocab-size must be between"),
        (("--num-connections", "0"), "--num-connections must be between"),
        (("--request-rate", "0"), "--request-rate must be between"),
        (("--report", "nowhere/report.html"), "--report"),
    ],
)
def test_invalid_command_lines_are_refused_before_the_run(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["quire", "loadtest", *arguments])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert message in capsys.readouterr().err
