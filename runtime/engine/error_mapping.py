"""What the scheduler refuses, in the words and classes that users meet. Pure.

One invariant: a refusal says how things stand: the place in the queue, pages needed and free, and the predicted wait.
"""

from __future__ import annotations

from ...scheduler import (
    AdmissionEstimate,
    CannotMeetDeadline,
    NotAccepting,
    PageQuotaExceeded,
    QueueFull,
    Refused,
    SchedulerError,
    TooLong,
)
from ..common import errors


def translate(error: SchedulerError) -> errors.QuireError:
    """The one place where the scheduler's errors become ours. What is no refusal is a bug, and passed on as it is."""
    if isinstance(error, NotAccepting):
        return errors.Unavailable(str(error))
    if not isinstance(error, Refused):
        raise error
    message = f"{error}; {_stands(error.estimate)}"
    match error:
        case QueueFull():
            return errors.Overloaded(message, _milliseconds(error.estimate.predicted_wait_s))
        case CannotMeetDeadline():
            return errors.DeadlineExceeded(message)
        case TooLong():
            return errors.ContextLengthExceeded(message)
        case PageQuotaExceeded():
            return errors.QuotaExceeded(message)
    raise error


def _stands(estimate: AdmissionEstimate) -> str:
    wait_s = estimate.predicted_wait_s
    needed = f"needed {estimate.pages_needed}, " if estimate.pages_needed else ""  # not known before tokenizing
    pages = f"{needed}free {estimate.pages_free}"
    wait = "unknown" if wait_s is None else f"{wait_s:.3g} s"
    return f"position {estimate.position} in the queue; pages: {pages}; predicted wait {wait}"


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else max(1, round(seconds * 1000))
