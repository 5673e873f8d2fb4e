"""The report: self-contained, with foreign text escaped, and with the figures of each run."""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from quire.runtime.common.errors import ConfigError, MissingDependency
from quire.runtime.tools.loadtest.latency import latencies_ms, parts_by_band, parts_ms
from quire.runtime.tools.loadtest.records import RequestRecord
from quire.runtime.tools.loadtest.report import check_report, render_report, write_report
from quire.runtime.tools.loadtest.results import LoadTestRun
from quire.runtime.tools.loadtest.server_metrics import MetricsSample, ServerMetrics
from quire.runtime.tools.loadtest.timeline import run_timeline

START_S = 100.0  # perf_counter does not start at 0
HOSTILE = "<script>alert('$x^2$')</script>"


def finished(index: int, server_times: bool = True) -> RequestRecord:
    """Return a record sent at second `index`: first token after 125 ms, four more 31.25 ms apart, exact in binary."""
    sent = START_S + index
    record = RequestRecord(index, 10, 5, sent - 0.0625, sent, [sent + 0.125 + 0.03125 * i for i in range(5)], [1] * 5)
    record.ended_s = record.token_times[-1]
    record.finish_reason = "length"
    if server_times:
        record.queue_ms = 40.0
        record.prefill_ms = 50.0
        record.decode_ms = 130.0
        record.stall_ms = 20.0
    return record


def failed(index: int, code: str, message: str) -> RequestRecord:
    sent = START_S + index
    return RequestRecord(index, 10, 5, sent, sent, ended_s=sent + 0.01, error=message, error_code=code)


def make_run(records: list[RequestRecord], label: str = "2 requests/s", **summary: Any) -> LoadTestRun:
    done = sum(record.finish_reason is not None for record in records)
    duration = 5.0
    tokens = sum(record.output_tokens for record in records)
    sample = MetricsSample(time_s=START_S + 1, running=1.0, waiting=2.0, kv_usage=0.5)
    return LoadTestRun(
        label=label,
        started_s=START_S,
        records=records,
        metrics=ServerMetrics(samples=[sample], server={"isa": "avx512-vnni", "threads": "2"}),
        summary={
            "model_id": "a model",
            "completed": done,
            "failed": len(records) - done,
            "duration": duration,
            "request_throughput": done / duration,
            "output_throughput": tokens / duration,
            "request_goodput": None,
            "request_rate": 2.0,
            "max_concurrency": None,
            "x_quire": {"dataset": "random", "seed": 7, "generator_delay_ms": {"mean": 0.1}},
            **summary,
        },
    )


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += f" {data}"

    def values(self, name: str) -> list[str]:
        return [value for each, value in self.attributes if each == name]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Page:
    path = tmp_path_factory.mktemp("report") / "report.html"
    records = [finished(index) for index in range(4)] + [failed(4, "RESOURCE_EXHAUSTED", HOSTILE)]
    check_report(path)
    write_report(path, [make_run(records, HOSTILE, model_id=HOSTILE, request_goodput=0.5)])
    return Page(path.read_text("utf-8"))


@pytest.fixture(scope="module")
def sweep() -> Page:
    runs = [
        make_run([finished(index) for index in range(4)], "1 requests/s", request_rate=1.0, request_goodput=0.9),
        make_run([finished(index, server_times=False) for index in range(3)], "2 requests/s"),
        make_run([failed(0, "UNAVAILABLE", "gone")], "inf requests/s", request_rate="inf"),
    ]
    return Page(render_report(runs))


def test_the_page_loads_nothing(single: Page) -> None:
    assert not {"script", "link", "img", "iframe", "object", "image", "base"} & set(single.tags)
    assert not single.values("src")
    assert all(target.startswith("#") for target in single.values("href") + single.values("xlink:href"))
    assert not any("url(" in style.replace("url(#", "") for style in single.values("style"))
    assert any("default-src 'none'" in content for content in single.values("content"))


def test_foreign_text_is_escaped(single: Page) -> None:
    assert single.text.count(HOSTILE) >= 4  # title, heading, table, run, error


def test_every_chart_has_its_figures_in_words(single: Page) -> None:
    words = single.values("aria-label")
    assert single.values("role").count("img") == len(words) == 7
    assert any("Time to first token" in text and "p50 125, p99 125 ms" in text for text in words)
    assert any("at most 2 requests waiting" in text and "50% of the KV pool" in text for text in words)


def test_ids_are_unique(sweep: Page) -> None:
    ids = sweep.values("id")
    assert len(ids) == len(set(ids))
    used = {target[1:] for target in sweep.values("xlink:href")}
    used |= {name for style in sweep.values("clip-path") for name in re.findall(r"url\(#(\w+)\)", style)}
    assert used <= set(ids)


def test_the_header_shows_the_settings(single: Page) -> None:
    for value in ("random", "avx512-vnni", "7", "2 per second, burstiness 1"):
        assert re.search(rf"\b{value}\b", single.text)


def test_errors_are_counted_by_code(single: Page) -> None:
    assert "RESOURCE_EXHAUSTED" in single.text


def test_a_sweep_has_a_curve_and_the_common_settings(sweep: Page) -> None:
    assert "Latency against throughput" in sweep.text
    assert "random" in sweep.text
    assert any("at 1/s: 4.0 output tokens per second" in text for text in sweep.values("aria-label"))
    assert any("at all at once" in text for text in sweep.values("aria-label"))


def test_goodput_is_shown_where_objectives_were_given(single: Page, sweep: Page) -> None:
    assert all("within limits" in page.text for page in (single, sweep))


def test_a_single_run_has_no_curve(single: Page) -> None:
    assert "Latency against throughput" not in single.text


def test_a_run_in_which_all_requests_failed_is_shown(sweep: Page) -> None:
    assert "UNAVAILABLE" in sweep.text
    assert any("inf requests/s: p50 –, p99 – ms" in text for text in sweep.values("aria-label"))


@pytest.mark.parametrize("name", ["report.pdf", "report", "missing/report.html"])
def test_a_report_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="report"):
        check_report(tmp_path / name)


def test_without_matplotlib_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match=r"pip install 'quire\[plot\]'"):
        check_report(tmp_path / "report.html")


# The data of the charts


def test_latencies_are_of_measured_requests() -> None:
    slow = finished(1)
    slow.slow_reader = True
    found = latencies_ms([finished(0), slow, failed(2, "INTERNAL", "")])
    assert {name: values.size for name, values in found.items()} == {
        "ttft": 1,
        "tpot": 1,
        "itl": 4,
        "e2el": 1,
        "schedule_delay": 3,
    }
    assert found["ttft"] == pytest.approx([125.0])
    assert found["tpot"] == pytest.approx([31.25])
    assert found["e2el"] == pytest.approx([250.0])
    assert found["schedule_delay"] == pytest.approx([62.5, 62.5, 0.0])


def test_a_timeline_counts_everything_once() -> None:
    timeline = run_timeline(make_run([finished(0), finished(1), failed(2, "INTERNAL", "")]))
    assert (timeline.arrivals.sum(), timeline.errors.sum(), timeline.tokens.sum()) == (3, 1, 10)
    times, counts = timeline.in_flight
    assert times[0] == pytest.approx(0.0)
    assert (counts.max(), counts[-1]) == (1, 0)
    samples = (timeline.sampled_s, timeline.running, timeline.waiting, timeline.kv_usage)
    assert [values[0] for values in samples] == [1.0, 1.0, 2.0, 0.5]


def test_time_beyond_the_servers_figures_is_elsewhere() -> None:
    assert parts_ms([finished(0)]) == pytest.approx(
        {"queue": 40.0, "prefill": 50.0, "decode": 130.0, "stall": 20.0, "elsewhere": 10.0}
    )
    assert parts_ms([finished(0, server_times=False), failed(1, "INTERNAL", "")]) is None


def test_requests_are_grouped_into_bands_that_have_requests() -> None:
    assert len(parts_by_band([finished(0)])) == 1
    assert [name for name, _ in parts_by_band([finished(index) for index in range(200)])] == [
        "fastest half",
        "p50 to p90",
        "p90 to p99",
        "slowest 1 %",
    ]
