"""`MetricsCollector`: the source of a scrape: the server's instruments and the engine's statistics.

Each scrape queries the engine once. While the engine does not answer, only the engine's metrics are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from ...common.config import MAX_DRAFT_TOKENS
from ...common.errors import QuireError
from ...engine.facade import EngineStats, HostStatus
from ..models.residency import Residency
from .history import kv_cache_usage
from .instruments import OTHER, Counter, Histogram, LabeledCounter, TenantCounter

Mirror = Callable[[Iterable[Metric]], Iterable[Metric]]
HostStatuses = Callable[[], Sequence[HostStatus] | None]

WAITING_REASONS = ("sequences", "pages", "latency", "tokens", "quota", "fork")
DRAFT_SOURCES = ("prompt", "suffix", "model", "head", "forced")
DRAFT_POSITIONS = tuple(str(position) for position in range(MAX_DRAFT_TOKENS))


class ClientLoad(NamedTuple):
    """The bytes that the API server process holds for clients now."""

    num_connections: int
    held_bytes: Mapping[str, int]  # purpose -> bytes, as in `MemoryLimits`


class MetricsCollector(Collector):
    """Exposes `info`, which never changes, and at each scrape `instruments` and the sources given to `watch`."""

    def __init__(
        self, info: Sequence[Metric], instruments: Sequence[Counter | LabeledCounter | TenantCounter | Histogram]
    ) -> None:
        self._info = info
        self._instruments = instruments
        self._stats: Callable[[], EngineStats] | None = None
        self._clients: Callable[[], ClientLoad] | None = None
        self._mirror: Mirror | None = None
        self._hosts: HostStatuses | None = None
        self._residency: Residency | None = None

    def watch(
        self,
        stats: Callable[[], EngineStats],
        clients: Callable[[], ClientLoad] | None,
        mirror: Mirror | None,
        hosts: HostStatuses | None,
        residency: Residency | None = None,
    ) -> None:
        """Read `stats`, `clients`, `hosts` and `residency` at each scrape; `mirror` returns more families from all."""
        self._stats = stats
        self._clients = clients
        self._mirror = mirror
        self._hosts = hosts
        self._residency = residency

    def describe(self) -> Iterable[Metric]:
        return []  # registering must not read an engine that is still starting

    def collect(self) -> Iterator[Metric]:
        families = [*self._info, *self._engine(), *(each.family() for each in self._instruments)]
        if self._clients is not None:
            clients = self._clients()
            families += (
                _gauge("connections", "Client connections that are open.", clients.num_connections),
                _gauges("client_memory_bytes", "Bytes held for clients, by purpose.", "purpose", clients.held_bytes),
            )
        if self._hosts is not None and (hosts := self._hosts()) is not None:
            families += _host_families(hosts)
        if self._residency is not None and self._residency.residents:
            families += _model_families(self._residency)
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
    running = stats.states_total - stats.states_cached - stats.states_free
    states = {"running": running, "cached": stats.states_cached, "free": stats.states_free}
    kinds = {"recompute": stats.preemptions - stats.preemptions_spilled, "spill": stats.preemptions_spilled}
    return [
        _gauge("num_requests_running", "Requests that are in the running batch.", stats.running),
        _gauge("num_requests_waiting", "Requests that wait in the queue.", stats.waiting),
        _gauges(
            "requests_waiting_by_reason",
            "Queued requests, by the resource that they wait for.",
            "reason",
            _known(WAITING_REASONS, stats.waiting_by_reason),
        ),
        _gauge(
            "kv_cache_usage_perc", "Share of the KV pages that live requests own, from 0 to 1.", kv_cache_usage(stats)
        ),
        _gauges("kv_pages", "KV pages by state; the states add up to the pool.", "state", pages),
        _gauge("kv_pages_reserved", "Cached or free pages reserved for running requests.", stats.pages_reserved),
        _gauge("kv_pages_pinned", "Cached pages that are evicted last.", stats.pages_pinned),
        _gauge("kv_pages_spilled", "KV pages that are in the spill file.", stats.pages_spilled),
        _gauges("states", "Slots for states of sequences, by use.", "use", states),
        _gauge("states_spilled", "States that are in the spill file.", stats.states_spilled),
        _gauge("states_cached_bytes", "Bytes of the states that the prefix cache keeps.", stats.states_cached_bytes),
        _counter(
            "prefix_cache_queries",
            "Prompt tokens that were looked up in the prefix cache.",
            stats.prefix_queries_tokens,
        ),
        _counter("prefix_cache_hits", "Prompt tokens that were found in the prefix cache.", stats.prefix_hits_tokens),
        _counter("states_kept", "States that the prefix cache has kept.", stats.states_kept),
        _counter("state_hits", "Prompts that continued from a kept state.", stats.state_hits),
        _counter(
            "stateless_tokens",
            "Prompt tokens that were computed again because the prefix cache had their pages, but no state.",
            stats.stateless_tokens,
        ),
        _counter("state_copies", "States that were copied because two owners shared a slot.", stats.state_copies),
        _counter("num_preemptions", "Times that a running request was put back into the queue.", stats.preemptions),
        _counters(
            "preemptions_by_kind",
            "Preemptions, by how the pages come back: computed again or read from the spill file.",
            "kind",
            kinds,
        ),
        _counter("recomputed_tokens", "Tokens that were computed again after a preemption.", stats.recomputed_tokens),
        _counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.", stats.draft_tokens),
        _counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted_draft_tokens),
        _counters(
            "spec_decode_draft_tokens_by_source",
            "Draft tokens that were verified, by their source: prompt, suffix, model, head, or forced by a grammar or "
            "the client.",
            "source",
            _known(DRAFT_SOURCES, stats.drafted_by_source),
        ),
        _counters(
            "spec_decode_accepted_tokens_by_source",
            "Draft tokens that were accepted, by their source.",
            "source",
            _known(DRAFT_SOURCES, stats.accepted_by_source),
        ),
        _counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that were accepted and not forced, by their position in the draft, from 0.",
            "position",
            _known(DRAFT_POSITIONS, stats.accepted_by_position),
        ),
        _counter("steps", "Engine steps that have finished.", stats.step),
        _counter(
            "steps_over_itl_target",
            "Steps since decoding alone was predicted to exceed the inter-token target, until it falls to 90 % of it.",
            stats.steps_over_itl_target,
        ),
        _gauge(
            "num_encodings_running", "Parts of requests to embed or score that are in a batch.", stats.encoder_running
        ),
        _gauge(
            "num_encodings_waiting",
            "Parts of requests to embed or score that wait in the queue.",
            stats.encoder_waiting,
        ),
        _counter("encoded_texts", "Texts that were embedded or scored.", stats.encoded_texts),
        _counter("encoded_tokens", "Tokens of texts that were embedded or scored.", stats.encoded_tokens),
        _counter("encoded_images", "Images that a vision tower computed.", stats.encoded_images),
        _counter("image_cache_hits", "Parts of prompts whose image was in the image cache.", stats.image_cache_hits),
        _counter(
            "engine_restarts",
            "Engine processes that were started in place of one that died or stalled.",
            stats.restarts,
        ),
        _counter("replayed_requests", "Requests that went on in a new engine process.", stats.replayed_requests),
        _counter(
            "quarantined_requests",
            "Requests that were ended after they crashed the engine twice.",
            stats.quarantined_requests,
        ),
    ]


def _host_families(hosts: Sequence[HostStatus]) -> list[Metric]:
    """Return the metrics of engine hosts. A host that is down has the counters of this API server only."""
    info = InfoMetricFamily("quire_host", "The ISA level and the bits id of an engine host as labels.", labels=["host"])
    for host in hosts:
        info.add_metric([host.address], {"bits": host.bits, "isa": host.isa})
    here = {host.address: host for host in hosts}
    there = {host.address: host.engine for host in hosts if host.engine is not None}
    waits = {host.address: host.predicted_wait_s for host in hosts if host.engine is not None}
    wait = _gauges(
        "host_predicted_wait_seconds", "Seconds that a new request is predicted to wait at the host.", "host", waits
    )
    return [info, wait, *_families_of_this_server(here), *_families_of_hosts(there)]


def _families_of_this_server(hosts: Mapping[str, HostStatus]) -> list[Metric]:
    up = {name: host.state == "up" for name, host in hosts.items()}
    requests = {name: host.requests for name, host in hosts.items()}
    moved = {name: host.moved_requests for name, host in hosts.items()}
    return [
        _gauges("host_up", "1 if the host takes requests of this server, else 0.", "host", up),
        _gauges("host_requests", "This server's requests at the host.", "host", requests),
        _counters("host_moved_requests", "This server's requests that went on at another host.", "host", moved),
    ]


def _families_of_hosts(engines: Mapping[str, EngineStats]) -> list[Metric]:
    """Return the metrics that the hosts report, of the requests of all API servers."""
    pages = GaugeMetricFamily("quire_host_kv_pages", "KV pages of the host by state.", labels=["host", "state"])
    for name, stats in engines.items():
        for state, count in (("owned", stats.pages_owned), ("cached", stats.pages_cached), ("free", stats.pages_free)):
            pages.add_metric([name, state], count)
    running = {name: stats.running + stats.encoder_running for name, stats in engines.items()}
    waiting = {name: stats.waiting + stats.encoder_waiting for name, stats in engines.items()}
    queries = {name: stats.prefix_queries_tokens for name, stats in engines.items()}
    hits = {name: stats.prefix_hits_tokens for name, stats in engines.items()}
    replayed = {name: stats.replayed_requests for name, stats in engines.items()}
    restarts = {name: stats.restarts for name, stats in engines.items()}
    return [
        pages,
        _gauges("host_running", "Requests that are in the host's batches.", "host", running),
        _gauges("host_waiting", "Requests that wait in the host's queues.", "host", waiting),
        _counters(
            "host_prefix_cache_queries",
            "Prompt tokens that were looked up in the host's prefix cache.",
            "host",
            queries,
        ),
        _counters("host_prefix_cache_hits", "Prompt tokens that were found in the host's prefix cache.", "host", hits),
        _counters(
            "host_replayed_requests", "Requests that went on at the host after another engine.", "host", replayed
        ),
        _counters(
            "host_engine_restarts",
            "Engine processes of the host that were started again, and new connections to it.",
            "host",
            restarts,
        ),
    ]


def _model_families(residency: Residency) -> list[Metric]:
    models = residency.statuses()
    counts = {
        "model_loads": ("Times that a model was loaded.", {each.name: each.loads for each in models}),
        "model_evictions": (
            "Times that a model was unloaded to make room for another one.",
            {each.name: each.evictions for each in models},
        ),
        "model_idle_unloads": (
            "Times that a model was unloaded because it was idle.",
            {each.name: each.idle_unloads for each in models},
        ),
        "model_waits": ("Requests that waited for a model to be loaded.", {each.name: each.waits for each in models}),
        "model_refusals": (
            "Requests that were refused because their model was not loaded in time.",
            {each.name: each.refusals for each in models},
        ),
    }
    families = [_counters(name, text, "model", values) for name, (text, values) in counts.items()]
    loaded = {each.name: int(each.state in ("ready", "draining")) for each in models}
    load_s = {each.name: each.load_s for each in models if each.load_s is not None}
    families += [
        _gauges("model_loaded", "Whether a model is loaded: 1 or 0.", "model", loaded),
        _gauges("model_load_seconds", "Duration of the last load of a model.", "model", load_s),
        _gauge("models_memory_used_bytes", "Memory that loaded models take, as planned.", residency.used_bytes),
    ]
    if residency.memory_bytes is not None:
        families.append(
            _gauge("models_memory_limit_bytes", "Memory for all loaded models together.", residency.memory_bytes)
        )
    return families


def _known(names: Sequence[str], counts: Mapping[str, int]) -> dict[str, int]:
    """Return the count of every known name, so that its series is always there; all other names count as `OTHER`."""
    known = dict.fromkeys((*names, OTHER), 0)
    for name, count in counts.items():
        known[name if name in known else OTHER] += count
    return known


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"quire_{name}", text, value)


def _counter(name: str, text: str, value: int) -> Metric:
    return CounterMetricFamily(f"quire_{name}", text, value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labeled(GaugeMetricFamily(f"quire_{name}", text, labels=[label]), values)


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    return _labeled(CounterMetricFamily(f"quire_{name}", text, labels=[label]), values)


def _labeled(family: GaugeMetricFamily | CounterMetricFamily, values: Mapping[str, float]) -> Metric:
    for value, count in values.items():
        family.add_metric([value], count)
    return family
