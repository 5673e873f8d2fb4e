"""What the scheduler can refuse, as one small tree.

It must not know users or the errors of the runtime, which translates these once, at its Engine facade. The one
invariant: whatever the scheduler refuses, it refuses before it has changed anything.

    SchedulerError
    ├── QueueFull        the waiting queue is at its limit; try again later
    ├── TooLong          the request could not fit the pool even alone
    ├── DuplicateRequest a live request already has this id
    ├── StepMismatch     a result does not belong to the step in flight, or there is none: a bug, never a user's fault
    └── NotAccepting     the batcher is draining or closed
"""

from __future__ import annotations


class SchedulerError(Exception):
    """Base of the tree."""


class QueueFull(SchedulerError):
    def __init__(self, limit: int) -> None:
        super().__init__(f"the queue is full: {limit} requests are waiting, which is the limit")
        self.limit = limit


class TooLong(SchedulerError):
    def __init__(self, num_tokens: int, pages_needed: int, pages_total: int) -> None:
        super().__init__(f"prompt and max_tokens, {num_tokens} together, need {pages_needed} pages of {pages_total}")
        self.num_tokens = num_tokens
        self.pages_needed = pages_needed
        self.pages_total = pages_total


class DuplicateRequest(SchedulerError):
    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is already in use")


class StepMismatch(SchedulerError):
    """Plans and results must alternate: one `commit` (or `abandon`) for each plan, in order."""


class NotAccepting(SchedulerError):
    """No new requests: the batcher is draining or closed."""
