"""Sample the server's own `/metrics` once per second during a run.

A scrape that fails is counted and never fails the run. Scrapes are parsed only after the run: parsing would delay the
event loop that times the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from http.client import HTTPException

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as PrometheusSample

from ...common.errors import ConfigError

SCRAPE_INTERVAL_S = 1.0
SCRAPE_TIMEOUT_S = 2.0
MAX_SCRAPE_BYTES = 4 << 20

METRIC_PREFIXES = ("quire_", "vllm:")  # prefixes of metric names; the first one that a server uses
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # the latter in vLLM before 0.10
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy, like the load itself
_KEPT = re.compile(
    rf"^(?:{'|'.join(METRIC_PREFIXES)})(?:num_requests_running|num_requests_waiting|num_preemptions_total"
    rf"|{'|'.join(KV_USAGE)}|kv_pages|cpu_info|build_info)[ {{].*$",
    re.MULTILINE,
)


class MetricsSample(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape; None where the server does not report a value."""

    time_s: float  # time.perf_counter
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1
    preemptions: float | None = None  # preemptions since the server's start
    kv_pages: dict[str, float] = {}  # state -> pages


class ServerMetrics(msgspec.Struct):
    """All samples of a run, in order of time. Filled when sampling ends."""

    samples: list[MetricsSample] = msgspec.field(default_factory=list)
    failures: int = 0  # scrapes without an answer
    server: dict[str, str] = msgspec.field(default_factory=dict)  # version, isa, threads, where reported


@contextlib.asynccontextmanager
async def sample_metrics(url: str | None) -> AsyncIterator[ServerMetrics]:
    """Sample `url` immediately, then every SCRAPE_INTERVAL_S, and once more at the end. Without a URL, sample nothing.

    Raises ConfigError unless `url` is an http(s) address.
    """
    metrics = ServerMetrics()
    if url is None:
        yield metrics
        return
    sampler = _Sampler(_checked(url))
    sampling = asyncio.create_task(sampler.run())
    try:
        yield metrics
    finally:
        sampler.stop.set()
        await sampling
        metrics.failures = sampler.failures
        for time_s, text in sampler.scrapes:
            add_scrape(metrics, time_s, text)


def add_scrape(metrics: ServerMetrics, time_s: float, text: str) -> None:
    """Parse one scrape and add its sample. A text that is not in the Prometheus format counts as a failure."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        samples = []
    prefix = next((each for each in METRIC_PREFIXES if any(sample.name.startswith(each) for sample in samples)), None)
    if prefix is None:
        metrics.failures += 1
        return
    own: defaultdict[str, list[PrometheusSample]] = defaultdict(list)
    for sample in samples:
        if sample.name.startswith(prefix):
            own[sample.name.removeprefix(prefix)].append(sample)
    metrics.samples.append(
        MetricsSample(
            time_s=time_s,
            running=_sum(own["num_requests_running"]),
            waiting=_sum(own["num_requests_waiting"]),
            kv_usage=_mean(own[KV_USAGE[0]] or own[KV_USAGE[1]]),
            preemptions=_sum(own["num_preemptions_total"]),
            kv_pages={series.labels["state"]: series.value for series in own["kv_pages"]},
        )
    )
    for series in own["build_info"] + own["cpu_info"]:
        metrics.server.update(series.labels)


class _Sampler:
    """A task that scrapes until `stop` is set, and keeps the lines of each scrape that `add_scrape` needs."""

    def __init__(self, url: str) -> None:
        self.stop = asyncio.Event()
        self.scrapes: list[tuple[float, str]] = []
        self.failures = 0
        self._url = url

    async def run(self) -> None:
        while not self.stop.is_set():
            started = time.perf_counter()
            await self._scrape()
            rest = SCRAPE_INTERVAL_S - (time.perf_counter() - started)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.stop.wait(), max(0.0, rest))
        await self._scrape()

    async def _scrape(self) -> None:
        try:
            text = await asyncio.to_thread(_fetch, self._url)
        except (OSError, HTTPException, ValueError):
            self.failures += 1
        else:
            self.scrapes.append((time.perf_counter(), text))


def _fetch(url: str) -> str:
    with _DIRECT.open(url, timeout=SCRAPE_TIMEOUT_S) as response:
        text = response.read(MAX_SCRAPE_BYTES).decode()
    return "\n".join(_KEPT.findall(text)) + "\n"


def _checked(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"metrics_url: {url!r} is not allowed; write it as http://HOST:PORT/metrics")
    return url


def _sum(series: Sequence[PrometheusSample]) -> float | None:
    """Add up the series of one metric: vLLM has one per engine and model."""
    return sum(each.value for each in series) if series else None


def _mean(series: Sequence[PrometheusSample]) -> float | None:
    return sum(each.value for each in series) / len(series) if series else None
