"""The request queue: the requests that may join it, their order, and the resource that the first one waits for.

Must not import the running batch or the planner. Counts queued requests and running sequences and pages per tenant.
An accepted request is in the queue exactly while it is neither running nor ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from .admission import AdmissionEstimate, CannotMeetDeadline, PageQuotaExceeded, SchedulerConfig, TooLong
from .policy import Policy
from .request import QueuedRequest, Request, State


class RequestQueue:
    """Requests that wait to run, ordered by `policy`, and the forks that wait for their parent's prompt."""

    def __init__(self, policy: Policy[Request], config: SchedulerConfig, num_pages: int) -> None:
        self.policy = policy
        self.num_tokens = 0  # known tokens of all queued requests
        self.blocked_by = "tokens"  # why the first request was not admitted
        self.over_quota: Collection[str] = ()  # tenants that `head` passed over
        self._config = config
        self._num_pages = num_pages
        self._num_waiting = 0
        self._waiting: Counter[str] = Counter()  # queued requests by tenant
        self._encodings: Counter[str] = Counter()  # queued encode requests by tenant
        self._running_seqs: Counter[str] = Counter()  # running sequences by tenant
        self._running_pages: Counter[str] = Counter()  # pages of running requests at their longest, by tenant
        self._promised_pins: Counter[str] = Counter()  # pages that live requests will pin, by tenant
        self._forks: dict[int, list[Request]] = {}  # forks that wait for their parent's prompt, by parent id

    def __len__(self) -> int:
        return self._num_waiting

    def limit_reached(self, tenant: str, count: int) -> str | None:
        """Describe the limit of the queue that `count` more requests of the tenant would exceed."""
        num_waiting = self._num_waiting + self._encodings.total()
        if num_waiting + count > self._config.max_num_waiting:
            return f"{num_waiting} requests are waiting, the limit is {self._config.max_num_waiting}"
        limit = self._config.max_num_waiting_per_tenant
        num_waiting = self._waiting[tenant] + self._encodings[tenant]
        if limit is not None and num_waiting + count > limit:
            return f"{num_waiting} requests of this tenant are waiting, the limit is {limit}"
        return None

    def count_encodings(self, tenant: str, amount: int) -> None:
        """Change the tenant's number of queued encode requests. They wait elsewhere, but within the same limits."""
        _add(self._encodings, tenant, amount)

    def check_fit(self, request: Request, estimate: AdmissionEstimate, now: float) -> None:
        """Raise TooLong, PageQuotaExceeded or CannotMeetDeadline if the request could never finish."""
        num_tokens = request.num_prompt_tokens + request.spec.max_tokens
        needs = f"prompt and max_tokens, {num_tokens} together, need {request.pages_needed} pages"
        if request.pages_needed > self._num_pages:
            raise TooLong(f"{needs} of {self._num_pages}", estimate)
        quota = self._config.max_kv_pages_per_tenant
        if quota is not None and request.pages_needed > quota:
            raise PageQuotaExceeded(f"{needs}, a tenant may have {quota}", estimate)
        wait_s = estimate.predicted_wait_s
        if request.spec.deadline is not None and wait_s is not None and now + wait_s > request.spec.deadline:
            raise CannotMeetDeadline(f"the first token is {wait_s:.3g} s away, after the request's deadline", estimate)

    def num_seqs(self, tenant: str) -> int:
        """Return the number of the tenant's running sequences."""
        return self._running_seqs[tenant]

    def add(self, requests: Sequence[Request]) -> None:
        """Queue new requests: the first immediately, its forks when its prompt is computed."""
        first, *forks = requests
        for request in requests:
            self._count_waiting(request, 1)
        self.policy.push(first)
        if forks:
            self._forks[first.request_id] = forks
            for fork in forks:
                fork.fork_parent = first

    def promise_pin(self, requests: Sequence[Request], num_pages: int, num_pinned: int) -> bool:
        """Promise requests with one prompt that its `num_pages` unpinned pages will be pinned.

        Return False, promising nothing, if the tenant's pins, now `num_pinned`, would exceed its quota.
        """
        tenant = requests[0].spec.tenant
        limit = self._config.max_kv_pages_per_tenant
        if limit is not None and num_pinned + self._promised_pins[tenant] + num_pages > limit:
            return False
        for request in requests:
            request.pages_to_pin = 0
        requests[0].pages_to_pin = num_pages
        _add(self._promised_pins, tenant, num_pages)
        return True

    def release_pin(self, request: Request) -> None:
        """Forget the promise of a pin: the request has ended."""
        _add(self._promised_pins, request.spec.tenant, -(request.pages_to_pin or 0))

    def requeue(self, request: Request) -> None:
        """Queue a preempted request again, before requests that never ran."""
        self._count_running(request, -1)
        self._count_waiting(request, 1)
        self.policy.push_front(request)

    def head(self) -> Request | None:
        """Return the request to admit next, passing over tenants whose page quota is used up."""
        over_quota: set[str] = set()
        while (request := self.policy.head(over_quota)) is not None:
            if self._has_quota(request):
                break
            over_quota.add(request.spec.tenant)
        self.over_quota = over_quota
        return request

    def pop_admitted(self, request: Request) -> None:
        """Remove a request that starts to run."""
        self.policy.remove(request)
        self._count_waiting(request, -1)
        self._count_running(request, 1)

    def remove(self, request: Request) -> None:
        """Remove a queued request that has ended."""
        self._count_waiting(request, -1)
        forks = self._forks.get(request.fork_parent.request_id, []) if request.fork_parent else []
        if request in forks:
            forks.remove(request)
        else:
            self.policy.remove(request)

    def note_finished(self, request: Request) -> None:
        """Record that a running request has ended."""
        self._count_running(request, -1)

    def release_forks(self, parent: Request) -> None:
        """Queue the forks of a request whose prompt is computed, or that has ended, before requests that never ran."""
        for fork in self._forks.pop(parent.request_id, ()):
            self.policy.push_front(fork)

    def waiting_by_reason(self) -> dict[str, int]:
        """Count queued requests by the resource that they wait for; the keys are listed at `SchedulerStats`."""
        held = [fork.spec.tenant for forks in self._forks.values() for fork in forks]
        quota = sum(self._waiting[tenant] - held.count(tenant) for tenant in self.over_quota)
        reasons = Counter({"fork": len(held), "quota": quota})
        reasons[self.blocked_by] += len(self) - len(held) - quota
        return {reason: count for reason, count in reasons.items() if count > 0}

    def _has_quota(self, request: Request) -> bool:
        limit = self._config.max_kv_pages_per_tenant
        return limit is None or self._running_pages[request.spec.tenant] + request.pages_needed <= limit

    def _count_waiting(self, request: Request, sign: int) -> None:
        self._num_waiting += sign
        self.num_tokens += sign * len(request.token_ids)
        _add(self._waiting, request.spec.tenant, sign)

    def _count_running(self, request: Request, sign: int) -> None:
        _add(self._running_seqs, request.spec.tenant, sign * request.width)
        _add(self._running_pages, request.spec.tenant, sign * request.pages_needed)


class DeadlineHeap:
    """Deadlines of requests that have not ended, queued or running."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueuedRequest]] = []  # entries of ended requests are removed late

    def push(self, request: QueuedRequest) -> None:
        """Add a request, if it has a deadline."""
        if request.spec.deadline is not None:
            heappush(self._heap, (request.spec.deadline, request.order, request))

    def pop(self) -> QueuedRequest:
        """Remove and return the request with the earliest deadline."""
        return heappop(self._heap)[2]

    def earliest(self, num_live: int) -> float | None:
        """Return the earliest deadline; `num_live` requests have not ended, so more entries are mostly stale."""
        if len(self._heap) > 2 * num_live + 64:
            self._heap = [entry for entry in self._heap if entry[2].state is not State.ENDED]
            heapify(self._heap)
        while self._heap and self._heap[0][2].state is State.ENDED:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None


def _add(counts: Counter[str], tenant: str, amount: int) -> None:
    """Add to a tenant's count, and drop the tenant when it reaches 0."""
    counts[tenant] += amount
    if not counts[tenant]:
        del counts[tenant]
