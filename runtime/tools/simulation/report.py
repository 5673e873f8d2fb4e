"""The figures of a simulation: latencies, throughput, goodput, fairness, recomputed tokens, memory.

A refused request counts as offered, never as served. The latencies have vLLM's names: TTFT, time to first token; ITL,
time between two tokens; TPOT, the mean of a request's ITLs; E2E, time to the last token.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..checks import parse_goodput
from ..percentiles import LatencySummary, percentile
from .fleet import Fleet
from .simulator import RequestOutcome, Simulator

ITL_PERCENTILE = 99  # percentile of a request's inter-token latencies, compared with its objective


@dataclass(frozen=True, slots=True)
class LatencyObjective:
    """A request is good if its `metric` (ttft, tpot, itl or e2el) is at most `limit_ms`."""

    metric: str
    limit_ms: float

    def is_met(self, outcome: RequestOutcome) -> bool:
        return _METRICS[self.metric](outcome) * 1000 <= self.limit_ms


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """The figures of one tenant."""

    offered: int
    finished: int
    served_tokens: int  # prompt and output, until the last arrival
    ttft_ms: LatencySummary | None


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """The part of the report about the hosts of a fleet."""

    hosts: int
    routing: str
    api_servers: int
    ideal_cached_share: float  # share of the prompt tokens in a common cache of all hosts without eviction
    mean_requests: float  # sent to a host
    most_requests: int
    fewest_requests: int
    lost_hosts: int
    moved_requests: int  # times that a request continued on another host


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The figures of a simulation. A latency is None where no request has one."""

    offered: int
    finished: int
    refused: dict[str, int]  # error -> requests
    duration_s: float  # time from the first arrival to the last token
    prompt_tokens: int  # prompt tokens of requests that finished
    output_tokens: int
    request_throughput: float  # per second
    output_throughput: float
    total_throughput: float  # prompt tokens too
    ttft_ms: LatencySummary | None
    itl_ms: LatencySummary | None
    tpot_ms: LatencySummary | None
    e2e_ms: LatencySummary | None
    queue_ms: LatencySummary | None
    objectives: dict[str, float]  # milliseconds
    goodput: float  # requests per second that met all objectives
    goodput_share: float  # share of the requests offered
    fairness: float  # Jain's index, see `fairness_index`
    steps: int
    preemptions: int
    spilled: int  # preemptions whose pages went to disk instead of being recomputed
    wasted_share: float  # share of the tokens computed: recomputed after a preemption or the loss of a host
    cached_share: float  # share of the prompt tokens: found in the prefix cache
    pool_mean: float  # share of the pages in use, mean over time
    pool_max: float
    most_waiting: int
    tenants: dict[str, TenantFigures]
    fleet: FleetFigures | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    simulator: Simulator | Fleet,
    objectives: Sequence[LatencyObjective] = (),
    weights: Mapping[str, float] | None = None,
) -> SimulationReport:
    """Compute the figures. `weights` are the relative shares of tenants, 1 by default."""
    outcomes = simulator.outcomes
    hosts = simulator.hosts
    finished = [outcome for outcome in outcomes if outcome.finished]
    started = [outcome for outcome in outcomes if outcome.token_times]
    duration_s = _span(outcomes)
    good = sum(all(objective.is_met(outcome) for objective in objectives) for outcome in finished)
    prompt_tokens = sum(outcome.arrival.prompt_tokens for outcome in finished)
    output_tokens = sum(len(outcome.token_times) for outcome in finished)
    page_seconds = sum(host.pager.pool.num_pages * (host.clock.now - host.started_s) for host in hosts)
    tenants = _by_tenant(outcomes)
    served = {tenant: _tokens_served(each, _last_arrival(outcomes)) for tenant, each in tenants.items()}
    return SimulationReport(
        offered=len(outcomes),
        finished=len(finished),
        refused=dict(sorted(Counter(outcome.refused for outcome in outcomes if outcome.refused).items())),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_throughput=_ratio(len(finished), duration_s),
        output_throughput=_ratio(output_tokens, duration_s),
        total_throughput=_ratio(prompt_tokens + output_tokens, duration_s),
        ttft_ms=LatencySummary.of(outcome.ttft_s for outcome in started),
        itl_ms=LatencySummary.of(seconds for outcome in started for seconds in outcome.itl_s),
        tpot_ms=LatencySummary.of(outcome.tpot_s for outcome in finished if len(outcome.token_times) > 1),
        e2e_ms=LatencySummary.of(outcome.e2e_s for outcome in finished),
        queue_ms=LatencySummary.of(outcome.queue_s for outcome in finished),
        objectives={objective.metric: objective.limit_ms for objective in objectives},
        goodput=_ratio(good, duration_s),
        goodput_share=_ratio(good, len(outcomes)),
        fairness=fairness_index(served, {tenant: _tokens_asked(each) for tenant, each in tenants.items()}, weights),
        steps=sum(host.num_steps for host in hosts),
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        spilled=sum(host.scheduler.stats().preemptions_spilled for host in hosts),
        wasted_share=_ratio(
            sum(outcome.recomputed_tokens for outcome in outcomes), sum(host.computed_tokens for host in hosts)
        ),
        cached_share=_ratio(sum(outcome.cached_tokens for outcome in finished), prompt_tokens),
        pool_mean=_ratio(sum(host.owned_page_seconds for host in hosts), page_seconds),
        pool_max=max(host.max_pages_owned / host.pager.pool.num_pages for host in hosts),
        most_waiting=max(host.max_waiting for host in hosts),
        tenants={
            tenant: TenantFigures(
                offered=len(each),
                finished=sum(outcome.finished for outcome in each),
                served_tokens=served[tenant],
                ttft_ms=LatencySummary.of(outcome.ttft_s for outcome in each if outcome.token_times),
            )
            for tenant, each in tenants.items()
        },
        fleet=_fleet_figures(simulator) if isinstance(simulator, Fleet) else None,
    )


def ideal_cached_tokens(outcomes: Iterable[RequestOutcome], page_size: int) -> int:
    """Return the prompt tokens of finished requests that a cache without eviction would have had, in full pages.

    The requests are in the order of their arrival, and each is in the cache when the next arrives.
    """
    total = 0
    seen: set[tuple[str, int]] = set()  # tenants and blocks
    for outcome in outcomes:
        arrival = outcome.arrival
        known = 0
        for block in arrival.blocks:
            if (arrival.tenant, block) not in seen:
                break
            known += arrival.block_tokens
        seen.update((arrival.tenant, block) for block in arrival.blocks)
        known = min(max(known, arrival.history_tokens - 1), arrival.prompt_tokens - 1)  # the last token is computed
        total += known // page_size * page_size if outcome.finished else 0
    return total


def _fleet_figures(fleet: Fleet) -> FleetFigures:
    finished = [outcome for outcome in fleet.outcomes if outcome.finished]
    counts = fleet.requests_of.values()
    return FleetFigures(
        hosts=fleet.options.hosts,
        routing=fleet.options.routing,
        api_servers=fleet.options.api_servers,
        ideal_cached_share=_ratio(
            ideal_cached_tokens(fleet.outcomes, fleet.hosts[0].pager.page_size),
            sum(outcome.arrival.prompt_tokens for outcome in finished),
        ),
        mean_requests=sum(counts) / fleet.options.hosts,
        most_requests=max(counts),
        fewest_requests=min(counts),
        lost_hosts=fleet.num_lost,
        moved_requests=sum(outcome.num_moves for outcome in fleet.outcomes),
    )


def fairness_index(
    served: Mapping[str, float], asked: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> float:
    """Return Jain's index of each tenant's service relative to its max-min fair share of the total; 1 is fair.

    A fair share is at most the tenant's demand; the rest goes to the other tenants by `weights`. So a heavy tenant gets
    the remainder, and a light tenant that waits lowers the index.
    """
    fair = _max_min_shares(sum(served.values()), asked, weights or {})
    ratios = [served[tenant] / share for tenant, share in fair.items() if share > 0]
    squares = sum(ratio * ratio for ratio in ratios)
    return sum(ratios) ** 2 / (len(ratios) * squares) if squares else 1.0


def parse_objectives(texts: Sequence[str]) -> tuple[LatencyObjective, ...]:
    """Parse objectives in milliseconds, such as `ttft:2000 itl:200`. Raises ConfigError."""
    return tuple(LatencyObjective(metric, limit_ms) for metric, limit_ms in parse_goodput(texts, _METRICS).items())


def _itl_s(outcome: RequestOutcome) -> float:
    return percentile(outcome.itl_s, ITL_PERCENTILE) if len(outcome.token_times) > 1 else 0.0


_METRICS: dict[str, Callable[[RequestOutcome], float]] = {
    "ttft": lambda outcome: outcome.ttft_s,
    "tpot": lambda outcome: outcome.tpot_s if len(outcome.token_times) > 1 else 0.0,
    "itl": _itl_s,
    "e2el": lambda outcome: outcome.e2e_s,
}


def _span(outcomes: Sequence[RequestOutcome]) -> float:
    """Return the seconds from the first arrival to the last token."""
    ends = [outcome.token_times[-1] for outcome in outcomes if outcome.token_times]
    return max(ends) - outcomes[0].arrival.time_s if ends else 0.0


def _last_arrival(outcomes: Sequence[RequestOutcome]) -> float:
    return outcomes[-1].arrival.time_s if outcomes else 0.0


def _by_tenant(outcomes: Sequence[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    tenants: defaultdict[str, list[RequestOutcome]] = defaultdict(list)
    for outcome in outcomes:
        tenants[outcome.arrival.tenant].append(outcome)
    return dict(sorted(tenants.items()))


def _tokens_asked(outcomes: Sequence[RequestOutcome]) -> int:
    return sum(outcome.arrival.prompt_tokens + outcome.arrival.output_tokens for outcome in outcomes)


def _tokens_served(outcomes: Sequence[RequestOutcome], until: float) -> int:
    """Count the output tokens up to `until` and their prompts: after the last arrival the scheduler has no choice."""
    served = 0
    for outcome in outcomes:
        output = sum(time <= until for time in outcome.token_times)
        served += output + (outcome.arrival.prompt_tokens if output else 0)
    return served


def _max_min_shares(total: float, asked: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Compute max-min fair shares by water-filling: tenants with the least demand per weight come first."""
    shares = {}
    weight_left = sum(weights.get(tenant, 1.0) for tenant in asked)
    for tenant in sorted(asked, key=lambda tenant: asked[tenant] / weights.get(tenant, 1.0)):
        weight = weights.get(tenant, 1.0)
        shares[tenant] = min(asked[tenant], total * weight / weight_left)
        total -= shares[tenant]
        weight_left -= weight
    return shares


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
