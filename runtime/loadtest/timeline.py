"""How the server looked from its own `/metrics` while it was under load, once per second.

It must not know the workload or its records. One invariant: it never fails nor slows a run; a scrape that fails is
counted, and scrapes are parsed only when the run is over, for parsing would hold up the clock that times the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Iterable
from http.client import HTTPException

import msgspec
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..errors import ConfigError

TIMEOUT_S = 2.0
MAX_SCRAPE_BYTES = 4 << 20

PREFIXES = ("quire_", "vllm:")  # the first that a server has
KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")  # the latter in vLLM before 0.10
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
        families = {family.name: family for family in text_string_to_metric_families(text)}
    except ValueError:
        timeline.failures += 1
        return
    prefix = next((each for each in PREFIXES if any(name.startswith(each) for name in families)), None)
    if prefix is None:
        timeline.failures += 1
        return
    own = {name.removeprefix(prefix): family for name, family in families.items() if name.startswith(prefix)}
    usage = next((own[name] for name in KV_USAGE if name in own), None)
    timeline.samples.append(
        Sample(
            time_s=time_s,
            running=_sum(own.get("num_requests_running")),
            waiting=_sum(own.get("num_requests_waiting")),
            kv_usage=_mean(usage),
            preemptions=_sum(own.get("num_preemptions_total", own.get("num_preemptions"))),
            kv_pages=_by_label(own.get("kv_pages"), "state"),
        )
    )
    for name in ("build_info", "cpu_info"):
        for sample in own[name].samples if name in own else ():
            timeline.server.update(sample.labels)


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
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        text = answer.read(MAX_SCRAPE_BYTES).decode()
    return "\n".join(_KEPT.findall(text)) + "\n"


def _checked(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--metrics-url: {url!r} is not allowed; write it as http://HOST:PORT/metrics")
    return url


def _values(family: Metric | None) -> list[float]:
    return [] if family is None else [sample.value for sample in family.samples]


def _sum(family: Metric | None) -> float | None:
    """Over engines and models: vLLM labels each."""
    values = _values(family)
    return sum(values) if values else None


def _mean(family: Metric | None) -> float | None:
    values = _values(family)
    return sum(values) / len(values) if values else None


def _by_label(family: Metric | None, label: str) -> dict[str, float]:
    samples: Iterable = () if family is None else family.samples
    return {sample.labels[label]: sample.value for sample in samples if label in sample.labels}
