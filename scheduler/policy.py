"""Policies: the order in which queued requests are admitted, by arrival, by priority or fair between tenants.

Must not import pages, budgets or steps. A pushed request stays queued until it is removed, and `head` returns the same
request as long as nothing changes.

Every tenant has its own queue; a policy compares their heads. Requests that ran before come before new ones.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from .request import QueuedRequest

R = TypeVar("R", bound=QueuedRequest)
Rank = tuple[float, ...]  # the smaller is served first

TENANT_CREDIT_TOKENS = 8192  # service that a tenant may receive ahead of others after a pause: a long prompt
PREFILL_WEIGHT = 1  # service units per token (Sheng et al., 2024)
DECODE_WEIGHT = 2  # likewise


class Policy(Protocol[R]):
    """The order of queued requests of one kind, and of prefilling ones."""

    def push(self, request: R) -> None:
        """Add a new request."""

    def push_front(self, request: R) -> None:
        """Add a request before its tenant's new ones: it was preempted, or is a fork whose parent's prompt is done."""

    def head(self, passed_over: Collection[str] = ()) -> R | None:
        """Return the request to admit next among all tenants except `passed_over`."""

    def remove(self, request: R) -> None:
        """Remove a queued request that was admitted or has ended."""

    def rank(self, request: R) -> Rank:
        """Return the sort key of a request when a step's prefill is divided; lower comes first."""

    def served(self, request: R, prefill_tokens: int, decode_tokens: int) -> None:
        """Record the service that a running request received in a step."""

    def may_displace(self, newcomer: R, running: R, num_seqs: Callable[[str], int]) -> bool:
        """Return whether `running` should be preempted for a queued request that finds no slot or pages.

        `num_seqs` returns the number of a tenant's running sequences.
        """

    def __len__(self) -> int: ...


class _Entry(NamedTuple, Generic[R]):
    """A request in its tenant's queue, sorted by the fields in this order."""

    is_new: bool
    rank: float
    number: int  # unique
    request: R


class _TenantQueues(Generic[R]):
    """Queued requests by tenant, each tenant's in a sorted list: moving thousands of entries takes microseconds."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[R]] = {}  # request id -> entry
        self._queues: dict[str, list[_Entry[R]]] = {}
        self._num_added = 0

    def add(self, request: R, rank: float, is_new: bool) -> None:
        entry = self._entries[request.request_id] = _Entry(is_new, rank, self._num_added, request)
        self._num_added += 1
        insort(self._queues.setdefault(request.spec.tenant, []), entry)

    def remove(self, request: R) -> None:
        entry = self._entries.pop(request.request_id)
        queue = self._queues[request.spec.tenant]
        del queue[bisect_left(queue, entry)]
        if not queue:
            del self._queues[request.spec.tenant]

    def heads(self, passed_over: Collection[str]) -> list[_Entry[R]]:
        """Return the first entry of each tenant."""
        return [queue[0] for tenant, queue in self._queues.items() if tenant not in passed_over]

    def tenants(self) -> Collection[str]:
        """Return the tenants that have queued requests."""
        return self._queues.keys()

    def __len__(self) -> int:
        return len(self._entries)


class FirstComeFirstServed(Generic[R]):
    """Requests run in order of arrival."""

    def __init__(self) -> None:
        self._queues: _TenantQueues[R] = _TenantQueues()

    def push(self, request: R) -> None:
        self._queues.add(request, self._urgency(request), is_new=True)

    def push_front(self, request: R) -> None:
        self._queues.add(request, self._urgency(request), is_new=False)

    def head(self, passed_over: Collection[str] = ()) -> R | None:
        heads = self._queues.heads(passed_over)
        return min(heads).request if heads else None

    def remove(self, request: R) -> None:
        self._queues.remove(request)

    def rank(self, request: R) -> Rank:
        return self._urgency(request), request.order

    def served(self, request: R, prefill_tokens: int, decode_tokens: int) -> None:
        pass

    def may_displace(self, newcomer: R, running: R, num_seqs: Callable[[str], int]) -> bool:
        return False

    def _urgency(self, request: R) -> float:
        return request.order

    def __len__(self) -> int:
        return len(self._queues)


class Priority(FirstComeFirstServed[R]):
    """Requests run by priority, lower first; waiting `ageing_s` seconds makes up for one level of priority.

    All requests age at the same rate, so their order never changes while they wait.
    """

    def __init__(self, ageing_s: float = 10.0) -> None:
        if not ageing_s > 0:
            raise ValueError(f"ageing_s must be above 0, got {ageing_s}")
        super().__init__()
        self._ageing_s = ageing_s

    def _urgency(self, request: R) -> float:
        return request.arrival_time + self._ageing_s * request.spec.priority


class Fair(FirstComeFirstServed[R]):
    """The tenant with the least service comes first; service is tokens divided by the tenant's weight (default 1).

    A tenant that had no queued request starts at the lowest service level of the tenants that have, minus at most
    `credit_tokens`, so no tenant saves up service (virtual token counters, Sheng et al., 2024). Without credit, a
    tenant with few requests would share every step with the heaviest tenant and wait twice as long as alone. A queued
    request may displace a running request of a tenant that afterwards still has at least as many sequences, by weight.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, credit_tokens: int = TENANT_CREDIT_TOKENS) -> None:
        super().__init__()
        self._credit_tokens = credit_tokens
        self._weights = dict(weights or {})
        if any(not weight > 0 for weight in self._weights.values()):
            raise ValueError("a tenant's weight must be above 0")
        self._counts: dict[str, float] = {}  # service by tenant
        self._starts: dict[str, float] = {}  # level at which each tenant last started, before its credit
        self._last = 0.0  # level at which the queue last became empty

    def push(self, request: R) -> None:
        tenant = request.spec.tenant
        waiting = self._queues.tenants()
        if tenant not in waiting:
            level = min(map(self._level, waiting), default=self._last)
            self._starts[tenant] = level
            self._counts[tenant] = max(self._count(tenant), level - self._credit_tokens / self._weight(tenant))
        super().push(request)

    def head(self, passed_over: Collection[str] = ()) -> R | None:
        heads = self._queues.heads(passed_over)
        return min(heads, key=lambda entry: (self._count(entry.request.spec.tenant), entry)).request if heads else None

    def remove(self, request: R) -> None:
        super().remove(request)
        if not self._queues.tenants():
            self._last = self._level(request.spec.tenant)

    def rank(self, request: R) -> Rank:
        return self._count(request.spec.tenant), request.order

    def served(self, request: R, prefill_tokens: int, decode_tokens: int) -> None:
        tenant = request.spec.tenant
        tokens = PREFILL_WEIGHT * prefill_tokens + DECODE_WEIGHT * decode_tokens
        self._counts[tenant] = self._count(tenant) + tokens / self._weight(tenant)

    def may_displace(self, newcomer: R, running: R, num_seqs: Callable[[str], int]) -> bool:
        old, new = running.spec.tenant, newcomer.spec.tenant
        left = (num_seqs(old) - running.width) / self._weight(old)
        return left >= (num_seqs(new) + newcomer.width) / self._weight(new)

    def _count(self, tenant: str) -> float:
        return self._counts.get(tenant, 0.0)

    def _level(self, tenant: str) -> float:
        """Return a tenant's service as if its credit were used up.

        A tenant that joins later must not start below this level.
        """
        return max(self._count(tenant), self._starts.get(tenant, 0.0))

    def _weight(self, tenant: str) -> float:
        return self._weights.get(tenant, 1.0)
