"""Samples of a server's /metrics: Quire's names, vLLM's names, and scrapes that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from prometheus_client import generate_latest
from quire.runtime.common.errors import ConfigError
from quire.runtime.server.monitoring.metrics import PrometheusObserver
from quire.runtime.tools.loadtest import server_metrics
from quire.runtime.tools.loadtest.server_metrics import MetricsSample, ServerMetrics, add_scrape, sample_metrics

QUIRE = """\
# TYPE quire_cpu_info gauge
quire_cpu_info{isa="avx2",threads="2",threads_reason="--threads"} 1.0
# TYPE quire_num_requests_running gauge
quire_num_requests_running 3.0
quire_num_requests_waiting 2.0
quire_kv_cache_usage_perc 0.25
quire_kv_pages{state="owned"} 10.0
quire_kv_pages{state="free"} 30.0
quire_num_preemptions_total 4.0
vllm:num_requests_running{model_name="m"} 99.0
"""
VLLM = """\
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:gpu_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:gpu_cache_usage_perc{engine="1",model_name="m"} 0.7
"""


def read(text: str) -> ServerMetrics:
    metrics = ServerMetrics()
    add_scrape(metrics, 1.0, text)
    return metrics


@dataclass
class FakeMetricsServer:
    url: str
    num_scrapes: int = 0


@asynccontextmanager
async def serving(body: str, status: str = "200 OK") -> AsyncIterator[FakeMetricsServer]:
    fake = FakeMetricsServer("")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fake.num_scrapes += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        fake.url = "http://{}:{}/metrics".format(*server.sockets[0].getsockname())
        yield fake


def test_quires_names_come_first() -> None:
    metrics = read(QUIRE)
    assert metrics.samples == [
        MetricsSample(
            time_s=1.0,
            running=3.0,
            waiting=2.0,
            kv_usage=0.25,
            preemptions=4.0,
            kv_pages={"owned": 10.0, "free": 30.0},
        )
    ]
    assert metrics.server["isa"] == "avx2"


def test_vllms_engines_are_added_up() -> None:
    (sample,) = read(VLLM).samples
    assert (sample.running, sample.waiting, sample.kv_usage, sample.preemptions) == (7.0, 1.0, pytest.approx(0.6), None)


@pytest.mark.parametrize("text", ["", "up 1.0\n", "quire_num_requests_running three\n"])
def test_a_scrape_without_metrics_counts_as_a_failure(text: str) -> None:
    metrics = read(text)
    assert (metrics.samples, metrics.failures) == ([], 1)


async def test_a_run_is_sampled_repeatedly_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_metrics, "SCRAPE_INTERVAL_S", 0.001)
    async with serving(QUIRE) as fake:
        async with sample_metrics(fake.url) as metrics:
            while fake.num_scrapes < 3:
                await asyncio.sleep(0.001)
        assert len(metrics.samples) == fake.num_scrapes > 3
        assert metrics.failures == 0
        times = [sample.time_s for sample in metrics.samples]
        assert times == sorted(times)


async def test_the_metrics_of_quire_serve_are_parsed() -> None:
    observer = PrometheusObserver(version="1.2.3", isa="avx512", threads=4)
    async with serving(generate_latest(observer.registry).decode()) as fake, sample_metrics(fake.url) as metrics:
        pass
    assert metrics.failures == 0
    assert metrics.server | {"version": "1.2.3", "isa": "avx512", "threads": "4"} == metrics.server


async def test_failed_scrapes_do_not_end_the_run() -> None:
    async with serving("no", status="503 Service Unavailable") as fake, sample_metrics(fake.url) as metrics:
        pass
    assert metrics.samples == []
    assert metrics.failures >= 1


async def test_without_an_address_nothing_is_sampled() -> None:
    async with sample_metrics(None) as metrics:
        pass
    assert metrics == ServerMetrics()


@pytest.mark.parametrize("url", ["", "127.0.0.1:7071", "file:///etc/passwd", "http:///metrics"])
async def test_invalid_addresses_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"metrics_url: .* is not allowed"):
        async with sample_metrics(url):
            pass
