"""The result of a few requests, with every figure worked out by hand, and every key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError
from quire.runtime.tools.loadtest.latency import e2el_s, tpot_s, ttft_s
from quire.runtime.tools.loadtest.options import Pacing
from quire.runtime.tools.loadtest.records import RequestRecord
from quire.runtime.tools.loadtest.results import LoadTestRun, RunOptions, summarize, without_details

SETUP = [
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency"),
]
TOTALS = [
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput"),
    *("max_output_tokens_per_s", "max_concurrent_requests", "rtfx"),
]
ALWAYS = ["latencies", "queue_times"]  # one value per request, also without --save-detailed
DETAILS = ["input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"]


def served(
    index: int, sent_s: float, *token_times: float, scheduled_s: float | None = None, **fields: Any
) -> RequestRecord:
    record = RequestRecord(
        index, 10, len(token_times), sent_s if scheduled_s is None else scheduled_s, sent_s, list(token_times)
    )
    record.token_counts = [1] * len(token_times)
    record.ended_s = token_times[-1]
    record.finish_reason = "length"
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def failed(index: int, sent_s: float) -> RequestRecord:
    return RequestRecord(index, 10, 4, sent_s, sent_s, ended_s=sent_s, error="full", error_code="RESOURCE_EXHAUSTED")


def options(**fields: Any) -> RunOptions:
    return RunOptions(**{"backend": "quire", "duration_s": 10.0, "num_prompts": 3, **fields})


TWO = [served(0, 100.0, 100.1, 100.2, 100.4), served(1, 100.0, 100.3, 100.5)]


def test_the_keys_are_vllms_and_x_quire() -> None:
    measured = [
        f"{name}_{metric}_ms"
        for metric in ("ttft", "tpot", "itl", "e2el")
        for name in ("mean", "median", "std", "p50", "p90", "p99")
    ]
    result = summarize(TWO, options())
    assert sorted(result) == sorted([*SETUP, *TOTALS, *ALWAYS, *DETAILS, *measured, "x_quire"])
    assert sorted(without_details(result)) == sorted([*SETUP, *TOTALS, *ALWAYS, *measured, "x_quire"])


def test_a_limit_a_ramp_and_metadata_add_keys() -> None:
    pacing = Pacing(
        max_concurrency=2, ramp_up_strategy="linear", ramp_up_start_rps=1, ramp_up_end_rps=3, request_rate=math.inf
    )
    result = summarize(TWO, options(pacing=pacing, metadata={"tp": "1"}, percentile_metrics=("client_queue_time",)))
    assert result["tp"] == "1"
    assert (result["ramp_up_strategy"], result["ramp_up_start_rps"], result["ramp_up_end_rps"]) == ("linear", 1, 3)
    assert [event["rps"] for event in result["rps_change_events"]] == [1, 2, 3]
    assert result["p99_client_queue_time_ms"] == 0
    with_rate = options(
        pacing=Pacing(max_concurrency=2, request_rate=5.0), percentile_metrics=("e2el_including_client_queue",)
    )
    assert "mean_e2el_including_client_queue_ms" in summarize(TWO, with_rate)
    at_once = options(pacing=Pacing(max_concurrency=2), percentile_metrics=("e2el_including_client_queue",))
    assert "mean_e2el_including_client_queue_ms" not in summarize(TWO, at_once)


def test_latencies() -> None:
    result = summarize(TWO, options(metric_percentiles=(50, 99.5)))
    expected = {
        "mean_ttft_ms": 200,
        "median_ttft_ms": 200,
        "std_ttft_ms": 100,
        "p50_ttft_ms": 200,
        "p99.5_ttft_ms": 299,
        "mean_tpot_ms": (150 + 200) / 2,
        "mean_itl_ms": (100 + 200 + 200) / 3,
        "median_itl_ms": 200,
        "p99.5_e2el_ms": 499.5,
        "mean_e2el_ms": 450,
    }
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["itls"] == [pytest.approx([0.1, 0.2]), pytest.approx([0.2])]
    assert result["ttfts"] == pytest.approx([0.1, 0.3])


def test_totals_are_of_finished_requests() -> None:
    result = summarize([*TWO, failed(2, 100.0)], options())
    assert (result["completed"], result["failed"]) == (2, 1)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20, 5)
    assert (result["request_throughput"], result["output_throughput"], result["total_token_throughput"]) == (
        0.2,
        0.5,
        2.5,
    )
    assert (result["output_lens"], result["errors"]) == ([3, 2, 0], ["", "", "full"])
    assert result["x_quire"]["errors"] == {"RESOURCE_EXHAUSTED": 1}


def test_the_busiest_second_and_the_most_concurrent_requests() -> None:
    records = [served(0, 0.0, 0.2, 0.4), served(1, 0.4, 1.1, 1.2, 1.3), served(2, 0.5, 2.5)]
    result = summarize(records, options())
    assert result["max_output_tokens_per_s"] == 3
    assert result["max_concurrent_requests"] == 2  # 0 ends when 1 begins


def test_all_tokens_of_a_chunk_are_counted() -> None:
    record = served(0, 0.0, 0.1, 0.5)
    record.token_counts = [1, 4]
    result = summarize([record], options())
    assert (result["total_output_tokens"], result["max_output_tokens_per_s"]) == (5, 5)
    assert result["mean_tpot_ms"] == pytest.approx(100)
    assert result["mean_itl_ms"] == pytest.approx(400)  # gaps between chunks, as in vLLM


def test_a_single_token_has_no_tpot_and_meets_any_limit_of_it() -> None:
    one = served(2, 100.0, 100.1)
    result = summarize([*TWO, one], options(goodput={"tpot": 160, "ttft": 500}))
    assert result["mean_tpot_ms"] == pytest.approx(175)
    assert result["request_goodput"] == pytest.approx(2 / 10)


def test_goodput_is_reported_only_with_objectives() -> None:
    assert summarize(TWO, options())["request_goodput"] is None
    assert summarize(TWO, options(goodput={"e2el": 450}))["request_goodput"] == pytest.approx(0.1)


def test_a_request_that_takes_as_long_as_its_objective_is_good() -> None:
    record = served(0, 100.0, 100.25, 100.5)
    limits = ({"e2el": 500}, {"ttft": 250}, {"tpot": 250}, {"e2el": 499.9})
    good = [summarize([record], options(goodput=each))["request_goodput"] for each in limits]
    assert good == [0.1, 0.1, 0.1, 0.0]


def test_a_run_that_cannot_be_saved_leaves_the_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    runs = [LoadTestRun(label=label, started_s=0.0, summary={}, records=list(TWO)) for label in ("old", "new")]
    runs[0].save(path)
    (tmp_path / "run.json.partial").mkdir()  # an obstacle: the folder cannot be written
    with pytest.raises(ConfigError, match="cannot be written"):
        runs[1].save(path)
    assert LoadTestRun.load(path).label == "old"


def test_late_sending_shows_in_latencies_from_the_schedule() -> None:
    late = served(0, 100.0, 100.1, 100.2, scheduled_s=99.0)
    result = summarize([late], options(generator_delays_s=[0.25]))
    own = result["x_quire"]
    assert result["mean_ttft_ms"] == pytest.approx(100)
    assert result["queue_times"] == pytest.approx([1.0])
    assert own["schedule_delay_ms"]["p99"] == pytest.approx(1000)
    assert own["generator_delay_ms"]["mean"] == pytest.approx(250)
    assert own["ttft_from_schedule_ms"]["mean"] == pytest.approx(1100)
    assert own["e2el_from_schedule_ms"]["mean"] == pytest.approx(1200)


def test_cancelled_and_slowly_read_requests_change_no_latency() -> None:
    slow = served(2, 100.0, 105.0, 109.0, slow_reader=True)
    left = RequestRecord(3, 10, 8, 100.0, 100.0, [100.2], [1], 100.2, cancelled=True)
    result = summarize([*TWO, slow, left], options(goodput={"ttft": 10_000}))
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (3, 0, 7)
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["request_goodput"] == pytest.approx(0.2)
    own = result["x_quire"]
    assert (own["cancelled"], own["cancelled_output_tokens"], own["slow_readers"]) == (1, 1, 1)


def test_the_servers_times_are_summed() -> None:
    records = [
        served(0, 0.0, 0.1, queue_ms=5.0, prefill_ms=20.0, decode_ms=1.0, stall_ms=0.0, cached_tokens=8),
        served(1, 0.0, 0.1, queue_ms=2.0, prefill_ms=10.0, decode_ms=4.0, stall_ms=3.0, cached_tokens=0),
        served(2, 0.0, 0.1),
    ]
    own = summarize(records, options())["x_quire"]
    assert own["server_ms"] == {"queue": 7.0, "prefill": 30.0, "decode": 5.0, "stall": 3.0}
    assert own["cached_tokens"] == 8


def test_without_a_finished_request_the_figures_are_zero() -> None:
    result = summarize([failed(0, 1.0)], options())
    assert (result["completed"], result["failed"], result["p99_e2el_ms"]) == (0, 1, 0.0)
    assert (result["max_output_tokens_per_s"], result["max_concurrent_requests"]) == (0.0, 0)


def test_latencies_are_from_sending_to_the_last_token() -> None:
    """Neither the wait before sending nor what follows the last token, such as usage, counts."""
    record = served(0, 1.0, 2.0, 3.0, scheduled_s=0.5)
    record.ended_s = 9.0
    assert (ttft_s(record), e2el_s(record), tpot_s(record)) == (1.0, 2.0, 1.0)
