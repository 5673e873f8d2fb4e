"""In which order waiting requests are admitted: the queue, and the three ways to order it.

It must not know pages, budgets or steps. The one invariant: a request that was pushed is in the queue, once, until it
is removed, and `head` is stable as long as nothing else changes.

Every tenant has a queue of its own, ordered by the request; a policy compares the heads. Requests that were admitted
once and came back come before those that were not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol

from .request import Request

Rank = tuple[float, ...]  # the smaller is served first

CREDIT_TOKENS = 8192  # that a tenant back from a pause may have before the others: a long prompt
PREFILL_WEIGHT, DECODE_WEIGHT = 1, 2  # service in a fair queue's tokens (Sheng et al., 2024)


class Policy(Protocol):
    def push(self, request: Request) -> None:
        """A new request."""

    def push_front(self, request: Request) -> None:
        """One that comes before all of its tenant that were never admitted: preempted, or a fork of one that runs."""

    def head(self, passed_over: Collection[str] = ()) -> Request | None:
        """The request to admit next, of all tenants but `passed_over`."""

    def remove(self, request: Request) -> None:
        """Take a waiting request out: it was admitted or has ended."""

    def rank(self, request: Request) -> Rank:
        """In which order running requests get their share of a step's prefill."""

    def served(self, request: Request, prefill_tokens: int, decode_tokens: int) -> None:
        """A running request got so much service."""

    def may_displace(self, newcomer: Request, running: Request, num_seqs: Callable[[str], int]) -> bool:
        """Whether `running` should give up its place, for now, to a newcomer that finds none.

        `num_seqs` tells how many sequences of a tenant run.
        """

    def __len__(self) -> int: ...


class _Place(NamedTuple):
    """Where a request stands in its tenant's queue."""

    is_new: bool
    rank: float
    number: int  # so that no two are equal
    request: Request


class _TenantQueues:
    """Waiting requests by tenant, each queue sorted: thousands of places move in microseconds."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}  # by request id
        self._queues: dict[str, list[_Place]] = {}
        self._num_added = 0

    def add(self, request: Request, rank: float, is_new: bool) -> None:
        place = self._places[request.request_id] = _Place(is_new, rank, self._num_added, request)
        self._num_added += 1
        insort(self._queues.setdefault(request.spec.tenant, []), place)

    def remove(self, request: Request) -> None:
        place = self._places.pop(request.request_id)
        queue = self._queues[request.spec.tenant]
        del queue[bisect_left(queue, place)]
        if not queue:
            del self._queues[request.spec.tenant]

    def heads(self, passed_over: Collection[str]) -> list[_Place]:
        """The first of each tenant."""
        return [queue[0] for tenant, queue in self._queues.items() if tenant not in passed_over]

    def tenants(self) -> Collection[str]:
        """Those that have requests waiting."""
        return self._queues.keys()

    def __len__(self) -> int:
        return len(self._places)


class FirstComeFirstServed:
    """In order of arrival."""

    def __init__(self) -> None:
        self._queues = _TenantQueues()

    def push(self, request: Request) -> None:
        self._queues.add(request, self._urgency(request), is_new=True)

    def push_front(self, request: Request) -> None:
        self._queues.add(request, self._urgency(request), is_new=False)

    def head(self, passed_over: Collection[str] = ()) -> Request | None:
        heads = self._queues.heads(passed_over)
        return min(heads).request if heads else None

    def remove(self, request: Request) -> None:
        self._queues.remove(request)

    def rank(self, request: Request) -> Rank:
        return self._urgency(request), request.order

    def served(self, request: Request, prefill_tokens: int, decode_tokens: int) -> None:
        pass

    def may_displace(self, newcomer: Request, running: Request, num_seqs: Callable[[str], int]) -> bool:
        return False

    def _urgency(self, request: Request) -> float:
        return request.order

    def __len__(self) -> int:
        return len(self._queues)


class Priority(FirstComeFirstServed):
    """By priority, lower first, with ageing: waiting `ageing_s` seconds makes up for one step of priority.

    All requests age alike, so their order never changes while they wait.
    """

    def __init__(self, ageing_s: float = 10.0) -> None:
        if not ageing_s > 0:
            raise ValueError(f"ageing_s must be above 0, got {ageing_s}")
        super().__init__()
        self._ageing_s = ageing_s

    def _urgency(self, request: Request) -> float:
        return request.arrival_time + self._ageing_s * request.spec.priority


class Fair(FirstComeFirstServed):
    """The tenant that was served least comes first, in tokens over its weight (1 where none is given).

    A tenant that had nothing waiting starts before the least served of those that had, but at most `credit_tokens`
    before: nobody saves up more service (virtual token counters, Sheng et al., 2024). Without credit, who asks for
    little shares every step with who asks for everything, and waits twice as long as alone. And nobody holds all
    places: a newcomer may displace a request of a tenant that still has as many as the newcomer's then, by weight.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, credit_tokens: int = CREDIT_TOKENS) -> None:
        super().__init__()
        self._credit_tokens = credit_tokens
        self._weights = dict(weights or {})
        if any(not weight > 0 for weight in self._weights.values()):
            raise ValueError("a tenant's weight must be above 0")
        self._counts: dict[str, float] = {}  # service by tenant
        self._starts: dict[str, float] = {}  # where each would have started last without credit
        self._last = 0.0  # the level when the queue emptied last

    def push(self, request: Request) -> None:
        waiting = self._queues.tenants()
        if request.spec.tenant not in waiting:
            level = min((self._level(tenant) for tenant in waiting), default=self._last)
            start = level - self._credit_tokens / self._weight(request)
            self._starts[request.spec.tenant] = level
            self._counts[request.spec.tenant] = max(self._count(request), start)
        super().push(request)

    def head(self, passed_over: Collection[str] = ()) -> Request | None:
        heads = self._queues.heads(passed_over)
        return min(heads, key=lambda place: (self._count(place.request), place)).request if heads else None

    def remove(self, request: Request) -> None:
        super().remove(request)
        if not self._queues.tenants():
            self._last = self._level(request.spec.tenant)

    def rank(self, request: Request) -> Rank:
        return self._count(request), request.order

    def served(self, request: Request, prefill_tokens: int, decode_tokens: int) -> None:
        tokens = PREFILL_WEIGHT * prefill_tokens + DECODE_WEIGHT * decode_tokens
        self._counts[request.spec.tenant] = self._count(request) + tokens / self._weight(request)

    def may_displace(self, newcomer: Request, running: Request, num_seqs: Callable[[str], int]) -> bool:
        theirs = (num_seqs(running.spec.tenant) - running.width) / self._weight(running)
        return theirs >= (num_seqs(newcomer.spec.tenant) + newcomer.width) / self._weight(newcomer)

    def _count(self, request: Request) -> float:
        return self._counts.get(request.spec.tenant, 0.0)

    def _level(self, tenant: str) -> float:
        """How much a tenant was served, as if it had spent its credit: whoever comes next must not start lower yet."""
        return max(self._counts.get(tenant, 0.0), self._starts.get(tenant, 0.0))

    def _weight(self, request: Request) -> float:
        return self._weights.get(request.spec.tenant, 1.0)
