"""`Status`: everything the status page shows, as one frozen struct, `/status.json`.

Its size is bounded: at most `MAX_SHOWN_LIVE` live requests, `NUM_RECENT` ended ones, `MAX_SHOWN_HOSTS` engine hosts and
`TICKS` seconds, and clients' strings are cut. It counts nothing itself. Must not import HTTP.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec
from msgspec import structs

from ...common.errors import QuireError
from ...engine.facade import EngineInfo, EngineStats, HostStatus
from ..models.catalog import ModelCatalog
from .history import History, Quantiles, Tick
from .metrics import Ended, PrometheusObserver

MAX_SHOWN_LIVE = 200
MAX_SHOWN_HOSTS = 200
MAX_NAME_CHARACTERS = 80
MAX_PROBLEM_CHARACTERS = 300  # characters of a host's problem

T = TypeVar("T")


RequestState = Literal["queued", "prefill", "decode"]


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A live request."""

    tenant: str
    request_id: str  # the client's number, unique on its connection; JavaScript's numbers end at 2**53
    age_s: float
    state: RequestState
    prompt_tokens: int | None  # None: not tokenized yet
    prefilled: int | None  # computed prompt tokens; None before the first step
    generated: int


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An ended request and where its time went, in milliseconds; None or 0 for a phase that it did not reach."""

    tenant: str
    ended_s_ago: float
    outcome: str  # the finish reason, or the code of the error
    ok: bool  # the request has a finish reason
    prompt_tokens: int
    cached_tokens: int  # cached tokens of the prompt
    generated: int
    time_to_first_token_ms: float | None
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    stall_ms: float
    e2e_ms: float


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of the last five minutes."""

    time_to_first_token: Quantiles
    inter_token: Quantiles
    e2e: Quantiles
    step: Quantiles


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of requests since the start by how they ended, under the names of the metrics, without zeros."""

    finished: dict[str, int]
    failed: dict[str, int]
    rejected: dict[str, int]
    cancelled: dict[str, int]


class FleetStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The engine hosts of an API server. Sums are over all hosts."""

    num_hosts: dict[str, int]  # state -> number of hosts, without zeros
    bits: dict[str, int]  # bits id -> number of hosts; "": hosts without a connection so far
    moved_requests: int
    hosts: list[HostStatus]  # first the hosts that take no requests, then the busiest


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one server at one moment."""

    model: str
    version: str
    uptime_s: float
    problem: str | None  # reason why requests should go elsewhere now, as in /readyz
    info: EngineInfo | None
    engine: EngineStats | None  # None: the engine does not answer
    fleet: FleetStatus | None  # None: the engine computes on this machine
    connections: int
    batch_size: float | None  # mean of the steps in the last minutes
    requests: list[RequestStatus]  # the oldest, oldest first
    recent: list[EndedRequest]  # the latest, latest first
    latencies: Latencies
    outcomes: Outcomes
    ticks: list[Tick]  # second by second, oldest first


class StatusCollector:
    """Collects the status of one server. `live_requests` returns the oldest live requests, at most its argument."""

    def __init__(
        self,
        models: ModelCatalog,
        observer: PrometheusObserver,
        *,
        problem: Callable[[], str | None],
        num_connections: Callable[[], int],
        live_requests: Callable[[int], Sequence[RequestStatus]],
    ) -> None:
        self._models = models
        self._observer = observer
        self._problem = problem
        self._num_connections = num_connections
        self._live_requests = live_requests
        self._started = time.monotonic()
        self.history = History(models.stats, observer.generation_tokens, observer.prefill_tokens)
        self._windows = {
            "time_to_first_token": self.history.window(observer.time_to_first_token),
            "inter_token": self.history.window(observer.inter_token_latency),
            "e2e": self.history.window(observer.e2e_latency),
            "step": self.history.window(observer.step_duration),
        }
        self._batch_size = self.history.window(observer.batch_size)

    def collect(self) -> Status:
        now_s = time.time()
        return Status(
            model=_cut(", ".join(model.name for model in self._models.models)),
            version=self._observer.version,
            uptime_s=time.monotonic() - self._started,
            problem=self._problem(),
            info=_answer(lambda: self._models.main.info),
            engine=_answer(self._models.stats),
            fleet=_fleet(self._models.host_statuses()),
            connections=self._num_connections(),
            batch_size=self._batch_size.mean(),
            requests=[structs.replace(each, tenant=_cut(each.tenant)) for each in self._live_requests(MAX_SHOWN_LIVE)],
            recent=[_ended(each, now_s) for each in reversed(self._observer.recent)],
            latencies=Latencies(**{name: window.quantiles() for name, window in self._windows.items()}),
            outcomes=self._outcomes(),
            ticks=list(self.history.ticks),
        )

    def _outcomes(self) -> Outcomes:
        observer = self._observer
        return Outcomes(
            finished=_happened(observer.success.counts),
            failed=_happened(observer.failures.counts),
            rejected=_happened(observer.rejections.counts),
            cancelled=_happened(observer.cancelled.counts),
        )


def _fleet(hosts: Sequence[HostStatus] | None) -> FleetStatus | None:
    if hosts is None:
        return None

    def attention(host: HostStatus) -> tuple[bool, int]:
        return host.state == "up", -max(host.requests, 0 if host.engine is None else host.engine.running)

    return FleetStatus(
        num_hosts=dict(Counter(host.state for host in hosts)),
        bits=dict(Counter(host.bits for host in hosts)),
        moved_requests=sum(host.moved_requests for host in hosts),
        hosts=[_shown(host) for host in sorted(hosts, key=attention)[:MAX_SHOWN_HOSTS]],
    )


def _shown(host: HostStatus) -> HostStatus:
    return structs.replace(host, problem=None if host.problem is None else _cut(host.problem, MAX_PROBLEM_CHARACTERS))


def _answer(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except QuireError:
        return None


def _happened(counts: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}


def _ended(ended: Ended, now_s: float) -> EndedRequest:
    stats = ended.stats
    usage = ended.stats.usage
    first_token_s = stats.time_to_first_token_s
    return EndedRequest(
        tenant=_cut(stats.tenant),
        ended_s_ago=max(0.0, now_s - ended.at_s),
        outcome=stats.finish_reason or (stats.error.code.lower() if stats.error else "unknown"),
        ok=stats.finish_reason is not None,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=usage.cached_tokens if usage else 0,
        generated=usage.completion_tokens if usage else 0,
        time_to_first_token_ms=None if first_token_s is None else first_token_s * 1000,
        queue_ms=usage.queue_ms if usage else 0.0,
        prefill_ms=usage.prefill_ms if usage else 0.0,
        decode_ms=usage.decode_ms if usage else 0.0,
        stall_ms=usage.stall_ms if usage else 0.0,
        e2e_ms=stats.e2e_s * 1000,
    )


def _cut(text: str, max_characters: int = MAX_NAME_CHARACTERS) -> str:
    return text if len(text) <= max_characters else f"{text[:max_characters]}…"
