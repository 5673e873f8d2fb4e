"""`PrometheusObserver`: the metrics of one server, counted by an engine observer, and the registry that exposes them.

Names are `quire_` plus vLLM's suffixes, with vLLM's buckets, so that dashboards can be ported. Every label has a small,
bounded set of values. Must not import sockets or HTTP.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import InfoMetricFamily

from ...common.errors import QuireError
from ...common.types import FinishReason, Usage
from ...engine.facade import EmbedStats, EngineStats, RequestStats, StepStats
from ...net.acceptor import RefusalCause
from ..models.residency import Residency
from .collector import ClientLoad, HostStatuses, MetricsCollector, Mirror
from .history import FINE_BOUNDS_S
from .instruments import Counter, Histogram, LabeledCounter, TenantCounter

CancelCause = Literal["client", "disconnect", "slow_reader", "shutdown"]

NUM_RECENT = 50  # ended requests that are kept for the status page

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
BATCH_SIZE_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


INSTRUMENTS = Counter | LabeledCounter | TenantCounter | Histogram


class Ended(NamedTuple):
    """A request that ended, and the time of its end in seconds since the epoch."""

    at_s: float
    stats: RequestStats


class PrometheusObserver:
    """One server's metrics, in a registry of their own. The arguments go into the info metrics."""

    def __init__(
        self, version: str = "unknown", isa: str = "unknown", threads: int = 0, threads_reason: str = "unknown"
    ) -> None:
        self.version = version
        self.recent: deque[Ended] = deque(maxlen=NUM_RECENT)
        self._make_counters()
        self._make_histograms()
        cpu = {"isa": isa, "threads": str(threads), "threads_reason": threads_reason}
        build = InfoMetricFamily(
            "quire_build", "The version of Quire as a label; the value is 1.", value={"version": version}
        )
        kernels = InfoMetricFamily(
            "quire_cpu",
            "The ISA level and the number of threads of the kernels, and why there are N threads, as labels.",
            value=cpu,
        )
        instruments = [each for each in vars(self).values() if isinstance(each, INSTRUMENTS)]
        self._collector = MetricsCollector((build, kernels), instruments)
        self.registry = CollectorRegistry()
        self.registry.register(self._collector)

    def watch(
        self,
        stats: Callable[[], EngineStats],
        clients: Callable[[], ClientLoad] | None = None,
        mirror: Mirror | None = None,
        hosts: HostStatuses | None = None,
        residency: Residency | None = None,
    ) -> None:
        """Read gauges from `stats`, `clients`, `hosts` and `residency` at each scrape.

        `mirror` renames all metrics once more.
        """
        self._collector.watch(stats, clients, mirror, hosts, residency)

    # EngineObserver

    def on_step(self, stats: StepStats) -> None:
        self.step_duration.observe(stats.duration_s)
        self.batch_size.observe(len(stats.context_tokens))
        self.prefill_tokens.value += stats.prefill_tokens

    def on_tokens(self, count: int, since_last_s: float | None) -> None:
        self.generation_tokens.value += count
        if since_last_s is not None:
            self.inter_token_latency.observe(since_last_s)

    def on_rejected(self, error: QuireError) -> None:
        self.rejections.add(error.code.lower())

    def on_finished(self, stats: RequestStats) -> None:
        self.recent.append(Ended(time.time(), stats))
        self.prompt_tokens.value += stats.prompt_tokens
        self.request_prompt_tokens.observe(stats.prompt_tokens)
        self.e2e_latency.observe(stats.e2e_s, stats.trace_id)
        if stats.time_to_first_token_s is not None:
            self.time_to_first_token.observe(stats.time_to_first_token_s, stats.trace_id)
        if stats.time_per_output_token_s is not None:
            self.time_per_output_token.observe(stats.time_per_output_token_s, stats.trace_id)
        if stats.finish_reason is not None:
            self.success.add(stats.finish_reason)
        if stats.error is not None:
            self.failures.add(stats.error.code.lower())
        if stats.usage is not None:
            self._observe_usage(stats.usage, stats.trace_id)

    def on_embedded(self, stats: EmbedStats) -> None:
        self.embed_requests.add(stats.kind)
        self.embed_latency.observe(stats.e2e_s)
        self.embed_texts.observe(stats.num_texts)
        if stats.error is not None:
            self.failures.add(stats.error.code.lower())

    # The server's own

    def on_cancelled(self, cause: CancelCause) -> None:
        self.cancelled.add(cause)

    def on_refused(self, tenant: str, code: str) -> None:
        self.refused_requests.add(tenant, code.lower())

    def on_connection_refused(self, cause: RefusalCause) -> None:
        self.connections_refused.add(cause)

    def _observe_usage(self, usage: Usage, trace_id: str) -> None:
        self.prompt_tokens_cached.value += usage.cached_tokens
        self.request_cached_tokens.observe(usage.cached_tokens)
        self.request_generation_tokens.observe(usage.completion_tokens)
        self.queue_time.observe(usage.queue_ms / 1000, trace_id)
        self.prefill_time.observe(usage.prefill_ms / 1000, trace_id)
        self.decode_time.observe(usage.decode_ms / 1000, trace_id)

    def _make_counters(self) -> None:
        codes = sorted(error_codes())
        self.generation_tokens = Counter("generation_tokens", "Tokens that were generated, of all requests.")
        self.prompt_tokens = Counter("prompt_tokens", "Prompt tokens of requests that have ended.")
        self.prompt_tokens_cached = Counter(
            "prompt_tokens_cached", "Prompt tokens of ended requests that were found in the prefix cache."
        )
        self.prefill_tokens = Counter("prefill_tokens", "Prompt tokens that prefill has computed, without cached ones.")
        self.success = LabeledCounter(
            "request_success", "Requests that finished, by finish reason.", "finished_reason", get_args(FinishReason)
        )
        self.failures = LabeledCounter(
            "request_failures", "Accepted requests that ended with an error, by its code.", "code", codes
        )
        self.rejections = LabeledCounter(
            "admission_rejections",
            "Requests refused by a limit, the queue or validation; not duplicate ids, failed RESUME or TOKENIZE.",
            "reason",
            codes,
        )
        self.embed_requests = LabeledCounter(
            "embed_requests",
            "Ended requests to embed, score or classify texts, also failed and cancelled ones.",
            "kind",
            ("embed", "score", "classify"),
        )
        self.cancelled = LabeledCounter(
            "cancelled", "Requests that the server cancelled, by cause.", "cause", get_args(CancelCause)
        )
        self.refused_requests = TenantCounter(
            "refused_requests",
            "All requests refused before they ran, by tenant: admission rejections, duplicate ids, failed RESUME "
            "or TOKENIZE.",
            "reason",
            [*codes, "already_exists"],
        )
        self.resumed_streams = Counter("resumed_streams", "Streams that another connection read on; not requests.")
        self.idempotent_replays = Counter(
            "idempotent_replays", "Requests that an earlier request with their idempotency key answered; not run."
        )
        self.http_unknown_fields = Counter(
            "http_unknown_fields", "Fields of HTTP requests that this server does not know and ignored."
        )
        self.connections_refused = LabeledCounter(
            "connections_refused",
            "Connections closed before HELLO: too many, too many pending, failed TLS handshake, no descriptor left.",
            "cause",
            get_args(RefusalCause),
        )

    def _make_histograms(self) -> None:
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds",
            "Seconds from the submission of a request to its first token.",
            TIME_TO_FIRST_TOKEN_BUCKETS,
            FINE_BOUNDS_S,
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds",
            "Seconds between two tokens of one request.",
            TOKEN_LATENCY_BUCKETS,
            FINE_BOUNDS_S,
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean seconds per token of one request after its first token.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_latency = Histogram(
            "e2e_request_latency_seconds",
            "Seconds from the submission of a request to its end.",
            REQUEST_TIME_BUCKETS,
            FINE_BOUNDS_S,
        )
        self.queue_time = Histogram(
            "request_queue_time_seconds", "Seconds that a request waited in the queue.", REQUEST_TIME_BUCKETS
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "Seconds that the prefill of a request took.", REQUEST_TIME_BUCKETS
        )
        self.decode_time = Histogram(
            "request_decode_time_seconds", "Seconds that the decode of a request took.", REQUEST_TIME_BUCKETS
        )
        self.request_cached_tokens = Histogram(
            "request_prompt_tokens_cached",
            "Prompt tokens of one request that were found in the prefix cache: the depth of its hit.",
            TOKEN_COUNT_BUCKETS,
        )
        self.request_prompt_tokens = Histogram(
            "request_prompt_tokens", "Prompt tokens of one request.", TOKEN_COUNT_BUCKETS
        )
        self.request_generation_tokens = Histogram(
            "request_generation_tokens", "Generated tokens of one request.", TOKEN_COUNT_BUCKETS
        )
        self.embed_latency = Histogram(
            "embed_latency_seconds",
            "Seconds from the submission of a request to embed or score to its end.",
            REQUEST_TIME_BUCKETS,
        )
        self.embed_texts = Histogram(
            "embed_request_texts", "Texts of one request to embed or score whose values were read.", TOKEN_COUNT_BUCKETS
        )
        self.step_duration = Histogram(
            "step_duration_seconds", "Seconds that an engine step took.", STEP_DURATION_BUCKETS, FINE_BOUNDS_S
        )
        self.batch_size = Histogram("batch_size", "Sequences that an engine step computed.", BATCH_SIZE_BUCKETS)


def error_codes(root: type[QuireError] = QuireError) -> set[str]:
    """Return every code of the tree in `errors.py`, in lower case."""
    return {root.code.lower()}.union(*(error_codes(each) for each in root.__subclasses__()))
