"""What a scrape sees: the server's instruments, the engine's own numbers, and both again under foreign names.

It must not know who counts or what a request is. One invariant: the engine is asked once per scrape, and while it
cannot answer only its numbers are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...common.errors import QuireError
from ...engine.facade import EngineStats
from .history import kv_cache_usage
from .instruments import OTHER, Counter, Histogram, LabelledCounter

Mirror = Callable[[Iterable[Metric]], Iterable[Metric]]

WAITING_REASONS = ("sequences", "pages", "latency", "tokens", "quota", "source")


class MetricsCollector(Collector):
    """`info` never changes, `instruments` are read at each scrape, and what `watch` names too."""

    def __init__(self, info: Sequence[Metric], instruments: Sequence[Counter | LabelledCounter | Histogram]) -> None:
        self._info = info
        self._instruments = instruments
        self._stats: Callable[[], EngineStats] | None = None
        self._num_connections: Callable[[], int] | None = None
        self._mirror: Mirror | None = None

    def watch(
        self, stats: Callable[[], EngineStats], num_connections: Callable[[], int] | None, mirror: Mirror | None
    ) -> None:
        self._stats, self._num_connections, self._mirror = stats, num_connections, mirror

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not read an engine that is still starting

    def collect(self) -> Iterator[Metric]:
        families = [*self._info, *self._engine(), *(each.family() for each in self._instruments)]
        if self._num_connections is not None:
            families.append(_gauge("connections", "Open client connections.", self._num_connections()))
        yield from families
        if self._mirror is not None:
            yield from self._mirror(families)

    def _engine(self) -> Iterable[Metric]:
        if self._stats is None:
            return ()
        try:
            return _engine_families(self._stats())
        except QuireError:
            return ()


def _engine_families(stats: EngineStats) -> list[Metric]:
    pages = {"owned": stats.pages_owned, "cached": stats.pages_cached, "free": stats.pages_free}
    kinds = {"recompute": stats.preemptions - stats.preemptions_spilled, "spill": stats.preemptions_spilled}
    return [
        _gauge("num_requests_running", "In the batch.", stats.running),
        _gauge("num_requests_waiting", "In the queue.", stats.waiting),
        _gauges("requests_waiting_by_reason", "What the queue waits for.", "reason", _waiting(stats)),
        _gauge("kv_cache_usage_perc", "Share of pages live requests own, 0 to 1.", kv_cache_usage(stats)),
        _gauges("kv_pages", "KV pages by state; together they are all there are.", "state", pages),
        _gauge("kv_pages_reserved", "Cached or free, kept for somebody.", stats.pages_reserved),
        _gauge("kv_pages_pinned", "Cached and evicted last.", stats.pages_pinned),
        _gauge("kv_pages_spilled", "In the spill file.", stats.pages_spilled),
        _counter("prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries_tokens),
        _counter("prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits_tokens),
        _counter("num_preemptions", "Requests put back to the queue.", stats.preemptions),
        _counters("preemptions_by_kind", "What became of their pages.", "kind", kinds),
        _counter("recomputed_tokens", "Lost to preemption.", stats.recomputed_tokens),
        _counter("spec_decode_num_draft_tokens", "Guessed and verified.", stats.draft_tokens),
        _counter("spec_decode_num_accepted_tokens", "Of those, right.", stats.accepted_draft_tokens),
        _counter("steps", "Finished steps.", stats.step),
        _counter("engine_restarts", "Of engine processes that died or stalled.", stats.restarts),
        _counter("replayed_requests", "Requests that went on in a new engine process.", stats.replayed_requests),
        _counter("quarantined_requests", "Requests refused after two crashes.", stats.quarantined_requests),
    ]


def _waiting(stats: EngineStats) -> dict[str, int]:
    """Every reason there is, so that a series does not vanish with its last request."""
    counts = dict.fromkeys((*WAITING_REASONS, OTHER), 0)
    for reason, count in stats.waiting_by_reason.items():
        counts[reason if reason in counts else OTHER] += count
    return counts


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"quire_{name}", text, value)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"quire_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _labelled(GaugeMetricFamily(f"quire_{name}", text, labels=[label]), values)


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    return _labelled(CounterMetricFamily(f"quire_{name}", text, labels=[label]), values)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, int]) -> Metric:
    for value, count in values.items():
        family.add_metric([value], count)
    return family
