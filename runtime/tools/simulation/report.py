"""What a simulation showed, in figures: latencies, throughput, goodput, fairness, waste, memory.

It must not simulate or print. One invariant: the same outcomes give the same figures; a request that was refused counts
in what was offered, and never as served.

Names are vLLM's: TTFT, time to first token; ITL, between two tokens; TPOT, a request's mean of those; E2E, to the last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..traffic import parse_goodput
from .simulator import Outcome, Simulator

ITL_PERCENTILE = 99  # of a request's own inter-token latencies, held against its objective


@dataclass(frozen=True, slots=True)
class Distribution:
    """Milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Objective:
    """A request is good if `metric` (ttft, tpot, itl or e2el) is at most `limit_ms`."""

    metric: str
    limit_ms: float

    def is_met(self, outcome: Outcome) -> bool:
        return _METRICS[self.metric](outcome) * 1000 <= self.limit_ms


@dataclass(frozen=True, slots=True)
class TenantReport:
    offered: int
    finished: int
    served_tokens: int  # prompt and output, while requests kept arriving
    ttft_ms: Distribution | None


@dataclass(frozen=True, slots=True)
class Report:
    """Of a whole simulation. A distribution is None where nothing was measured."""

    offered: int
    finished: int
    refused: dict[str, int]  # by error
    duration_s: float  # from the first arrival to the last token
    prompt_tokens: int  # of requests that finished
    output_tokens: int
    request_throughput: float  # per second
    output_throughput: float
    total_throughput: float  # prompt tokens too
    ttft_ms: Distribution | None
    itl_ms: Distribution | None
    tpot_ms: Distribution | None
    e2e_ms: Distribution | None
    queue_ms: Distribution | None
    objectives: dict[str, float]  # milliseconds
    goodput: float  # requests per second that met all objectives
    goodput_share: float  # of those offered
    fairness: float  # Jain's index, see `fairness_index`
    steps: int
    preemptions: int
    spilled: int  # of them: the pages were kept, not computed again
    wasted_share: float  # of the tokens computed: those computed before, and lost in a preemption
    cached_share: float  # of the prompt tokens: found in the prefix cache
    pool_mean: float  # share of the pages in use, over time
    pool_max: float
    most_waiting: int
    tenants: dict[str, TenantReport]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize(
    simulator: Simulator, objectives: Sequence[Objective] = (), weights: Mapping[str, float] | None = None
) -> Report:
    """`weights` are what tenants are entitled to relative to each other, 1 by default."""
    outcomes = simulator.outcomes
    finished = [outcome for outcome in outcomes if outcome.finished]
    started = [outcome for outcome in outcomes if outcome.token_times]
    duration_s = _span(outcomes)
    good = sum(all(objective.is_met(outcome) for objective in objectives) for outcome in finished)
    prompt_tokens = sum(outcome.arrival.prompt_tokens for outcome in finished)
    output_tokens = sum(len(outcome.token_times) for outcome in finished)
    pages, busy_s = simulator.pager.num_pages, simulator.clock.now
    tenants = _by_tenant(outcomes)
    served = {tenant: _tokens_served(each, _last_arrival(outcomes)) for tenant, each in tenants.items()}
    return Report(
        offered=len(outcomes),
        finished=len(finished),
        refused=dict(sorted(Counter(outcome.refused for outcome in outcomes if outcome.refused).items())),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        request_throughput=_ratio(len(finished), duration_s),
        output_throughput=_ratio(output_tokens, duration_s),
        total_throughput=_ratio(prompt_tokens + output_tokens, duration_s),
        ttft_ms=distribution(outcome.ttft_s for outcome in started),
        itl_ms=distribution(seconds for outcome in started for seconds in outcome.itl_s),
        tpot_ms=distribution(outcome.tpot_s for outcome in finished if len(outcome.token_times) > 1),
        e2e_ms=distribution(outcome.e2e_s for outcome in finished),
        queue_ms=distribution(outcome.queue_s for outcome in finished),
        objectives={objective.metric: objective.limit_ms for objective in objectives},
        goodput=_ratio(good, duration_s),
        goodput_share=_ratio(good, len(outcomes)),
        fairness=fairness_index(served, {tenant: _tokens_asked(each) for tenant, each in tenants.items()}, weights),
        steps=simulator.num_steps,
        preemptions=sum(outcome.preemptions for outcome in outcomes),
        spilled=simulator.scheduler.stats().preemptions_spilled,
        wasted_share=_ratio(sum(outcome.recomputed_tokens for outcome in outcomes), simulator.computed_tokens),
        cached_share=_ratio(sum(outcome.cached_tokens for outcome in finished), prompt_tokens),
        pool_mean=_ratio(simulator.owned_page_seconds, busy_s * pages),
        pool_max=simulator.most_pages_owned / pages,
        most_waiting=simulator.most_waiting,
        tenants={
            tenant: TenantReport(
                offered=len(each),
                finished=sum(outcome.finished for outcome in each),
                served_tokens=served[tenant],
                ttft_ms=distribution(outcome.ttft_s for outcome in each if outcome.token_times),
            )
            for tenant, each in tenants.items()
        },
    )


def distribution(seconds: Iterable[float]) -> Distribution | None:
    """Mean, percentiles (linear between neighbours, as numpy's default) and maximum, in milliseconds."""
    values = np.fromiter(seconds, np.float64) * 1000
    if not values.size:
        return None
    p50, p90, p95, p99 = (float(value) for value in np.percentile(values, (50, 90, 95, 99)))
    return Distribution(float(values.mean()), p50, p90, p95, p99, float(values.max()))


def fairness_index(
    served: Mapping[str, float], asked: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> float:
    """Jain's index of what each tenant got relative to its max-min fair share of all that was served; 1 is fair.

    The fair share gives nobody more than it asked for, and what one leaves goes to the others by `weights`. So a tenant
    that asks for much and gets the rest of the machine is no injustice, one that asks for little and waits is.
    """
    fair = _max_min_shares(sum(served.values()), asked, weights or {})
    ratios = [served[tenant] / share for tenant, share in fair.items() if share > 0]
    squares = sum(ratio * ratio for ratio in ratios)
    return sum(ratios) ** 2 / (len(ratios) * squares) if squares else 1.0


def parse_objectives(texts: Sequence[str]) -> tuple[Objective, ...]:
    """`ttft:2000 itl:200`, milliseconds. Raises ConfigError."""
    return tuple(Objective(metric, limit_ms) for metric, limit_ms in parse_goodput(texts, _METRICS).items())


def _itl_s(outcome: Outcome) -> float:
    return float(np.percentile(outcome.itl_s, ITL_PERCENTILE)) if len(outcome.token_times) > 1 else 0.0


_METRICS: dict[str, Callable[[Outcome], float]] = {
    "ttft": lambda outcome: outcome.ttft_s,
    "tpot": lambda outcome: outcome.tpot_s if len(outcome.token_times) > 1 else 0.0,
    "itl": _itl_s,
    "e2el": lambda outcome: outcome.e2e_s,
}


def _span(outcomes: Sequence[Outcome]) -> float:
    """Seconds from the first arrival to the last token."""
    ends = [outcome.token_times[-1] for outcome in outcomes if outcome.token_times]
    return max(ends) - outcomes[0].arrival.time_s if ends else 0.0


def _last_arrival(outcomes: Sequence[Outcome]) -> float:
    return outcomes[-1].arrival.time_s if outcomes else 0.0


def _by_tenant(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    tenants: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        tenants[outcome.arrival.tenant].append(outcome)
    return dict(sorted(tenants.items()))


def _tokens_asked(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.arrival.prompt_tokens + outcome.arrival.output_tokens for outcome in outcomes)


def _tokens_served(outcomes: Sequence[Outcome], until: float) -> int:
    """Output up to `until`, and the prompts it began for: what is served after the last arrival is no choice."""
    served = 0
    for outcome in outcomes:
        output = sum(time <= until for time in outcome.token_times)
        served += output + (outcome.arrival.prompt_tokens if output else 0)
    return served


def _max_min_shares(total: float, asked: Mapping[str, float], weights: Mapping[str, float]) -> dict[str, float]:
    """Water-filling: the least demanding by weight are satisfied first."""
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
