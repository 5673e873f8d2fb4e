"""The limits of a scheduler, and its two answers to a new request: an estimate, or an error that explains the refusal.

    SchedulerError
    ├── Refused              the request cannot be accepted; `estimate` describes the queue and the pool
    │   ├── QueueFull        the queue, or this tenant's part of it, is full; a retry can succeed
    │   ├── CannotMeetDeadline  its first token would come after its deadline
    │   ├── TooLong          it needs more pages than the whole pool has
    │   └── PageQuotaExceeded  it needs more pages than its tenant may hold
    ├── DuplicateRequest     its id belongs to a request that has not ended
    ├── StepMismatch         a result does not match the step in flight: a bug in Quire
    └── NotAccepting         the engine loop is draining or closed

A refused request has changed nothing. runtime/engine translates these errors into the public ones.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

MAY_BE_ZERO = ("num_speculative_tokens", "draft_cost", "draft_reads_steps", "whole_images")  # fields of the config


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a scheduler. Raises ValueError if a limit is below 1, or below 0 for a field in `MAY_BE_ZERO`."""

    max_num_seqs: int  # sequences that run at once
    max_num_samples: int | None = None  # rows of a step that sample; None: max_num_seqs
    num_speculative_tokens: int = 0  # draft tokens per sequence and step; 0: none
    draft_cost: float | None = None  # estimated time of a draft model's step over the model's; None: no draft model
    draft_reads_steps: bool = False  # the draft model is a head of the model, and reads the rows of its steps
    max_num_waiting: int = 1024  # requests in the queue
    max_num_waiting_per_tenant: int | None = None  # None: no limit besides max_num_waiting
    max_kv_pages_per_tenant: int | None = None  # pages of pins and of running requests at their longest
    whole_images: bool = False  # an image's tokens attend to each other, so one step computes all of them

    def __post_init__(self) -> None:
        for field in fields(self):
            limit = getattr(self, field.name)
            least = 0 if field.name in MAY_BE_ZERO else 1
            if limit is not None and limit < least:
                raise ValueError(f"{field.name} must be at least {least}, got {limit}")


@dataclass(frozen=True, slots=True)
class AdmissionEstimate:
    """The prospects of a new request, known when it is accepted or refused."""

    position: int  # requests ahead of it in the queue
    pages_needed: int  # pages of the request at its longest
    pages_free: int  # pages that can be allocated now, cached ones included
    predicted_wait_s: float | None = None  # wait until the first token; None until step costs have been measured
    pin_refused: bool = False  # the prompt will not be pinned: its tenant's pins would hold too many pages


class SchedulerError(Exception):
    """Base class of the scheduler's errors."""


class Refused(SchedulerError):
    """A request that the scheduler does not accept."""

    def __init__(self, message: str, estimate: AdmissionEstimate) -> None:
        super().__init__(message)
        self.estimate = estimate


class QueueFull(Refused):
    """The queue is full. `estimate.predicted_wait_s` is the time until it has room."""


class CannotMeetDeadline(Refused):
    """The predicted first token comes after the request's deadline."""


class TooLong(Refused):
    """The request needs more pages than the pool has."""


class PageQuotaExceeded(Refused):
    """The request needs more pages than its tenant may hold."""


class DuplicateRequest(SchedulerError):
    """A request that has not ended has this id."""

    def __init__(self, request_id: int) -> None:
        super().__init__(f"request id {request_id} is already in use")


class StepMismatch(SchedulerError):
    """A call does not match the step in flight: each plan needs one `commit` or `abandon` before the next plan."""


class NotAccepting(SchedulerError):
    """The engine loop accepts no new requests: it is draining or closed."""
