"""How the server looked from its own `/metrics` while it was under load, once per second.

It must not know the workload or its records. One invariant: it never fails nor slows a run; a scrape that fails is
counted, and scrapes are parsed only when the run is over, for parsing would hold up the clock that times the tokens.
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
from prometheus_client.samples import Sample as Series

from ...common.errors import ConfigError

TIMEOUT_S = 2.0
MAX_SCRAPE_BYTES = 4 << 20

PREFIXES = ("quire_", "vllm:")  # the first that a server has
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # the latter in vLLM before 0.10
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # as the requests of the load go
_KEPT = re.compile(
    rf"^(?:{'|'.join(PREFIXES)})(?:num_requests_running|num_requests_waiting|num_preemptions_total"
    rf"|{'|'.join(KV_USAGE)}|kv_pages|cpu_info|build_info)[ {{].*$",
    re.MULTILINE,
)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One scrape; None: the server does not say."""

    time_s: float  # of perf_counter
    running: float | None = None
    waiting: float | None = None
    kv_usage: float | None = None  # 0 to 1
    preemptions: float | None = None  # since the server's start
    kv_pages: dict[str, float] = {}  # by state


class Timeline(msgspec.Struct):
    """Filled when sampling ends."""

    samples: list[Sample] = msgspec.field(default_factory=list)
    failures: int = 0  # scrapes without an answer
    server: dict[str, str] = msgspec.field(default_factory=dict)  # version, isa, threads, where the server tells


@contextlib.asynccontextmanager
async def sample_metrics(url: str | None, interval_s: float = 1.0) -> AsyncIterator[Timeline]:
    """Sample `url` at once, then every `interval_s` and once more at the end; without one, sample nothing.

    Raises ConfigError for what is no http(s) address.
    """
    timeline = Timeline()
    if url is None:
        yield timeline
        return
    sampler = _Sampler(_checked(url), interval_s)
    sampling = asyncio.create_task(sampler.run())
    try:
        yield timeline
    finally:
        sampler.stop.set()
        await sampling
        timeline.failures = sampler.failures
        for time_s, text in sampler.scrapes:
            read_scrape(timeline, time_s, text)


def read_scrape(timeline: Timeline, time_s: float, text: str) -> None:
    """Add the sample that one scrape holds; a text that is no exposition counts as a failure."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        samples = []
    prefix = next((each for each in PREFIXES if any(sample.name.startswith(each) for sample in samples)), None)
    if prefix is None:
        timeline.failures += 1
        return
    own: defaultdict[str, list[Series]] = defaultdict(list)
    for sample in samples:
        if sample.name.startswith(prefix):
            own[sample.name.removeprefix(prefix)].append(sample)
    timeline.samples.append(
        Sample(
            time_s=time_s,
            running=_sum(own["num_requests_running"]),
            waiting=_sum(own["num_requests_waiting"]),
            kv_usage=_mean(own[KV_USAGE[0]] or own[KV_USAGE[1]]),
            preemptions=_sum(own["num_preemptions_total"]),
            kv_pages={series.labels["state"]: series.value for series in own["kv_pages"]},
        )
    )
    for series in own["build_info"] + own["cpu_info"]:
        timeline.server.update(series.labels)


class _Sampler:
    """Keeps the few lines of each scrape that `read_scrape` needs."""

    def __init__(self, url: str, interval_s: float) -> None:
        self.stop = asyncio.Event()
        self.scrapes: list[tuple[float, str]] = []
        self.failures = 0
        self._url = url
        self._interval_s = interval_s

    async def run(self) -> None:
        while not self.stop.is_set():
            began = time.perf_counter()
            await self._scrape()
            rest = self._interval_s - (time.perf_counter() - began)
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
    with _DIRECT.open(url, timeout=TIMEOUT_S) as answer:
        text = answer.read(MAX_SCRAPE_BYTES).decode()
    return "\n".join(_KEPT.findall(text)) + "\n"


def _checked(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--metrics-url: {url!r} is not allowed; write it as http://HOST:PORT/metrics")
    return url


def _sum(series: Sequence[Series]) -> float | None:
    """Over engines and models: vLLM labels each."""
    return sum(each.value for each in series) if series else None


def _mean(series: Sequence[Series]) -> float | None:
    return sum(each.value for each in series) / len(series) if series else None
