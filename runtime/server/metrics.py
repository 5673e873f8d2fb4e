"""Prometheus metrics: an engine observer that counts, and gauges read from the engine's stats when scraped.

It must not know sockets or HTTP. One invariant: names are `quire_` plus vLLM's suffixes with vLLM's buckets, so that
dashboards port, and every label has a small fixed set of values; those of the info metrics never change at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ..engine.facade import EngineStats, RequestStats, StepStats
from ..errors import QuireError
from ..generation import Usage

CancelCause = Literal["client", "disconnect", "slow_reader", "shutdown"]

TIME_TO_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
TOKEN_LATENCY_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_TIME_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
    7680,
)  # fmt: skip
STEP_DURATION_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
TOKEN_COUNT_BUCKETS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))
WAITING_REASONS = ("sequences", "pages", "latency", "tokens", "quota", "source")
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class PrometheusObserver:
    """One server's metrics in a registry of their own. `isa`, `threads` and why so many: what the kernels run with."""

    def __init__(
        self, version: str = "unknown", isa: str = "unknown", threads: int = 0, threads_reason: str = "unknown"
    ) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._make_info(version, isa, threads, threads_reason)
        self._make_counters()
        self._make_histograms()

    def watch(self, stats: Callable[[], EngineStats]) -> None:
        """Read gauges from `stats` at every scrape from now on. Call once."""
        self.registry.register(_EngineCollector(stats))

    # EngineObserver

    def on_step(self, stats: StepStats) -> None:
        self._step_duration.observe(stats.duration_s)
        self._batch_size.observe(len(stats.context_tokens))

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        self._generation_tokens.inc(count)
        if since_last_s is not None:
            self._inter_token_latency.observe(since_last_s)

    def on_rejected(self, error: QuireError) -> None:
        self._rejections.labels(error.code.lower()).inc()

    def on_finished(self, stats: RequestStats) -> None:
        self._prompt_tokens.inc(stats.prompt_tokens)
        self._request_prompt_tokens.observe(stats.prompt_tokens)
        self._e2e_latency.observe(stats.e2e_s)
        if stats.time_to_first_token_s is not None:
            self._time_to_first_token.observe(stats.time_to_first_token_s)
        if stats.time_per_output_token_s is not None:
            self._time_per_output_token.observe(stats.time_per_output_token_s)
        if stats.finish_reason is not None:
            self._success.labels(stats.finish_reason).inc()
        if stats.usage is not None:
            self._observe_usage(stats.usage)

    # The server's own

    def on_cancelled(self, cause: CancelCause) -> None:
        self._cancelled.labels(cause).inc()

    def _observe_usage(self, usage: Usage) -> None:
        self._prompt_tokens_cached.inc(usage.cached_tokens)
        self._request_generation_tokens.observe(usage.completion_tokens)
        self._queue_time.observe(usage.queue_ms / 1000)
        self._prefill_time.observe(usage.prefill_ms / 1000)
        self._decode_time.observe(usage.decode_ms / 1000)

    def _make_info(self, version: str, isa: str, threads: int, threads_reason: str) -> None:
        Info("quire_build", "What is running.", registry=self.registry).info({"version": version})
        Info("quire_cpu", "What the kernels run with, and why so many threads.", registry=self.registry).info(
            {"isa": isa, "threads": str(threads), "threads_reason": threads_reason}
        )

    def _make_counters(self) -> None:
        self._generation_tokens = self._counter("generation_tokens", "Tokens published.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self._prompt_tokens_cached = self._counter("prompt_tokens_cached", "Those found in the prefix cache.")
        self._success = self._counter("request_success", "Finished requests.", "finished_reason")
        self._rejections = self._counter("admission_rejections", "Requests refused before any work.", "reason")
        self._cancelled = self._counter("cancelled", "Requests cancelled by the server's side.", "cause")

    def _make_histograms(self) -> None:
        self._time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", TIME_TO_FIRST_TOKEN_BUCKETS
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", TOKEN_LATENCY_BUCKETS
        )
        self._time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "A request's mean, after its first.", TOKEN_LATENCY_BUCKETS
        )
        self._e2e_latency = self._histogram(
            "e2e_request_latency_seconds", "From submission to the end.", REQUEST_TIME_BUCKETS
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting to run.", REQUEST_TIME_BUCKETS)
        self._prefill_time = self._histogram("request_prefill_time_seconds", "In prefill.", REQUEST_TIME_BUCKETS)
        self._decode_time = self._histogram("request_decode_time_seconds", "In decode.", REQUEST_TIME_BUCKETS)
        self._request_prompt_tokens = self._histogram("request_prompt_tokens", "Per request.", TOKEN_COUNT_BUCKETS)
        self._request_generation_tokens = self._histogram(
            "request_generation_tokens", "Per request.", TOKEN_COUNT_BUCKETS
        )
        self._step_duration = self._histogram("step_duration_seconds", "Of engine steps.", STEP_DURATION_BUCKETS)
        self._batch_size = self._histogram("batch_size", "Sequences per step.", BATCH_SIZE_BUCKETS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quire_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"quire_{name}", text, buckets=buckets, registry=self.registry)


class _EngineCollector(Collector):
    """The engine's own numbers, read once per scrape; none while the engine cannot answer."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not read an engine that is still starting

    def collect(self) -> Iterable[Metric]:
        try:
            stats = self._stats()
        except QuireError:
            return
        yield GaugeMetricFamily("quire_num_requests_running", "In the batch.", stats.running)
        yield GaugeMetricFamily("quire_num_requests_waiting", "In the queue.", stats.waiting)
        yield _by("reason", "requests_waiting_by_reason", "What the queue waits for.", _waiting(stats))
        yield GaugeMetricFamily("quire_kv_cache_usage_perc", "Share of pages live requests own, 0 to 1.", _share(stats))
        pages = {"owned": stats.pages_owned, "cached": stats.pages_cached, "free": stats.pages_free}
        yield _by("state", "kv_pages", "KV pages by state; together they are all there are.", pages)
        yield GaugeMetricFamily("quire_kv_pages_reserved", "Cached or free, kept for somebody.", stats.pages_reserved)
        yield GaugeMetricFamily("quire_kv_pages_pinned", "Cached and evicted last.", stats.pages_pinned)
        yield GaugeMetricFamily("quire_kv_pages_spilled", "In the spill file.", stats.pages_spilled)
        yield CounterMetricFamily("quire_prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_tokens)
        yield CounterMetricFamily("quire_prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_tokens)
        yield CounterMetricFamily("quire_num_preemptions", "Requests put back to the queue.", stats.preemptions)
        kinds = CounterMetricFamily("quire_preemptions_by_kind", "What became of their pages.", labels=["kind"])
        kinds.add_metric(["recompute"], stats.preemptions - stats.preemptions_spilled)
        kinds.add_metric(["spill"], stats.preemptions_spilled)
        yield kinds
        yield CounterMetricFamily("quire_recomputed_tokens", "Lost to preemption.", stats.recomputed_tokens)
        yield CounterMetricFamily("quire_spec_decode_num_draft_tokens", "Guessed and verified.", stats.guessed_tokens)
        yield CounterMetricFamily("quire_spec_decode_num_accepted_tokens", "Of those, right.", stats.right_guesses)
        yield CounterMetricFamily("quire_steps", "Finished steps.", stats.step)


def _by(label: str, name: str, text: str, counts: Mapping[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"quire_{name}", text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family


def _waiting(stats: EngineStats) -> dict[str, int]:
    """Every reason there is, so that a series does not vanish with its last request."""
    return dict.fromkeys(WAITING_REASONS, 0) | stats.waiting_by_reason


def _share(stats: EngineStats) -> float:
    return stats.pages_owned / stats.pages_total if stats.pages_total else 0.0
