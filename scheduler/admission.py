"""What the scheduler can refuse, as one small tree.

It must not know users or the errors of the runtime, which translates these once, at its Engine facade. The one
invariant: whatever the scheduler refuses, it refuses before it has changed anything.

    SchedulerError
    ├── Refused              a request cannot be taken; `estimate` says how things stand
    │   ├── QueueFull        the waiting queue, or this tenant's part of it, is at its limit; try again later
    │   ├── CannotMeetDeadline  it would still be waiting for its first token when its deadline passes
    │   ├── TooLong          the request could not fit the pool even alone
    │   └── PageQuotaExceeded    nor its tenant's share of it
    ├── DuplicateRequest     a live request already has this id
    ├── StepMismatch         a result does not belong to the step in flight, or there is none: a bug in Quire
    └── NotAccepting         the engine loop is draining or closed
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AdmissionEstimate:
    """How things stand for a request: what is known when it is accepted, or refused."""

    position: int  # requests ahead of it in the queue
    pages_needed: int  # at its longest
    pages_free: int  # that could be allocated now, cached ones included
    predicted_wait_s: float | None = None  # until its first token; None as long as costs are not known


class SchedulerError(Exception):
    """Base of the tree."""


class Refused(SchedulerError):
    def __init__(self, message: str, estimate: AdmissionEstimate) -> None:
        super().__init__(message)
        self.estimate = estimate


class QueueFull(Refused):
    """`predicted_wait_s` is then until there is room in the queue."""


class CannotMeetDeadline(Refused):
    pass


class TooLong(Refused):
    pass


class PageQuotaExceeded(Refused):
    pass


class DuplicateRequest(SchedulerError):
    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is already in use")


class StepMismatch(SchedulerError):
    """Plans and results must alternate: one `commit` (or `abandon`) for each plan, in order."""


class NotAccepting(SchedulerError):
    """No new requests: the engine loop is draining or closed."""
