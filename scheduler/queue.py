"""All requests that wait: who may join them, in which order they leave, and what keeps them.

It must not know pages of running requests, steps or budgets. The one invariant: a request that is refused has changed
nothing, and one that was accepted waits here exactly as long as it is neither running nor ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush

from .admission import AdmissionEstimate, CannotMeetDeadline, PageQuotaExceeded, TooLong
from .policy import Policy
from .request import Request, State
from .tenants import QueueLimits, Tenants


class RequestQueue:
    def __init__(self, policy: Policy, limits: QueueLimits, num_pages: int) -> None:
        self.policy = policy
        self.num_tokens = 0  # that those who wait know
        self.held_up = "tokens"  # why the head of the queue was not admitted
        self.over_quota: Collection[str] = ()  # tenants that were passed over
        self._tenants = Tenants(limits)
        self._num_pages = num_pages
        self._held: dict[int, list[Request]] = {}  # forks that wait for their source's prompt, by the source's id
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; ended requests are left in it for a while

    def __len__(self) -> int:
        return self._tenants.num_waiting

    def limit_reached(self, tenant: str, count: int) -> str | None:
        """Which limit of the queue `count` more of the tenant's requests would break, in words."""
        return self._tenants.limit_reached(tenant, count)

    def check_fit(self, request: Request, estimate: AdmissionEstimate, now: float) -> None:
        """Raises TooLong, PageQuotaExceeded or CannotMeetDeadline for what could never come to a good end."""
        num_tokens = request.num_prompt_tokens + request.spec.max_tokens
        needs = f"prompt and max_tokens, {num_tokens} together, need {request.pages_needed} pages"
        if request.pages_needed > self._num_pages:
            raise TooLong(f"{needs} of {self._num_pages}", estimate)
        quota = self._tenants.limits.max_kv_pages_per_tenant
        if quota is not None and request.pages_needed > quota:
            raise PageQuotaExceeded(f"{needs}, a tenant may have {quota}", estimate)
        wait_s = estimate.predicted_wait_s
        if request.spec.deadline is not None and wait_s is not None and now + wait_s > request.spec.deadline:
            raise CannotMeetDeadline(f"the first token is {wait_s:.3g} s away, after the request's deadline", estimate)

    def num_seqs(self, tenant: str) -> int:
        """Sequences of a tenant that run."""
        return self._tenants.num_seqs(tenant)

    def accept(self, requests: Sequence[Request]) -> None:
        """New ones, which have arrived; the first queues, the others wait for its prompt."""
        first, *forks = requests
        for request in requests:
            self._count(request, 1)
            if request.spec.deadline is not None:
                heappush(self._deadlines, (request.spec.deadline, request.order, request))
        self.policy.push(first)
        if forks:
            self._held[first.request_id] = forks
            for fork in forks:
                fork.fork_parent = first

    def requeue(self, request: Request) -> None:
        """It ran, and was preempted."""
        self._tenants.run(request.spec.tenant, -request.width, -request.pages_needed)
        self._count(request, 1)
        self.policy.push_front(request)

    def head(self) -> Request | None:
        """Who comes next; tenants whose quota has no room for their own next one are passed over."""
        over_quota: set[str] = set()
        while (request := self.policy.head(over_quota)) is not None:
            if self._tenants.has_quota(request.spec.tenant, request.pages_needed):
                break
            over_quota.add(request.spec.tenant)
        self.over_quota = over_quota
        return request

    def pop_admitted(self, request: Request) -> None:
        """It runs now."""
        self.policy.remove(request)
        self._count(request, -1)
        self._tenants.run(request.spec.tenant, request.width, request.pages_needed)

    def remove(self, request: Request) -> None:
        """It ends, having waited."""
        self._count(request, -1)
        forks = self._held.get(request.fork_parent.request_id, []) if request.fork_parent else []
        if request in forks:
            forks.remove(request)
        else:
            self.policy.remove(request)

    def note_finished(self, request: Request) -> None:
        """It ends, having run."""
        self._tenants.run(request.spec.tenant, -request.width, -request.pages_needed)

    def release_forks(self, parent: Request) -> None:
        """The source's prompt is computed, or it ended: its forks queue, before all that are new."""
        for fork in self._held.pop(parent.request_id, ()):
            self.policy.push_front(fork)

    def next_deadline(self, num_alive: int) -> float | None:
        """The earliest of a live request; `num_alive` there are, so the rest may be forgotten."""
        if len(self._deadlines) > 2 * num_alive + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].state is not State.ENDED]
            heapify(self._deadlines)
        while self._deadlines and self._deadlines[0][2].state is State.ENDED:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def pop_deadline(self) -> Request:
        """The request with the earliest deadline, whose deadline is then forgotten."""
        return heappop(self._deadlines)[2]

    def by_reason(self) -> dict[str, int]:
        """How many wait for a sequence's place, pages, latency, tokens of a step, quota, or a fork's source."""
        held = [fork.spec.tenant for forks in self._held.values() for fork in forks]
        quota = sum(self._tenants.waiting(tenant) - held.count(tenant) for tenant in self.over_quota)
        reasons = Counter({"source": len(held), "quota": quota})
        reasons[self.held_up] += len(self) - len(held) - quota
        return {reason: count for reason, count in reasons.items() if count > 0}

    def _count(self, request: Request, count: int) -> None:
        self._tenants.queue(request.spec.tenant, count)
        self.num_tokens += count * len(request.token_ids)
